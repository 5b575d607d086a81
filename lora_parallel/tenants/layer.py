"""Compute a layer with the adapters of tenants: the base once, then LoRA for all tenants' tokens in one product."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel.adapters.dropout import Keys, TopologyInvariantDropout
from lora_parallel.adapters.injection import draw_adapter
from lora_parallel.adapters.peft_private import activate, refuse_merge
from lora_parallel.distributed.dtensors import tensor_on
from lora_parallel.distributed.mesh import dp_rank, sharded_axes
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.layers.layer_parameters import base_of, clean_names
from lora_parallel.layers.wrapped_forward import Around, wrap_forward
from lora_parallel.lazy.tracking import without_values
from lora_parallel.runtime.compiled_blocks import compiled_parts
from lora_parallel.state import ParallelState
from lora_parallel.tenants.routing import Factor, Forward, Route, TenantTokens
from lora_parallel.tenants.state import cut
from lora_parallel.tp.layer import AllUsed, TPLayer, tp_layer_of


class TenantLayer:
    """Run one PEFT layer of a pool, around a layer of the base, with the adapters of the current route's tenants."""

    # `forward` returns the forward that is computed or recomputed, for a layer's name; None outside of any route.
    # Adapters are computed in `dtype`, or in the one that each is stored in.
    def __init__(
        self, layer: Any, name: str, forward: Callable[[str], Forward | None], dtype: torch.dtype | None
    ) -> None:
        self.layer, self.name, self._forward, self._dtype = layer, name, forward, dtype
        self.factors: dict[str, tuple[Factor, Factor]] = {}
        self._base: Any = base_of(layer)
        self._unit: TPLayer | None = tp_layer_of(self._base)
        # adapter of the call in a compiled block; None if the base is called alone
        self._entered: _Adapter | None = None
        arounds: dict[Any, Around] = {layer: lambda layer, _, args, kwargs: layer.base_layer(*args, **kwargs)}
        if self._unit is None:
            arounds[self._base] = lambda _, compute, args, kwargs: self._compute(compute, *args, **kwargs)
        self._undo = [wrap_forward(module, around) for module, around in arounds.items()]
        if self._unit is not None:
            self._undo.append(partial(setattr, self._unit, "compute", self._unit.compute))
            self._unit.compute = partial(self._compute, self._unit.compute)

    def restore(self) -> nn.Module:
        """Give the layer of the base its own forward back, and return the layer."""
        for undo in self._undo:
            undo()
        return self._base

    def add(self, tenant: str, shards: DeviceMesh | None) -> None:
        """Place an adapter that the PEFT layer has whole on every rank, and use it from now on."""
        self.factors[tenant] = placed(self.layer, tenant, shards)
        dropout = self.layer.lora_dropout[tenant]
        if self._unit is not None and isinstance(dropout, TopologyInvariantDropout):
            dropout.feature_offset = self._unit.feature_offset(self.layer.in_features)

    def reseed(self, tenant: str, seed: int) -> None:
        """Draw the dropout of a tenant from `seed` from now on."""
        dropout = self.layer.lora_dropout[tenant]
        if isinstance(dropout, TopologyInvariantDropout):
            dropout.seed = seed

    def enter(self) -> bool:
        """Find the adapter of a call in a compiled block, which cannot look it up; False if samples are mixed."""
        forward = self._called()
        if forward is not None and forward.route.names is not None:  # several tenants, which no graph computes
            return False
        self._entered = None if forward is None else self._adapter(forward, as_tensors=True)
        return True

    def leave(self) -> None:
        """Drop what `enter` found."""
        self._entered = None

    def _called(self) -> Forward | None:
        """Return the forward that calls the layer; None if no adapter is to be added."""
        forward = self._forward(self.name)
        if forward is None or self.layer.disable_adapters:
            return None
        route = forward.route
        if not in_backward():
            forward.training[self.name] = self.layer.training
            if set(self.layer.active_adapters) != set(route.tenants):
                active, asked = sorted(self.layer.active_adapters), sorted(route.tenants)
                forward.refuse(
                    RuntimeError(
                        f"{self.name}: PEFT's active adapters are {active}, and the samples are of {asked}: do not "
                        "call set_adapter in train() or route(), which choose the adapters."
                    )
                )
                return None
        return forward

    def _factors(self, tenant: str, route: Route) -> list[Tensor]:
        return [f.compute(route.gathered.get(f), route.weights[tenant], self._dtype) for f in self.factors[tenant]]

    def _adapter(self, forward: Forward, as_tensors: bool = False) -> _Adapter | None:
        """Return the adapter of the one tenant to whom all samples belong; None if it is not on this layer."""
        (tenant,) = forward.route.tenants
        if tenant not in self.factors:
            return None
        A, B = self._factors(tenant, forward.route)
        dropout = self._dropout(tenant, forward)
        keys: Keys = () if dropout is None else dropout.keys(forward.counts[tenant])
        if dropout is not None and as_tensors:
            keys = tensor_on(A.device, dropout.keys(forward.counts[tenant]), torch.int32).unbind()
        return _Adapter(A, B, self.layer.scaling[tenant], dropout, keys)

    def _compute(self, compute: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        y = compute(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()))
        if torch.compiler.is_compiling():
            return y if self._entered is None else self._entered.add(y, x)
        forward = self._called()
        if forward is None:
            return y
        route = forward.route
        if route.names is None:
            adapter = self._adapter(forward)
            return y if adapter is None else adapter.add(y, x)
        factors = {tenant: self._factors(tenant, route) for tenant in route.tenants if tenant in self.factors}
        if not factors or (tokens := forward.tokens(x.shape[:-1], x.device, self.name)) is None:
            return y
        here = [tenant for tenant in factors if tenant in tokens]
        flat, total = x.reshape(-1, x.shape[-1]), y
        for dtype in dict.fromkeys(factors[t][0].dtype for t in here):
            some = [t for t in here if factors[t][0].dtype == dtype]
            inputs = [self._dropped(t, flat[tokens[t].index].to(dtype), forward, tokens[t]) for t in some]
            deltas = _grouped(inputs, [factors[t] for t in some], [self.layer.scaling[t] for t in some])
            indices = torch.cat([tokens[t].index for t in some])
            spread = deltas.new_zeros(len(flat), deltas.shape[-1]).index_copy(0, indices, deltas)
            total = (total + spread.view(*x.shape[:-1], -1)).to(y.dtype)
        # Factors of tenants without samples on this rank get gradients of zeros, so that this rank's backward runs the
        # same collectives as those of other ranks.
        absent = [factor for tenant in factors if tenant not in tokens for factor in factors[tenant]]
        return AllUsed.apply(total, *absent) if absent else total

    def _dropout(self, tenant: str, forward: Forward) -> TopologyInvariantDropout | None:
        """Return the dropout of a tenant's adapter; None if it drops nothing in this forward."""
        dropout = self.layer.lora_dropout[tenant]
        if not isinstance(dropout, TopologyInvariantDropout) or not forward.training[self.name]:
            return None
        if tenant not in forward.counts:
            raise RuntimeError(
                f"the layer {self.name} was called in training, but not by the model's own forward, which counts the "
                "steps that its dropout depends on: call the parallelized model, not a module inside it."
            )
        return dropout

    def _dropped(self, tenant: str, x: Tensor, forward: Forward, tokens: TenantTokens) -> Tensor:
        dropout = self._dropout(tenant, forward)
        if dropout is None:
            return x
        keys = dropout.keys(forward.counts[tenant])
        return dropout.drop_at(x, tokens.row, tokens.token, keys)


