"""Make what a model is run with without its weights: likely inputs, a copy with random values, another config.

All modules of a model share one config object. A module whose sizes differ gets an object that replaces those values
and has the shared config's own `__dict__` for every other attribute, so that later changes to it
(`set_attn_implementation`) reach the module too.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from lora_parallel.layers.linear_classes import features_dim

_LENGTH = 240


class TraceError(Exception):
    """Report that a model cannot be run without its weights, and why."""


class FailedError(TraceError):
    """Report that the model's own code raised an error."""


def brief(error: Exception) -> str:
    """Return the error's class name and the first line of its message, cut after a whole word at 240 characters."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {shorten(text, _LENGTH, placeholder=' ...')}"


def likely_inputs(model: nn.Module, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield keyword arguments that the model may take ("args": positional ones), the likeliest first."""
    if not isinstance(model, PreTrainedModel):
        first = next((m for m in model.modules() if next(m.children(), None) is None and m._parameters), None)
        if isinstance(first, nn.Embedding):
            yield {"args": (torch.randint(first.num_embeddings, shape),)}
        elif isinstance(first, (nn.Linear, Conv1D, nn.LayerNorm, nn.RMSNorm)):
            layer = isinstance(first, (nn.Linear, Conv1D))
            width = first.weight.shape[1 - features_dim(first)] if layer else first.weight.shape[-1]
            yield {"args": (torch.randn(*shape, width),)}
            yield {"args": (torch.randn(shape[0], width),)}
        return
    known = set(inspect.signature(model.forward).parameters)
    off = {key: False for key in ("use_cache",) if key in known}
    config: Any = model.config
    text = {key: value for key, value in _text(config, shape).items() if key in known}
    options = {key: value for key, value in _options(config, shape).items() if key in known}
    image = {key: value for key, value in _image(config, shape[0]).items() if key in known}
    sound = {key: value for key, value in _sound(config, shape[0]).items() if key in known}
    decoder = (
        {"decoder_input_ids": text.get("input_ids", _text(config, shape)["input_ids"])}
        if ("decoder_input_ids" in known and getattr(config, "is_encoder_decoder", False))
        else {}
    )
    text = {key: value for key, value in text.items() if not key.startswith("decoder_")}
    for inputs in (text, options, {**text, **image}, image, sound, {**text, **sound}, model.dummy_inputs):
        if inputs:
            yield {**inputs, **decoder, **off}
    for inputs in (_video(config, shape[0]), _spectrogram(config, shape[0])):
        if inputs.keys() & known:
            yield {key: value for key, value in inputs.items() if key in known} | decoder | off


def _text(config: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(inner, "vocab_size", None) or 2
    special = [getattr(inner, key, None) for key in ("pad_token_id", "eos_token_id", "bos_token_id")]
    reserved = {token for value in special for token in (value if isinstance(value, (list, tuple)) else [value])}
    ids = [index for index in range(min(vocabulary, 64)) if index not in reserved] or [0]
    chosen = torch.tensor(ids)[torch.randint(len(ids), shape)]
    mask = torch.ones(shape, dtype=torch.long)
    mask[0, -(shape[1] // 8) :] = 0
    return {"input_ids": chosen, "attention_mask": mask}


def _options(config: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Return the inputs of a multiple-choice model, each [rows, choices, tokens]."""
    return {key: value[:, None].expand(-1, 2, -1) for key, value in _text(config, shape).items()}


def _video(config: Any, rows: int) -> dict[str, Tensor]:
    frames = getattr(config, "num_frames", 8)
    image = _image(config, rows)["pixel_values"]
    return {"pixel_values": image[:, None].expand(-1, frames, -1, -1, -1)}


def _spectrogram(config: Any, rows: int) -> dict[str, Tensor]:
    bands: Any = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
    length: Any = getattr(config, "max_length", None) or 64
    values = torch.randn(rows, length, bands)
    return {"input_values": values, "input_features": values}


def _image(config: Any, rows: int) -> dict[str, Tensor]:
    inner = getattr(config, "vision_config", config)
    size = getattr(inner, "image_size", 32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"pixel_values": torch.randn(rows, getattr(inner, "num_channels", 3), height, width)}


def _sound(config: Any, rows: int) -> dict[str, Tensor]:
    frames = 2 * getattr(config, "max_source_positions", 50)
    return {
        "input_features": torch.randn(rows, getattr(config, "num_mel_bins", 80), frames),
        "input_values": torch.randn(rows, 4000),
    }


def stand_in_for(model: nn.Module, without: Collection[nn.Module] = ()) -> nn.Module:
    """Return a copy of `model` in float32 on the CPU, in evaluation mode, with random parameters and without hooks."""
    # `without`: modules that are left out; lists of modules are shorter then.
    # A parameter of more than 2^16 elements takes the memory of one row, which stands for all of its rows.
    try:
        return _copied(model, without)
    except Exception as error:  # whatever a module makes of being copied
        raise TraceError(f"it cannot be copied ({brief(error)})") from error


def _copied(model: nn.Module, without: Collection[nn.Module]) -> nn.Module:
    memo: dict[int, Any] = {id(module): None for module in without}
    kept = [module for module in model.modules() if module not in without]
    for parameter in {p: None for module in kept for p in module._parameters.values() if p is not None}:
        values = 0.5 + torch.rand(parameter.shape[-1:])
        if parameter.numel() <= 2**16:
            values = 0.5 + torch.rand(parameter.shape)
        if parameter.is_floating_point():
            memo[id(parameter)] = nn.Parameter(values.expand(parameter.shape))
        else:  # of a quantised layer: the tracer runs a stand-in for the layer, so the values do not matter
            nothing = torch.zeros(1, dtype=parameter.dtype).view([1] * parameter.dim())
            memo[id(parameter)] = nn.Parameter(nothing.expand(parameter.shape), requires_grad=False)
    for buffer in {b: None for module in kept for b in module._buffers.values() if b is not None}:
        if id(buffer) in memo:
            continue
        plain = type(buffer) is Tensor and not buffer.is_meta
        copied = buffer.detach().cpu().clone() if plain else torch.ones(buffer.shape, dtype=buffer.dtype)
        memo[id(buffer)] = copied.float() if copied.is_floating_point() else copied
    twin = copy.deepcopy(model, memo)
    for module in twin.modules():
        if isinstance(module, nn.ModuleList):
            module._modules = {key: child for key, child in module._modules.items() if child is not None}
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


@dataclass(frozen=True)
class ConfigView:
    """Hold the values that one module sees in place of the shared config's, by attribute name."""

    values: dict[str, Any]


def viewed_with(shared: Any, value: Any) -> Any:
    """Return `value`, or the config that it describes if it is a `ConfigView`."""
    if not isinstance(value, ConfigView):
        return value
    kind: Any = type(shared)
    seen: Any = object.__new__(_kind(kind, tuple(value.values.items())))
    object.__setattr__(seen, "__dict__", shared.__dict__)
    return seen


@cache
def _kind(kind: Any, values: tuple[tuple[str, Any], ...]) -> Any:
    """Return a subclass of `kind` with properties for the replaced values, found before the instance's own."""
    # Cached: views with the same values share the class, so that a graph of one block serves the others.
    replaced = {key: property(partial(_replaced, value), partial(_set, key)) for key, value in values}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **replaced})


def _replaced(value: Any, _view: Any) -> Any:
    return value


def _set(key: str, view: Any, new: Any) -> None:
    view.__dict__[key] = new
