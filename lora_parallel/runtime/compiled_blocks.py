"""Compile the blocks of a model: what is Python's own work is done as a block begins, and the rest is one graph.

`torch.compile` cannot trace a sharded model: FSDP2 gathers weights in hooks, and parameters are DTensors. So, as a
block begins, this rank's plain tensors shadow its DTensors, the number of tokens is looked up, and the keys of LoRA
dropout are computed. The forward of the block itself sees plain tensors and functional collectives only, and the same
graph serves every block of its kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from inspect import signature
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.adapters.peft_private import trace_dora
from lora_parallel.cp.attention import CPContext
from lora_parallel.distributed.dtensors import tensor_on
from lora_parallel.distributed.rank_checks import is_rank_zero
from lora_parallel.distributed.torch_private import drop_compiled_call, has_compiled_call, without_compile
from lora_parallel.layers.layer_parameters import asks_for_cache, innermost, without_cache, without_caches
from lora_parallel.layers.wrapped_forward import wrap_forward
from lora_parallel.state import Setup
from lora_parallel.tp.context import TPContext
from lora_parallel.tp.layer import tp_layer_of

_BLOCK = "_lora_parallel_block"
log = logging.getLogger(__name__)


def compile_blocks(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    device: str,
    context: TPContext | None,
    chunk: CPContext | None,
    arguments: Mapping[str, Any],
) -> None:
    """Compile the forward of each block, none of which contains another, in place with `torch.compile`'s arguments."""
    compiled, caches = _compiler(arguments), _Caches(model)
    for block in blocks:
        block.__dict__[_BLOCK] = _Block(block, device, context, chunk, compiled, caches)
        # As FSDP2 does with its units. transformers' `GradientCheckpointingLayer` checkpoints in the forward of the
        # subclass, and so around what is done here: what is recomputed is prepared too.
        kind: Any = type(block)
        block.__class__ = _subclass(kind)
    trace_dora()


class CompiledPart(Protocol):
    """Define what a block asks of a layer that was put into it later, such as a `TenantLayer`."""

    def enter(self) -> bool:
        """Prepare for a compiled forward of the block. Return False if the block cannot run compiled this time."""

    def leave(self) -> None:
        """Drop what `enter` prepared."""


def compiled_parts(model: nn.Module) -> dict[nn.Module, list[CompiledPart]]:
    """Map each module in a block of `model` to the list of the block's parts, to which parts may be added."""
    blocks = [block for block in model.modules() if _BLOCK in block.__dict__]
    return {module: block.__dict__[_BLOCK].parts for block in blocks for module in block.modules()}


@cache
def _subclass(kind: Any) -> Any:
    """Return the subclass of a block's class that runs its `_Block`; one for all blocks, as graphs depend on it."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_BLOCK].run(*args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__, "__doc__": kind.__doc__})


# Count the graphs of each class of blocks by themselves, from torch 2.13 on. Otherwise all classes of transformers'
# blocks would share one limit of 8 graphs, as their forwards share a wrapper, and a class has one graph for each kind
# of attention, with and without gradients, in training and in evaluation, and so on.
_DEFAULTS = {"isolate_recompiles": True, "recompile_limit": 64}


def _compiler(arguments: Mapping[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a function that compiles forwards of blocks; those of one class share a compiled forward and its graphs.

    A compiled forward has two more arguments in front: the contexts, and the tokens of each.
    """
    known = signature(torch.compile).parameters
    arguments = {**{name: value for name, value in _DEFAULTS.items() if name in known}, **arguments}

    @cache
    def compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
        def traced(contexts: Any, tokens: tuple[int, int], *args: Any, **kwargs: Any) -> Any:
            context, chunk = contexts
            if chunk is not None:
                chunk.tokens.in_graph = tokens[1]
            if context is None:
                return forward(*args, **kwargs)
            context.tokens.in_graph = tokens[0]
            output = forward(*args, **kwargs)
            context.forget_input()  # or it would be an output of the graph
            return output

        return torch.compile(traced, **arguments)

    return compiled


