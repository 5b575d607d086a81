"""The adapters of tenants on the layers of a model: in PEFT's own modules, and known to PEFT."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from torch.distributed import DeviceMesh

from lora_parallel.dropout import TopologyInvariantDropout
from lora_parallel.mesh import dp_rank
from lora_parallel.names import clean_names
from lora_parallel.peft_hooks import activate, refuse_merge
from lora_parallel.state import ParallelState
from lora_parallel.tenants.drawing import adapted_layers
from lora_parallel.tenants.factor import Factor
from lora_parallel.tenants.layer import TenantLayer, placed
from lora_parallel.tenants.route import Forward

__all__ = ["Grafts"]


class Grafts:
    """Puts adapters on layers, and takes them away.

    Args:
        model: Parallelized, without adapters.
        state: What `parallelize` left on it.
        shards: Share adapters out over the dp_shard axis of this mesh.
        forward: As for `TenantLayer`.
    """

    def __init__(
        self, model: Any, state: ParallelState, shards: DeviceMesh | None, forward: Callable[[str], Forward | None]
    ) -> None:
        self._model, self._state, self._shards, self._forward = model, state, shards, forward
        self._places = {name: module for module, name in clean_names(model).items()}
        self._layers: dict[str, TenantLayer] = {}

    def factors(self, tenant: str, shapes: Any, dtype: torch.dtype | None) -> list[Factor]:
        """What an adapter would be here, without values.

        Args:
            tenant: Its name.
            shapes: From `drawing.shaped`.
            dtype: As for `put`.
        """
        found: list[Factor] = []
        for where, layer in adapted_layers(shapes).items():
            layer.base_layer = self._places[where]
            for role in ("lora_A", "lora_B"):
                getattr(layer, role)[tenant].to(dtype=dtype)
            found += placed(layer, tenant, self._shards)
        return found

    def put(self, tenant: str, seed: int, dtype: torch.dtype | None, where: str, shape: Any) -> TenantLayer:
        """Put an adapter, which is in full on a PEFT layer of the bare base, on the layer of the model.

        Args:
            tenant: Its name.
            seed: What its dropout is drawn from.
            dtype: What it is stored in; None: as it is.
            where: The layer's name.
            shape: PEFT's layer.
        """
        for role in ("lora_A", "lora_B"):
            getattr(shape, role)[tenant].to(self._state.mesh.device_type, dtype)
        dropout = shape.lora_dropout[tenant]
        if type(dropout) is nn.Dropout and dropout.p > 0:
            count, rank = self._state.forward_count, dp_rank(self._state.mesh)
            shape.lora_dropout[tenant] = TopologyInvariantDropout(dropout.p, where, seed, count, rank)
        if where not in self._layers:
            base = self._places[where]
            shape.base_layer = base
            _replace(self._model, base, shape)
            shape.train(base.training)
            refuse_merge(shape, "a tenant's adapter", "into a base that others share")
            self._layers[where] = TenantLayer(shape, where, self._forward, self._state.config.param_dtype)
        put = self._layers[where]
        if put.layer is not shape:
            for attribute in (*put.layer.adapter_layer_names, *put.layer.other_param_names):
                there, new = getattr(put.layer, attribute), getattr(shape, attribute)
                if tenant in new:
                    there[tenant] = new[tenant]
                    if isinstance(there, nn.ModuleDict):
                        there[tenant].train(put.layer.training)  # it alone: others train as they do
        put.add(tenant, self._shards)
        return put

    def remove(self, tenant: str) -> None:
        """Take an adapter away, as far as it is there; where no other is, the layer is the base's own again."""
        for where, each in list(self._layers.items()):
            each.factors.pop(tenant, None)
            each.layer.delete_adapter(tenant)
            if not each.factors:
                _replace(self._model, each.layer, each.restore())
                del self._layers[where]

    def tell(self, configs: Mapping[str, LoraConfig]) -> None:
        """Keep what PEFT and transformers say of the model's adapters true."""
        if configs:
            self._model.peft_config = dict(configs)
        else:
            self._model.__dict__.pop("peft_config", None)
        if hasattr(self._model, "_hf_peft_config_loaded"):
            self._model._hf_peft_config_loaded = bool(configs)
        self.activate(())

    def activate(self, tenants: Sequence[str]) -> None:
        """Have PEFT say that these adapters are active."""
        for each in self._layers.values():
            activate(each.layer, list(tenants))
            for factor in (factor for both in each.factors.values() for factor in both):
                if not factor.parameter.requires_grad:  # PEFT's switches freeze; a penalty may come later
                    factor.parameter.requires_grad_(True)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """`new` in place of `old`, wherever the model has it."""
    for parent in list(model.modules()):
        if parent is new:
            continue
        for key, child in list(parent._modules.items()):
            if child is old:
                parent._modules[key] = new
