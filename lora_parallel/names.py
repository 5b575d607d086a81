"""Module names as the model's author would write them."""

from __future__ import annotations

from typing import Any, Literal

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn

from lora_parallel.adapter_forms import has_adapters_inside
from lora_parallel.subclasses import is_linear

__all__ = ["clean_names", "embeddings_of", "innermost"]


def clean_names(model: nn.Module) -> dict[nn.Module, str]:
    """Each layer's name as the model's author would write it; what PEFT put inside a layer is left out.

    A PEFT layer and its base layer are one layer, of which the PEFT layer stands here. The modules inside a
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
    """The model that PEFT wraps, or the model itself."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def embeddings_of(model: Any, side: Literal["input", "output"]) -> nn.Module | None:
    """The embeddings that a transformers model says it has on one side, if it does."""
    try:
        return getattr(model, f"get_{side}_embeddings", lambda: None)()
    except NotImplementedError:
        return None
