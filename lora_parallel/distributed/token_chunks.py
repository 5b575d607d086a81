"""Say which tokens of a batch each rank of a group computes, and move chunks of tokens between these ranks.

Under sequence parallelism the ranks of the tp axis each have a chunk of the tokens [rows, tokens, ...] between the
layers that tp cuts; an all-gather before these and a reduce-scatter after them replace all-reduces (Korthikanti et al.,
https://arxiv.org/abs/2205.05198). Ranks of the cp axis have a chunk everywhere. Attention needs all tokens: Ulysses
exchanges heads for tokens by an all-to-all (DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509); the other method
gathers keys and values (Llama 3, https://arxiv.org/abs/2407.21783, section 3.3.2). All functions here lay tokens out in
the first dim while they are sent, so that the graphs of `torch.compile` do not depend on whether the ranks divide the
length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lora_parallel.distributed.collectives import exchanged, padded, scattered_sum, stacked_over


class TokenChunks:
    """Divide the tokens of a row between ranks: one chunk for each rank, or two if `balanced`."""

    # Balanced ranks have as much work in causal attention over gathered keys: chunk `rank` of the first half of the
    # tokens, and chunk ranks - 1 - `rank` of the second.
    def __init__(self, ranks: int, rank: int, group: ProcessGroup | None = None, balanced: bool = False) -> None:
        self.ranks, self.rank, self.balanced, self._group = ranks, rank, balanced, group

    @property
    def group(self) -> ProcessGroup:
        """Return the process group of the ranks; it is None where nothing is sent."""
        assert self._group is not None
        return self._group

    def ranges(self, tokens: int, rank: int | None = None) -> list[tuple[int, int]]:
        """Return the first and last + 1 token of each of a rank's chunks, of this rank's if `rank` is None."""
        rank = self.rank if rank is None else rank
        if not self.balanced:
            return [_bounds(tokens, self.ranks, rank)]
        half = (tokens + 1) // 2
        start, end = _bounds(tokens - half, self.ranks, self.ranks - 1 - rank)
        return [_bounds(half, self.ranks, rank), (half + start, half + end)]

    @property
    def fewest(self) -> int:
        """Return the smallest number of tokens of which each rank has one."""
        return 2 * self.ranks if self.balanced else self.ranks

    def count(self, tokens: int, rank: int | None = None) -> int:
        """Return the number of tokens of a rank, of this one if `rank` is None."""
        return sum(end - start for start, end in self.ranges(tokens, rank))

    def width(self, tokens: int) -> int:
        """Return the number of tokens that a rank has at most: what is sent is padded to it."""
        return 2 * -(-tokens // (2 * self.ranks)) if self.balanced else -(-tokens // self.ranks)

    def mine(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's tokens of `x`, of which a dim is all tokens. Of one chunk it is a view."""
        parts = [x.narrow(dim, start, end - start) for start, end in self.ranges(x.shape[dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Return the index in the row of each of this rank's tokens, int32 [tokens of this rank]."""
        return self.mine(torch.arange(tokens, dtype=torch.int32, device=device), 0)

    def joined(self, stacked: Tensor, tokens: int) -> Tensor:
        """Return all tokens [tokens, ...] in their order, from those of each rank [ranks, width, ...]."""
        if self._divides(tokens):
            return stacked.flatten(0, 1)
        begins = [0] * self.ranks
        pieces = []
        for half in range(len(self.ranges(tokens))):  # the second halves are those of the last rank first
            for rank in reversed(range(self.ranks)) if half else range(self.ranks):
                start, end = self.ranges(tokens, rank)[half]
                pieces.append(stacked[rank].narrow(0, begins[rank], end - start))
                begins[rank] += end - start
        return torch.cat(pieces)

    def parted(self, whole: Tensor) -> Tensor:
        """Return the tokens of each rank [ranks, width, ...], from all tokens [tokens, ...]; the rest is zeros."""
        tokens, width = whole.shape[0], self.width(whole.shape[0])
        if self._divides(tokens):
            return whole.unflatten(0, (self.ranks, width))
        chunks = [torch.cat([whole[a:b] for a, b in self.ranges(tokens, rank)]) for rank in range(self.ranks)]
        return torch.stack([padded(chunk, 0, width) for chunk in chunks])

    def _divides(self, tokens: int) -> bool:
        """Return True if chunks are joined without a copy. In a graph that would be a condition on the length."""
        return not self.balanced and not torch.compiler.is_compiling() and tokens % self.ranks == 0

    def whole(self, part: Tensor, tokens: int, where: str) -> Tensor:
        """Return all tokens [rows, tokens, ...] from each rank's `part`; backward keeps this rank's. Collective."""
        return _Whole.apply(part, tokens, self, where)

    def cut(self, whole: Tensor, where: str) -> Tensor:
        """Return this rank's tokens of [rows, tokens, ...]; backward gathers the gradient of all. Collective there."""
        return _Cut.apply(whole, self, where)

    def gather(self, part: Tensor, tokens: int, where: str) -> Tensor:
        """Return all tokens as `whole` does, for layers that the ranks split: backward sums over ranks. Collective."""
        return _Gather.apply(part, tokens, self, where)

    def reduce_scatter(self, partial: Tensor, where: str) -> Tensor:
        """Return this rank's tokens of the sum of each rank's `partial` [rows, tokens, ...]. Collective."""
        return _ReduceScatter.apply(partial, self, where)


def _bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the start and the end of chunk `index` of `parts` whose sizes differ by one at most."""
    # No rank is without tokens as with `torch.chunk`, and there is no condition on the size, as a graph would have.
    return index * size // parts, (index + 1) * size // parts


def _gathered(part: Tensor, tokens: int, chunks: TokenChunks, what: str, where: str) -> Tensor:
    first = padded(part.transpose(0, 1), 0, chunks.width(tokens)).contiguous()
    whole = chunks.joined(stacked_over(first, chunks.group, what, where), tokens).transpose(0, 1).contiguous()
    # Never a view, of one row either: FSDP2 registers hooks on the outputs of the root, and an in-place operation on a
    # view would lose the hooks. A copy would take the memory of all logits once more.
    return torch.ops.aten._unsafe_view(whole, whole.shape)


def _reduce_scattered(partial: Tensor, chunks: TokenChunks, what: str, where: str) -> Tensor:
    parted = chunks.parted(partial.transpose(0, 1)).contiguous()
    mine = scattered_sum(parted, chunks.group, what, where).narrow(0, 0, chunks.count(partial.shape[1]))
    return mine.transpose(0, 1).clone(memory_format=torch.contiguous_format)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tokens: int, chunks: TokenChunks, where: str) -> Tensor:
        ctx.chunks = chunks
        return _gathered(part, tokens, chunks, "tokens", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.chunks.mine(grads[0]).contiguous(), None, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, chunks: TokenChunks, where: str) -> Tensor:
        ctx.chunks, ctx.tokens, ctx.where = chunks, whole.shape[1], where
        return chunks.mine(whole).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grads[0], ctx.tokens, ctx.chunks, "input gradient", ctx.where), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, tokens: int, chunks: TokenChunks, where: str) -> Tensor:
        ctx.chunks, ctx.where = chunks, where
        return _gathered(part, tokens, chunks, "tokens", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _reduce_scattered(grads[0], ctx.chunks, "input gradient", ctx.where), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, chunks: TokenChunks, where: str) -> Tensor:
        ctx.tokens, ctx.chunks, ctx.where = partial.shape[1], chunks, where
        return _reduce_scattered(partial, chunks, "output", where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(grads[0], ctx.tokens, ctx.chunks, "output gradient", ctx.where), None, None


# ------------------------------------------------------------------------------- heads against tokens


def _packed(xs: Sequence[Tensor]) -> Tensor:
    """Return tensors [rows, heads, tokens, features] as one, [tokens, rows, heads x features of all]."""
    return torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in xs], -1)


def _unpacked(packed: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the tensors [rows, heads, tokens, features] that `_packed` has packed, from heads and features of each."""
    parts = packed.split([heads * features for heads, features in sizes], -1)
    return [part.unflatten(2, size).permute(1, 2, 0, 3) for part, size in zip(parts, sizes, strict=True)]


def _sizes(xs: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(x.shape[1], x.shape[3]) for x in xs]


def _to_heads(xs: Sequence[Tensor], tokens: int, chunks: TokenChunks, what: str, where: str) -> list[Tensor]:
    """Return a share of the heads of all tokens [rows, heads / ranks, tokens, features] of each [rows, heads, ...]."""
    shares = [x.unflatten(1, (chunks.ranks, -1)).unbind(1) for x in xs]
    packed = torch.stack([_packed(of_rank) for of_rank in zip(*shares, strict=True)], 1)  # [tokens, ranks, rows, ...]
    sent = padded(packed, 0, chunks.width(tokens)).transpose(0, 1).contiguous()
    whole = chunks.joined(exchanged(sent, chunks.group, what, where), tokens)
    return _unpacked(whole, _sizes([share[0] for share in shares]))


def _to_tokens(xs: Sequence[Tensor], chunks: TokenChunks, what: str, where: str) -> list[Tensor]:
    """Return all heads of this rank's tokens [rows, heads, tokens of this rank, features]: undo `_to_heads`."""
    packed = _packed(xs)
    received = exchanged(chunks.parted(packed).contiguous(), chunks.group, what, where)
    mine = received.narrow(1, 0, chunks.count(packed.shape[0]))
    shares = [_unpacked(of_rank, _sizes(xs)) for of_rank in mine.unbind(0)]
    return [torch.cat(of_tensor, 1) for of_tensor in zip(*shares, strict=True)]


class _TokensToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: int, chunks: TokenChunks, where: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.where = chunks, where
        return tuple(_to_heads(xs, tokens, chunks, "queries, keys and values", where))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        what = "gradients of queries, keys and values"
        return None, None, None, *_to_tokens(grads, ctx.chunks, what, ctx.where)


class _HeadsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, chunks: TokenChunks, where: str) -> Tensor:
        ctx.tokens, ctx.chunks, ctx.where = x.shape[2], chunks, where
        return _to_tokens([x], chunks, "output of attention", where)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grads, ctx.tokens, ctx.chunks, "output gradient of attention", ctx.where)[0], None, None


def tokens_to_heads(xs: Sequence[Tensor], tokens: int, chunks: TokenChunks, where: str) -> tuple[Tensor, ...]:
    """Return a share of the heads [rows, heads / ranks, tokens, features] from this rank's tokens `xs`. Collective."""
    return _TokensToHeads.apply(tokens, chunks, where, *xs)


def heads_to_tokens(x: Tensor, chunks: TokenChunks, where: str) -> Tensor:
    """Return all heads of this rank's tokens: undo `tokens_to_heads` for one tensor. Collective."""
    return _HeadsToTokens.apply(x, chunks, where)


# ------------------------------------------------------------------------------- keys and values of all tokens


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: int, chunks: TokenChunks, where: str, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.chunks, ctx.where = chunks, where
        sent = padded(_packed(xs), 0, chunks.width(tokens)).contiguous()
        return tuple(_unpacked(chunks.joined(stacked_over(sent, chunks.group, "keys", where), tokens), _sizes(xs)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        chunks, packed = ctx.chunks, _packed(grads)
        total = scattered_sum(chunks.parted(packed).contiguous(), chunks.group, "gradients of keys", ctx.where)
        return None, None, None, *_unpacked(total.narrow(0, 0, chunks.count(packed.shape[0])), _sizes(grads))


def gather_keys(xs: Sequence[Tensor], tokens: int, chunks: TokenChunks, where: str) -> tuple[Tensor, ...]:
    """Return the keys and values [rows, heads, tokens, features] of all tokens from `xs`, this rank's. Collective."""
    return _GatherKeys.apply(tokens, chunks, where, *xs)