@dataclass(frozen=True, eq=False)
class _Adapter:
    """Hold the adapter of one tenant on a layer, as one forward computes with it."""

    A: Tensor
    B: Tensor
    scaling: float
    dropout: TopologyInvariantDropout | None
    keys: Keys

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """Return the output `y` of the base for its input `x`, with the adapter added."""
        x = x.to(self.A.dtype)  # as PEFT: first the cast, then dropout
        if self.dropout is not None:
            x = self.dropout.drop(x, self.keys)
        return (y + F.linear(F.linear(x, self.A), self.B) * self.scaling).to(y.dtype)


def placed(layer: Any, tenant: str, shards: DeviceMesh | None) -> tuple[Factor, Factor]:
    """Place an adapter that a PEFT layer has whole over tp as the base layer is, and over dp_shard; return A and B."""
    tp_layer = tp_layer_of(base_of(layer))
    on_tp = {} if tp_layer is None else tp_layer.place_adapter(layer, tenant)

    def factor(role: str) -> Factor:
        module = getattr(layer, role)[tenant]
        parameter, rows, partial = on_tp.get(role, (module.weight, None, False))
        whole = not partial and "tp" not in sharded_axes(parameter)
        if shards is None:
            return Factor(parameter, rows, partial, whole)
        parameter, chunks = cut(parameter, shards)
        module._parameters["weight"] = parameter
        return Factor(parameter, rows, partial, whole, chunks)

    return factor("lora_A"), factor("lora_B")


