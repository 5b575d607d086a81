"""Count the floating-point operations of training that a model needs for a token, with frozen and with trained weights.

A product with a matrix of N elements costs 2 N operations a token in the forward (a multiplication and an addition for
each element), 2 N for the gradient of its input, and 2 N for the gradient of the matrix (Kaplan et al. 2020, "Scaling
Laws for Neural Language Models", section 2.1). A frozen matrix needs no gradient: 4 N. Adapters train: 6 N. Attention
costs 12 x layers x heads x head size x sequence length a token, the mask not considered (Chowdhery et al. 2022, "PaLM",
appendix B). What is computed a second time by activation checkpointing is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_parallel.distributed.stages import over_stages
from lora_parallel.layers.module_names import innermost
from lora_parallel.layers.products import matrices
from lora_parallel.state import state_of

__all__ = ["TokenFlops", "token_flops"]


@dataclass(frozen=True)
class TokenFlops:
    """Hold what the operations for a token depend on."""

    frozen: float
    """Number of elements of the frozen matrices that a token is multiplied with."""

    trained: float
    """Number of elements of the matrices that train."""

    attention: float
    """Sum over the layers of heads times head size; 0 if the model's config does not say."""

    def training(self, length: int) -> float:
        """Return the operations of a training step for one token of a sequence of `length` tokens."""
        return 4 * self.frozen + 6 * self.trained + 12 * self.attention * length


def token_flops(models: Iterable[nn.Module]) -> TokenFlops:
    """Add up what a token costs in each model, in all stages of a pipeline. Collective if a mesh has a pp axis."""
    frozen = trained = attention = 0.0
    for model in models:
        state = state_of(model)
        inner = innermost(model)
        config = getattr(inner, "config", None)
        mine = [0.0, 0.0]
        for parameter_trains, products in matrices(inner, config):
            mine[parameter_trains] += products
        for other in over_stages(mine, None if state is None else state.mesh):
            frozen += other[0]
            trained += other[1]
        attention += _attention(config)
    return TokenFlops(frozen, trained, attention)


def _attention(config: Any) -> float:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    if not layers or not heads:
        return 0.0
    size = getattr(text, "head_dim", None) or text.hidden_size / heads
    return float(layers * heads * size)
