"""Run the collectives of tensor parallel compute, as autograd functions on plain local tensors.

All are functional (out of place), so that `torch.compile` can trace them. If a peer rank runs another program, the
collective times out, and each rank raises an error that names the collective it was in (see `_named`).
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

from lora_parallel.distributed.torch_private import all_gather_stacked, all_reduce_sum, all_to_all, reduce_scatter_sum


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the start and end of chunk `index` of `parts` in `size` elements, cut as by `torch.chunk` and `Shard`."""
    width = -(-size // parts)
    return min(index * width, size), min((index + 1) * width, size)


def unless_compiled(name: str) -> str:
    """Return the name of a layer for error messages, or "" in a graph, which serves the same layer of every block."""
    return "" if torch.compiler.is_compiling() else name


@contextmanager
def _named(what: str, where: str, group: ProcessGroup) -> Iterator[None]:
    """Turn the failure of a collective into an error that names it: `what` is the kind of tensor, `where` the layer."""
    if torch.compiler.is_compiling():  # a graph holds the collective alone
        yield
        return
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise RuntimeError(
            f"rank {dist.get_rank()}: the collective '{what} of {where}' over "
            f"{group.group_desc.removeprefix('mesh_')} (ranks {dist.get_process_group_ranks(group)}) failed. Compare "
            "with what the other ranks name: a rank that names another collective, or none, ran a different program. "
            f"Cause: {error}"
        ) from error


def all_reduce(tensor: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return the sum of `tensor` over the ranks of `group`, as a new tensor."""
    with _named(what, where, group):
        return all_reduce_sum(tensor.contiguous(), group)


def stacked_over(tensor: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return the `tensor` of each rank of `group`, stacked to [ranks, ...]. Autograd does not see it."""
    with _named(what, where, group):
        return all_gather_stacked(tensor.contiguous(), group)


def exchanged(stacked: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Send part i of `stacked` [ranks, ...] to rank i; return each rank's part for this one, without autograd."""
    with _named(what, where, group):
        return all_to_all(stacked, group)


def scattered_sum(stacked: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return this rank's part [...] of the sum of `stacked` [ranks, ...] over the ranks. Autograd does not see it."""
    with _named(what, where, group):
        return reduce_scatter_sum(stacked, group)


def chunks_over_tp(x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
    """Return the output [..., size] of which each rank holds a chunk `x` of the last dim. Autograd does not see it."""
    return _all_chunks(x, size, -1, group, "output slices", where)


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


_TOKENS = 1  # dim of the tokens in activations [rows, tokens, features]


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Return `x` with zeros at the end of a dim, so that it has this size there."""
    if dim < 0:
        dim += x.dim()
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, size - x.shape[dim]))


def _all_chunks(x: Tensor, size: int, dim: int, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return the ranks' chunks `x` of a dim concatenated: `size` elements in that dim."""
    ranks = group.size()
    stacked = stacked_over(padded(x, dim, -(-size // ranks)), group, what, where)
    bounds = (chunk_bounds(size, ranks, rank) for rank in range(ranks))
    # A new tensor, never a view: FSDP2 registers hooks on the outputs of the root, and an in-place operation on a view
    # would lose the hooks.
    return torch.cat([part.narrow(dim, 0, b - a) for part, (a, b) in zip(stacked, bounds, strict=True)], dim=dim)


def _my_chunk(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Return this rank's chunk of a dim, as a view."""
    start, end = chunk_bounds(x.shape[dim], group.size(), group.rank())
    return x.narrow(dim, start, end - start)


def _all_tokens(x: Tensor, size: int, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return all `size` tokens [rows, tokens, ...], of which each rank has a chunk `x`. Autograd does not see it."""
    if not torch.compiler.is_compiling():
        return _all_chunks(x, size, _TOKENS, group, what, where)
    stacked = stacked_over(_tokens_first(x, -(-size // group.size()), group), group, what, where)
    return stacked.flatten(0, 1).narrow(0, 0, size).transpose(0, 1).contiguous()


def _tokens_first(x: Tensor, size: int, group: ProcessGroup) -> Tensor:
    """Return `x` [rows, tokens, ...] as [size, rows, ...], with zeros at the end."""
    # A graph that serves lengths which vary has its tokens in the first dim, and always pads. In another dim, whether a
    # tensor without its last tokens is contiguous would depend on whether tp divides the length: a graph for each case.
    longer = torch.nn.functional.pad(x.transpose(0, 1), ((0, 0) * (x.dim() - 1) + (0, group.size() - 1)))
    return longer.contiguous().narrow(0, 0, size)


def _sum_of_mine(x: Tensor, group: ProcessGroup, what: str, where: str) -> Tensor:
    """Return this rank's chunk of the tokens of the sum of `x` [rows, tokens, ...] over `group`."""
    size = x.shape[_TOKENS]
    width = -(-size // group.size())
    start, end = chunk_bounds(size, group.size(), group.rank())
    if torch.compiler.is_compiling():
        chunks = _tokens_first(x, width * group.size(), group).unflatten(0, (group.size(), width))
        return scattered_sum(chunks, group, what, where).narrow(0, 0, end - start).transpose(0, 1).contiguous()
    stacked = torch.stack(padded(x, _TOKENS, width * group.size()).split(width, dim=_TOKENS))
    mine = scattered_sum(stacked, group, what, where)
    return mine.narrow(_TOKENS, 0, end - start).clone(memory_format=torch.contiguous_format)


class _GatherChunks(torch.autograd.Function):
    """Concatenate the ranks' chunks of a dim in forward; in backward keep this rank's chunk of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, dim: int, group: ProcessGroup, what: str, where: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_chunks(x, size, dim, group, what, where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _my_chunk(grads[0], ctx.dim, ctx.group), None, None, None, None, None


class _SplitChunks(torch.autograd.Function):
    """Keep this rank's chunk of a dim in forward; in backward concatenate the gradients of all ranks' chunks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup, what: str, where: str) -> Tensor:
        ctx.size, ctx.dim, ctx.group, ctx.what, ctx.where = x.shape[dim], dim, group, what, where
        # A copy, not a view: code may change the output of an autograd function in place.
        return _my_chunk(x, dim, group).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = _all_chunks(grads[0], ctx.size, ctx.dim, ctx.group, ctx.what, ctx.where)
        return whole, None, None, None, None


class _GatherTokens(torch.autograd.Function):
    """Gather the ranks' chunks of the tokens in forward; in backward sum the gradients for this rank's chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
        ctx.group, ctx.where = group, where
        return _all_tokens(x, size, group, "tokens", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_of_mine(grads[0], ctx.group, "input gradient", ctx.where), None, None, None


class _SumOfTokens(torch.autograd.Function):
    """Sum partial outputs over tp in forward, for this rank's chunk of the tokens; in backward gather the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, where: str) -> Tensor:
        ctx.size, ctx.group, ctx.where = x.shape[_TOKENS], group, where
        return _sum_of_mine(x, group, "output", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _all_tokens(grads[0], ctx.size, ctx.group, "output gradient", ctx.where), None, None


def gather_tokens(x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
    """Return all `size` tokens from each rank's chunk `x`, for layers that tp splits: backward sums over tp."""
    return _GatherTokens.apply(x, size, group, where)


def sum_of_tokens(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """Return the sum over tp of the partial outputs `x` [rows, tokens, ...], for this rank's chunk of the tokens."""
    return _SumOfTokens.apply(x, group, where)


def split_tokens(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """Return this rank's chunk of the tokens of `x` [rows, tokens, ...], which is the same on every rank."""
    return _SplitChunks.apply(x, _TOKENS, group, "input gradient", where)


def whole_tokens(x: Tensor, size: int, group: ProcessGroup, where: str) -> Tensor:
    """Return all `size` tokens from each rank's chunk `x`; the same compute follows on every rank, and no sum."""
    return _GatherChunks.apply(x, size, _TOKENS, group, "tokens", where)


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
    return _GatherChunks.apply(x, size, -1, group, "output slices", where)


def split_last_dim(x: Tensor, group: ProcessGroup, where: str) -> Tensor:
    """Return this rank's chunk of the last dim of `x`, which is the same on every rank."""
    return _SplitChunks.apply(x, -1, group, "input gradient slices", where)
