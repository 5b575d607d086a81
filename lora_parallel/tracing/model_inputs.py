"""Guess which inputs a model takes: token ids, images, video, sound, or plain activations."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lora_parallel.layers.layer_parameters import features_dim

__all__ = ["likely_inputs"]


def likely_inputs(model: nn.Module, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield inputs that the model may take, the likeliest first.

    Args:
        model: A model that is to be run.
        shape: Number of rows, and number of tokens of a text.

    Yields:
        Keyword arguments for the model; under the key "args" a tuple of positional ones.
    """
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
    for each in (text, options, {**text, **image}, image, sound, {**text, **sound}, model.dummy_inputs):
        if each:
            yield {**each, **decoder, **off}
    for each in (_video(config, shape[0]), _spectrogram(config, shape[0])):
        if each.keys() & known:
            yield {key: value for key, value in each.items() if key in known} | decoder | off


def _text(config: Any, shape: tuple[int, int]) -> dict[str, Tensor]:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(inner, "vocab_size", None) or 2
    special = [getattr(inner, key, None) for key in ("pad_token_id", "eos_token_id", "bos_token_id")]
    reserved = {each for value in special for each in (value if isinstance(value, (list, tuple)) else [value])}
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
