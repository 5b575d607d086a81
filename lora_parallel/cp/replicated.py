"""Run layers outside of the blocks on all tokens, the same on every cp rank, and divide their gradients.

FSDP2 adds the gradients of cp ranks up. In blocks each rank has those of its tokens. What computes the same on every
rank has all of its gradient on each: it is divided by cp.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lora_parallel.cp.context import CPContext
from lora_parallel.distributed.gradients import scale_gradient
from lora_parallel.tp.sliced_tensor import SlicedTensor, part_of, sliced_tensor

__all__ = ["refuse_gradients", "replicated", "run_replicated"]


def run_replicated(layer: nn.Module, context: CPContext) -> None:
    """Make a layer divide its gradients by cp, in place."""
    own = layer.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replicated(self, own, context, args, kwargs)

    layer.forward = MethodType(forward, layer)


def replicated(
    layer: nn.Module, own: Callable[..., Any], context: CPContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a layer's own forward; its parameters get their gradients divided by cp, and its inputs get all of theirs.

    Args:
        layer: The layer.
        own: Its own forward.
        context: The chunks.
        args: Positional arguments of the forward. Chunks among them are gathered.
        kwargs: Arguments by name.
    """
    trains = any(parameter.requires_grad for parameter in layer.parameters())
    if not context.cuts:
        if trains:
            refuse_gradients(type(layer).__name__)
        return own(*args, **kwargs)
    ranks = context.chunks.ranks

    def entering(x: Tensor) -> Tensor:
        if isinstance(x, SlicedTensor):
            x = x.slicing.gathered(part_of(x), type(layer).__name__).to(x.dtype).view(x.shape)
        return scale_gradient(x, ranks) if trains and x.requires_grad else x

    def leaving(x: Tensor) -> Tensor:
        if not (trains and x.requires_grad):
            return x
        if isinstance(x, SlicedTensor):
            return sliced_tensor(scale_gradient(part_of(x), 1 / ranks), x.slicing)
        return scale_gradient(x, 1 / ranks)

    args, kwargs = tree_map_only(Tensor, entering, (args, kwargs))
    return tree_map_only(Tensor, leaving, own(*args, **kwargs))


def refuse_gradients(name: str) -> None:
    """Refuse to compute a part of the model by itself with gradients, which FSDP2 would add up over cp ranks.

    Raises:
        ValueError: Gradients are enabled.
    """
    if torch.is_grad_enabled():
        raise ValueError(
            f"{name} was called with gradients, but not by the parallelized model's own forward, which cuts the tokens "
            "under cp: call the parallelized model, or use torch.no_grad()."
        )
