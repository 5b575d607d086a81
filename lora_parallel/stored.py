"""Tensors that are still on disk.

A `StoredTensor` has a shape and a dtype and no data. Operations on it that only rearrange (concatenate, stack, split,
transpose, cast, ...) are recorded, and a region of the result is traced back to regions of what the files hold. So
transformers' own weight conversions, written for tensors in memory, run on it as they are, and afterwards each rank
reads just the bytes of its shard. An operation that computes is recorded too; a region of its result needs all of its
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lora_parallel.upstream import no_torch_function, storageless

__all__ = [
    "Block",
    "Computed",
    "Derived",
    "Leaf",
    "Node",
    "Piece",
    "Read",
    "Region",
    "StoredTensor",
    "describe",
    "leaves",
    "read",
    "read_blocks",
    "whole",
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


def _with(region: Region, dim: int, part: slice) -> Region:
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
class Computed(Block):
    """The result of an operation that is not a rearrangement."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    """Which of its results, where it has several."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(each.node for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, StoredTensor))

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        yield from ((node, whole(node.shape)) for node in self.inputs)

    def blocks(self, regions: Sequence[Region], read: Read, device: str) -> Iterator[Tensor]:
        args, kwargs = tree_map_only(StoredTensor, lambda each: read(each.node), (self.args, self.kwargs))
        result = self.function(*args, **kwargs)
        result = result if self.index is None else result[self.index]
        yield from (result[region] for region in regions)


@dataclass(frozen=True)
class _Concat:
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
                for piece in part.pieces(_with(region, self.dim, slice(low - start, high - start))):
                    moved = _shifted(piece.target[self.dim], low - wanted.start)
                    yield replace(piece, target=_with(piece.target, self.dim, moved))
            start = end


@dataclass(frozen=True)
class _OfOne:
    parent: Node

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.parent,)


@dataclass(frozen=True)
class _Slice(_OfOne):
    dim: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def pieces(self, region: Region) -> Iterator[Piece]:
        yield from self.parent.pieces(_with(region, self.dim, _shifted(region[self.dim], self.start)))


@dataclass(frozen=True)
class _Permute(_OfOne):
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
class _Unsqueeze(_OfOne):
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
class _Select(_OfOne):
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
class _Cast(_OfOne):
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


class StoredTensor(Tensor):
    """A tensor on disk: see the module."""

    node: Node

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, node: Node) -> StoredTensor:
        tensor = storageless(cls, node.shape, node.dtype)
        tensor.node = node
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"StoredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensor:
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is aten.equal.default:
            return _equal(*args)
        if function in _FACTORIES:  # asks for no values; a model's initialisation makes temporaries so
            stand_in = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return function(stand_in, *args[1:], **{**kwargs, "device": torch.device("cpu")})
        if function._schema.is_mutable:
            return _written(function, *args, **kwargs)
        rearrange = _REARRANGEMENTS.get(function)
        if rearrange is not None and function is not aten._to_copy.default:
            _on_meta(function, args, kwargs)  # torch's own errors, of dims and sizes that do not fit
        node = rearrange(*args, **kwargs) if rearrange is not None else None
        if node is not None:
            return [StoredTensor(each) for each in node] if isinstance(node, list) else StoredTensor(node)
        return _computed(function, args, kwargs)


