"""Whether flows can be cut: the model is run as each tp rank would, and every layer must be fed what it should be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.collectives import chunk_bounds
from lora_parallel.flow import Flow, pattern_of
from lora_parallel.overlay import laid_over
from lora_parallel.probe import Call, FailedError, Probe, ProbeError

__all__ = ["proven", "same", "verify_rank", "verify_ranks"]

_TOLERANCE = 1e-4
"""Of float32: the same operations on slices, where a mistake is of the order of 1."""


def verify_ranks(probe: Probe, flows: Sequence[Flow], tp: int, ranks: Iterable[int]) -> str | None:
    """Run as ranks would: None if every layer is fed what it was fed before, or its slice; else what differs."""
    for rank in ranks:
        problem = verify_rank(probe, flows, tp, rank)
        if problem is not None:
            return problem
    return None


def proven(probe: Probe, flows: list[Flow], tp: int, ranks: Collection[int], rejected: dict[str, str]) -> list[Flow]:
    """The flows that `verify_ranks` finds no fault with: all, as a rule, or else kind by kind."""
    if verify_ranks(probe, flows, tp, ranks) is None:
        return flows
    kinds: dict[tuple[str, ...], list[Flow]] = {}
    for flow in flows:
        kinds.setdefault(tuple(pattern_of(name) for name in flow.units), []).append(flow)
    kept: list[Flow] = []
    for group in kinds.values():
        problem = verify_ranks(probe, [*kept, *group], tp, ranks)
        if problem is None:
            kept += group
        else:
            rejected.update({name: problem for flow in group for name in flow.units})
    return kept


class _EnoughError(ProbeError):
    """A run need not go on."""


def verify_rank(probe: Probe, flows: Sequence[Flow], tp: int, rank: int, until: Flow | None = None) -> str | None:
    """As `verify_ranks`, for one rank; if asked, only `until` a flow has been run."""
    sinks = {name for flow in flows for name in flow.sinks}
    sources = {name: selection.rows(rank) for flow in flows for name, selection in flow.sources.items()}
    last = -1 if until is None else max(index for index, call in enumerate(probe.calls) if call.unit in until.units)

    def stand_in(index: int, call: Call, fed: Tensor) -> Tensor:
        if until is not None and index > last:
            raise _EnoughError
        want = call.fed
        if call.unit in sinks:
            start, stop = chunk_bounds(want.shape[-1], tp, rank)
            want = want[..., start:stop]
        if not same(fed, want):
            raise ProbeError(f"{call.unit} is not fed what it should be by a rank's share of the features")
        return call.output(sources.get(call.unit))

    with _cut_to(flows, rank):
        try:
            outputs = probe.run_again(stand_in)
        except _EnoughError:
            return None
        except FailedError as error:
            return f"with a rank's share of the features the code around it fails ({error})"
        except ProbeError as error:
            return str(error)
    if len(outputs) != len(probe.outputs) or not all(map(same, outputs, probe.outputs)):
        return "what the model returns changes"
    return None


def same(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors of runs are equal but for rounding."""
    if got.shape != want.shape:
        return False
    want = want.detach()
    if not want.is_floating_point():
        return torch.equal(got, want)
    if not want.isfinite().all():
        return torch.equal(got.isfinite(), want.isfinite())
    return bool((got - want).abs().max() <= _TOLERANCE * want.abs().max().clamp_min(1e-6)) if want.numel() else True


@contextmanager
def _cut_to(flows: Iterable[Flow], rank: int) -> Iterator[None]:
    """The twin's parameters and sizes as they are on a rank."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for flow in flows:
            for module, values in flow.attributes.items():
                for key, value in values.items():
                    undo.append((module.__dict__, key, module.__dict__[key]))
                    module.__dict__[key] = laid_over(module.__dict__[key], value)
            for (module, key), cut in flow.between.items():
                if cut is not None:
                    dim, selection = cut
                    parameter: Any = module._parameters[key]
                    undo.append((module._parameters, key, parameter))
                    part = parameter.detach().index_select(dim, selection.rows(rank))
                    module._parameters[key] = nn.Parameter(part)
        yield
    finally:
        for held, key, value in reversed(undo):
            held[key] = value
