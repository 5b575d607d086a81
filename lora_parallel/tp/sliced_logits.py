"""Keep the logits of a language model in slices over the vocabulary, one on each tp rank (`loss_parallel=True`)."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from lora_parallel.distributed.collectives import gather_last_dim
from lora_parallel.layers.module_names import embeddings_of, innermost
from lora_parallel.tp.layer import tp_layer_of
from lora_parallel.tp.sliced_tensor import sliced_tensor
from lora_parallel.tp.slicing import Slicing

__all__ = ["head_of", "keep_logits_sliced"]


def head_of(model: nn.Module) -> nn.Module:
    """Return the layer that computes a model's logits.

    Raises:
        ValueError: The model names no output embeddings.
    """
    inner = innermost(model)
    head = embeddings_of(inner, "output")
    if not isinstance(head, nn.Module):
        raise ValueError(
            f"loss_parallel=True: {type(inner).__name__} names no language-model head, so that nothing shows which "
            "layer computes logits: give it a method get_output_embeddings that returns the layer, or use "
            "loss_parallel=False."
        )
    return head


def keep_logits_sliced(head: nn.Module) -> None:
    """Make a head return `SlicedTensor` in training, in place. `apply_style` has been called if tp is above 1.

    A head whose output is whole on every rank (tp is 1, or its style says so) computes chunks of the tokens only.
    """
    layers = [module for module in head.modules() if tp_layer_of(module) is not None]
    for layer in layers or [head]:
        _keep_output_sliced(layer)


def _keep_output_sliced(layer: nn.Module) -> None:
    own, unit = layer.forward, tp_layer_of(layer)
    split: Slicing | None = None
    if unit is not None and unit.style.leave == "gather":
        assert unit.out_features is not None
        split = Slicing(unit.out_features, unit.context.group, unit.name)
        unit.style = replace(unit.style, leave="keep")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        y = own(*args, **kwargs)
        if self.training and torch.is_grad_enabled():
            return sliced_tensor(y, split or Slicing(y.shape[-1], None, "the head"))
        if split is None or split.group is None:
            return y
        return gather_last_dim(y, split.features, split.group, split.name)

    layer.forward = MethodType(forward, layer)
