"""Adapters as PEFT draws them in one process, on a copy of the base that has no values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from lora_parallel.deferred import without_values
from lora_parallel.inject import seeded
from lora_parallel.names import clean_names
from lora_parallel.peft_hooks import observe_layers

__all__ = ["adapted_layers", "draw", "shaped"]


def shaped(bare: nn.Module, name: str, config: LoraConfig) -> Any:
    """A bare base with an adapter, on meta: which layers it is on, and what they are."""
    return _adapted(bare, name, config, 0, lambda layer: None)


def adapted_layers(shapes: nn.Module) -> dict[str, Any]:
    """PEFT's layers, by their names in the base, in the order in which PEFT draws them."""
    return {where: layer for layer, where in clean_names(shapes).items() if isinstance(layer, LoraLayer)}


def draw(
    bare: nn.Module, shapes: Any, name: str, config: LoraConfig, seed: int, put: Callable[[str, Any], None]
) -> None:
    """Draw an adapter, layer by layer.

    Args:
        bare: The base, on meta.
        shapes: What `shaped` made of it; its layers are used up.
        name: The adapter's.
        config: What it is.
        seed: What it is drawn from.
        put: Is called with the name of each layer and PEFT's layer on meta, its adapter in full on the CPU.
    """
    remaining = iter(adapted_layers(shapes).items())

    def keep(drawn: Any) -> None:
        where, layer = next(remaining)
        for role in ("lora_A", "lora_B"):
            meta, values = getattr(layer, role)[name], getattr(drawn, role)[name]
            meta.weight = nn.Parameter(values.weight.detach().to(meta.weight.dtype))
        put(where, layer)

    _adapted(bare, name, config, seed, keep)


def _adapted(
    bare: nn.Module, name: str, config: LoraConfig, seed: int, observer: Callable[[nn.Module], None]
) -> nn.Module:
    with seeded(seed), observe_layers(observer):
        return get_peft_model(without_values(bare, {}), copy.deepcopy(config), adapter_name=name)
