"""Run the collectives of tensor parallel compute, as autograd functions on plain local tensors.

All are out of place, so that `torch.compile` can trace them. If a peer rank runs another program, the collective times
out, and each rank raises an error that names the collective it was in (see `named`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lora_parallel.distributed.torch_private import all_gather_stacked, all_reduce_sum, all_to_all, reduce_scatter_sum


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the start and end of chunk `index` of `parts` in `size` elements, cut as by `torch.chunk` and `Shard`."""
    width = -(-size // parts)
    return min(index * width, size), min((index + 1) * width, size)


@contextmanager
def named(what: str, where: str, group: ProcessGroup) -> Iterator[None]:
    """Turn the failure of a collective into an error that names it: `what` is the kind of tensor, `where` the layer."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise RuntimeError(
            f"rank {dist.get_rank()}: the collective '{what} of {where}' over "
            f"{group.group_desc.removeprefix('mesh_')} (ranks {dist.get_process_group_ranks(group)}) failed. Compare "
            "with what the other ranks name: a rank that names another collective, or none, ran a different program. "
            f"Cause: {error}"
        ) from error


def _run(
    collective: Callable[[Tensor, ProcessGroup], Tensor], tensor: Tensor, group: ProcessGroup, what: str, where: str
) -> Tensor:
    """Run a collective of a layer, and name its failure; a context around each call would cost more than the rest."""
    if torch.compiler.is_compiling():  # a graph holds the collective alone
        return collective(tensor, group)
    try:
        return collective(tensor, group)
    except (RuntimeError, dist.DistError):
        with named(what, where, group):
            raise


def all_reduce(tensor: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return the sum of `tensor` over the ranks of `group`, as a new tensor."""
    return _run(all_reduce_sum, tensor.contiguous(), group, what, where)


def stacked_over(tensor: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return the `tensor` of each rank of `group`, stacked to [ranks, ...]. Autograd does not see it."""
    return _run(all_gather_stacked, tensor.contiguous(), group, what, where)


def exchanged(stacked: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Send part i of `stacked` [ranks, ...] to rank i; return each rank's part for this one, without autograd."""
    return _run(all_to_all, stacked, group, what, where)


def scattered_sum(stacked: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return this rank's part [...] of the sum of `stacked` [ranks, ...] over the ranks. Autograd does not see it."""
    return _run(reduce_scatter_sum, stacked, group, what, where)


class _CopyToTP(torch.autograd.Function):
    """Return the tensors unchanged in forward; in backward sum the gradients of all of them over tp, in one message."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, where: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.where = group, where
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if len(grads) == 1:
            return None, None, all_reduce(grads[0], ctx.group, "input gradient", ctx.where)
        flat = torch.cat([grad.flatten() for grad in grads])
        total = all_reduce(flat, ctx.group, "input gradients", ctx.where).split([grad.numel() for grad in grads])
        return None, None, *(part.view_as(grad).to(grad.dtype) for part, grad in zip(total, grads, strict=True))


class _SumOverTP(torch.autograd.Function):
    """Sum partial outputs over tp in forward; in backward return the gradient, which is the same on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, where: str) -> Tensor:
        return all_reduce(x, group, "output", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Return `x` with zeros at the end of a dim, so that it has this size there."""
    # A graph always pads: whether there is anything to pad would be a condition on the size.
    if not torch.compiler.is_compiling() and x.shape[dim] == size:
        return x
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (0, size - x.shape[dim]))


def chunks_over_tp(x: Tensor, size: int, group: ProcessGroup, where: str, what: str = "output slices") -> Tensor:
    """Return the tensor [..., size] of which each rank holds a chunk `x` of the last dim. Autograd does not see it."""
    ranks = group.size()
    stacked = stacked_over(padded(x, -1, -(-size // ranks)), group, what, where)
    bounds = (chunk_bounds(size, ranks, rank) for rank in range(ranks))
    # A new tensor, never a view: FSDP2 registers hooks on the outputs of the root, and an in-place operation on a view
    # would lose the hooks.
    return torch.cat([part[..., : b - a] for part, (a, b) in zip(stacked, bounds, strict=True)], dim=-1)


def _my_chunk(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's chunk of the last dim, as a view."""
    start, end = chunk_bounds(x.shape[-1], group.size(), group.rank())
    return x[..., start:end]


class _GatherLastDim(torch.autograd.Function):
    """Concatenate the ranks' chunks in forward; in backward keep this rank's chunk of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
        ctx.group = group
        return chunks_over_tp(x, size, group, where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _my_chunk(grads[0], ctx.group), None, None, None


class _SplitLastDim(torch.autograd.Function):
    """Keep this rank's chunk in forward; in backward concatenate the gradients of all ranks' chunks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, where: str) -> Tensor:
        ctx.size, ctx.group, ctx.where = x.shape[-1], group, where
        # A copy, not a view: code may change the output of an autograd function in place.
        return _my_chunk(x, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return chunks_over_tp(grads[0], ctx.size, ctx.group, ctx.where, "input gradient slices"), None, None


def copy_to_tp(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """Return `x`, the same on every rank, to feed layers that tp splits; backward sums its gradients over tp."""
    return _CopyToTP.apply(group, where, x)[0]


def copy_all_to_tp(xs: Sequence[Tensor], group: ProcessGroup, where: str) -> tuple[Tensor, ...]:
    """Return the tensors `xs` as `copy_to_tp` does, with one all-reduce for all of their gradients."""
    return _CopyToTP.apply(group, where, *xs)


def sum_over_tp(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """Return the sum over tp of the partial outputs `x`, for layers that compute the same with it on every rank."""
    return _SumOverTP.apply(x, group, where)


def gather_last_dim(x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
    """Return the output [..., size] of which each rank holds a chunk `x` of the last dim."""
    return _GatherLastDim.apply(x, size, group, where)


def split_last_dim(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """Return this rank's chunk of the last dim of `x`, which is the same on every rank."""
    return _SplitLastDim.apply(x, group, where)
