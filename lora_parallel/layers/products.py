"""Count the multiplications that a model's matrices cost for a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from lora_parallel.layers.quantised_layer import QuantisedLayer

__all__ = ["matrices"]


def matrices(model: nn.Module, config: Any) -> Iterator[tuple[bool, float]]:
    """Yield, for each matrix that tokens are multiplied with, whether it trains and its multiplications for a token.

    Embeddings are looked up and cost none. Of a mixture's experts a token goes to some only.

    Args:
        model: The model, or a part of it, sharded or not: a sharded matrix counts as a whole.
        config: The model's config, which says how many experts a token goes to; None if there is none.
    """
    used = _share_of_experts(config)
    for module in model.modules():
        if isinstance(module, QuantisedLayer):
            yield False, float(module.out_features * module.in_features)
        elif not isinstance(module, nn.Embedding):
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dim() > 1:
                    yield parameter.requires_grad, parameter.numel() * (used if parameter.dim() == 3 else 1.0)


def _share_of_experts(config: Any) -> float:
    """Return the share of a mixture's experts that a token goes to, 1 for other models."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    every = next(
        (n for key in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(text, key, None))), None
    )
    chosen = getattr(text, "num_experts_per_tok", None)
    return chosen / every if every and chosen else 1.0
