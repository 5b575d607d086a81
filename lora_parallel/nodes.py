"""Tensors that are not in memory: what they are made of, and what to read for a region of one.

A node is a tensor of a checkpoint, a rearrangement of other nodes, or computed from them. A region of a rearrangement
is traced back to regions of what the files hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "Block",
    "Cast",
    "Concat",
    "Derived",
    "Leaf",
    "Node",
    "Permute",
    "Piece",
    "Read",
    "Region",
    "Select",
    "Slice",
    "Unsqueeze",
    "describe",
    "leaves",
    "read",
    "read_blocks",
    "whole",
    "with_part",
]

Region = tuple[slice, ...]
"""A rectangle of a tensor: one slice with start and stop a dim."""

Read = Callable[..., Tensor]
"""Brings a node into memory, or a region of it: `read`."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a stored tensor, and where it goes in the region that was asked for."""

    leaf: Leaf | Derived
    region: Region
    """What to read of the leaf."""

    target: Region
    """Where it goes, relative to the start of the region asked for."""

    steps: tuple[Callable[[Tensor], Tensor], ...] = ()
    """What to do to the block that was read, in order."""


class Node(Protocol):
    """A tensor that is not in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """What it is made of; nothing, of a leaf."""

    def pieces(self, region: Region) -> Iterator[Piece]:
        """What to read for a region of it."""


class Derived(Node, Protocol):
    """A node whose values are computed from those of others."""

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        """What of its inputs a region of it needs."""

    def blocks(self, regions: Sequence[Region], read: Read, device: str) -> Iterator[Tensor]:
        """Regions of it, on any device, from inputs that `read` brings into memory.

        Args:
            regions: All that is wanted, so that what they have in common is done once.
            read: Of a node, or of a region of it.
            device: Where to compute what costs something.
        """


def whole(shape: tuple[int, ...]) -> Region:
    """The region that is the whole tensor."""
    return tuple(slice(0, size) for size in shape)


def _inside(region: Region) -> Region:
    return tuple(slice(0, part.stop - part.start) for part in region)


def with_part(region: Region, dim: int, part: slice) -> Region:
    """`region` with `part` of one dim."""
    return (*region[:dim], part, *region[dim + 1 :])


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


class Block:
    """A node whose regions are read, or computed, as they are asked for."""

    def pieces(self, region: Region) -> Iterator[Piece]:
        """One, unless the region is empty."""
        if all(part.stop > part.start for part in region):
            yield Piece(self, region, _inside(region))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Leaf(Block):
    """A tensor of a checkpoint."""

    source: Any
    """Where it is: see `lora_parallel.sources`."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        return ()


@dataclass(frozen=True)
class Concat:
    """Nodes along a dim that they have."""

    inputs: tuple[Node, ...]
    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self, region: Region) -> Iterator[Piece]:
        wanted, start = region[self.dim], 0
        for part in self.inputs:
            end = start + part.shape[self.dim]
            low, high = max(start, wanted.start), min(end, wanted.stop)
            if low < high:
                for piece in part.pieces(with_part(region, self.dim, slice(low - start, high - start))):
                    moved = _shifted(piece.target[self.dim], low - wanted.start)
                    yield replace(piece, target=with_part(piece.target, self.dim, moved))
            start = end


@dataclass(frozen=True)
class _OfOne:
    parent: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.parent,)


@dataclass(frozen=True)
class Slice(_OfOne):
    """What begins at `start` of a dim."""

    dim: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self, region: Region) -> Iterator[Piece]:
        yield from self.parent.pieces(with_part(region, self.dim, _shifted(region[self.dim], self.start)))


@dataclass(frozen=True)
class Permute(_OfOne):
    """Its dims in another order."""

    dims: tuple[int, ...]
    """Dim i of the result is dim dims[i] of the parent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self, region: Region) -> Iterator[Piece]:
        asked = tuple(region[self.dims.index(dim)] for dim in range(len(self.dims)))
        for piece in self.parent.pieces(asked):
            yield replace(
                piece,
                target=tuple(piece.target[dim] for dim in self.dims),
                steps=(*piece.steps, lambda block: block.permute(self.dims)),
            )


@dataclass(frozen=True)
class Unsqueeze(_OfOne):
    """With a dim of one element more."""

    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self, region: Region) -> Iterator[Piece]:
        if region[self.dim].start == region[self.dim].stop:
            return
        for piece in self.parent.pieces(region[: self.dim] + region[self.dim + 1 :]):
            yield replace(
                piece,
                target=(*piece.target[: self.dim], slice(0, 1), *piece.target[self.dim :]),
                steps=(*piece.steps, lambda block: block.unsqueeze(self.dim)),
            )


@dataclass(frozen=True)
class Select(_OfOne):
    """One index of a dim, which is gone."""

    dim: int
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self, region: Region) -> Iterator[Piece]:
        one = slice(self.index, self.index + 1)
        for piece in self.parent.pieces((*region[: self.dim], one, *region[self.dim :])):
            yield replace(
                piece,
                target=piece.target[: self.dim] + piece.target[self.dim + 1 :],
                steps=(*piece.steps, lambda block: block.squeeze(self.dim)),
            )


@dataclass(frozen=True)
class Cast(_OfOne):
    """In another dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self, region: Region) -> Iterator[Piece]:
        for piece in self.parent.pieces(region):
            yield replace(piece, steps=(*piece.steps, lambda block: block.to(self.dtype)))


def leaves(node: Node) -> Iterator[Leaf]:
    """The checkpoint's tensors that `node` is made of, whether or not a region of it needs them."""
    if isinstance(node, Leaf):
        yield node
    for each in node.inputs:
        yield from leaves(each)


def describe(node: Node) -> str:
    """Where a stored tensor is, for an error."""
    first = next(leaves(node))
    return f"{first.source.path}: {first.key}"


def read(node: Node, region: Region | None = None, device: str = "cpu") -> Tensor:
    """A region of a stored tensor in memory, by itself; `lora_parallel.weights` reads many, file by file."""
    region = whole(node.shape) if region is None else region
    result = torch.empty([part.stop - part.start for part in region], dtype=node.dtype, device=device)
    for piece in node.pieces(region):
        (block,) = read_blocks(piece.leaf, [piece.region], device)
        for step in piece.steps:
            block = step(block)
        result[piece.target] = block
    return result


def read_blocks(leaf: Leaf | Derived, regions: Sequence[Region], device: str = "cpu") -> Iterator[Tensor]:
    """Regions of a leaf, which is opened for this; or of what is computed, on `device`."""
    if not isinstance(leaf, Leaf):
        yield from leaf.blocks(regions, read, device)
        return
    with leaf.source.open() as reader:
        for region in regions:
            yield reader(leaf.key, region)
