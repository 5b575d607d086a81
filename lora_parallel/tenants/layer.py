"""A layer with the adapters of tenants: the base once, LoRA for each tenant's tokens, all of them in one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel.dropout import TopologyInvariantDropout
from lora_parallel.layers import AllUsed, Unit, base_of, unit_of
from lora_parallel.tenants.factor import Factor
from lora_parallel.tenants.route import Route, Tokens
from lora_parallel.tenants.shards import cut

__all__ = ["TenantLayer"]


class TenantLayer:
    """One PEFT layer of a pool, whose forward takes the adapters that the route says.

    Args:
        layer: PEFT's layer; that it wraps a layer of the base is new.
        name: The layer's name in the base.
        route: Gives the route of the context that this forward is in, or None outside of one.
        current: Gives the number of the model's training forward that is computed, or recomputed.
        dtype: What adapters are computed in; None: in their own.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        route: Callable[[], Route | None],
        current: Callable[[], int],
        dtype: torch.dtype | None,
    ) -> None:
        self.layer, self.name = layer, name
        self.factors: dict[str, tuple[Factor, Factor]] = {}
        self._route, self._current, self._dtype = route, current, dtype
        self._base: Any = base_of(layer)
        self._unit: Unit | None = unit_of(self._base)
        self._own = self._unit.compute if self._unit is not None else self._base.forward
        if self._unit is not None:
            self._unit.compute = self._compute
        else:
            self._base.forward = self._compute
        layer.forward = MethodType(lambda self, *args, **kwargs: self.base_layer(*args, **kwargs), layer)

    def restore(self) -> nn.Module:
        """The layer of the base, as it was."""
        if self._unit is not None:
            self._unit.compute = self._own
        else:
            self._base.__dict__.pop("forward")
        return self._base

    def add(self, tenant: str, shards: DeviceMesh | None) -> None:
        """Take over an adapter that the PEFT layer has, in full on every rank.

        Args:
            tenant: Its name.
            shards: Share it out over the dp_shard axis of this mesh.
        """
        placed = {} if self._unit is None else self._unit.place_adapter(self.layer, tenant)
        both = []
        for role in ("lora_A", "lora_B"):
            module = getattr(self.layer, role)[tenant]
            parameter, rows, partial = placed.get(role, (module.weight, None, False))
            how = None
            if shards is not None:
                parameter, how = cut(parameter, shards)
                module._parameters["weight"] = parameter
            both.append(Factor(parameter, rows, partial, how))
        self.factors[tenant] = both[0], both[1]
        dropout = self.layer.lora_dropout[tenant]
        if self._unit is not None and isinstance(dropout, TopologyInvariantDropout):
            dropout.feature_offset = self._unit.feature_offset(self.layer.in_features)

    def reseed(self, tenant: str, seed: int) -> None:
        """Draw a tenant's dropout from this seed from now on."""
        dropout = self.layer.lora_dropout[tenant]
        if isinstance(dropout, TopologyInvariantDropout):
            dropout.seed = seed

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        y = self._own(*args, **kwargs)
        route = self._route()
        if route is None:
            return y
        tenants = [tenant for tenant in route.tenants if tenant in self.factors]
        if not tenants:
            return y
        x = args[0] if args else next(iter(kwargs.values()))
        factors = {t: [f.compute(route.weights[t], self._dtype) for f in self.factors[t]] for t in tenants}
        if route.names is None:
            (tenant,) = tenants
            A, B = factors[tenant]
            fed = self._dropped(tenant, x, route, None).to(A.dtype)
            return (y + F.linear(F.linear(fed, A), B) * self.layer.scaling[tenant]).to(y.dtype)
        tokens = route.tokens(x.shape[:-1], x.device)
        here = [tenant for tenant in tenants if tenant in tokens]
        flat, total = x.reshape(-1, x.shape[-1]), y
        for dtype in dict.fromkeys(factors[t][0].dtype for t in here):
            some = [t for t in here if factors[t][0].dtype == dtype]
            theirs = [self._dropped(t, flat[tokens[t].place], route, tokens[t]).to(dtype) for t in some]
            deltas = _grouped(theirs, [factors[t] for t in some], [self.layer.scaling[t] for t in some])
            places = torch.cat([tokens[t].place for t in some])
            spread = deltas.new_zeros(len(flat), deltas.shape[-1]).index_copy(0, places, deltas)
            total = (total + spread.view(*x.shape[:-1], -1)).to(y.dtype)
        # Each rank's backward goes the same way, whoever's samples it has: others wait for it in their collectives.
        absent = [factor for tenant in tenants if tenant not in tokens for factor in factors[tenant]]
        return AllUsed.apply(total, *absent) if absent else total

    def _dropped(self, tenant: str, x: Tensor, route: Route, tokens: Tokens | None) -> Tensor:
        dropout = self.layer.lora_dropout[tenant]
        if not isinstance(dropout, TopologyInvariantDropout) or not self.layer.training:
            return x
        count = route.forwards[self._current()][tenant]
        if tokens is None:
            dropped = dropout.dropped(x.shape, x.device, count)
        else:
            dropped = dropout.dropped_at(tokens.row, tokens.token, x.shape[-1], count)
        return x.masked_fill(dropped, 0) * (1 / (1 - dropout.p)) if dropout.p < 1 else x * 0


def _grouped(fed: Sequence[Tensor], factors: Sequence[Sequence[Tensor]], scales: Sequence[float]) -> Tensor:
    """What each tenant's adapter comes to for its tokens, one after the other: [all tokens, out].

    Ranks are filled up with zeros, which add nothing. Where torch has a product of groups, tokens are not.
    """
    rank = max(A.shape[0] for A, _ in factors)
    device, dtype = fed[0].device, fed[0].dtype
    grouped = dtype in _GROUPED and device.type == "cuda"
    rank = -(-rank // 8) * 8 if grouped else rank
    down = torch.stack([F.pad(A, (0, 0, 0, rank - A.shape[0])) for A, _ in factors]).transpose(1, 2)
    up = torch.stack([F.pad(B, (0, rank - B.shape[1])) for _, B in factors]).transpose(1, 2)
    sizes = [len(x) for x in fed]
    if grouped:
        ends = torch.tensor(sizes).cumsum(0).to(device=device, dtype=torch.int32)
        scale = torch.tensor(scales, dtype=dtype, device=device).repeat_interleave(torch.tensor(sizes, device=device))
        low = F.grouped_mm(torch.cat(list(fed)), down, offs=ends)
        return F.grouped_mm(low, up, offs=ends) * scale[:, None]
    longest = max(sizes)
    padded = torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x in fed])
    deltas = (padded @ down) @ up * torch.tensor(scales, dtype=dtype, device=device)[:, None, None]
    return torch.cat([delta[:size] for delta, size in zip(deltas, sizes, strict=True)])


_GROUPED = (torch.bfloat16,)
