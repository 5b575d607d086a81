"""Tell which adapters have a tensor parallel form, and why the others have none."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.lora.variants import DoraLinearVariant
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor.placement_types import Shard

from lora_parallel.layers.linear_classes import is_linear, subclass_problem
from lora_parallel.layers.quantised_layer import QuantisedLayer
from lora_parallel.layers.styles import STYLES, Style

__all__ = ["WORKS", "cut_problem", "has_adapters_inside", "problem_anywhere"]

WORKS = (
    "What is cut over tp: LoRA (rsLoRA, rank and alpha patterns, lora_bias) and DoRA on linear layers and Conv1D, LoRA "
    "on embeddings, modules_to_save, trained biases."
)


def has_adapters_inside(base: nn.Module) -> bool:
    """Return True if a module inside of `base`, not `base` itself, is a PEFT layer."""
    return any(isinstance(inner, BaseTunerLayer) for inner in base.modules() if inner is not base)


def problem_anywhere(module: nn.Module) -> str | None:
    """Return the reason why a layer can have no style at all, or None if it can have one (at least `replicate`)."""
    tokens = (isinstance(inner, TrainableTokensLayer) for inner in module.modules() if inner is not module)
    if isinstance(module, BaseTunerLayer) and any(tokens):
        return (
            "trainable_token_indices reaches it through a tied weight, and it has an adapter of its own: leave one out"
        )
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    if is_linear(base) and has_adapters_inside(base):
        return f"a layer inside of {type(base).__name__} is adapted by itself: adapt the whole of it"
    return None


def cut_problem(module: nn.Module, style: Style) -> str | None:
    """Return the reason why a layer cannot be cut as `style` says.

    Returns:
        None if the layer can be cut, if the style leaves it whole, or if the style is one of experts, which
        `planning/expert_sharing.py` checks.
    """
    if style is STYLES["replicate"] or style.enter == "experts":
        return None
    if isinstance(module, BaseTunerLayer) and (problem := _adapter_problem(module)) is not None:
        return problem
    base: Any = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    if not isinstance(style.weight, Shard) or not is_linear(base):
        return None
    return subclass_problem(base, style)


def _adapter_problem(module: Any) -> str | None:
    if isinstance(module, TrainableTokensLayer):
        return "trainable_token_indices writes rows into the whole embedding"
    if isinstance(module, ParamWrapper):
        return f"target_parameters adapts its {module.parameter_name!r} by itself"
    if type(module) not in (LoraLinear, LoraEmbedding) and not isinstance(module.get_base_layer(), QuantisedLayer):
        return f"adapter layers of type {type(module).__name__} have no other form under tensor parallelism"
    if isinstance(module.base_layer, BaseTunerLayer):
        return "adapters are nested"
    for variant in module.lora_variant.values():
        if isinstance(module, LoraEmbedding) or type(variant) is not DoraLinearVariant:
            return f"its adapter is a LoRA variant ({type(variant).__name__})"
    return None
