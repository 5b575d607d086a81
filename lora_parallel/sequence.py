"""Sequence parallelism: between the layers that tensor parallelism cuts, each tp rank has a chunk of the tokens.

Norms, dropout and the residual stream of a block work token by token. With a chunk each, ranks hold a tp-th of these
activations, and an all-gather before a pair of layers and a reduce-scatter after it take the place of the all-reduces
(Korthikanti et al., https://arxiv.org/abs/2205.05198). Attention sees all tokens, so masks and rotary embeddings stay
as they are. That a block does nothing else between tokens is proven by running it on a chunk (see `probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lora_parallel.collectives import chunk_bounds, gather_tokens, split_tokens, whole_tokens
from lora_parallel.flow import Flow
from lora_parallel.probe import Call, Probe, ProbeError
from lora_parallel.proof import same
from lora_parallel.structure import Structure
from lora_parallel.tp_context import Tokens
from lora_parallel.upstream import in_backward

__all__ = ["Sequence", "find_sequence", "run_on_chunks"]


@dataclass
class Sequence:
    """Where a model's tokens are split and put together."""

    stacks: dict[nn.Module, nn.Module] = field(default_factory=dict)
    """The first block of each stack, and the last."""

    modules: list[nn.Module] = field(default_factory=list)
    """What is fed all tokens as a module: attention, whose code reshapes by their number."""

    layers: set[str] = field(default_factory=set)
    """Colwise layers that are fed all tokens one by one, in modules that also have the residual stream."""

    sinks: set[str] = field(default_factory=set)
    """Rowwise layers, which give a chunk."""

    inside: set[nn.Module] = field(default_factory=set)
    """All modules that work on chunks."""

    model: nn.Module | None = None
    """The one that was run."""


def find_sequence(structure: Structure, flows: list[Flow], tp: int) -> Sequence:
    """Where the tokens of a model may be split.

    Args:
        structure: Of the model.
        flows: Those of its flows that are cut.
        tp: Size of the tp axis.

    Raises:
        ValueError: A block does something else than its layers between tokens, or there are no blocks.
    """
    probe = structure.probe
    real_of = {twin: real for real, twin in probe.twin_of.items()}
    paths = probe.paths
    units = {name: module for module, name in probe.units.items()}
    found = Sequence()
    stacks: dict[str, list[nn.Module]] = {}
    for flow in flows:
        block = {_block(paths[units[name]]) for name in flow.units}
        stack = {path.rpartition(".")[0] for path in block}
        if "" in block or len(stack) != 1:
            raise ValueError(f"{next(flow.units)} is in no block")
        home = _home(probe.twin, [paths[units[name]] for name in flow.units])
        stacks.setdefault(stack.pop(), [])
        found.sinks |= set(flow.sinks)
        if home is None or paths[home] in block or len([f for f in flows if _holds(paths[home], f, paths, units)]) > 1:
            found.layers |= set(flow.sources)
        else:
            found.modules.append(home)
    if not stacks:
        raise ValueError("it has no blocks of layers that are cut")
    if len(stacks) > 1:
        raise ValueError(f"it has more than one stack of blocks ({', '.join(sorted(stacks))})")
    for prefix in stacks:
        stacks[prefix] = list(probe.twin.get_submodule(prefix).children())
        found.stacks[stacks[prefix][0]] = stacks[prefix][-1]
    inside = {module for blocks in stacks.values() for block in blocks for module in block.modules()}
    fed_all = {module for home in found.modules for module in home.modules()}
    found.inside = inside - fed_all
    outside = {id(p) for module in set(probe.twin.modules()) - inside for p in module._parameters.values()}
    for module in found.inside:
        for key, parameter in real_of[module]._parameters.items():
            if parameter is not None and parameter.requires_grad and id(module._parameters[key]) in outside:
                raise ValueError(f"{paths[module]}.{key} trains, and is used on all tokens elsewhere")
    for rank in range(tp):
        problem = _verify(probe, found, flows, tp, rank)
        if problem is not None:
            raise ValueError(f"run on a chunk of them, it does not compute the same ({problem})")
    return Sequence(
        {real_of[first]: real_of[last] for first, last in found.stacks.items()},
        [real_of[module] for module in found.modules],
        found.layers,
        found.sinks,
        {real_of[module] for module in found.inside},
        probe.model,
    )


