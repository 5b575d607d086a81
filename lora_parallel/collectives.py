"""The collectives of tensor parallel compute, as autograd functions on plain local tensors.

All are functional (out of place), so that `torch.compile` can trace them. A peer that runs another program shows as a
timeout: each rank then names its own last collective, see `_named`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lora_parallel.upstream import all_gather_stacked, all_reduce_sum, reduce_scatter_sum

__all__ = [
    "all_reduce",
    "chunk_bounds",
    "copy_all_to_tp",
    "copy_to_tp",
    "gather_last_dim",
    "gather_tokens",
    "split_last_dim",
    "split_tokens",
    "sum_of_tokens",
    "sum_over_tp",
    "whole_tokens",
]


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of chunk `index` of `parts` over `size` elements, as `torch.chunk` and DTensor's `Shard` cut."""
    width = -(-size // parts)
    return min(index * width, size), min((index + 1) * width, size)


@contextmanager
def _named(what: str, where: str, group: ProcessGroup) -> Iterator[None]:
    """Turn a failed collective into an error that says which one this rank was in."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise RuntimeError(
            f"rank {dist.get_rank()}: the collective '{what} of {where}' over tp (ranks "
            f"{dist.get_process_group_ranks(group)}) failed. Compare with what the other ranks name: a rank that names "
            f"another collective, or none, ran a different program. Cause: {error}"
        ) from error


def all_reduce(tensor: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """The sum of `tensor` over `group`, as a new tensor."""
    with _named(what, where, group):
        return all_reduce_sum(tensor.contiguous(), group)


class _CopyToTP(torch.autograd.Function):
    """Identity forward; backward sums the gradients over tp, in one message, for every layer fed from it at once."""

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
        return None, None, *(each.view_as(grad).to(grad.dtype) for each, grad in zip(total, grads, strict=True))


class _SumOverTP(torch.autograd.Function):
    """Sum over tp forward; identity backward, because every rank goes on with the same output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, where: str) -> Tensor:
        return all_reduce(x, group, "output", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def _gather(x: Tensor, size: int, group: ProcessGroup, what: str, where: str) -> Tensor:
    width = -(-size // group.size())
    padded = torch.nn.functional.pad(x, (0, width - x.shape[-1])).contiguous()
    with _named(what, where, group):
        stacked = all_gather_stacked(padded, group)
    widths = [end - start for start, end in (chunk_bounds(size, group.size(), i) for i in range(group.size()))]
    # A new tensor, never a view: FSDP2 hangs its hooks on what the root returns, and an in-place operation on a view
    # would lose them.
    return torch.cat([part[..., :width] for part, width in zip(stacked.unbind(0), widths, strict=True)], dim=-1)


class _GatherLastDim(torch.autograd.Function):
    """Slices put together forward; backward keeps this rank's slice of a gradient that is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
        ctx.bounds = chunk_bounds(size, group.size(), group.rank())
        return _gather(x, size, group, "output slices", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        start, end = ctx.bounds
        return grads[0][..., start:end], None, None, None


class _SplitLastDim(torch.autograd.Function):
    """This rank's slice forward; backward puts the slices' gradients together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, where: str) -> Tensor:
        ctx.size, ctx.group, ctx.where = x.shape[-1], group, where
        start, end = chunk_bounds(x.shape[-1], group.size(), group.rank())
        return x[..., start:end].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grads[0], ctx.size, ctx.group, "input gradient slices", ctx.where), None, None


_TOKENS = 1
"""The dim of the sequence in activations [rows, tokens, features]."""


def _token_bounds(size: int, group: ProcessGroup) -> list[tuple[int, int]]:
    return [chunk_bounds(size, group.size(), index) for index in range(group.size())]