class _Block:
    """Run one block: prepare its layers, run its compiled forward, and clean up after it."""

    def __init__(
        self,
        block: nn.Module,
        device: str,
        context: TPContext | None,
        chunk: CPContext | None,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
        caches: _Caches,
    ) -> None:
        self.eager = False
        self._device, self._context, self._chunk, self._caches = device, context, chunk, caches
        self._layers = [layer for module in block.modules() if (layer := tp_layer_of(module)) is not None]
        self._dropouts = [module for module in block.modules() if isinstance(module, TopologyInvariantDropout)]
        # layers that were put into the block later, and prepare for a compiled forward themselves
        self.parts: list[CompiledPart] = []
        kind_forward: Any = type(block).forward
        self._eager = block.__dict__.pop("forward", None) or kind_forward.__get__(block)
        is_method = getattr(self._eager, "__self__", None) is block
        self._block = (block,) if is_method else ()  # given the block as an argument, a graph is not of one block
        self._compiled = compiled(self._eager.__func__ if is_method else self._eager)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if self._caches.unused:
            args, kwargs = without_caches(args, kwargs)
        # What a cache holds grows with each call, and is another object for each layer: a graph for every call.
        if self.eager or any(isinstance(argument, Cache) for argument in (*args, *kwargs.values())):
            return self._eager(*args, **kwargs)
        try:
            if not all(part.enter() for part in self.parts):
                return self._eager(*args, **kwargs)
            for layer in self._layers:
                layer.shadow()
            training = [dropout for dropout in self._dropouts if dropout.training]
            if training:  # the keys of all dropouts are sent to the device in one tensor
                training[0].check_counted()
                keys = tensor_on(self._device, [dropout.keys() for dropout in training], torch.int32)
                for dropout, prepared in zip(training, keys.unbind(), strict=True):
                    dropout.prepared = prepared
            if self._context is not None:
                self._context.forget_input()
            contexts = self._context, self._chunk
            tokens = tuple(context.tokens.known() if context is not None else 0 for context in contexts)
            with self._chunk.kept_for_graph() if self._chunk is not None else nullcontext():
                return self._compiled(contexts, tokens, *self._block, *args, **kwargs)
        finally:
            for layer in self._layers:
                layer.unshadow()
            for part in self.parts:
                part.leave()
            if self._context is not None:
                self._context.forget_input()


class _Caches:
    """Keep key-value caches out of the blocks in training forwards that were not asked for one.

    transformers' models make a cache by default, which nothing reads in training, and with which blocks do not run
    compiled: it grows with each call. The model's own `use_cache` stays as it is, since transformers looks for packed
    sequences only where there is no cache. A forward that is given a cache, or `use_cache=True`, gets what it asks for.
    """

    def __init__(self, model: nn.Module) -> None:
        self.unused = False  # True while a forward runs whose cache nothing reads
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.unused = model.training and not asks_for_cache(args, kwargs)

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        unused, self.unused = self.unused, False
        return without_cache(output) if unused else None  # it is empty


def unwrap_compiled(module: nn.Module) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """Take `torch.compile` off a module and all modules in it, in place, and log what was compiled.

    Args:
        module: A module that may be compiled (by `torch.compile(module)` or `module.compile()`), or hold modules that
            are.

    Returns:
        The module without its wrapper; and the arguments of `torch.compile` for its blocks, None if nothing was
        compiled. The arguments are known where Lightning was imported before the call, which keeps them; else there are
        none.
    """
    compiled: list[tuple[str, Mapping[str, Any]]] = []

    def unwrapped(name: str, module: nn.Module) -> nn.Module:
        if (inner := without_compile(module)) is not None:
            compiled.append((name, getattr(module, "_compile_kwargs", {})))
            module = inner
        if has_compiled_call(module):
            drop_compiled_call(module)
            compiled.append((name, {}))
        return module

    bare = unwrapped("", module)
    for prefix, parent in list(bare.named_modules()):
        for key, child in list(parent._modules.items()):
            if child is not None:
                parent._modules[key] = unwrapped(f"{prefix}.{key}".lstrip("."), child)
    if not compiled:
        return bare, None
    tell_unwrapped([name or type(bare).__name__ for name, _ in compiled])
    return bare, next((arguments for _, arguments in compiled if arguments), {})


def tell_unwrapped(names: Sequence[str]) -> None:
    """Log, on rank 0, that `torch.compile` was taken off the modules of these names."""
    if is_rank_zero():
        message = "torch.compile is taken off %s: each block is compiled instead, as compile=True does."
        log.warning(message, ", ".join(names))


@torch.compiler.assume_constant_result  # which is called, not traced: what it raises ends the compilation
def refuse_whole_compile(*_: Any, **__: Any) -> NoReturn:
    """Raise the error with the remedy: in the place of a sharded model's `compile`, and in a forward that is traced."""
    raise ValueError(
        "torch.compile cannot trace a sharded model as a whole: leave model.compile() and torch.compile(model) out, "
        "and compile its blocks with compile=True (in ParallelConfig or the strategy), or torch_compile=True of "
        "TrainingArguments, or dynamo_backend of Accelerate."
    )


def compile_each_block(setup: Setup) -> None:
    """Compile the forward of each block, if the config asks for it."""
    if (arguments := setup.config.compile_arguments) is not None:
        compile_blocks(setup.model, setup.blocks, setup.mesh.device_type, setup.context, setup.cp_context, arguments)


def leave_nested_eager(setup: Setup) -> None:
    """Run compiled blocks eagerly that have FSDP units inside: not all of such a block is gathered as it begins."""
    if setup.config.compile_arguments is None:
        return
    eager = [b for b in setup.blocks if any(isinstance(m, FSDPModule) and m is not b for m in b.modules())]
    for block in eager:
        block.__dict__[_BLOCK].eager = True
    if eager and is_rank_zero():
        reason = "a weight that is another block's too, or one that trains in another dtype than the others"
        log.warning("%d blocks have FSDP units inside (%s), and are not compiled.", len(eager), reason)


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
        wrap_forward(block, _checkpointed)


def _checkpointed(block: nn.Module, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return compute(*args, **kwargs)
    return checkpoint(compute, *args, use_reentrant=False, **kwargs)