def _block(path: str) -> str:
    """The outermost member of a list that a module is in: "" for none."""
    parts = path.split(".")
    index = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if index is None else ".".join(parts[: index + 1])


def _home(twin: nn.Module, paths: list[str]) -> nn.Module | None:
    """The smallest module that holds all of these."""
    split = [path.split(".") for path in paths]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return twin.get_submodule(".".join(shared)) if shared else None


def _holds(path: str, flow: Flow, paths: Mapping[nn.Module, str], units: Mapping[str, nn.Module]) -> bool:
    return any(paths[units[name]].startswith(f"{path}.") for name in flow.units)


# ---------------------------------------------------------------------- proof


def _verify(probe: Probe, found: Sequence, flows: list[Flow], tp: int, rank: int) -> str | None:
    """Run as a rank would that has a chunk of the tokens between the layers of flows."""
    sources = {name for flow in flows for name in flow.sources}
    real_of = {twin: real for real, twin in probe.twin_of.items()}
    whole: dict[nn.Module, list[Tensor]] = {}

    def chunk(x: Tensor) -> Tensor:
        start, end = chunk_bounds(x.shape[1], tp, rank)
        return x[:, start:end]

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        whole.setdefault(module, []).append(_first(args, kwargs)[1])
        if module in found.stacks.values():
            whole[module].append(_output(output))

    def stand_in(index: int, call: Call, fed: Tensor) -> Tensor:
        gave = call.output()
        in_chunks = state["inside"] and call.unit not in sources | found.sinks
        want = chunk(call.fed) if in_chunks or (state["inside"] and call.unit in found.layers) else call.fed
        if not same(fed, want):
            raise ProbeError(f"{call.unit} is not fed the same by a chunk of the tokens as by all")
        return chunk(gave) if in_chunks or (state["inside"] and call.unit in found.sinks) else gave

    state = {"inside": False}
    watched = [*found.stacks, *found.stacks.values(), *found.modules]
    hooks = [module.register_forward_hook(note, with_kwargs=True) for module in dict.fromkeys(watched)]
    try:
        probe.run_again(lambda index, call, fed: call.output())
    except ProbeError as error:
        return str(error)
    finally:
        for hook in hooks:
            hook.remove()

    def inside_only(module: nn.Module, _: Any) -> None:
        if not state["inside"] and any(p.requires_grad for p in real_of[module].parameters(recurse=False)):
            raise ProbeError(f"{type(module).__name__} trains, and is used on all tokens elsewhere")

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state["inside"] = True
        return _replaced(args, kwargs, chunk)

    def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        all_tokens = whole[module].pop(0)
        if not same(_first(args, kwargs)[1], chunk(all_tokens)):
            raise ProbeError(f"{type(module).__name__} is not fed a chunk of the tokens")
        return _replaced(args, kwargs, lambda _: all_tokens)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        state["inside"] = False
        whole[module].pop(0)
        all_tokens = whole[module].pop(0)
        if not same(_output(output), chunk(all_tokens)):
            raise ProbeError(f"{type(module).__name__} does not give a chunk of the tokens")
        return _with_output(output, all_tokens)

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in found.stacks]
    hooks += [module.register_forward_pre_hook(inside_only) for module in found.inside - {*found.stacks}]
    hooks += [module.register_forward_pre_hook(feed, with_kwargs=True) for module in found.modules]
    hooks += [module.register_forward_hook(leave) for module in found.stacks.values()]
    try:
        outputs = probe.run_again(stand_in)
    except ProbeError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) != len(probe.outputs) or not all(map(same, outputs, probe.outputs)):
        return "what the model returns changes"
    return None


