"""Run a copy of a model once in whole and then as ranks would run it, and compare what its layers are fed.

A table says for layers and modules what a rank has of what enters and of what leaves them: a slice of the features
(tp), a chunk of the tokens (sequence and context parallelism), or all, of some of the layers (pp). In the run of a rank
each layer must be fed that part of what it is fed in the whole model, and the model must return the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.cp.regions import changed_arguments, first_output, with_first_output
from lora_parallel.tp.sequence import first_activations, with_activations
from lora_parallel.tracing.inputs import TraceError
from lora_parallel.tracing.tracer import Call, Tracer, hooked

Part = Callable[[Tensor], Tensor]  # Returns what a rank has of an activation of the whole model


def all_of(x: Tensor) -> Tensor:
    """Return an activation that each rank has in whole."""
    return x


# ---------------------------------------------------------------------- the whole model


@dataclass(eq=False)
class Visit:
    """Record one call of a module in the run of the whole model."""

    module: nn.Module
    begin: int  # Number of events before it: modules that began or ended, and layers that were called
    first: Tensor | None  # Its first argument that is a tensor, on meta
    fed: Tensor | None  # Its first activations [rows, tokens, features], if the run was asked to keep them
    end: int = -1  # Number of events before its end
    outputs: int | None = None  # Number of values that it returned in a tuple
    gave: Tensor | None = None  # The tensor that it returned, on meta, or the first one if the run keeps it


class WholeRun:
    """Run the copy of a model, and note when each of its modules is called, with what, and what it returns."""

    def __init__(self, tracer: Tracer, fed_of: Collection[nn.Module] = (), gave_of: Collection[nn.Module] = ()) -> None:
        # `fed_of` and `gave_of`: the modules whose activations are kept.
        self.visits: dict[nn.Module, list[Visit]] = {}  # By module, in the order of their first calls
        self.calls: list[int] = []  # Number of events before each call of a layer
        self._fed_of, self._gave_of = {*fed_of}, {*gave_of}
        self._running, self._events = list[Visit](), 0
        modules = list(tracer.twin.modules())
        hooks = [module.register_forward_pre_hook(self._enter, with_kwargs=True) for module in modules]
        hooks += [module.register_forward_hook(self._leave) for module in modules]
        with hooked(hooks):
            tracer.run_again(self._stand_in)

    def _next_event(self) -> int:
        self._events += 1
        return self._events

    def _stand_in(self, index: int, call: Call, fed: Tensor) -> Tensor:
        self.calls.append(self._next_event())
        return call.output()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        fed = first_activations(args, kwargs)[1].clone() if module in self._fed_of else None
        visit = Visit(module, self._next_event(), None if first is None else first.to("meta"), fed)
        self.visits.setdefault(module, []).append(visit)
        self._running.append(visit)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        while (visit := self._running.pop()).module is not module:
            pass  # a module that raised an error, which the one around it caught
        visit.end = self._next_event()
        visit.outputs = len(output) if isinstance(output, (tuple, list)) else None
        if module in self._gave_of:
            visit.gave = first_output(output).clone()
        elif isinstance(output, Tensor):
            visit.gave = output.to("meta")

    def of(self, module: nn.Module) -> list[Visit]:
        """Return the calls of a module, in order."""
        return self.visits.get(module, [])

    def pairs(self, first: nn.Module, last: nn.Module) -> Iterator[tuple[Visit, Visit]]:
        """Yield the calls of two modules that are called equally often, such as the first and the last block.

        Raises:
            TraceError: They are not called equally often, or not at all.
        """
        firsts, lasts = self.of(first), self.of(last)
        if not firsts or len(firsts) != len(lasts):
            raise TraceError("its blocks are not called one after the other")
        yield from zip(firsts, lasts, strict=True)


# ---------------------------------------------------------------------- a rank


@dataclass
class RankTable:
    """Say what a rank has of what enters and leaves layers and modules in the whole model."""

    wanted: str  # What each layer should be fed, in words
    # Parts of the input and of the output of a layer, by the index of its call.
    layers: Callable[[int, Call], tuple[Part, Part]] = lambda index, call: (all_of, all_of)
    # Parts of a module's first activations: what a rank comes with, which is checked, and what it goes on with.
    enter: Mapping[nn.Module, tuple[Part, Part]] = field(default_factory=dict)
    leave: Mapping[nn.Module, tuple[Part, Part]] = field(default_factory=dict)  # The same of what a module returns
    # Parts of all arguments of a module, by their names; positional arguments have the names of the list.
    arguments: Mapping[nn.Module, tuple[list[str], Callable[[str, Tensor], Tensor]]] = field(default_factory=dict)


def run_as_rank(
    tracer: Tracer, table: RankTable, whole: WholeRun | None = None, calls: Iterable[Call] | None = None
) -> None:
    """Run the copy of a model as a rank that has the parts of `table`, and calls the layers of `calls` alone.

    Raises:
        TraceError: The rank computes something else than its part of the whole model, or the model's code fails.
    """

    def stand_in(index: int, call: Call, fed: Tensor) -> Tensor:
        of_input, of_output = table.layers(index, call)
        if not same(fed, of_input(call.fed)):
            raise TraceError(f"{call.layer} is not fed {table.wanted}")
        return of_output(call.output())

    visits = {
        side: {module: iter(whole.of(module)) if whole else iter(()) for module in at}
        for side, at in (("enter", table.enter), ("leave", table.leave))
    }

    def part(module: nn.Module, side: str, has: Part, gets: Part, got: Tensor) -> Tensor:
        visit = next(visits[side][module], None)
        noted = None if visit is None else visit.fed if side == "enter" else visit.gave
        if noted is None or not same(got, has(noted)):
            does = "is not fed" if side == "enter" else "does not return"
            raise TraceError(f"{tracer.paths[module] or 'it'} {does} a chunk of the tokens")
        return gets(noted).clone()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_activations(args, kwargs, lambda x: part(module, "enter", *table.enter[module], x))

    def change(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names, argument = table.arguments[module]
        return changed_arguments(names, args, kwargs, argument)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return with_first_output(output, part(module, "leave", *table.leave[module], first_output(output)))

    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in table.enter]
    hooks += [module.register_forward_pre_hook(change, with_kwargs=True) for module in table.arguments]
    hooks += [module.register_forward_hook(leave) for module in table.leave]
    with hooked(hooks):
        outputs = tracer.run_again(stand_in, calls)
    if len(outputs) != len(tracer.outputs) or not all(map(same, outputs, tracer.outputs)):
        raise TraceError("what the model returns changes")


# Largest relative difference from rounding, in float32. A mistake makes a difference of the order of 1.
_TOLERANCE = 1e-4


def same(got: Tensor, want: Tensor) -> bool:
    """Return True if a tensor of one run equals that of another, apart from rounding."""
    # Where the expected values are not all finite, only the places of finite values are compared.
    if got.shape != want.shape:
        return False
    want = want.detach()
    if not want.is_floating_point():
        return torch.equal(got, want)
    if not want.numel():
        return True
    largest = want.abs().max()
    if not largest.isfinite():
        return torch.equal(got.isfinite(), want.isfinite())
    return bool((got - want).abs().max() <= _TOLERANCE * largest.clamp_min(1e-6))
