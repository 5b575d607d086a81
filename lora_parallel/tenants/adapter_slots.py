"""Put the adapters of tenants on the layers of a model, in PEFT's own modules, so that PEFT knows of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from torch.distributed import DeviceMesh

from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.adapters.peft_private import activate, refuse_merge
from lora_parallel.distributed.mesh import dp_rank
from lora_parallel.layers.module_names import clean_names
from lora_parallel.runtime.compiled_blocks import compiled_parts
from lora_parallel.state import ParallelState
from lora_parallel.tenants.adapter_init import adapted_layers
from lora_parallel.tenants.batch_routing import Forward
from lora_parallel.tenants.factor import Factor
from lora_parallel.tenants.layer import TenantLayer, placed

__all__ = ["AdapterSlots"]


class AdapterSlots:
    """Put adapters on the layers of a model, and take them away.

    Args:
        model: The parallelized model, without adapters.
        state: The state that `parallelize` left on the model.
        shards: Mesh over whose dp_shard axis adapters are sharded; None: every data-parallel rank has them whole.
        forward: The argument `forward` of `TenantLayer`.
    """

    def __init__(
        self, model: Any, state: ParallelState, shards: DeviceMesh | None, forward: Callable[[str], Forward | None]
    ) -> None:
        self._model, self._state, self._shards, self._forward = model, state, shards, forward
        self._places = {name: module for module, name in clean_names(model).items()}
        self._layers: dict[str, TenantLayer] = {}
        self._parts = compiled_parts(model)

    def factors(self, tenant: str, shapes: Any, dtype: torch.dtype | None) -> list[Factor]:
        """Return the factors that an adapter would have on this rank, without values.

        Args:
            tenant: Name of the tenant, which is also that of the adapter.
            shapes: The result of `adapter_init.shaped` for the adapter.
            dtype: Dtype that the adapter is stored in; None: the one that PEFT gave it.
        """
        found: list[Factor] = []
        for where, layer in adapted_layers(shapes).items():
            layer.base_layer = self._places[where]
            for role in ("lora_A", "lora_B"):
                getattr(layer, role)[tenant].to(dtype=dtype)
            found += placed(layer, tenant, self._shards)
        return found

    def put(self, tenant: str, seed: int, dtype: torch.dtype | None, where: str, shape: Any) -> TenantLayer:
        """Put the adapter of one PEFT layer of the bare base on the model's layer of the same name.

        Args:
            tenant: Name of the tenant, which is also that of the adapter.
            seed: Seed of the tenant's dropout.
            dtype: Dtype that the adapter is stored in; None: the one that it has.
            where: Name of the layer in the base.
            shape: PEFT's layer of the bare base, which holds the whole adapter.

        Returns:
            The model's layer, with this adapter and those of other tenants.
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
            if base in self._parts:
                self._parts[base].append(self._layers[where])
        put = self._layers[where]
        if put.layer is not shape:
            for attribute in (*put.layer.adapter_layer_names, *put.layer.other_param_names):
                there, new = getattr(put.layer, attribute), getattr(shape, attribute)
                if tenant in new:
                    there[tenant] = new[tenant]
                    if isinstance(there, nn.ModuleDict):
                        there[tenant].train(put.layer.training)  # this module alone: other tenants' keep their mode
        put.add(tenant, self._shards)
        return put

    def remove(self, tenant: str) -> None:
        """Remove a tenant's adapter from every layer that has it.

        A layer that has no adapter left becomes the layer of the base again.
        """
        for where, each in list(self._layers.items()):
            each.factors.pop(tenant, None)
            each.layer.delete_adapter(tenant)
            if not each.factors:
                base = each.restore()
                _replace(self._model, each.layer, base)
                if base in self._parts:
                    self._parts[base].remove(each)
                del self._layers[where]

    def check_known(self, what: str, tenants: Collection[str]) -> None:
        """Check that PEFT knows the tenants and no other adapters.

        Args:
            what: The method of the pool that was called.
            tenants: The names of the tenants.

        Raises:
            ValueError: An adapter was added or deleted behind the pool.
        """
        there: Any = getattr(self._model, "peft_config", {})
        if there.keys() != set(tenants):
            raise ValueError(
                f"{what}: the model has the adapters {sorted(there)}, and the tenants are {sorted(tenants)}: add "
                "and remove adapters of a pooled model with the pool, not with add_adapter and delete_adapter."
            )

    def tell(self, configs: Mapping[str, LoraConfig]) -> None:
        """Tell PEFT and transformers which adapters the model has.

        Args:
            configs: The config of each adapter, by its name.
        """
        if configs:
            self._model.peft_config = dict(configs)
        else:
            self._model.__dict__.pop("peft_config", None)
        if hasattr(self._model, "_hf_peft_config_loaded"):
            self._model._hf_peft_config_loaded = bool(configs)
        self.activate(())

    def activate(self, tenants: Sequence[str]) -> None:
        """Make the adapters of these tenants the ones that PEFT reports as active.

        Adapters that one of PEFT's functions froze train again.
        """
        for each in self._layers.values():
            activate(each.layer, list(tenants))
            for factor in (factor for both in each.factors.values() for factor in both):
                if not factor.parameter.requires_grad:  # frozen by PEFT's set_adapter; a later loss may penalise it
                    factor.parameter.requires_grad_(True)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace the module `old` by `new` wherever the model has it."""
    for parent in list(model.modules()):
        if parent is new:
            continue
        for key, child in list(parent._modules.items()):
            if child is old:
                parent._modules[key] = new
