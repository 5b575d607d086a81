"""Find where the tokens of a model may be split, and run its blocks on a chunk of them to prove it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.layers.module_names import block_of
from lora_parallel.tp.sequence import (
    NoActivationsError,
    Sequence,
    block_output,
    first_activations,
    with_activations,
    with_output,
)
from lora_parallel.tracing.layer_group import LayerGroup
from lora_parallel.tracing.rank_simulation import same
from lora_parallel.tracing.structure import Structure
from lora_parallel.tracing.trace_errors import TraceError
from lora_parallel.tracing.tracer import Call, Tracer

__all__ = ["find_sequence"]


def find_sequence(structure: Structure, layer_groups: list[LayerGroup], tp: int) -> Sequence:
    """Return the places where the tokens of a model can be split and gathered, proven by running the model.

    Args:
        structure: The structure of the model, with the tracer that found it.
        layer_groups: The model's layer groups that are cut.
        tp: Size of the tp axis.

    Raises:
        ValueError: The model has no stack of blocks or several, a block mixes tokens outside of the layer groups, or a
            trained parameter is used on chunks and on all tokens.
    """
    tracer = structure.tracer
    real_of = {twin: real for real, twin in tracer.twin_of.items()}
    paths = tracer.paths
    layers = tracer.modules
    found = Sequence()
    stacks: dict[str, list[nn.Module]] = {}
    for layer_group in layer_groups:
        block = {block_of(paths[layers[name]]) for name in layer_group.layers}
        stack = {path.rpartition(".")[0] for path in block}
        if "" in block or len(stack) != 1:
            raise ValueError(f"{next(layer_group.layers)} is in no block")
        home = _home(tracer.twin, [paths[layers[name]] for name in layer_group.layers])
        stacks.setdefault(stack.pop(), [])
        found.consumers |= set(layer_group.consumers)
        if (
            home is None
            or paths[home] in block
            or len([f for f in layer_groups if _holds(paths[home], f, paths, layers)]) > 1
        ):
            found.layers |= set(layer_group.producers)
        else:
            found.modules.append(home)
    if not stacks:
        raise ValueError("it has no blocks of layers that are cut")
    if len(stacks) > 1:
        raise ValueError(f"it has more than one stack of blocks ({', '.join(sorted(stacks))})")
    for prefix in stacks:
        stacks[prefix] = list(tracer.twin.get_submodule(prefix).children())
        found.stacks[stacks[prefix][0]] = stacks[prefix][-1]
    inside = {module for blocks in stacks.values() for block in blocks for module in block.modules()}
    fed_whole = {module for home in found.modules for module in home.modules()}
    found.inside = inside - fed_whole
    outside = {id(p) for module in set(tracer.twin.modules()) - inside for p in module._parameters.values()}
    for module in found.inside:
        for key, parameter in real_of[module]._parameters.items():
            if parameter is not None and parameter.requires_grad and id(module._parameters[key]) in outside:
                raise ValueError(f"{paths[module]}.{key} trains, and is used on all tokens elsewhere")
    for rank in range(tp):
        problem = _verify(tracer, found, layer_groups, tp, rank)
        if problem is not None:
            raise ValueError(f"run on a chunk of them, it does not compute the same ({problem})")
    return Sequence(
        {real_of[first]: real_of[last] for first, last in found.stacks.items()},
        [real_of[module] for module in found.modules],
        found.layers,
        found.consumers,
        {real_of[module] for module in found.inside},
        tracer.model,
    )


def _home(twin: nn.Module, paths: list[str]) -> nn.Module | None:
    """Return the smallest module that holds all of the modules at `paths`, or None if it is the whole model."""
    split = [path.split(".") for path in paths]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return twin.get_submodule(".".join(shared)) if shared else None


def _holds(path: str, layer_group: LayerGroup, paths: Mapping[nn.Module, str], layers: Mapping[str, nn.Module]) -> bool:
    return any(paths[layers[name]].startswith(f"{path}.") for name in layer_group.layers)


def _verify(tracer: Tracer, found: Sequence, layer_groups: list[LayerGroup], tp: int, rank: int) -> str | None:
    """Run the model as a rank that has a chunk of the tokens between layer groups, and return the problem, if any.

    The model is run twice: on all tokens, to note the inputs of blocks and attention modules, and then on the chunk.
    """
    producers = {name for layer_group in layer_groups for name in layer_group.producers}
    real_of = {twin: real for real, twin in tracer.twin_of.items()}
    whole: dict[nn.Module, list[Tensor]] = {}

    def chunk(x: Tensor) -> Tensor:
        start, end = chunk_bounds(x.shape[1], tp, rank)
        return x[:, start:end]

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        whole.setdefault(module, []).append(first_activations(args, kwargs)[1])
        if module in found.stacks.values():
            whole[module].append(block_output(output))

    def stand_in(index: int, call: Call, fed: Tensor) -> Tensor:
        gave = call.output()
        in_chunks = state["inside"] and call.layer not in producers | found.consumers
        want = chunk(call.fed) if in_chunks or (state["inside"] and call.layer in found.layers) else call.fed
        if not same(fed, want):
            raise TraceError(f"{call.layer} is not fed the same by a chunk of the tokens as by all")
        return chunk(gave) if in_chunks or (state["inside"] and call.layer in found.consumers) else gave

    state = {"inside": False}
    watched = [*found.stacks, *found.stacks.values(), *found.modules]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in dict.fromkeys(watched)]
    try:
        tracer.run_again(lambda index, call, fed: call.output())
    except (TraceError, NoActivationsError) as error:
        return str(error)
    finally:
        for hook in hooks:
            hook.remove()

    def inside_only(module: nn.Module, _: Any) -> None:
        if not state["inside"] and any(p.requires_grad for p in real_of[module].parameters(recurse=False)):
            raise TraceError(f"{type(module).__name__} trains, and is used on all tokens elsewhere")

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state["inside"] = True
        return with_activations(args, kwargs, chunk)

    def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        all_tokens = whole[module].pop(0)
        if not same(first_activations(args, kwargs)[1], chunk(all_tokens)):
            raise TraceError(f"{type(module).__name__} is not fed a chunk of the tokens")
        return with_activations(args, kwargs, lambda _: all_tokens)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        state["inside"] = False
        whole[module].pop(0)
        all_tokens = whole[module].pop(0)
        if not same(block_output(output), chunk(all_tokens)):
            raise TraceError(f"{type(module).__name__} does not give a chunk of the tokens")
        return with_output(output, all_tokens)

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in found.stacks]
    hooks += [module.register_forward_pre_hook(inside_only) for module in found.inside - {*found.stacks}]
    hooks += [module.register_forward_pre_hook(feed, with_kwargs=True) for module in found.modules]
    hooks += [module.register_forward_hook(leave) for module in found.stacks.values()]
    try:
        outputs = tracer.run_again(stand_in)
    except (TraceError, NoActivationsError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) != len(tracer.outputs) or not all(map(same, outputs, tracer.outputs)):
        return "what the model returns changes"
    return None
