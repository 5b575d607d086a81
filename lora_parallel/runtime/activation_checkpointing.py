"""Recompute the activations of blocks in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lora_parallel.layers.layer_parameters import innermost
from lora_parallel.state import Setup


def checkpoint_activations(setup: Setup) -> None:
    """Enable activation checkpointing, if the config asks for it, inside of each block's forward.

    In this way no wrapper's prefix gets into parameter names.
    """
    if not setup.config.activation_checkpointing:
        return
    bare: Any = innermost(setup.model)
    if hasattr(bare, "gradient_checkpointing_enable"):
        bare.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for block in setup.blocks:
        block.forward = partial(_checkpointed, block, block.forward)


def _checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
