"""Let a tensor stand for one that the last pipeline stage has, and get it when it is read: `LastStageTensor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lora_parallel.distributed.torch_private import MEMORY_READERS, no_torch_function, storageless

__all__ = ["LastStageTensor"]


class _Held:
    """Get a tensor from the last stage once."""

    def __init__(self, fetch: Callable[[], Tensor]) -> None:
        self._fetch: Callable[[], Tensor] | None = fetch
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        if self._whole is None:
            assert self._fetch is not None
            self._whole, self._fetch = self._fetch(), None
        return self._whole


class LastStageTensor(Tensor):
    """Stand for an output of the last stage, such as the logits beside a loss.

    The first operation that reads it gets it from the last stage, on all ranks of the pipeline: each of them must run
    this operation. Reading its shape or dtype, or detaching it, costs nothing.

    Args:
        held: Gets the tensor.
        shape: Its shape.
        dtype: Its dtype.
        device: The device that it will be on.
    """

    held: _Held

    @staticmethod
    def __new__(cls, held: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> LastStageTensor:
        tensor: LastStageTensor = storageless(cls, shape, dtype, device)
        tensor.held = held if isinstance(held, _Held) else _Held(held)
        return tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LastStageTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in MEMORY_READERS:
            args = tree_map_only(LastStageTensor, lambda each: each.held.whole(), args)
        return no_torch_function(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            (tensor,) = args
            return LastStageTensor(tensor.held, tuple(tensor.shape), tensor.dtype, tensor.device)
        args, kwargs = tree_map_only(LastStageTensor, lambda each: each.held.whole(), (args, kwargs or {}))
        return func(*args, **kwargs)
