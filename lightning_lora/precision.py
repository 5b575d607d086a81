"""Translate Lightning's precision flags to dtypes of sharded training.

| flag | base | adapters | compute |
|---|---|---|---|
| 32-true | as built | as built | as stored |
| 64-true | float64 | float64 | float64 |
| bf16-true | bfloat16 | float32 master weights (bfloat16 if asked) | bfloat16; the LoRA branch in the adapters' dtype |
| bf16-mixed | as built | as built | bfloat16 by FSDP2's MixedPrecisionPolicy, gradients reduced in float32 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lora_parallel import clip_grad_norm_
from lora_parallel.integration import adapter_parameters, clip_grad_value_

SUPPORTED = ("32-true", "64-true", "bf16-true", "bf16-mixed")
_STORED = {"64-true": torch.float64, "bf16-true": torch.bfloat16}


class PrecisionLogic:
    """Override Lightning's own precision plugins: clip gradients across the mesh, and use no autocast."""

    main_params: Callable[[Optimizer], Iterable[torch.Tensor]]  # of Lightning's class

    def __init__(self, precision: str) -> None:
        self.precision = precision
        self.stored_dtype = _STORED.get(precision)
        self.compute_dtype = torch.bfloat16 if precision == "bf16-mixed" else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _made, (type(self).__bases__[1], self.precision)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip an optimizer's gradients by their norm over the whole mesh."""
        clip_grad_norm_(self.main_params(optimizer), clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of an optimizer's gradients."""
        clip_grad_value_(self.main_params(optimizer), clip_val)

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point tensors of a batch to the stored dtype, as Lightning's own plugins do."""
        dtype = self.stored_dtype
        if dtype is None:
            return data
        return apply_to_collection(data, torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x)

    def convert_output(self, data: Any) -> Any:
        """Cast floating-point tensors that a model returns to a Fabric loop to the default dtype, if that is wider."""
        dtype = torch.get_default_dtype()  # Fabric's own plugins would also round float64 to it

        def widen(tensor: torch.Tensor) -> torch.Tensor:
            narrow = tensor.is_floating_point() and torch.finfo(tensor.dtype).bits < torch.finfo(dtype).bits
            return tensor.to(dtype) if narrow else tensor

        return apply_to_collection(data, torch.Tensor, widen)

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Make the stored dtype the default dtype of tensors that are made within the context."""
        if self.stored_dtype is None:
            yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.stored_dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    module_init_context = forward_context = tensor_init_context  # for modules, and for tensors that a forward makes


def sharded_precision(plugin: Any, lightning: SimpleNamespace) -> Any:
    """Return a precision plugin for sharded training in place of the one that Trainer or Fabric chose."""
    if isinstance(plugin, PrecisionLogic):
        return plugin
    known = (lightning.Precision, lightning.HalfPrecision, lightning.MixedPrecision, lightning.DoublePrecision)
    flag = plugin.precision
    if type(plugin) not in known or flag not in SUPPORTED:
        reason = " (fp16 needs loss scaling, which sharded training does not have here)" if flag[:3] == "16-" else ""
        raise ValueError(
            f"precision={flag!r} ({type(plugin).__name__}) is not supported by LoRAParallelStrategy{reason}: use one "
            f"of {', '.join(SUPPORTED)}."
        )
    return _made(lightning.Precision, flag)


def _made(base: type, flag: str) -> Any:
    """Return a precision plugin of a class that derives from a namespace's own; pickle calls this function too."""
    return type("ShardedPrecision", (PrecisionLogic, base), {})(flag)


def convert_base(model: nn.Module, dtype: torch.dtype | None, keep_adapters: bool) -> None:
    """Cast parameters and persistent buffers to `dtype`, in place, before the model is sharded."""
    if dtype is None:
        return
    adapters = set(adapter_parameters(model).values()) if keep_adapters else set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or not parameter.is_floating_point() or isinstance(parameter, DTensor):
                continue  # what is sharded already was cast before
            if parameter in adapters and torch.finfo(parameter.dtype).bits > torch.finfo(dtype).bits:
                continue
            parameter.data = parameter.data.to(dtype)
        # Buffers that no checkpoint holds (rotary tables) stay as they are: rounding them would change every position.
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)
