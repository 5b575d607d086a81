"""Draw adapters with the values that PEFT draws in one process, on a copy of the base that has no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from lora_parallel.adapters.injection import draw_adapter
from lora_parallel.layers.module_names import clean_names
from lora_parallel.lazy.tracking import without_values

__all__ = ["adapted_layers", "draw", "shaped"]


def shaped(bare: nn.Module, name: str, config: LoraConfig) -> Any:
    """Return a copy of the base on meta with PEFT's adapter on it, which shows the adapter's layers and their shapes.

    Args:
        bare: The base, on meta.
        name: The adapter's name.
        config: The adapter's config.
    """
    return draw_adapter(without_values(bare, {}), config, 0, lambda layer: None, name)


def adapted_layers(shapes: nn.Module) -> dict[str, Any]:
    """Map the name of each adapted layer in the base to PEFT's layer, in the order in which PEFT draws the adapters."""
    return {where: layer for layer, where in clean_names(shapes).items() if isinstance(layer, LoraLayer)}


def draw(
    bare: nn.Module, shapes: Any, name: str, config: LoraConfig, seed: int, put: Callable[[str, Any], None]
) -> None:
    """Draw the values of an adapter, layer by layer.

    Args:
        bare: The base, on meta.
        shapes: The result of `shaped` for this adapter; its layers are filled and handed to `put`.
        name: The adapter's name.
        config: The adapter's config.
        seed: Seed of the random state that the values are drawn from.
        put: Called for each layer with its name and PEFT's layer, whose base weight is on meta and whose adapter is on
            the CPU, whole.
    """
    remaining = iter(adapted_layers(shapes).items())

    def keep(drawn: Any) -> None:
        where, layer = next(remaining)
        for role in ("lora_A", "lora_B"):
            meta, values = getattr(layer, role)[name], getattr(drawn, role)[name]
            meta.weight = nn.Parameter(values.weight.detach().to(meta.weight.dtype))
        put(where, layer)

    draw_adapter(without_values(bare, {}), config, seed, keep, name)
