"""Represent tensors that are still on disk, and record the operations on them.

A `LazyTensor` has a shape and a dtype and no data. Operations on it that only rearrange (concatenate, stack, split,
transpose, cast, ...) are recorded, and a region of the result is traced back to regions of the tensors in the files. So
transformers' own weight conversions, written for tensors in memory, run on lazy tensors unchanged, and afterwards each
rank reads just the bytes of its shard. An operation that computes is recorded too; a region of its result needs all of
its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lora_parallel.distributed.torch_private import no_torch_function, storageless
from lora_parallel.lazy.graph import (
    Block,
    Cast,
    Concat,
    Node,
    Permute,
    ReadNode,
    Region,
    Select,
    Slice,
    Unsqueeze,
    read,
    whole,
    with_part,
)

__all__ = ["Computed", "LazyTensor"]


@dataclass(frozen=True)
class Computed(Block):
    """Represent a result of an operation that is not a rearrangement."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None
    """Index of the result, if the operation has several; else None."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(each.node for each in tree_leaves((self.args, self.kwargs)) if isinstance(each, LazyTensor))

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        yield from ((node, whole(node.shape)) for node in self.inputs)

    def blocks(self, regions: Sequence[Region], read: ReadNode, device: str) -> Iterator[Tensor]:
        args, kwargs = tree_map_only(LazyTensor, lambda each: read(each.node), (self.args, self.kwargs))
        result = self.function(*args, **kwargs)
        result = result if self.index is None else result[self.index]
        yield from (result[region] for region in regions)


class LazyTensor(Tensor):
    """Represent a tensor on disk by the node that it would be read from; see the module's docstring."""

    node: Node

    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, node: Node) -> LazyTensor:
        tensor = storageless(cls, node.shape, node.dtype)
        tensor.node = node
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LazyTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is aten.equal.default:
            return _equal(*args)
        if function in _FACTORIES:  # needs no values; a model's initialisation makes temporary tensors this way
            stand_in = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
            return function(stand_in, *args[1:], **{**kwargs, "device": torch.device("cpu")})
        if function._schema.is_mutable:
            return _written(function, *args, **kwargs)
        rearrange = _REARRANGEMENTS.get(function)
        if rearrange is not None and function is not aten._to_copy.default:
            _on_meta(function, args, kwargs)  # raises torch's own errors for dims and sizes that do not fit
        node = rearrange(*args, **kwargs) if rearrange is not None else None
        if node is not None:
            return [LazyTensor(each) for each in node] if isinstance(node, list) else LazyTensor(node)
        return _computed(function, args, kwargs)


def _on_meta(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def stand_in(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    return function(*tree_map_only(Tensor, stand_in, args), **tree_map_only(Tensor, stand_in, kwargs))


def _computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _on_meta(function, args, kwargs)
    if isinstance(result, Tensor):
        return LazyTensor(Computed(function, args, kwargs, None, tuple(result.shape), result.dtype))
    return [
        LazyTensor(Computed(function, args, kwargs, index, tuple(each.shape), each.dtype))
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
    """Overwrite a computed tensor in memory; refuse to write to any other lazy tensor.

    Under weight norm `module.weight` is computed anew at each access. A model's initialisation fills it, which has no
    effect on the parameters, but draws random numbers: without this draw all later random numbers would be others.

    Raises:
        TypeError: A file holds the tensor, the tensor is a view, or the operation does not overwrite all of it.
    """
    node = target.node if isinstance(target, LazyTensor) else None
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


def _same(x: LazyTensor, **_: Any) -> Node:
    return x.node


def _cat(tensors: list[LazyTensor], dim: int = 0) -> Node | None:
    if not all(isinstance(each, LazyTensor) for each in tensors) or len({each.dtype for each in tensors}) > 1:
        return None
    first, dim = tensors[0], _dim(tensors[0], dim)
    shape = list(first.shape)
    shape[dim] = sum(each.shape[dim] for each in tensors)
    for each in tensors:
        if (*each.shape[:dim], *each.shape[dim + 1 :]) != (*shape[:dim], *shape[dim + 1 :]):
            raise RuntimeError(f"cat along dim {dim} of shapes {[tuple(each.shape) for each in tensors]}")
    return Concat(tuple(each.node for each in tensors), dim, tuple(shape), first.dtype)


def _stack(tensors: list[LazyTensor], dim: int = 0) -> Node | None:
    return _cat([each.unsqueeze(dim) for each in tensors], _dim(tensors[0], dim, extra=1))  # type: ignore[misc]


def _slice(x: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim = _dim(x, dim)
    low, high, _ = slice(start, end).indices(x.shape[dim])
    if step != 1:
        return None
    return Slice(x.node, dim, low, (*x.shape[:dim], max(high - low, 0), *x.shape[dim + 1 :]), x.dtype)


def _split(x: LazyTensor, size: int | list[int], dim: int = 0) -> list[Node]:
    total = x.shape[_dim(x, dim)]
    sizes = size if isinstance(size, (list, tuple)) else [min(size, total - at) for at in range(0, total, size)] or [0]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [_slice(x, dim, end - each, end) for end, each in zip(ends, sizes, strict=True)]


def _permute(x: LazyTensor, dims: list[int]) -> Node:
    dims = [_dim(x, dim) for dim in dims]
    return Permute(x.node, tuple(dims), tuple(x.shape[dim] for dim in dims), x.dtype)


def _transpose(x: LazyTensor, first: int, second: int) -> Node:
    dims = list(range(x.dim()))
    first, second = _dim(x, first), _dim(x, second)
    dims[first], dims[second] = second, first
    return _permute(x, dims)


def _unsqueeze(x: LazyTensor, dim: int) -> Node:
    dim = _dim(x, dim, extra=1)
    return Unsqueeze(x.node, dim, (*x.shape[:dim], 1, *x.shape[dim:]), x.dtype)


def _select(x: LazyTensor, dim: int, index: int) -> Node:
    dim = _dim(x, dim)
    return Select(x.node, dim, index % x.shape[dim], (*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)


def _squeeze(x: LazyTensor, dim: int) -> Node:
    return _select(x, dim, 0) if x.shape[_dim(x, dim)] == 1 else x.node


def _unbind(x: LazyTensor, dim: int = 0) -> list[Node]:
    return [_select(x, dim, index) for index in range(x.shape[_dim(x, dim)])]


def _view(x: LazyTensor, shape: list[int]) -> Node | None:
    return x.node if list(x.shape) == list(shape) else None


def _to(x: LazyTensor, dtype: torch.dtype | None = None, **_: Any) -> Node:
    return x.node if dtype is None or dtype == x.dtype else Cast(x.node, tuple(x.shape), dtype)


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
    """Compare two tensors on disk, reading a few rows at a time.

    transformers compares the head and the embedding if a checkpoint holds both.
    """
    if first.shape != second.shape or first.is_meta or second.is_meta:
        return False
    if not (isinstance(first, LazyTensor) and isinstance(second, LazyTensor)):
        raise TypeError("a tensor on disk can be compared with another one on disk only.")
    region, rows = whole(first.shape), first.shape[0] if first.dim() else 0
    step = max(1, _EQUAL_BYTES // max(1, prod(first.shape[1:]) * first.element_size()))
    parts = [with_part(region, 0, slice(at, min(at + step, rows))) for at in range(0, rows, step)] if rows else [region]
    return all(torch.equal(read(first.node, part), read(second.node, part)) for part in parts)


_EQUAL_BYTES = 16 * 2**20
