"""Name modules as the model's author would, without the wrappers that PEFT adds."""

from __future__ import annotations

from typing import Any, Literal

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from lora_parallel.layers.adapter_support import has_adapters_inside
from lora_parallel.layers.linear_classes import is_linear

__all__ = ["clean_names", "embeddings_of", "innermost"]


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


def innermost(model: nn.Module) -> nn.Module:
    """Return the model that PEFT wraps, or `model` itself if PEFT does not wrap it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def embeddings_of(model: Any, side: Literal["input", "output"]) -> nn.Module | None:
    """Return the input or output embeddings that a transformers model names, or None if it names none."""
    try:
        return getattr(model, f"get_{side}_embeddings", lambda: None)()
    except NotImplementedError:
        return None
