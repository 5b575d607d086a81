"""Find where the tokens of a model can be cut, for sequence and context parallelism, and prove it on chunks of them.

The model is run without its weights, once on all tokens, and then as each of some ranks would run it: blocks are given
a chunk of the tokens, and attention returns the chunk of what it computed from all of them. Every layer must be fed the
chunk of what it was fed before. What mixes tokens elsewhere in a block (a convolution, linear attention) fails this.
Each attention is also computed for every share of its heads, as a rank would, and compared with that of all heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from inspect import Parameter, signature
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.cp.attention import (
    ATTENTION,
    AttentionCall,
    CPContext,
    attend_from_tokens,
    attend_with_share,
    check_heads,
    check_method,
    with_repeated_heads,
    wrap_registry,
)
from lora_parallel.cp.regions import Places, has_tokens, refuse_outputs
from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.distributed.mesh import axis_size
from lora_parallel.distributed.token_chunks import TokenChunks
from lora_parallel.layers.layer_parameters import block_of, clean_names, innermost
from lora_parallel.replaced import replaced_entries
from lora_parallel.state import Setup
from lora_parallel.tp.context import Tokens
from lora_parallel.tp.sequence import Sequence
from lora_parallel.tracing.inputs import FailedError, TraceError
from lora_parallel.tracing.layer_groups import LayerGroup
from lora_parallel.tracing.prove_feature_slices import Structure
from lora_parallel.tracing.rank_simulation import Part, RankTable, WholeRun, all_of, run_as_rank, same
from lora_parallel.tracing.tracer import Call, Tracer, check_outside, refuse_flows, tracer_of

_WANTED = "the same by a chunk of the tokens as by all"


def find_sequence(structure: Structure, layer_groups: list[LayerGroup], tp: int) -> Sequence:
    """Return the places where the tokens of a model can be split and gathered, proven by running the model."""
    tracer, repeated = structure.tracer, structure.tracer.blocks
    layer_groups = [group for group in layer_groups if tracer.modules.keys() >= {*group.layers}]
    real_of, paths, sequence = tracer.real_of, tracer.paths, Sequence()
    paths_of = [[paths[tracer.modules[name]] for name in layer_group.layers] for layer_group in layer_groups]
    stacks: set[str] = set()
    for layer_group, inner in zip(layer_groups, paths_of, strict=True):
        block = {block_of(path) for path in inner}
        stack = {path.rpartition(".")[0] for path in block}
        if "" in block or len(stack) != 1:
            raise ValueError(f"{next(layer_group.layers)} is in no block")
        stacks |= stack
        sequence.consumers |= set(layer_group.consumers)
        home = _home(inner)
        holds = [any(path.startswith(f"{home}.") for path in others) for others in paths_of]
        if not home or home in block or sum(holds) > 1:
            sequence.layers |= set(layer_group.producers)
        else:
            sequence.modules.append(tracer.twin.get_submodule(home))
    if not stacks:
        raise ValueError("it has no blocks of layers that are cut")
    if len(stacks) > 1:
        raise ValueError(f"it has more than one stack of blocks ({', '.join(sorted(stacks))})")
    blocks = list(tracer.twin.get_submodule(stacks.pop()).children())
    sequence.stacks[blocks[0]] = blocks[-1]
    inside = {module for member in blocks for module in member.modules()}
    sequence.inside = inside - {module for fed_whole in sequence.modules for module in fed_whole.modules()}
    outside = {id(p) for module in set(tracer.twin.modules()) - inside for p in module._parameters.values()}
    for module in sequence.inside:
        for key, parameter in real_of[module]._parameters.items():
            if parameter is not None and parameter.requires_grad and id(module._parameters[key]) in outside:
                raise ValueError(f"{paths[module]}.{key} trains, and is used on all tokens elsewhere")
    try:
        _verify(tracer, sequence, layer_groups, tp)
    except TraceError as error:
        raise ValueError(f"run on a chunk of them, it does not compute the same ({error})") from error
    return Sequence(
        {real_of[first]: real_of[last] for first, last in sequence.stacks.items()},
        list(repeated.modules_of_all(real_of[module] for module in sequence.modules)),
        set(repeated.names_of_all(sequence.layers)),
        set(repeated.names_of_all(sequence.consumers)),
        set(repeated.modules_of_all(real_of[module] for module in sequence.inside)),
        tracer.model,
    )


def _home(paths: list[str]) -> str:
    """Return the path of the smallest module that holds all of the modules at `paths`; "" is the whole model."""
    parts = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(part[0] for part in takewhile(lambda part: len(set(part)) == 1, parts))


def _verify(tracer: Tracer, sequence: Sequence, layer_groups: list[LayerGroup], tp: int) -> None:
    """Run the model as each rank, with a chunk of the tokens between layer groups; raise a TraceError for a problem."""
    producers = {name for layer_group in layer_groups for name in layer_group.producers}
    whole = WholeRun(tracer, [*sequence.stacks, *sequence.modules], sequence.stacks.values())
    spans = [
        (begin.begin, end.end) for first, last in sequence.stacks.items() for begin, end in whole.pairs(first, last)
    ]

    def is_inside(event: int) -> bool:
        return any(begin <= event <= end for begin, end in spans)

    for module in sequence.inside:
        trains = any(p.requires_grad for p in tracer.real_of[module].parameters(recurse=False))
        if trains and not all(is_inside(visit.begin) for visit in whole.of(module)):
            raise TraceError(f"{type(module).__name__} trains, and is used on all tokens elsewhere")
    for rank in range(tp):
        chunk = TokenChunks(tp, rank).mine

        def parts(index: int, call: Call, chunk: Part = chunk) -> tuple[Part, Part]:
            if not is_inside(whole.calls[index]):
                return all_of, all_of
            if call.layer in sequence.consumers:
                return all_of, chunk
            if call.layer in producers:
                return chunk if call.layer in sequence.layers else all_of, all_of
            return chunk, chunk

        enter: dict[nn.Module, tuple[Part, Part]] = dict.fromkeys(sequence.stacks, (all_of, chunk))
        enter |= dict.fromkeys(sequence.modules, (chunk, all_of))
        leave = dict.fromkeys(sequence.stacks.values(), (chunk, all_of))
        run_as_rank(tracer, RankTable(_WANTED, parts, enter, leave), whole)


_RANKS = 3  # Number of ranks that the runs simulate: chunks of different sizes, and a first, a middle and a last one


@torch.random.fork_rng(devices=[])
def find_places(setup: Setup) -> None:
    """Find the places where the tokens of a model are cut, proven by running the model, under context parallelism."""
    model, mesh, method, cp = setup.model, setup.mesh, setup.config.cp_method, axis_size(setup.mesh, "cp")
    if cp == 1:
        return
    refuse_outputs(innermost(model), {})
    alora = "after which it acts on the tokens of a row, and each rank has a chunk of them"
    refuse_flows(model, f"cp={cp}", "of which each has its own tokens", alora)
    try:
        if setup.places is None:
            tracer = tracer_of(model, clean_names(model))
            if method == "all_gather":
                check_method(getattr(getattr(tracer.model, "config", None), "_attn_implementation", None))
            check_outside(model, tracer)
            setup.places = _Proof(tracer, cp, mesh["tp"].size(), method).places()
    except TraceError as error:
        raise ValueError(
            f"cp={cp}: the tokens of {type(innermost(model)).__name__} cannot be cut: {error}. Use cp=1, with tp, "
            "sequence_parallel or activation_checkpointing for the memory."
        ) from error
    chunks = TokenChunks(cp, mesh.get_local_rank("cp"), mesh.get_group("cp"), balanced=method == "all_gather")
    setup.cp_context = CPContext(chunks, Tokens(setup.count), method)


class _Proof:
    """Run the copy of a model that a tracer holds, on all tokens and on chunks."""

    def __init__(self, tracer: Tracer, cp: int, tp: int, method: str) -> None:
        self._tracer, self._cp, self._tp, self._method = tracer, cp, tp, method
        # Computations of attention on all tokens, and their outputs [rows, tokens, heads, features].
        self._calls: list[tuple[AttentionCall, Tensor]] = []
        self._rows = self._tokens = 0  # Of the hidden states that the first block is fed
        self._cut: dict[nn.Module, set[str]] = {}  # Names of the arguments of each block that are cut

    def places(self) -> Places:
        """Return the places, with the model's own modules."""
        wrap_registry()
        with self._attention_by(self._note):
            WholeRun(self._tracer)
        blocks, trunk = self._stack()
        if self._method == "ulysses":
            for call, _ in self._calls:
                check_heads(call.heads // self._tp if call.heads % self._tp == 0 else call.heads, self._cp)
        whole = WholeRun(self._tracer, blocks[:1], [blocks[-1], trunk])
        (start, end), *more = whole.pairs(blocks[0], trunk)
        name = self._tracer.paths[trunk] or "it"
        if more:  # what is called after one of them is before another
            raise TraceError(f"a forward calls {name} more than once")
        if start.fed is None or end.gave is None or end.gave.shape[:2] != start.fed.shape[:2]:
            raise TraceError(f"{name} does not return activations of all tokens")
        self._rows, self._tokens = start.fed.shape[:2]
        problem = self._on_chunks(whole, blocks, trunk, norm_on_chunks=True)
        norm_on_chunks = problem is None
        if problem is not None:
            problem = self._on_chunks(whole, blocks, trunk, norm_on_chunks=False)
        if problem is not None:
            raise TraceError(problem)
        tracer, real_of = self._tracer, self._tracer.real_of
        calls = zip(tracer.calls, whole.calls, strict=True)
        after = {call.layer: None for call, event in calls if event > end.end}
        return Places(
            [real_of[block] for block in blocks],
            {real_of[block]: _positional(block) for block in blocks},
            {real_of[call.module]: tracer.paths[call.module] for call, _ in self._calls},
            real_of[trunk],
            norm_on_chunks,
            {real_of[block]: frozenset(self._cut.get(block, ())) for block in blocks},
            [real_of[tracer.modules[name]] for name in after],
        )

    def _note(
        self, kernel: Callable[..., Any], implementation: str, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        call = AttentionCall.of(kernel, module, *args, **kwargs)
        output = call.compute()
        self._calls.append((call, output.clone()))
        return output, None

    def _stack(self) -> tuple[list[nn.Module], nn.Module]:
        """Return the blocks of the stack that computes the last attention, and the module around the stack."""
        tracer = self._tracer
        if not self._calls:
            raise TraceError("its attention does not go through transformers' registry of attention functions")
        last = tracer.paths[self._calls[-1][0].module]
        block = block_of(last)
        path = block.rpartition(".")[0]
        if not block:
            raise TraceError(f"{last} computes attention, and is in no block")
        blocks = list(tracer.twin.get_submodule(path).children())
        inside = {module for each in blocks for module in each.modules()}
        self._calls = [each for each in self._calls if each[0].module in inside]
        return blocks, tracer.twin.get_submodule(path.rpartition(".")[0])

    def _on_chunks(
        self, whole: WholeRun, blocks: list[nn.Module], trunk: nn.Module, norm_on_chunks: bool
    ) -> str | None:
        """Run the model as each of some ranks, and return the first problem, or None."""
        spans = [(visit.begin, visit.end) for block in blocks for visit in whole.of(block)]
        if norm_on_chunks:
            spans += [(last.end, end.end) for last, end in whole.pairs(blocks[-1], trunk)]
        inside = [any(begin < event < end for begin, end in spans) for event in whole.calls]
        for rank in range(_RANKS):
            chunks = TokenChunks(_RANKS, rank)
            chunk = partial(_chunk, chunks, self._rows, self._tokens)
            table = RankTable(
                _WANTED,
                lambda index, call, chunk=chunk: (chunk, chunk) if inside[index] else (all_of, all_of),  # type: ignore[misc]
                {},
                {
                    blocks[-1]: (chunks.mine, chunks.mine if norm_on_chunks else all_of),
                    trunk: (chunks.mine if norm_on_chunks else all_of, all_of),
                },
                {block: (_positional(block), partial(self._argument, chunks, block)) for block in blocks},
            )
            try:
                with self._attention_by(partial(self._attend, chunks, iter(self._calls))):
                    run_as_rank(self._tracer, table, whole)
            except FailedError as error:
                return f"its own code fails on a chunk of them ({error}), as if it mixed tokens outside of attention"
            except TraceError as error:
                return str(error)
        return None

    def _argument(self, chunks: TokenChunks, block: nn.Module, name: str, x: Tensor) -> Tensor:
        if not has_tokens(name, x, self._tokens):
            return x
        self._cut.setdefault(block, set()).add(name)
        return chunks.mine(x)

    def _attend(
        self,
        chunks: TokenChunks,
        remaining: Iterator[tuple[AttentionCall, Tensor]],
        kernel: Callable[..., Any],
        implementation: str,
        module: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        call, output = next(remaining, (None, None))
        name = self._tracer.paths[module]
        if call is None or output is None or call.module is not module:
            raise TraceError(f"the attention of {name} was computed out of turn, as in a model of several stacks")
        for got, want in zip(args[:3], call.tensors, strict=True):
            if want.dim() != 4 or want.shape[2] != self._tokens or not same(got, chunks.mine(want, 2)):
                raise TraceError(f"the attention of {name} is not given a chunk of the tokens")
        if chunks.rank == 0:
            self._check_attention(call, output)
        return chunks.mine(output), None

    def _check_attention(self, call: AttentionCall, output: Tensor) -> None:
        """Check that attention can be computed as the ranks of the cp axis will."""
        name, (query, key, value) = self._tracer.paths[call.module], call.tensors
        if self._method == "all_gather":
            for rank in range(_RANKS):
                chunks = TokenChunks(_RANKS, rank, balanced=True)
                if not same(attend_from_tokens(call, (chunks.mine(query, 2), key, value), chunks), chunks.mine(output)):
                    raise TraceError(f"the attention of {name} of some tokens to all is not what it is among all")
            return
        repeated = with_repeated_heads(call.tensors, self._cp)
        for rank in range(self._cp):
            start, end = chunk_bounds(call.heads, self._cp, rank)
            parts = [tensor.chunk(self._cp, 1)[rank] for tensor in repeated]
            if not same(attend_with_share(call, parts, (start, end)), output[:, :, start:end]):
                raise TraceError(f"the attention of {name} for a share of its heads is not what it is among all")

    def _attention_by(self, compute: Callable[..., Any]) -> AbstractContextManager[None]:
        """Compute the attention of all modules of the copy by a function, within the context."""
        return replaced_entries((module.__dict__, ATTENTION, compute) for module in self._tracer.twin.modules())


def _chunk(chunks: TokenChunks, rows: int, tokens: int, x: Tensor) -> Tensor:
    """Return the chunk of activations [rows, ..., tokens, features] or [rows * tokens, features]."""
    if x.dim() == 2 and x.shape[0] == rows * tokens and x.is_floating_point():
        return chunks.mine(x.unflatten(0, (rows, tokens))).flatten(0, 1)
    dim = next((dim for dim in range(1, x.dim()) if x.shape[dim] == tokens), None)
    return x if dim is None else chunks.mine(x, dim)


def _positional(block: nn.Module) -> list[str]:
    """Return the names of the positional arguments of a block's forward."""
    for kind in type(block).__mro__:
        if forward := kind.__dict__.get("forward"):
            parameters = list(signature(forward).parameters.values())[1:]
            if not any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
                return [parameter.name for parameter in parameters if parameter.kind is not Parameter.VAR_KEYWORD]
    return []
