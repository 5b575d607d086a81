"""Represent tensors that are still on disk, record the operations on them, and hold one in each parameter on meta.

Operations on a `LazyTensor` that only rearrange (concatenate, split, transpose, cast, ...) are recorded, and a region
of the result is traced back to regions of the tensors in the files. So transformers' own weight conversions run on lazy
tensors unchanged, and afterwards each rank reads just the bytes of its shard. An operation that computes is recorded
too; a region of its result needs all of its inputs.

A tensor on meta accepts any write without an error and keeps no values: what a user puts into a loaded weight, a merge
of an adapter or a resize would be lost when the checkpoint is read. So a `LazyParameter` raises an error on a write,
and on the usual computations. An operation that only passes a weight on (a cast, `.data`, a tie, a copy of the model)
also passes on the node that will fill it. The tensor says that it is on the CPU, where its values will be read to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
    describe,
    read,
    whole,
    with_part,
)


@dataclass(frozen=True)
class Computed(Block):
    """Represent a result of an operation that is not a rearrangement."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None  # Index of the result, if the operation has several; else None
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        return tuple(leaf.node for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, LazyTensor))

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        yield from ((node, whole(node.shape)) for node in self.inputs)

    def blocks(self, regions: Sequence[Region], read: ReadNode, device: str) -> Iterator[Tensor]:
        args, kwargs = tree_map_only(LazyTensor, lambda lazy: read(lazy.node), (self.args, self.kwargs))
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
            return [LazyTensor(part) for part in node] if isinstance(node, list) else LazyTensor(node)
        return _computed(function, args, kwargs)


def _on_meta(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype, device="meta"), (args, kwargs))
    return function(*args, **kwargs)


def _computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = _on_meta(function, args, kwargs)
    if isinstance(result, Tensor):
        return LazyTensor(Computed(function, args, kwargs, None, tuple(result.shape), result.dtype))
    return [
        LazyTensor(Computed(function, args, kwargs, index, tuple(part.shape), part.dtype))
        for index, part in enumerate(result)
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
    """Overwrite a computed tensor in memory; refuse to write to any other lazy tensor."""
    # A model's initialisation fills `module.weight` under weight norm, which is computed anew at each access: without
    # this draw all later random numbers would be others.
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


def _cat(tensors: list[LazyTensor], dim: int = 0) -> Node | None:
    # torch leaves out an empty tensor [0] among others; their sizes have been checked on meta
    if not all(isinstance(x, LazyTensor) for x in tensors) or len({(x.dtype, x.dim()) for x in tensors}) > 1:
        return None
    first, dim = tensors[0], _dim(tensors[0], dim)
    shape = (*first.shape[:dim], sum(x.shape[dim] for x in tensors), *first.shape[dim + 1 :])
    return Concat(tuple(x.node for x in tensors), dim, shape, first.dtype)


def _stack(tensors: list[LazyTensor], dim: int = 0) -> Node | None:
    return _cat([x.unsqueeze(dim) for x in tensors], _dim(tensors[0], dim, extra=1))  # type: ignore[misc]


def _slice(x: LazyTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    dim = _dim(x, dim)
    low, high, _ = slice(start, end).indices(x.shape[dim])
    if step != 1:
        return None
    return Slice(x.node, (*x.shape[:dim], max(high - low, 0), *x.shape[dim + 1 :]), x.dtype, dim, low)


def _split(x: LazyTensor, size: int | list[int], dim: int = 0) -> list[Node]:
    total = x.shape[_dim(x, dim)]
    sizes = size if isinstance(size, (list, tuple)) else [min(size, total - at) for at in range(0, total, size)] or [0]
    return [_slice(x, dim, end - length, end) for end, length in zip(accumulate(sizes), sizes, strict=True)]


def _permute(x: LazyTensor, dims: list[int]) -> Node:
    dims = [_dim(x, dim) for dim in dims]
    return Permute(x.node, tuple(x.shape[dim] for dim in dims), x.dtype, tuple(dims))


def _transpose(x: LazyTensor, first: int, second: int) -> Node:
    dims = list(range(x.dim()))
    first, second = _dim(x, first), _dim(x, second)  # t() of a vector swaps a dim with itself
    dims[first], dims[second] = second, first
    return _permute(x, dims)


def _unsqueeze(x: LazyTensor, dim: int) -> Node:
    dim = _dim(x, dim, extra=1)
    return Unsqueeze(x.node, (*x.shape[:dim], 1, *x.shape[dim:]), x.dtype, dim)


def _select(x: LazyTensor, dim: int, index: int) -> Node:
    dim = _dim(x, dim)
    return Select(x.node, (*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype, dim, index % x.shape[dim])


def _squeeze(x: LazyTensor, dim: int) -> Node:
    return _select(x, dim, 0) if x.shape[_dim(x, dim)] == 1 else x.node


def _squeeze_all(x: LazyTensor) -> Node:
    for dim in reversed(range(x.dim())):
        x = x.squeeze(dim)  # type: ignore[assignment]
    return x.node


def _unbind(x: LazyTensor, dim: int = 0) -> list[Node]:
    return [_select(x, dim, index) for index in range(x.shape[_dim(x, dim)])]


def _view(x: LazyTensor, shape: list[int]) -> Node | None:
    return x.node if list(x.shape) == list(shape) else None


def _to(x: LazyTensor, dtype: torch.dtype | None = None, **_: Any) -> Node:
    return x.node if dtype is None or dtype == x.dtype else Cast(x.node, tuple(x.shape), dtype)


_REARRANGEMENTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((aten.alias.default, aten.detach.default, aten.clone.default), lambda x, **_: x.node),
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.slice.Tensor: _slice,
    **dict.fromkeys((aten.split.Tensor, aten.split_with_sizes.default), _split),
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: lambda x: _transpose(x, 0, 1),
    aten.unsqueeze.default: _unsqueeze,
    aten.select.int: _select,
    aten.squeeze.default: _squeeze_all,
    aten.squeeze.dim: _squeeze,
    aten.unbind.int: _unbind,
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default), _view),
    aten._to_copy.default: _to,
}