def _grouped(inputs: Sequence[Tensor], factors: Sequence[Sequence[Tensor]], scales: Sequence[float]) -> Tensor:
    """Return the scaled LoRA outputs of all tenants' tokens, one tenant after the other, [all tokens, out]."""
    # inputs: [a tenant's tokens, in]; factors: A [r, in], B [out, r], padded to the largest r with zeros, which add
    # nothing. Tokens are padded only where torch has no grouped matrix product.
    r, grouped = max(A.shape[0] for A, _ in factors), _takes_groups(inputs[0], factors[0][1].shape[0])
    r = -(-r // _GROUPED_MULTIPLE) * _GROUPED_MULTIPLE if grouped else r
    down = torch.stack([F.pad(A, (0, 0, 0, r - A.shape[0])) for A, _ in factors]).transpose(1, 2)
    up = torch.stack([F.pad(B, (0, r - B.shape[1])) for _, B in factors]).transpose(1, 2)
    sizes = [len(x) for x in inputs]
    if grouped:
        ends = tensor_on(inputs[0].device, list(accumulate(sizes)), torch.int32)
        low = F.grouped_mm(torch.cat(list(inputs)), down, offs=ends)
        deltas = F.grouped_mm(low, up, offs=ends).split(sizes)
        return torch.cat([delta * scale for delta, scale in zip(deltas, scales, strict=True)])
    padded = torch.stack([F.pad(x, (0, 0, 0, max(sizes) - len(x))) for x in inputs])
    deltas = (padded @ down) @ up
    # Multiply by Python floats, as PEFT does: a tensor of the scales would round them to 16 bits first.
    return torch.cat([delta[:size] * scale for delta, size, scale in zip(deltas, sizes, scales, strict=True)])


# sizes of a grouped product must be its multiples: torch wants strides of 16 bytes, 8 bfloat16 values
_GROUPED_MULTIPLE = 8


def _takes_groups(x: Tensor, out_features: int) -> bool:
    """Return True if torch has a native grouped matrix product for `x` [tokens, in] and `out_features`."""
    # It has one for bfloat16, on CPUs and on GPUs from Ampere on, if both sizes are multiples of 8.
    if x.dtype != torch.bfloat16 or (x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0)):
        return False
    return x.shape[-1] % _GROUPED_MULTIPLE == 0 and out_features % _GROUPED_MULTIPLE == 0


def shaped(bare: nn.Module, name: str, config: LoraConfig) -> Any:
    """Return a copy of the base on meta with PEFT's adapter on it, which shows the adapter's layers and shapes."""
    return draw_adapter(without_values(bare, {}), config, 0, lambda layer: None, name)


def adapted_layers(shapes: nn.Module) -> dict[str, Any]:
    """Map the name of each adapted layer in the base to PEFT's layer, in the order in which PEFT draws the adapters."""
    return {where: layer for layer, where in clean_names(shapes).items() if isinstance(layer, LoraLayer)}