def _on_meta(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def stand_in(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return function(*tree_map_only(Tensor, stand_in, args), **tree_map_only(Tensor, stand_in, kwargs))


def _computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _on_meta(function, args, kwargs)
    if isinstance(result, Tensor):
        return StoredTensor(Computed(function, args, kwargs, None, tuple(result.shape), result.dtype))
    return [
        StoredTensor(Computed(function, args, kwargs, index, tuple(each.shape), each.dtype))
        for index, each in enumerate(result)
    ]


aten = torch.ops.aten
_FACTORIES = frozenset(
    getattr(aten, name).default
    for family in (
        "empty_like zeros_like ones_like full_like rand_like randn_like",
        "new_empty new_zeros new_ones new_full",
    )
    for name in family.split()
)
_OVERWRITES = (aten.normal_.default, aten.uniform_.default, aten.fill_.Scalar, aten.zero_.default)


def _written(function: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A write to a result that no file holds.

    Under weight norm `module.weight` is computed anew each time that it is asked for, and a model's initialisation
    fills it, in vain. That draws random numbers, which those after it depend on.
    """
    node = target.node if isinstance(target, StoredTensor) else None
    if isinstance(node, Computed) and function in _OVERWRITES and not _aliases(node.function):
        values = torch.empty(target.shape, dtype=target.dtype)
        function(values, *args, **kwargs)
        target.node = Computed(aten.clone.default, (values,), {}, None, tuple(values.shape), values.dtype)
        return target
    raise TypeError(f"a tensor on disk cannot be written to ({function}).")


def _aliases(function: Any) -> bool:
    return any(result.alias_info is not None for result in function._schema.returns)


# ---------------------------------------------------------------------- which operations are rearrangements


def _dim(tensor: Tensor, dim: int, extra: int = 0) -> int:
    return dim % (tensor.dim() + extra)


def _same(x: StoredTensor, **_: Any) -> Node:
    return x.node


def _cat(tensors: list[StoredTensor], dim: int = 0) -> Node | None:
    if not all(isinstance(each, StoredTensor) for each in tensors) or len({each.dtype for each in tensors}) > 1:
        return None
    first, dim = tensors[0], _dim(tensors[0], dim)
    shape = list(first.shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    for each in tensors:
        if (*each.shape[:dim], *each.shape[dim + 1 :]) != (*shape[:dim], *shape[dim + 1 :]):
            raise RuntimeError(f"cat along dim {dim} of shapes {[tuple(each.shape) for each in tensors]}")
    return _Concat(tuple(each.node for each in tensors), dim, tuple(shape), first.dtype)


def _stack(tensors: list[StoredTensor], dim: int = 0) -> Node | None:
    return _cat([each.unsqueeze(dim) for each in tensors], _dim(tensors[0], dim, extra=1))  # type: ignore[misc]


def _slice(x: StoredTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim = _dim(x, dim)
    low, high, _ = slice(start, end).indices(x.shape[dim])
    if step != 1:
        return None
    return _Slice(x.node, dim, low, (*x.shape[:dim], max(high - low, 0), *x.shape[dim + 1 :]), x.dtype)


def _split(x: StoredTensor, size: int | list[int], dim: int = 0) -> list[Node]:
    total = x.shape[_dim(x, dim)]
    sizes = size if isinstance(size, (list, tuple)) else [min(size, total - at) for at in range(0, total, size)] or [0]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [_slice(x, dim, end - each, end) for end, each in zip(ends, sizes, strict=True)]


def _permute(x: StoredTensor, dims: list[int]) -> Node:
    dims = [_dim(x, dim) for dim in dims]
    return _Permute(x.node, tuple(dims), tuple(x.shape[dim] for dim in dims), x.dtype)


def _transpose(x: StoredTensor, first: int, second: int) -> Node:
    dims = list(range(x.dim()))
    first, second = _dim(x, first), _dim(x, second)
    dims[first], dims[second] = second, first
    return _permute(x, dims)


def _unsqueeze(x: StoredTensor, dim: int) -> Node:
    dim = _dim(x, dim, extra=1)
    return _Unsqueeze(x.node, dim, (*x.shape[:dim], 1, *x.shape[dim:]), x.dtype)


def _select(x: StoredTensor, dim: int, index: int) -> Node:
    dim = _dim(x, dim)
    return _Select(x.node, dim, index % x.shape[dim], (*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)


def _squeeze(x: StoredTensor, dim: int) -> Node:
    return _select(x, dim, 0) if x.shape[_dim(x, dim)] == 1 else x.node


def _unbind(x: StoredTensor, dim: int = 0) -> list[Node]:
    return [_select(x, dim, index) for index in range(x.shape[_dim(x, dim)])]


def _view(x: StoredTensor, shape: list[int]) -> Node | None:
    return x.node if list(x.shape) == list(shape) else None


def _to(x: StoredTensor, dtype: torch.dtype | None = None, **_: Any) -> Node:
    return x.node if dtype is None or dtype == x.dtype else _Cast(x.node, tuple(x.shape), dtype)


_REARRANGEMENTS: dict[Any, Callable[..., Any]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: lambda x: _transpose(x, 0, 1),
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.squeeze.dim: _squeeze,
    aten.unbind.int: _unbind,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten._to_copy.default: _to,
}


def _equal(first: Tensor, second: Tensor) -> bool:
    """A few rows at a time: transformers asks it of a head and an embedding that a checkpoint holds both."""
    if first.shape != second.shape or first.is_meta or second.is_meta:
        return False
    if not (isinstance(first, StoredTensor) and isinstance(second, StoredTensor)):
        raise TypeError("a tensor on disk can be compared with another one on disk only.")
    region, rows = whole(first.shape), first.shape[0] if first.dim() else 0
    step = max(1, _EQUAL_BYTES // max(1, prod(first.shape[1:]) * first.element_size()))
    parts = [_with(region, 0, slice(at, min(at + step, rows))) for at in range(0, rows, step)] if rows else [region]
    return all(torch.equal(read(first.node, part), read(second.node, part)) for part in parts)


_EQUAL_BYTES = 16 * 2**20


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
