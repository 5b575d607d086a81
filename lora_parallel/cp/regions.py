"""Run the blocks of a model, and the layers after them, on this rank's chunk of the tokens.

The model's own code around the blocks sees all tokens, so that masks, rotary embeddings, packed rows and position ids
are what they are in one process. Each block is given its rank's part of what has the tokens in dim 1. After the
blocks, norm and head compute on the chunk too, and the logits stand for those of all tokens (`tp/loss_parallel.py`):
the loss is computed from chunks, and what reads them otherwise gathers them.

FSDP2 takes the mean of the gradients of cp ranks, as of all others. So whatever every rank computes alike counts once,
wherever a parameter is used. Where chunks become all tokens, the gradient is multiplied by cp: the mean is then the sum
over the chunks, for all that computes on them and all that comes before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.utils import ModelOutput

from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.cp.attention import ATTENTION, CPContext, attend_to_all_tokens, remember_whole, wrap_registry
from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.distributed.gradients import scale_gradient
from lora_parallel.layers.layer_parameters import (
    asks_for_cache,
    check_between_blocks,
    without_cache,
    without_caches,
)
from lora_parallel.layers.wrapped_forward import Around, wrap_forward
from lora_parallel.replaced import replaced
from lora_parallel.state import Setup
from lora_parallel.tp.loss_parallel import SlicedTensor, Slicing, part_of, sliced_tensor
from lora_parallel.tp.sequence import (
    Entry,
    OwnDraws,
    block_output,
    first_activations,
    refuse_block_outputs,
    with_activations,
    with_output,
)


def refuse_gradients(name: str) -> None:
    """Refuse a block called by itself with gradients, which would be computed again from a chunk where recomputed."""
    if torch.is_grad_enabled():
        raise ValueError(
            f"{name} was called with gradients, but not by the parallelized model's own forward, which cuts the tokens "
            "under cp: call the parallelized model, or use torch.no_grad()."
        )


@dataclass
class Places:
    """List the places of a model where its tokens are cut, and where they are whole again."""

    # The blocks of the stack, in order; None for a block that is on another pipeline stage.
    blocks: list[nn.Module | None]
    arguments: dict[nn.Module, list[str]]  # Names of the positional arguments of each block
    attentions: dict[nn.Module, str]  # Modules that compute attention, and their names
    # Module whose output is that of the stack, after a norm: for a language model, all of it but the head.
    trunk: nn.Module
    norm_on_chunks: bool  # True if what the trunk computes after the last block works on chunks
    cut: dict[nn.Module, frozenset[str]]  # Names of the arguments of each block that have tokens and are cut
    after: list[nn.Module]  # Linear layers that are called after the trunk

    def of(self, twins: Mapping[nn.Module, nn.Module]) -> Places:
        """Return the same places in modules that are like these; places in a module without a twin are left out."""
        return replace(
            self,
            blocks=[twins.get(block) if block is not None else None for block in self.blocks],
            arguments={twins[block]: names for block, names in self.arguments.items() if block in twins},
            attentions={twins[module]: name for module, name in self.attentions.items() if module in twins},
            trunk=twins.get(self.trunk, self.trunk),
            cut={twins[block]: names for block, names in self.cut.items() if block in twins},
            after=[twins[layer] for layer in self.after if layer in twins],
        )


def split_tokens_over_cp(setup: Setup) -> None:
    """Make a model compute on chunks of the tokens, in place, under context parallelism; note what stages call."""
    if setup.places is None:
        return
    places: Places = setup.places
    context: CPContext = setup.cp_context
    wrap_registry()
    for module, name in places.attentions.items():
        module.__dict__[ATTENTION] = attend_to_all_tokens(context, name)
    blocks = [block for block in places.blocks if block is not None]
    for part in (*blocks, *places.after):
        for module in part.modules():
            if isinstance(module, TopologyInvariantDropout):
                module.chunk = context
    chunks, draws = context.chunks, OwnDraws(context.chunks.rank, setup.model, setup.count)

    def begin(hidden: Tensor) -> None:
        tokens = hidden.shape[1]
        if tokens < chunks.fewest:
            raise ValueError(
                f"a batch has {tokens} tokens a row, and cp={chunks.ranks} needs {chunks.fewest} at least: pad the "
                "rows, or use a smaller cp."
            )
        context.tokens.count = tokens
        draws.begin(hidden.device)

    def enter(hidden: Tensor) -> Tensor:
        begin(hidden)
        return chunks.mine(hidden)  # no gradient flows back to the stage before

    arounds: list[tuple[nn.Module, Around]] = [
        *((block, partial(_run_block, places, context, begin, draws.end)) for block in blocks),
        (places.trunk, partial(_run_trunk, places, context, type(places.trunk).__name__)),
        *((layer, partial(_run_after, context)) for layer in places.after),
    ]
    for module, around in arounds:
        wrap_forward(module, around)
    _decide_cuts(setup.model, context)
    setup.entries.insert(0, Entry(enter, draws.end))  # hidden states are cut over cp before they are cut over tp


def _decide_cuts(model: nn.Module, context: CPContext) -> None:
    """Decide about each forward of the model whether its tokens are cut, and refuse what could not be right."""

    def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caches = asks_for_cache(args, kwargs)
        if caches:
            refuse_caches()
        for tensor in tensors_in([args, kwargs]):
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    "an input of the model requires a gradient, and under cp each rank would give it that of its own "
                    "tokens: let the model compute it (embeddings inside of the model), or use cp=1."
                )
        context.cuts, context.running = not caches, False
        context.has_labels = kwargs.get("labels") is not None
        if context.cuts:
            refuse_outputs(model, kwargs)

    def end(model: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        cut = context.cuts
        context.end_forward()
        return without_cache(output) if cut else None  # it would have a chunk of the tokens

    model.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
    model.register_forward_hook(end, always_call=True)


def refuse_caches() -> None:
    """Refuse a forward that is given a cache, or asked for one."""
    if torch.is_grad_enabled():
        raise ValueError(
            "a forward with gradients was given use_cache=True or a cache: under cp each rank would cache its own "
            "tokens. Leave both out, or use torch.no_grad()."
        )


def refuse_outputs(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Refuse a forward that is asked for outputs of single blocks, or adds features of images between blocks."""
    reason = "under cp each rank has a chunk of the tokens between blocks, and would return, or compute a loss"
    refuse_block_outputs(model, kwargs, f"{reason} of, that. Leave it False, or use cp=1.")
    check_between_blocks(kwargs, "under cp", "use cp=1")


