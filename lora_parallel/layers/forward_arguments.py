"""Read what the forward of a model is asked for: outputs of single blocks, and key-value caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import Cache
from transformers.utils import ModelOutput

__all__ = ["asks_for", "asks_for_cache", "check_between_blocks", "without_cache", "without_caches"]


def asks_for(name: str, kwargs: Mapping[str, Any], model: nn.Module) -> bool:
    """Return True if an output (`output_attentions`, for example) is asked for, by the forward or else the config."""
    asked = kwargs.get(name)
    return bool(asked if asked is not None else getattr(getattr(model, "config", None), name, False))


def asks_for_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a model's forward is given a cache, or `use_cache=True`."""
    return bool(kwargs.get("use_cache")) or any(isinstance(each, Cache) for each in (*args, *kwargs.values()))


def check_between_blocks(kwargs: Mapping[str, Any], option: str, remedy: str) -> None:
    """Check that a forward adds no features of images to the tokens between blocks, where ranks have chunks of them.

    Args:
        kwargs: The keyword arguments of the model that calls the blocks; Qwen3-VL gives its text model such features.
        option: What gives ranks chunks, in words.
        remedy: How to do without it.

    Raises:
        ValueError: There are such features.
    """
    if kwargs.get("deepstack_visual_embeds") is not None:
        raise ValueError(
            f"deepstack_visual_embeds: features of images are added to the tokens between blocks, where {option} each "
            f"rank has a chunk of the tokens. Leave images out, or {remedy}."
        )


def without_caches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with None in the place of caches."""
    return (
        tuple(None if isinstance(each, Cache) else each for each in args),
        {key: None if isinstance(value, Cache) else value for key, value in kwargs.items()},
    )


def without_cache(output: Any) -> Any:
    """Return what a model returns without its cache, or None, as a hook does, if there is none in it."""
    if isinstance(output, ModelOutput) and isinstance(output.get("past_key_values"), Cache):
        return type(output)(**{key: value for key, value in output.items() if key != "past_key_values"})
    return None
