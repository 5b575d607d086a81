"""Gradients of tenants: all that wait for their sum, in one message over tp and one over each data-parallel axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from lora_parallel.collectives import all_reduce
from lora_parallel.tenants.factor import Factor

__all__ = ["finish"]


@torch.no_grad()
def finish(factors: Sequence[Factor], mesh: DeviceMesh) -> list[Tensor | None]:
    """Take what has come together since the last time, and sum over all ranks what each has a part of. Collective.

    Args:
        factors: The same on every rank, in the same order.
        mesh: Of the model.

    Returns:
        The sum of each, as its parameter is placed; None where no rank has a gradient.
    """
    taken = [factor.take_gradients() for factor in factors]
    gradients = [part for part, _ in taken]
    rank = mesh.get_local_rank("dp_shard")
    sums: list[Tensor | None] = [None] * len(factors)
    dtypes = list(dict.fromkeys(factor.parameter.dtype for factor in factors))
    for dtype in dtypes:
        of_dtype = [index for index, factor in enumerate(factors) if factor.parameter.dtype == dtype]
        # Partial sums over tp first, so that the front of the message is what goes over tp.
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
    # What a loss takes of the parameters themselves, every rank has in full.
    for index, (_, own) in enumerate(taken):
        if own is not None:
            known = sums[index]
            sums[index] = own if known is None else known + own
    return sums


def _or_zeros(factor: Factor, gradient: Tensor | None) -> Tensor:
    if gradient is not None:
        return gradient
    return torch.zeros(factor.shape, dtype=factor.parameter.dtype, device=factor.device)
