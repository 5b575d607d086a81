"""Sum the gradients of tenants over ranks: for each dtype one message over tp and one over each data-parallel axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from lora_parallel.distributed.collectives import all_reduce
from lora_parallel.tenants.factor import Factor
from lora_parallel.tenants.tenant import Tenant

__all__ = ["finish"]


def finish(tenants: Sequence[Tenant], mesh: DeviceMesh) -> None:
    """Sum the gradients of tenants over all ranks, and add them to those that wait for a step. Collective.

    Args:
        tenants: The tenants whose gradients have not been summed, the same on every rank and in the same order.
        mesh: The mesh of the model.
    """
    sums = iter(_summed([factor for tenant in tenants for factor in tenant.factors], mesh))
    for tenant in tenants:
        tenant.add_sums([next(sums) for _ in tenant.factors])


@torch.no_grad()
def _summed(factors: Sequence[Factor], mesh: DeviceMesh) -> list[Tensor | None]:
    """Take the gradients of factors that have accumulated since the last call, and sum them over all ranks. Collective.

    Gradients of the parameters themselves, which every rank has in full, are added without a sum over ranks.

    Args:
        factors: The factors, the same on every rank and in the same order.
        mesh: The mesh of the model.

    Returns:
        The summed gradient of each factor, placed as its parameter is; None where no rank has a gradient.
    """
    taken = [factor.take_gradients() for factor in factors]
    gradients = [part for part, _ in taken]
    rank = mesh.get_local_rank("dp_shard")
    sums: list[Tensor | None] = [None] * len(factors)
    dtypes = list(dict.fromkeys(factor.parameter.dtype for factor in factors))
    for dtype in dtypes:
        of_dtype = [index for index, factor in enumerate(factors) if factor.parameter.dtype == dtype]
        # Gradients that are partial over tp come first: the front of the message is summed over tp, all of it over dp.
        order = sorted(of_dtype, key=lambda index: not factors[index].partial)
        held = [_or_zeros(factors[index], gradients[index]) for index in order]
        there = torch.tensor([gradients[index] is not None for index in order], dtype=dtype, device=held[0].device)
        flat = torch.cat([there, *(each.reshape(-1) for each in held)])
        partial = sum(each.numel() for index, each in zip(order, held, strict=True) if factors[index].partial)
        if mesh["tp"].size() > 1 and partial:
            front = slice(len(there), len(there) + partial)
            flat[front] = all_reduce(flat[front], mesh.get_group("tp"), "gradients", "tenants")
        for axis in ("dp_shard", "dp_replicate"):
            if mesh[axis].size() > 1:
                flat = all_reduce(flat, mesh.get_group(axis), "gradients", "tenants")
        found, values = flat[: len(there)].tolist(), flat[len(there) :].split([each.numel() for each in held])
        for index, present, value, each in zip(order, found, values, held, strict=True):
            if present:
                sums[index] = factors[index].placed(value.view_as(each), rank)
    # The gradient of a loss term of the parameter itself is complete on every rank: it is added without a sum.
    for index, (_, own) in enumerate(taken):
        if own is not None:
            known = sums[index]
            sums[index] = own if known is None else known + own
    return sums


def _or_zeros(factor: Factor, gradient: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    return torch.zeros(factor.shape, dtype=factor.parameter.dtype, device=factor.device)
