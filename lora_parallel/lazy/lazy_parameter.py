"""Represent parameters and buffers on meta, each with the lazy tensor that will fill it.

A tensor on meta accepts any write without an error and keeps no values. Values that a user puts into a loaded weight, a
merge of an adapter or a resize would all be lost when the checkpoint is read. So a `LazyParameter` raises an error on a
write, and on the usual computations. An operation that only passes a weight on (a cast, `.data`, a tie, a move to
another layer, a copy of the model) also passes on the node that will fill the weight. Rows that are picked by their
numbers are read at once. The tensor says that it is on the CPU, where its values will be read to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_parallel.lazy.graph import Node, describe, read, whole, with_part
from lora_parallel.lazy.lazy_tensor import LazyTensor

__all__ = ["LazyParameter"]


class LazyParameter(Tensor):
    """Represent a tensor on meta that will be filled from `node`: a parameter, a buffer or a view of one."""

    source: _Source

    @staticmethod
    def of(node: Node, parameter: bool, requires_grad: bool = False) -> LazyParameter:
        """Return a LazyParameter of the node's shape and dtype.

        Args:
            node: The node that will fill the tensor.
            parameter: Make an `nn.Parameter` (as `isinstance` sees it), not a buffer.
            requires_grad: As for `nn.Parameter`.
        """
        empty = torch.empty(node.shape, dtype=node.dtype, device="meta")
        return _waiting(empty, _Source(node), parameter, requires_grad)

    @property
    def node(self) -> Node:
        """Return the node that will fill the tensor."""
        return self.source.node

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LazyParameter(shape={tuple(self.shape)}, dtype={self.dtype}, from {describe(self.node)})"

    def noting(self, other: Tensor) -> LazyParameter:
        """Copy the attributes that somebody has set on `other` to this tensor, and return it.

        Quantisers set attributes on weights, and PEFT reads them.
        """
        own = {"node", "source", "_is_param"}
        self.__dict__.update({key: value for key, value in vars(other).items() if key not in own})
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
                dtype = next(
                    (each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), target.dtype
                )
                function, args, kwargs = Tensor.to, (target, dtype), {}
        written = kwargs.get("out", target if _writes(function) else None)
        if isinstance(written, LazyParameter):
            raise ValueError(
                f"{_name(function)} would write into a weight that is still on disk ({describe(written.node)}): on the "
                "meta device the value is lost. Give it by load_state_dict, do it after parallelize, or load the model "
                "outside of meta_init."
            )
        fills_memory = _name(function) in _FILLS and isinstance(target, Tensor) and not target.is_meta
        if fills_memory or _name(function) in _COMPUTES:
            waits = next(each for each in (*args, *kwargs.values()) if isinstance(each, LazyParameter))
            raise ValueError(
                f"{_name(function)} would compute with a weight that is still on disk ({describe(waits.node)}), and "
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
    is_part: bool = False
    """True if the tensor was made by a rearrangement (a view, a slice): a write to it may reach a larger tensor."""


def _waiting(tensor: Tensor, source: _Source, parameter: bool = False, requires_grad: bool = False) -> LazyParameter:
    made: LazyParameter = Tensor._make_subclass(LazyParameter, tensor, requires_grad)
    made.source = source
    if parameter:
        made._is_param = True  # as nn.Parameter does for other classes of tensors
    return made


def _rows(target: LazyParameter, index: Any) -> Tensor:
    """Read rows of a tensor into memory, as PEFT takes the embeddings of tokens that it trains.

    Args:
        target: A tensor of at least one dim.
        index: Numbers of rows, or a mask of them, as torch takes them.

    Raises:
        IndexError: There is no such row.
    """
    rows, region = torch.arange(target.shape[0])[index], whole(tuple(target.shape))
    parts = [read(target.node, with_part(region, 0, slice(row, row + 1))) for row in rows.flatten().tolist()]
    none = torch.empty(0, *target.shape[1:], dtype=target.dtype)
    return torch.cat([none, *parts]).view(*rows.shape, *target.shape[1:])


_DEVICE: Any = Tensor.device.__get__
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_TAKES: tuple[Any, ...] = (_SET_DATA, Tensor.copy_)
"""Functions that may replace the values of a LazyParameter by those of another one."""


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


_ALIASES: tuple[Callable[..., Any], ...] = (
    Tensor.data.__get__,  # type: ignore[attr-defined]
    Tensor.detach,
    Tensor.contiguous,
    Tensor.to,
    Tensor.type,
    Tensor.double,
    Tensor.float,
    Tensor.half,
    Tensor.bfloat16,
)
"""Functions whose result shares the tensor's memory, or has the same values in another dtype."""

_REARRANGES: tuple[Callable[..., Any], ...] = (
    Tensor.clone,
    Tensor.__getitem__,
    Tensor.narrow,
    Tensor.select,
    Tensor.t,
    Tensor.transpose,
    Tensor.permute,
    Tensor.reshape,
    Tensor.view,
    Tensor.T.__get__,  # type: ignore[attr-defined]
)

_MOVES: tuple[Callable[..., Any], ...] = (Tensor.to, Tensor.cpu, Tensor.cuda)
"""Functions that move a tensor. A LazyParameter stays on meta; its values are later read to the device of the mesh."""

_COMPUTES = frozenset({"linear", "embedding", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "mean", "item"})


_FILLS = frozenset({"copy_", "__setitem__"})
"""Names of functions that copy values into a tensor, which may be in memory."""

_HARMLESS = frozenset({"requires_grad_", "share_memory_", "detach_", "rename_"})
_IN_PLACE = frozenset(
    {
        "__setitem__",
        *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or")),
    }
)


def _writes(function: Any) -> bool:
    name = _name(function)
    if function == _SET_DATA or name in _IN_PLACE:
        return True
    return name.endswith("_") and not name.endswith("__") and name not in _HARMLESS


def _name(function: Any) -> str:
    return "an assignment to .data" if function == _SET_DATA else getattr(function, "__name__", str(function))
