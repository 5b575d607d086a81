"""Parameters and buffers on meta that know which stored tensor will fill them.

What is on meta takes any write without a word and keeps nothing of it: values that a user puts into a loaded weight, a
merge of an adapter, a resize would all be lost when the checkpoint is read. So these say no. What only passes a weight
on (a cast, `.data`, a tie, a move to another layer, a copy of the model) passes on what will fill it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lora_parallel.nodes import Node, describe
from lora_parallel.stored import StoredTensor

__all__ = ["Waiting"]


class Waiting(Tensor):
    """A tensor on meta to be filled from `node`; a parameter, a buffer or a view of one."""

    source: _Source

    @staticmethod
    def of(node: Node, parameter: bool, requires_grad: bool = False) -> Waiting:
        """One of the node's shape and dtype."""
        empty = torch.empty(node.shape, dtype=node.dtype, device="meta")
        return _waiting(empty, _Source(node), parameter, requires_grad)

    @property
    def node(self) -> Node:
        """What will fill it."""
        return self.source.node

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Waiting(shape={tuple(self.shape)}, dtype={self.dtype}, from {describe(self.node)})"

    def noting(self, other: Tensor) -> Waiting:
        """Itself, with the attributes that somebody has set on `other`: quantisers do, and PEFT asks for them."""
        own = {"node", "source", "_is_param"}
        self.__dict__.update({key: value for key, value in vars(other).items() if key not in own})
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Waiting:
        copied = Waiting.of(self.node, getattr(self, "_is_param", False), self.requires_grad).noting(self)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Waiting.of, (self.node, getattr(self, "_is_param", False), self.requires_grad)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")  # torch.nn.init's functions name it
        if isinstance(target, Waiting):
            if function in _TAKES and _may_take(target, args[1]):
                return _take(function, target, args[1])
            if function in _MOVES:
                dtype = next(
                    (each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)), target.dtype
                )
                function, args, kwargs = Tensor.to, (target, dtype), {}
        written = kwargs.get("out", target if _writes(function) else None)
        if isinstance(written, Waiting):
            raise ValueError(
                f"{_name(function)} would write into a weight that is still on disk ({describe(written.node)}): on the "
                "meta device the value is lost. Give it by load_state_dict, do it after parallelize, or load the model "
                "outside of meta_init."
            )
        if _name(function) in _COMPUTES:
            waits = next(each for each in (*args, *kwargs.values()) if isinstance(each, Waiting))
            raise ValueError(
                f"{_name(function)} would compute with a weight that is still on disk ({describe(waits.node)}), and "
                "the meta device has no values: shard the model first (parallelize, fabric.setup or "
                "accelerator.prepare_model), or load it outside of meta_init."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if isinstance(target, Waiting) and isinstance(result, Tensor) and type(result) is Tensor:
            if function in _ALIASES and result.dtype == target.dtype:
                return _waiting(result, target.source)
            if function in _ALIASES or function in _REARRANGES:
                stored = StoredTensor(target.node).to(result.dtype)
                moved: Any = stored if function in _ALIASES else function(stored, *args[1:], **kwargs)
                return _waiting(result, _Source(moved.node, is_part=function in _REARRANGES))
        return result


@dataclass
class _Source:
    """What fills a tensor and all others that share its memory."""

    node: Node
    is_part: bool = False
    """Of a larger tensor, which a write would reach."""


def _waiting(tensor: Tensor, source: _Source, parameter: bool = False, requires_grad: bool = False) -> Waiting:
    made: Waiting = Tensor._make_subclass(Waiting, tensor, requires_grad)
    made.source = source
    if parameter:
        made._is_param = True  # as nn.Parameter does for other classes of tensors
    return made


_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_TAKES: tuple[Any, ...] = (_SET_DATA, Tensor.copy_)
"""What may put one waiting tensor in place of another's values."""


def _may_take(target: Waiting, value: Any) -> bool:
    return isinstance(value, Waiting) and value.shape == target.shape and not target.source.is_part


def _take(function: Any, target: Waiting, value: Waiting) -> Waiting:
    stored: Any = StoredTensor(value.node)
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
"""What has the same memory, or other memory with the same values in another dtype."""

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
"""It stays on meta until it is read, to the device of the mesh."""

_COMPUTES = frozenset({"linear", "embedding", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "mean", "item"})


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