def _equal(first: Tensor, second: Tensor) -> bool:
    """Compare two tensors on disk, a few rows at a time, as transformers does with head and embedding."""
    if first.shape != second.shape or first.is_meta or second.is_meta:
        return False
    if not (isinstance(first, LazyTensor) and isinstance(second, LazyTensor)):
        raise TypeError("a tensor on disk can be compared with another one on disk only.")
    region, rows = whole(first.shape), first.shape[0] if first.dim() else 0
    step = max(1, _EQUAL_BYTES // max(1, prod(first.shape[1:]) * first.element_size()))
    parts = [with_part(region, 0, slice(at, min(at + step, rows))) for at in range(0, rows, step)] if rows else [region]
    return all(torch.equal(read(first.node, part), read(second.node, part)) for part in parts)


_EQUAL_BYTES = 16 * 2**20


class LazyParameter(Tensor):
    """Represent a tensor on meta that will be filled from `node`: a parameter, a buffer or a view of one."""

    source: _Source

    @staticmethod
    def of(node: Node, parameter: bool, requires_grad: bool = False) -> LazyParameter:
        """Return a LazyParameter of the node's shape and dtype."""
        empty = torch.empty(node.shape, dtype=node.dtype, device="meta")
        return _waiting(empty, _Source(node), parameter, requires_grad)

    @property
    def node(self) -> Node:
        """Return the node that will fill the tensor."""
        return self.source.node

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LazyParameter(shape={tuple(self.shape)}, dtype={self.dtype}, from {describe(self.node)})"

    def noting(self, other: Tensor) -> LazyParameter:
        """Copy to this tensor what quantisers have set on `other`, which PEFT reads, and return it."""
        settings = {key: value for key, value in vars(other).items() if key not in ("node", "source", "_is_param")}
        self.__dict__.update(settings)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyParameter:
        copied = LazyParameter.of(self.node, getattr(self, "_is_param", False), self.requires_grad).noting(self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return LazyParameter.of, (self.node, getattr(self, "_is_param", False), self.requires_grad)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init's functions pass it by this name
        if isinstance(target, LazyParameter):
            if function == _DEVICE:  # so that module.to(model.device) moves nothing that is in memory to meta
                return torch.device("cpu")
            if function == Tensor.__getitem__ and isinstance(args[1], (list, Tensor)):
                return _rows(target, args[1])
            if function in _TAKES and _may_take(target, args[1]):
                return _take(function, target, args[1])
            if function in _MOVES:
                dtypes = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.dtype)]
                function, args, kwargs = Tensor.to, (target, *(dtypes or [target.dtype])), {}
        written = kwargs.get("out", target if _writes(function) else None)
        if isinstance(written, LazyParameter):
            raise ValueError(
                f"{_name(function)} would write into a weight that is still on disk ({describe(written.node)}): on the "
                "meta device the value is lost. Leave merge_and_unload() and merge_adapter() out before training. Give "
                "a value of your own by load_state_dict or after the model is sharded, or load the model with "
                "LORA_PARALLEL_DEFER=0 set."
            )
        fills_memory = _name(function) in _FILLS and isinstance(target, Tensor) and not target.is_meta
        if fills_memory or _name(function) in _COMPUTES:
            lazy = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, LazyParameter))
            raise ValueError(
                f"{_name(function)} would compute with a weight that is still on disk ({describe(lazy.node)}), and "
                "the meta device has no values: shard the model first (parallelize, fabric.setup or "
                f"accelerator.prepare_model), or load it outside of meta_init, or with LORA_PARALLEL_DEFER=0 set."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if isinstance(target, LazyParameter) and isinstance(result, Tensor) and type(result) is Tensor:
            if function in _ALIASES and result.dtype == target.dtype:
                return _waiting(result, target.source)
            if function in _ALIASES or function in _REARRANGES:
                stored = LazyTensor(target.node).to(result.dtype)
                moved: Any = stored if function in _ALIASES else function(stored, *args[1:], **kwargs)
                return _waiting(result, _Source(moved.node, is_part=function in _REARRANGES))
        return result


@dataclass
class _Source:
    """Hold the node that fills a tensor and all other tensors that share its memory."""

    node: Node
    # True if the tensor was made by a rearrangement (a view, a slice): a write to it may reach a larger tensor.
    is_part: bool = False


def _waiting(tensor: Tensor, source: _Source, parameter: bool = False, requires_grad: bool = False) -> LazyParameter:
    made: LazyParameter = Tensor._make_subclass(LazyParameter, tensor, requires_grad)
    made.source = source
    if parameter:
        made._is_param = True  # as nn.Parameter does for other classes of tensors
    return made


def _rows(target: LazyParameter, index: Any) -> Tensor:
    """Read rows of a tensor into memory, as PEFT takes the embeddings of tokens that it trains."""
    rows, region = torch.arange(target.shape[0])[index], whole(tuple(target.shape))
    parts = [read(target.node, with_part(region, 0, slice(row, row + 1))) for row in rows.flatten().tolist()]
    none = torch.empty(0, *target.shape[1:], dtype=target.dtype)
    return torch.cat([none, *parts]).view(*rows.shape, *target.shape[1:])


_DEVICE: Any = Tensor.device.__get__
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
# Functions that may replace the values of a LazyParameter by those of another one.
_TAKES: tuple[Any, ...] = (_SET_DATA, Tensor.copy_)


def _may_take(target: LazyParameter, value: Any) -> bool:
    return isinstance(value, LazyParameter) and value.shape == target.shape and not target.source.is_part


def _take(function: Any, target: LazyParameter, value: LazyParameter) -> LazyParameter:
    stored: Any = LazyTensor(value.node)
    if function != _SET_DATA:
        target.source.node = stored.to(target.dtype).node
        return target
    with torch._C.DisableTorchFunctionSubclass():
        _SET_DATA(target, torch.empty(value.shape, dtype=value.dtype, device="meta"))
    target.source = _Source(stored.node)
    return target


def _methods(names: str) -> Iterator[Callable[..., Any]]:
    return (getattr(Tensor, name) for name in names.split())


# Functions whose result shares the tensor's memory, or has the same values in another dtype.
_ALIASES = (Tensor.data.__get__, *_methods("detach contiguous to type double float half bfloat16"))  # type: ignore[attr-defined]
_REARRANGES = (
    Tensor.T.__get__,  # type: ignore[attr-defined]
    *_methods("clone __getitem__ narrow select t transpose permute reshape view"),
)
# Functions that move a tensor. A LazyParameter stays on meta; its values are later read to the device of the mesh.
_MOVES: tuple[Callable[..., Any], ...] = (Tensor.to, Tensor.cpu, Tensor.cuda)
_COMPUTES = frozenset({"linear", "embedding", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "mean", "item"})


# Names of functions that copy values into a tensor, which may be in memory.
_FILLS = frozenset({"copy_", "__setitem__"})
_HARMLESS = frozenset({"requires_grad_", "share_memory_", "detach_", "rename_"})
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or".split())}


def _writes(function: Any) -> bool:
    name = _name(function)
    if function == _SET_DATA or name in _IN_PLACE:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _HARMLESS


def _name(function: Any) -> str:
    return "an assignment to .data" if function == _SET_DATA else getattr(function, "__name__", str(function))
