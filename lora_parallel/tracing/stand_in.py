"""Copy a model with random values that take almost no memory, so that the copy can run in the model's place."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_parallel.tracing.trace_errors import TraceError, brief

__all__ = ["stand_in_for"]


def stand_in_for(model: nn.Module) -> nn.Module:
    """Return a copy of `model` in float32 on the CPU, in evaluation mode, with random parameters and without hooks.

    A parameter of more than 2^16 elements takes the memory of one row, which stands for all of its rows.

    Raises:
        TraceError: A module cannot be copied.
    """
    try:
        return _copied(model)
    except Exception as error:  # whatever a module makes of being copied
        raise TraceError(f"it cannot be copied ({brief(error)})") from error


def _copied(model: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        values = 0.5 + torch.rand(parameter.shape[-1:])
        if parameter.numel() <= 2**16:
            values = 0.5 + torch.rand(parameter.shape)
        if parameter.is_floating_point():
            memo[id(parameter)] = nn.Parameter(values.expand(parameter.shape))
        else:  # of a quantised layer: the tracer runs a stand-in for the layer, so the values do not matter
            nothing = torch.zeros(1, dtype=parameter.dtype).view([1] * parameter.dim())
            memo[id(parameter)] = nn.Parameter(nothing.expand(parameter.shape), requires_grad=False)
    for buffer in model.buffers():
        if id(buffer) in memo:
            continue
        plain = type(buffer) is Tensor and not buffer.is_meta
        held = buffer.detach().cpu().clone() if plain else torch.ones(buffer.shape, dtype=buffer.dtype)
        memo[id(buffer)] = held.float() if held.is_floating_point() else held
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():  # the hooks are the user's: they must not see this run
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            hooks.clear()
    config = getattr(twin, "config", None)
    if isinstance(twin, PreTrainedModel) and getattr(config, "_attn_implementation", None) not in ("eager", "sdpa"):
        twin.set_attn_implementation("eager")  # kernels of other implementations need an accelerator
    for module in twin.modules():  # grouped matrix products refuse these parameters, which have strides of zero
        inner = getattr(module, "config", None)
        if getattr(inner, "_experts_implementation", None) is not None:
            inner._experts_implementation = "eager"  # type: ignore[union-attr]
    return twin.eval()
