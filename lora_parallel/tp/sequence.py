"""Split the tokens of a model between tp ranks (sequence parallelism), outside of the layers that tp cuts.

Norms, dropout and the residual stream of a block work token by token. With a chunk of the tokens each, ranks hold 1/tp
of these activations. An all-gather before a layer group and a reduce-scatter after it replace the all-reduces
(Korthikanti et al., https://arxiv.org/abs/2205.05198). Attention gets all tokens, so masks and rotary embeddings stay
as they are. `tracing/prove_token_chunks.py` proves that a block mixes tokens nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.distributed.token_chunks import TokenChunks
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.layers.layer_parameters import asks_for, check_between_blocks
from lora_parallel.layers.wrapped_forward import Around, wrap_forward
from lora_parallel.state import ForwardCount, Setup
from lora_parallel.tp.context import Tokens


@dataclass
class Sequence:
    """List the places of a model where tokens are split among tp ranks and gathered."""

    # First block of each stack, and as its value the last block.
    stacks: dict[nn.Module, nn.Module] = field(default_factory=dict)
    # Modules whose input is gathered to all tokens: attention, whose code reshapes by the number of tokens.
    modules: list[nn.Module] = field(default_factory=list)
    # Names of colwise layers that gather all tokens themselves, as the module around them also works on chunks.
    layers: set[str] = field(default_factory=set)
    # Names of the rowwise layers, whose output is a chunk of the tokens.
    consumers: set[str] = field(default_factory=set)
    inside: set[nn.Module] = field(default_factory=set)  # Modules that compute on a chunk of the tokens
    model: nn.Module | None = None  # Model that was run to find these places


@dataclass(frozen=True)
class Entry:
    """Cut hidden states that enter blocks behind the first one, as pipeline stages do, and clean up behind the last."""

    enter: Callable[[Tensor], Tensor]
    leave: Callable[[torch.device], None]


def run_on_chunks(sequence: Sequence, chunks: TokenChunks, tokens: Tokens, count: ForwardCount) -> list[Entry]:
    """Make a model compute on chunks of the tokens, in place; return what later pipeline stages call."""
    entries, arounds = [], list[tuple[nn.Module, Around]]()
    for index, (first, last) in enumerate(sequence.stacks.items()):
        draws = OwnDraws(chunks.rank + index * chunks.ranks, sequence.model or first, count)
        split = _splitting(chunks, tokens, type(first).__name__, draws)
        gather = _gathering(chunks, tokens, type(last).__name__, draws)
        arounds += [(last, partial(_changing_output, gather)), (first, partial(_changing_input, split))]
        entries.append(Entry(split, draws.end))
    arounds += [(module, partial(_gathering_input, chunks, tokens)) for module in sequence.modules]
    for module, around in arounds:
        wrap_forward(module, around)
    if sequence.model is not None:
        sequence.model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)
        for module in sequence.model.modules():  # the one that calls the blocks may be inside of the one that was run
            if "deepstack_visual_embeds" in signature(type(module).forward).parameters:
                module.register_forward_pre_hook(_refuse_features, with_kwargs=True)
    return entries


def refuse_block_outputs(model: nn.Module, kwargs: Mapping[str, Any], reason: str) -> None:
    """Refuse a forward that is asked, by an argument or the model's config, for outputs of single blocks."""
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if asks_for(name, kwargs, model):
            raise ValueError(f"{name}=True: {reason}")


