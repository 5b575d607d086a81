"""Represent tensors that are not in memory as graphs of nodes, and find what to read for a region of a node.

A node is a tensor of a checkpoint, a rearrangement of other nodes, or the result of a computation on other nodes. A
region of a rearrangement is traced back to regions of the tensors in the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

Region = tuple[slice, ...]  # A rectangle of a tensor: one slice with start and stop for each dim
ReadNode = Callable[..., Tensor]  # Function like `read`, which brings a node, or a region of it, into memory


@dataclass(frozen=True)
class Piece:
    """Describe one rectangle of a leaf to read, and its place in the region that was asked for."""

    leaf: Leaf | Derived
    region: Region  # The region of the leaf to read
    target: Region  # The region of the result to write, relative to the start of the region that was asked for
    steps: tuple[Callable[[Tensor], Tensor], ...] = ()  # Functions to apply, in this order, to the block that was read


class Node(Protocol):
    """Represent a tensor that is not in memory."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the tensor."""

    @property
    def inputs(self) -> tuple[Node, ...]:
        """Return the nodes that this node is made of; a leaf has none."""

    def pieces(self, region: Region) -> Iterator[Piece]:
        """Yield the pieces to read for a region of this node."""


class Derived(Node, Protocol):
    """Represent a node whose values are computed from the values of other nodes."""

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        """Yield the inputs that a region of this node needs, each with the region of the input."""

    def blocks(self, regions: Sequence[Region], read: ReadNode, device: str) -> Iterator[Tensor]:
        """Yield regions of this node, on any device, computed from inputs that `read` brings into memory."""
        # All regions come at once, so that the work which they share is done once.


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region that is the whole tensor."""
    return tuple(slice(0, size) for size in shape)


def with_part(region: Region, dim: int, part: slice) -> Region:
    """Return `region` with its slice of `dim` replaced by `part`."""
    return (*region[:dim], part, *region[dim + 1 :])


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)


class Block:
    """Represent a node that is no rearrangement: each region is read, or computed, in one piece."""

    def pieces(self, region: Region) -> Iterator[Piece]:
        """Yield the region as one piece; yield nothing if the region is empty."""
        sizes = tuple(part.stop - part.start for part in region)
        if all(size > 0 for size in sizes):
            yield Piece(self, region, whole(sizes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Leaf(Block):
    """Represent a tensor of a checkpoint."""

    source: Any  # The `Source` that holds the tensor (see `lora_parallel.lazy.files`)
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        return ()


@dataclass(frozen=True)
class Concat:
    """Concatenate nodes along an existing dim."""

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
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.parent,)


def _then(
    pieces: Iterator[Piece], step: Callable[[Tensor], Tensor], target: Callable[[Region], Region]
) -> Iterator[Piece]:
    """Add a step to the pieces of a parent, which changes the dims of their targets."""
    return (replace(piece, target=target(piece.target), steps=(*piece.steps, step)) for piece in pieces)


@dataclass(frozen=True)
class Slice(_OfOne):
    """Take the slice of a node that begins at `start` of `dim`; its length is in `shape`."""

    dim: int
    start: int

    def pieces(self, region: Region) -> Iterator[Piece]:
        return self.parent.pieces(with_part(region, self.dim, _shifted(region[self.dim], self.start)))


@dataclass(frozen=True)
class Permute(_OfOne):
    """Put the dims of a node in another order: dim i of the result is dim dims[i] of the parent."""

    dims: tuple[int, ...]

    def pieces(self, region: Region) -> Iterator[Piece]:
        pieces = self.parent.pieces(tuple(region[self.dims.index(dim)] for dim in range(len(self.dims))))
        return _then(pieces, lambda block: block.permute(self.dims), lambda target: tuple(target[d] for d in self.dims))


@dataclass(frozen=True)
class Unsqueeze(_OfOne):
    """Insert a dim of size 1 into a node."""

    dim: int

    def pieces(self, region: Region) -> Iterator[Piece]:
        if region[self.dim].start == region[self.dim].stop:
            return iter(())
        dim, pieces = self.dim, self.parent.pieces(region[: self.dim] + region[self.dim + 1 :])
        return _then(pieces, lambda x: x.unsqueeze(dim), lambda target: (*target[:dim], slice(0, 1), *target[dim:]))


@dataclass(frozen=True)
class Select(_OfOne):
    """Take one index of a dim of a node, and remove the dim."""

    dim: int
    index: int

    def pieces(self, region: Region) -> Iterator[Piece]:
        dim, one = self.dim, slice(self.index, self.index + 1)
        pieces = self.parent.pieces((*region[:dim], one, *region[dim:]))
        return _then(pieces, lambda x: x.squeeze(dim), lambda target: target[:dim] + target[dim + 1 :])


class Cast(_OfOne):
    """Convert a node to another dtype."""

    def pieces(self, region: Region) -> Iterator[Piece]:
        return _then(self.parent.pieces(region), lambda block: block.to(self.dtype), lambda target: target)


def leaves(node: Node) -> Iterator[Leaf]:
    """Yield all tensors of the checkpoint that `node` is made of, also those that some regions do not need."""
    if isinstance(node, Leaf):
        yield node
    for parent in node.inputs:
        yield from leaves(parent)


def describe(node: Node) -> str:
    """Return the file and the name of a node's first leaf, for an error message."""
    first = next(leaves(node))
    return f"{first.source.path}: {first.key}"


def read(node: Node, region: Region | None = None, device: str = "cpu") -> Tensor:
    """Read a region of one node into memory; `lora_parallel.lazy.materialize` reads many nodes, file by file."""
    region = whole(node.shape) if region is None else region
    result = torch.empty([part.stop - part.start for part in region], dtype=node.dtype, device=device)
    for piece in node.pieces(region):
        (block,) = read_blocks(piece.leaf, [piece.region], device)
        put(block, piece, result)
    return result


def put(block: Tensor, piece: Piece, filled: Tensor) -> None:
    """Write the block that was read for a piece to its place in a tensor."""
    for step in piece.steps:
        block = step(block)
    target = filled[piece.target]
    if block.shape != target.shape:  # copy_ would broadcast
        raise ValueError(
            f"{describe(piece.leaf)} gave a block of shape {tuple(block.shape)} where {tuple(target.shape)} was asked "
            "for: the file has changed since the model was built."
        )
    target.copy_(block)


def read_blocks(leaf: Leaf | Derived, regions: Sequence[Region], device: str = "cpu") -> Iterator[Tensor]:
    """Yield regions of a leaf, whose file is opened for this, or of a derived node, which is computed on `device`."""
    if not isinstance(leaf, Leaf):
        yield from leaf.blocks(regions, read, device)
        return
    with leaf.source.open() as reader:
        for region in regions:
            yield reader(leaf.key, region)
