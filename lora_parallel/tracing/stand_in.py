"""Copy a model with random values that take almost no memory, so that the copy can run in the model's place."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lora_parallel.tracing.trace_errors import TraceError, brief

__all__ = ["stand_in_for", "without_own_attention"]


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
    if isinstance(twin, PreTrainedModel) and _needs_accelerator(twin.config._attn_implementation):
        twin.set_attn_implementation("eager")
    for module in twin.modules():  # grouped matrix products refuse these parameters, which have strides of zero
        inner = getattr(module, "config", None)
        if getattr(inner, "_experts_implementation", None) is not None:
            inner._experts_implementation = "eager"  # type: ignore[union-attr]
    return twin.eval()


def without_own_attention(twin: nn.Module) -> bool:
    """Let a copy compute attention by the model's own code, and return True, if it had a kernel of the user's."""
    if not isinstance(twin, PreTrainedModel) or twin.config._attn_implementation in ("eager", "sdpa", None):
        return False
    twin.set_attn_implementation("eager")
    return True


def _needs_accelerator(implementation: str | None) -> bool:
    """Return True for kernels that transformers brings, but for eager and sdpa; one of the user's own may run."""
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return implementation not in ("eager", "sdpa") and getattr(function, "__module__", "transformers").startswith(
        ("transformers", "kernels")
    )