def _refuse_hidden_states(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if asks_for("output_hidden_states", kwargs, model):
        raise ValueError(
            f"output_hidden_states=True is asked of {type(model).__name__}: with sequence_parallel=True each tp rank "
            "has a chunk of the tokens between blocks, and would return that. Use sequence_parallel=False, or leave it "
            "False where your own code asks for it (models with images may ask their vision tower)."
        )


def _refuse_features(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check_between_blocks(kwargs, "with sequence_parallel=True", "use sequence_parallel=False")


_APART = 1_000_003  # Difference between the seeds of a rank in two forwards: more than there are ranks


class OwnDraws:
    """Give each rank random numbers of its own while it computes on its chunk, and restore the shared state after."""

    # With a shared state, dropout would draw the same numbers for each chunk, and the states would differ afterwards,
    # as a rank with one token more draws more. The shared state stays as it was, since the order of the data may be
    # drawn from it: so the seed of the own numbers depends on the number of the forward too.

    def __init__(self, rank: int, model: nn.Module, count: ForwardCount) -> None:
        self._rank, self._model, self._count = rank, model, count
        self._shared: list[Tensor] = []

    def begin(self, device: torch.device) -> None:
        self.end(device)  # in case an earlier forward failed before it came to `end`
        if not self._model.training:
            return
        shared = torch.get_rng_state()
        seed = int(torch.randint(2**62, ()).item())  # the same on all of these ranks
        if not in_backward():  # recomputing activations, torch's checkpoint restores the state itself
            self._shared = [shared]
            if device.type not in ("cpu", "meta"):
                self._shared.append(torch.get_device_module(device).get_rng_state(device))
        forward = self._count.current * self._count.microbatches + self._count.microbatch
        torch.manual_seed((seed + self._rank + forward * _APART) % 2**63)

    def end(self, device: torch.device) -> None:
        if not self._shared or in_backward():
            return
        torch.set_rng_state(self._shared[0])
        if device.type not in ("cpu", "meta"):
            torch.get_device_module(device).set_rng_state(self._shared[1], device)
        self._shared = []


def _splitting(chunks: TokenChunks, tokens: Tokens, where: str, draws: OwnDraws) -> Callable[[Tensor], Tensor]:
    def split(x: Tensor) -> Tensor:
        tokens.count = x.shape[1]
        draws.begin(x.device)
        return chunks.cut(x, where)

    return split


def _gathering(chunks: TokenChunks, tokens: Tokens, where: str, draws: OwnDraws) -> Callable[[Tensor], Tensor]:
    def gather(x: Tensor) -> Tensor:
        draws.end(x.device)
        return chunks.whole(x, tokens.count, where)

    return gather


def _changing_input(
    change: Callable[[Tensor], Tensor], _: nn.Module, compute: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    args, kwargs = with_activations(args, kwargs, change)
    return compute(*args, **kwargs)


def _gathering_input(
    chunks: TokenChunks, tokens: Tokens, module: nn.Module, compute: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    where = type(module).__name__
    return _changing_input(lambda x: chunks.gather(x, tokens.count, where), module, compute, args, kwargs)


def _changing_output(
    change: Callable[[Tensor], Tensor], _: nn.Module, compute: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    output = compute(*args, **kwargs)
    return with_output(output, change(block_output(output)))


def first_activations(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor]:
    """Return the first argument of a module that is activations [rows, tokens, features], and its place or keyword."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in places:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
            return key, value
    raise ValueError("a block is fed no activations of shape [rows, tokens, features]")


def with_activations(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's arguments with its first activations changed."""
    key, value = first_activations(args, kwargs)
    if isinstance(key, str):
        return args, {**kwargs, key: change(value)}
    return (*args[:key], change(value), *args[key + 1 :]), dict(kwargs)


def block_output(output: Any) -> Tensor:
    """Return the activations in what a block returns: the first of a tuple or list."""
    return output[0] if isinstance(output, (tuple, list)) else output


def with_output(output: Any, tensor: Tensor) -> Any:
    """Return what a block returns with other activations in it."""
    if isinstance(output, tuple):
        return (tensor, *output[1:])
    return [tensor, *output[1:]] if isinstance(output, list) else tensor


def split_tokens_over_tp(setup: Setup) -> None:
    """Make models of the plan compute on chunks of the tokens between layers that tp cuts (sequence parallelism)."""
    context = setup.context
    for sequence in setup.plan.sequences:
        setup.entries += run_on_chunks(sequence, context.chunks, context.tokens, setup.count)
