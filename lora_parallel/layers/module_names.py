"""Name modules as the model's author would, without the wrappers that PEFT adds, and by the block that they are in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from lora_parallel.layers.adapter_support import has_adapters_inside
from lora_parallel.layers.linear_classes import is_linear

__all__ = [
    "block_of",
    "clean_names",
    "clean_parameter_name",
    "count_kinds",
    "embeddings_of",
    "innermost",
    "without_block_numbers",
]


def clean_names(model: nn.Module) -> dict[nn.Module, str]:
    """Map each module to its name as the model's author would write it, without modules that PEFT put into a layer.

    A PEFT layer and its base layer are one layer, and the PEFT layer is the key. The modules inside a
    `ModulesToSaveWrapper` (the original and the trained copies) all have the wrapper's name.
    """
    names: dict[nn.Module, str] = {}

    def walk(module: nn.Module, name: str) -> None:
        if isinstance(module, PeftModel):
            walk(module.get_base_model(), name)
            return
        if isinstance(module, ModulesToSaveWrapper):
            for inner in (module.original_module, *module.modules_to_save.values()):
                walk(inner, name)
            return
        if module in names:
            return
        names[module] = name
        if isinstance(module, BaseTunerLayer) or (is_linear(module) and not has_adapters_inside(module)):
            return
        if isinstance(module, TrainableTokensWrapper):
            del names[module]
            walk(module.token_adapter, name)
            return
        for key, child in module.named_children():
            walk(child, f"{name}.{key}" if name else key)

    walk(model, "")
    return names


def clean_parameter_name(name: str) -> str:
    """Return a parameter's name without the components that PEFT's layers add: `base_layer`, `original_module`."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def block_of(name: str) -> str:
    """Return the name of the block that a module is in, the outermost numbered one, or "" if it is in none."""
    found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", name)
    return found[0] if found else ""


def without_block_numbers(name: str) -> str:
    """Return a module's name as a glob that matches the same module of all blocks."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


def count_kinds(said: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Count layers by their name without block numbers and by the text about them.

    Args:
        said: The text about each layer, by the layer's name.
    """
    counts: dict[tuple[str, str], int] = {}
    for name, what in said.items():
        key = without_block_numbers(name), what
        counts[key] = counts.get(key, 0) + 1
    return counts


def innermost(model: nn.Module) -> nn.Module:
    """Return the model that PEFT wraps, or `model` itself if PEFT does not wrap it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def embeddings_of(model: Any, side: Literal["input", "output"]) -> nn.Module | None:
    """Return the input or output embeddings that a transformers model names, or None if it names none."""
    try:
        return getattr(model, f"get_{side}_embeddings", lambda: None)()
    except NotImplementedError:
        return None