# ---------------------------------------------------------------------- what is fed, what is returned


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int | str, Tensor]:
    """The activations [rows, tokens, features] among a module's arguments: the first there are."""
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in places:
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
            return key, value
    raise ProbeError("a block is fed no activations of shape [rows, tokens, features]")


def _replaced(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    key, value = _first(args, kwargs)
    if isinstance(key, str):
        return args, {**kwargs, key: change(value)}
    return (*args[:key], change(value), *args[key + 1 :]), dict(kwargs)


def _output(output: Any) -> Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def _with_output(output: Any, tensor: Tensor) -> Any:
    if isinstance(output, tuple):
        return (tensor, *output[1:])
    return [tensor, *output[1:]] if isinstance(output, list) else tensor


# ---------------------------------------------------------------------- running


def run_on_chunks(sequence: Sequence, group: ProcessGroup, tokens: Tokens) -> None:
    """Let stacks split what they are fed and put together what they give, and modules be fed all tokens."""
    for first, last in sequence.stacks.items():
        draws = _OwnDraws(group, first)
        _around(last, after=_gathering(group, tokens, type(last).__name__, draws))
        _around(first, before=_splitting(group, tokens, type(first).__name__, draws))
    for module in sequence.modules:
        _around(module, before=_feeding(group, tokens, type(module).__name__))
    if sequence.model is not None:
        sequence.model.register_forward_pre_hook(_refuse_hidden_states, with_kwargs=True)


def _refuse_hidden_states(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_hidden_states")
    if asked if asked is not None else getattr(getattr(model, "config", None), "output_hidden_states", False):
        raise ValueError(
            "output_hidden_states=True: with sequence_parallel=True each tp rank has a chunk of the tokens between "
            "blocks, and would return that. Leave it False, or use sequence_parallel=False."
        )


class _OwnDraws:
    """Random numbers of each rank's own, for its tokens; afterwards the peers go on with the state that they share.

    Else the model's dropout would draw the same for each chunk, and more on a rank with one token more.
    """

    def __init__(self, group: ProcessGroup, stack: nn.Module) -> None:
        self._group = group
        self._stack = stack
        self._shared: list[Tensor] = []

    def begin(self, device: torch.device) -> None:
        self.end(device)  # after a forward that failed on its way
        if not self._stack.training:
            return
        seed = int(torch.randint(2**62, ()).item())  # the same for all
        if not in_backward():  # where activations are recomputed, a checkpoint keeps the state
            self._shared = [torch.get_rng_state()]
            if device.type != "cpu":
                self._shared.append(torch.get_device_module(device).get_rng_state(device))
        torch.manual_seed(seed + self._group.rank())

    def end(self, device: torch.device) -> None:
        if not self._shared or in_backward():
            return
        torch.set_rng_state(self._shared[0])
        if device.type != "cpu":
            torch.get_device_module(device).set_rng_state(self._shared[1], device)
        self._shared = []


def _splitting(group: ProcessGroup, tokens: Tokens, where: str, draws: _OwnDraws) -> Callable[[Tensor], Tensor]:
    def split(x: Tensor) -> Tensor:
        tokens.count = x.shape[1]
        draws.begin(x.device)
        return split_tokens(x, group, where)

    return split


def _feeding(group: ProcessGroup, tokens: Tokens, where: str) -> Callable[[Tensor], Tensor]:
    return lambda x: gather_tokens(x, tokens.count, group, where)


def _gathering(group: ProcessGroup, tokens: Tokens, where: str, draws: _OwnDraws) -> Callable[[Tensor], Tensor]:
    def gather(x: Tensor) -> Tensor:
        draws.end(x.device)
        return whole_tokens(x, tokens.count, group, where)

    return gather


def _around(
    module: nn.Module,
    before: Callable[[Tensor], Tensor] | None = None,
    after: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """In the forward itself, where activation checkpointing recomputes it."""
    own = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            args, kwargs = _replaced(args, kwargs, before)
        output = own(*args, **kwargs)
        return output if after is None else _with_output(output, after(_output(output)))

    module.forward = MethodType(forward, module)