# ------------------------------------------------------------------------------- blocks


def changed_arguments(
    names: list[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    change: Callable[[str, Tensor], Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the tensors that a block is given."""

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(name, value)
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(changed(name, one) for one in value)
        return {key: changed(name, one) for key, one in value.items()} if type(value) is dict else value

    names = [*names, *(f"argument {index}" for index in range(len(names), len(args)))]
    changed_args = tuple(changed(name, value) for name, value in zip(names, args, strict=False))
    return changed_args, {name: changed(name, value) for name, value in kwargs.items()}


def has_tokens(name: str, x: Tensor, tokens: int) -> bool:
    """Return True if an argument of a block has the tokens in dim 1, and is no mask."""
    return "mask" not in name and x.dim() in (2, 3) and x.shape[1] == tokens and x.dtype is not torch.bool


def _run_block(
    places: Places,
    context: CPContext,
    begin: Callable[[Tensor], None],
    end: Callable[[torch.device], None],
    block: nn.Module,
    compute: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Give a block its chunks; the first one begins what computes on chunks, and the last one ends it."""
    if not context.active:
        refuse_gradients(type(block).__name__)
        return compute(*args, **kwargs)
    names, cut = places.arguments[block], places.cut[block]

    def change(name: str, x: Tensor) -> Tensor:
        if name not in cut or not has_tokens(name, x, tokens):
            return x
        return context.part(x) if x.is_floating_point() else remember_whole(context.part(x), x)

    args, kwargs = without_caches(args, kwargs)  # nobody would read them
    if block is places.blocks[0]:
        begin(first_activations(args, kwargs)[1])
        args, kwargs = with_activations(args, kwargs, context.cut)
    tokens = context.tokens.count
    args, kwargs = changed_arguments(names, args, kwargs, change)
    context.running = True
    try:
        # transformers' own checkpointing computes the block again in backward.
        context.recomputes = block.training and bool(getattr(block, "gradient_checkpointing", False))
        output = compute(*args, **kwargs)
    finally:
        context.running = context.recomputes = False
    if block is places.blocks[-1]:
        hidden = block_output(output)
        end(hidden.device)
        if not places.norm_on_chunks:
            whole = context.chunks.whole(scale_gradient(hidden, context.chunks.ranks), tokens, type(block).__name__)
            return with_output(output, whole)
    return output


# ------------------------------------------------------------------------------- after the blocks


def first_output(output: Any) -> Tensor:
    """Return the activations in what a trunk returns: the first of its outputs."""
    return next(iter(output.values())) if isinstance(output, ModelOutput) else block_output(output)


def with_first_output(output: Any, tensor: Tensor) -> Any:
    """Return what a trunk returns with other activations in it."""
    if isinstance(output, ModelOutput):
        return type(output)(**{**output, next(iter(output)): tensor})
    return with_output(output, tensor)


def _run_trunk(
    places: Places,
    context: CPContext,
    name: str,
    trunk: nn.Module,
    compute: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Let a trunk's output stand for all tokens, of which this rank has a chunk; gather them if no head follows."""
    if context.cuts and asks_for_cache(args, kwargs):  # by the model's own code: the user's model was not given it
        refuse_caches()
        with replaced(context, {"cuts": False}):
            return compute(*args, **kwargs)
    if context.cuts:
        refuse_outputs(trunk, kwargs)
    output = compute(*args, **kwargs)
    if not context.cuts:
        return output
    hidden, tokens = first_output(output), context.tokens.count
    if places.norm_on_chunks:
        hidden = scale_gradient(hidden, context.chunks.ranks)
    elif not places.after:
        return output
    else:
        hidden = context.chunks.cut(hidden, name)  # what comes before computes the same on every rank
    if not places.after:
        return with_first_output(output, context.chunks.whole(hidden, tokens, name))
    slicing = Slicing(hidden.shape[-1], None, name, context.chunks, tokens)
    return with_first_output(output, sliced_tensor(hidden, slicing))


def _run_after(
    context: CPContext, layer: nn.Module, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a linear layer after the trunk on this rank's chunk of its input, if that stands for the trunk's tokens."""
    x = args[0] if args else next(iter(kwargs.values()))
    if not (context.cuts and isinstance(x, SlicedTensor) and x.is_chunk and x.dim() == 3):
        return compute(*args, **kwargs)
    chunks, tokens = context.chunks, context.tokens.count
    # What computes on chunks is given its gradient times cp. A layer that does not train needs no copy of its logits'.
    factor = chunks.ranks if any(parameter.requires_grad for parameter in layer.parameters()) else 1
    own = part_of(x) if factor == 1 else scale_gradient(part_of(x), 1 / factor)
    args, kwargs = tree_map(lambda value: own if value is x else value, (args, kwargs))
    context.running = True
    try:
        y = compute(*args, **kwargs)
    finally:
        context.running = False
    slicing = y.slicing if isinstance(y, SlicedTensor) else None
    part = part_of(y) if isinstance(y, SlicedTensor) else y
    part = part if factor == 1 else scale_gradient(part, factor)
    if context.has_labels:
        own_slicing = slicing or Slicing(part.shape[-1], None, "the head", plain_loss=True)
        return sliced_tensor(part, own_slicing.over_tokens(chunks, tokens))
    whole = chunks.whole(part, tokens, "the head")
    return whole if slicing is None else sliced_tensor(whole, slicing)
