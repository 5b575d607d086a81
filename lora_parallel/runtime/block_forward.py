"""Run the blocks of a model: what is Python's own work is done as a block begins, and the rest may be compiled.

As a block begins, this rank's plain tensors shadow its DTensors, the number of tokens is looked up, and the keys of
LoRA dropout are computed. The forward of the block itself sees plain tensors and functional collectives only, so that
`torch.compile` traces it as one graph, and the same graph serves every block of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.tp.context import TPContext
from lora_parallel.tp.layer import TPLayer, tp_layer_of

__all__ = ["run_blocks"]

_BLOCK = "_lora_parallel_block"


def run_blocks(
    blocks: Iterable[nn.Module], device: str, context: TPContext | None, compile_arguments: Mapping[str, Any] | None
) -> None:
    """Make each block prepare its layers as its forward begins, and compile the forward if asked to. In place.

    Each block gets a class of its own kind, as FSDP2 gives one to its units. A subclass is where transformers'
    `GradientCheckpointingLayer` checkpoints: around the forward defined here, so that what is recomputed is prepared
    too.

    Args:
        blocks: The blocks, none of which contains another.
        device: The type of the device that the model runs on.
        context: The context that the model's tensor parallel layers share; None if tp is 1.
        compile_arguments: The arguments of `torch.compile`; None to compile nothing.
    """
    for block in blocks:
        own = block.__dict__.pop("forward", None) or type(block).forward.__get__(block)
        block.__dict__[_BLOCK] = _Block(block, own, device, context, compile_arguments)
        block.__class__ = _prepared(type(block))


@cache
def _prepared(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a block's class that runs its `_Block`; one for all blocks, as graphs depend on the class."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_BLOCK](*args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})


class _Block:
    """Prepare the layers of one block, run its own forward, and clean up after it."""

    def __init__(
        self,
        block: nn.Module,
        own: Callable[..., Any],
        device: str,
        context: TPContext | None,
        compile_arguments: Mapping[str, Any] | None,
    ) -> None:
        self._context, self._device = context, device
        self._layers: list[tuple[nn.Module, TPLayer]] = [
            (module, layer) for module in block.modules() if (layer := tp_layer_of(module)) is not None
        ]
        self._dropouts = [module for module in block.modules() if isinstance(module, TopologyInvariantDropout)]
        self._run = own if compile_arguments is None else torch.compile(own, **compile_arguments)
        self._compiled = compile_arguments is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            for module, layer in self._layers:
                layer.shadow(module)
            if self._context is not None:
                self._context.forget_input()
            if self._compiled:
                self._prepare()
            return self._run(*args, **kwargs)
        finally:
            for module, layer in self._layers:
                layer.unshadow(module)
            if self._context is not None:
                self._context.forget_input()

    def _prepare(self) -> None:
        if self._context is not None:
            self._context.tokens.enter_block()
        running = [each for each in self._dropouts if each.training]
        if running:
            keys = torch.tensor([each.keys() for each in running], dtype=torch.int32, device=self._device)
            for each, own in zip(running, keys.unbind(), strict=True):
                each.prepared = own