def draw(
    bare: nn.Module, shapes: Any, name: str, config: LoraConfig, seed: int, put: Callable[[str, Any], None]
) -> None:
    """Draw an adapter's values into the layers of `shapes`, one by one, and hand each with its name to `put`."""
    remaining = iter(adapted_layers(shapes).items())

    def keep(drawn: Any) -> None:
        where, layer = next(remaining)
        for role in ("lora_A", "lora_B"):
            meta, values = getattr(layer, role)[name], getattr(drawn, role)[name]
            meta.weight = nn.Parameter(values.weight.detach().to(meta.weight.dtype))
        put(where, layer)

    draw_adapter(without_values(bare, {}), config, seed, keep, name)


class AdapterSlots:
    """Put adapters on the layers of a parallelized model, and take them away."""

    def __init__(
        self, model: Any, state: ParallelState, shards: DeviceMesh | None, forward: Callable[[str], Forward | None]
    ) -> None:
        self._model, self._state, self._shards, self._forward = model, state, shards, forward
        self._modules = {name: module for module, name in clean_names(model).items()}
        self._layers: dict[str, TenantLayer] = {}
        self._parts = compiled_parts(model)

    def factors(self, tenant: str, shapes: Any, dtype: torch.dtype | None) -> list[Factor]:
        """Return the factors that an adapter would have on this rank, without values."""
        factors: list[Factor] = []
        for where, layer in adapted_layers(shapes).items():
            layer.base_layer = self._modules[where]
            for role in ("lora_A", "lora_B"):
                getattr(layer, role)[tenant].to(dtype=dtype)
            factors += placed(layer, tenant, self._shards)
        return factors

    def put(self, tenant: str, seed: int, dtype: torch.dtype | None, where: str, shape: Any) -> TenantLayer:
        """Put the adapter of one PEFT layer of the bare base (`shape`, whole) on the model's layer of the same name."""
        for role in ("lora_A", "lora_B"):
            getattr(shape, role)[tenant].to(self._state.mesh.device_type, dtype)
        dropout = shape.lora_dropout[tenant]
        if type(dropout) is nn.Dropout and dropout.p > 0:
            count, rank = self._state.forward_count, dp_rank(self._state.mesh)
            shape.lora_dropout[tenant] = TopologyInvariantDropout(dropout.p, where, seed, count, rank)
        if where not in self._layers:
            shape.base_layer = base = self._modules[where]
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
        """Remove a tenant's adapter from each layer; one without adapters becomes the layer of the base again."""
        for where, layer in list(self._layers.items()):
            layer.factors.pop(tenant, None)
            layer.layer.delete_adapter(tenant)
            if not layer.factors:
                base = layer.restore()
                _replace(self._model, layer.layer, base)
                if base in self._parts:
                    self._parts[base].remove(layer)
                del self._layers[where]

    def check_known(self, what: str, tenants: Collection[str]) -> None:
        """Raise ValueError if PEFT knows other adapters than the tenants."""
        there: Any = getattr(self._model, "peft_config", {})
        if there.keys() != set(tenants):
            raise ValueError(
                f"{what}: the model has the adapters {sorted(there)}, and the tenants are {sorted(tenants)}: add "
                "and remove adapters of a pooled model with the pool, not with add_adapter and delete_adapter."
            )

    def tell(self, configs: Mapping[str, LoraConfig]) -> None:
        """Tell PEFT and transformers which adapters the model has."""
        if configs:
            self._model.peft_config = dict(configs)
        else:
            self._model.__dict__.pop("peft_config", None)
        if hasattr(self._model, "_hf_peft_config_loaded"):
            self._model._hf_peft_config_loaded = bool(configs)
        self.activate(())

    def activate(self, tenants: Sequence[str]) -> None:
        """Make these tenants' adapters the ones that PEFT reports as active, and unfreeze what PEFT has frozen."""
        for layer in self._layers.values():
            activate(layer.layer, list(tenants))
            for factor in (factor for both in layer.factors.values() for factor in both):
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