def _all_tokens(x: Tensor, size: int, group: ProcessGroup, what: str, where: str) -> Tensor:
    width = -(-size // group.size())
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, width - x.shape[_TOKENS])).contiguous()
    with _named(what, where, group):
        stacked = all_gather_stacked(padded, group)
    parts = zip(stacked.unbind(0), _token_bounds(size, group), strict=True)
    return torch.cat([part.narrow(_TOKENS, 0, end - start) for part, (start, end) in parts], dim=_TOKENS)


def _my_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    start, end = chunk_bounds(x.shape[_TOKENS], group.size(), group.rank())
    # Not a view: what comes of a function may be changed in place.
    return x.narrow(_TOKENS, start, end - start).clone(memory_format=torch.contiguous_format)


def _sum_of_mine(x: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    size = x.shape[_TOKENS]
    width = -(-size // group.size())
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, width * group.size() - size))
    stacked = torch.stack(padded.split(width, dim=_TOKENS))
    with _named(what, where, group):
        mine = reduce_scatter_sum(stacked, group)
    start, end = chunk_bounds(size, group.size(), group.rank())
    return mine.narrow(_TOKENS, 0, end - start).clone(memory_format=torch.contiguous_format)


class _GatherTokens(torch.autograd.Function):
    """All tokens for slices; the gradient that comes back is partial, and each rank gets the sum for its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
        ctx.group, ctx.where = group, where
        return _all_tokens(x, size, group, "tokens", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_of_mine(grads[0], ctx.group, "input gradient", ctx.where), None, None, None


class _SumOfTokens(torch.autograd.Function):
    """The sum of partial outputs for this rank's tokens; backward gives all of them the gradient of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, where: str) -> Tensor:
        ctx.size, ctx.group, ctx.where = x.shape[_TOKENS], group, where
        return _sum_of_mine(x, group, "output", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_tokens(grads[0], ctx.size, ctx.group, "output gradient", ctx.where), None, None


class _SplitTokens(torch.autograd.Function):
    """This rank's tokens of a tensor that is the same everywhere; backward puts the gradients together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, where: str) -> Tensor:
        ctx.size, ctx.group, ctx.where = x.shape[_TOKENS], group, where
        return _my_tokens(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_tokens(grads[0], ctx.size, ctx.group, "input gradient", ctx.where), None, None


class _WholeTokens(torch.autograd.Function):
    """All tokens, for what every rank computes alike; backward keeps the gradient of this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
        ctx.group = group
        return _all_tokens(x, size, group, "tokens", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _my_tokens(grads[0], ctx.group), None, None, None


def gather_tokens(x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
    """All `size` tokens of which each rank has one chunk in `x` [rows, tokens, ...], fed to slices."""
    return _GatherTokens.apply(x, size, group, where)


def sum_of_tokens(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """The sum of the partial outputs `x` [rows, tokens, ...], for this rank's chunk of the tokens."""
    return _SumOfTokens.apply(x, group, where)


def split_tokens(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """This rank's chunk of the tokens of `x` [rows, tokens, ...], which is whole on every rank."""
    return _SplitTokens.apply(x, group, where)


def whole_tokens(x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
    """All `size` tokens of which each rank has one chunk in `x` [rows, tokens, ...], the same on every rank."""
    return _WholeTokens.apply(x, size, group, where)


def copy_to_tp(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """`x`, whole on every rank, fed to slices: the gradient that comes back is partial and is summed over tp."""
    return _CopyToTP.apply(group, where, x)[0]


def copy_all_to_tp(xs: Sequence[Tensor], group: ProcessGroup, where: str) -> tuple[Tensor, ...]:
    """As `copy_to_tp` of each, with one sum for all of their gradients."""
    return _CopyToTP.apply(group, where, *xs)


def sum_over_tp(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """The sum of the partial outputs `x`."""
    return _SumOverTP.apply(x, group, where)


def gather_last_dim(x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
    """The output of width `size` of which each rank holds one chunk of the last dim."""
    return _GatherLastDim.apply(x, size, group, where)


def split_last_dim(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """This rank's chunk of the last dim of `x`, which is whole on every rank."""
    return _SplitLastDim.apply(x, group, where)
