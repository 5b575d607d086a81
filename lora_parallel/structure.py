"""Pairs of layers that tensor parallelism can cut with one reduction, found by running the model, and proven so.

A rowwise layer (an attention's output projection, an MLP's down projection) takes slices of its input. What it is fed
must therefore be computable slice by slice from the layers before it (query, key and value; gate and up), each of which
computes some of its output features only. Which features a slice needs is read off autograd: those with a gradient. So
fused projections in any interleaving, grouped and multi-query attention with fewer heads than tp, and plain pairs are
one case. Then the model is run again for each rank, with those features only and with what its code says of its own
sizes (`num_heads`, `split_size`) cut to match: every layer must be fed just what it was fed before, or its slice of it.
What fails is left out, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.collectives import chunk_bounds
from lora_parallel.flow import Flow, pattern_of
from lora_parallel.layers import base_of, is_linear
from lora_parallel.probe import Call, Probe
from lora_parallel.proof import proven, verify_rank
from lora_parallel.selection import Selection
from lora_parallel.sizes import sizes_on_a_rank

__all__ = ["Structure", "find_structure"]

_MOST_SOURCES = 16
"""More layers than that feed a layer through the residual stream only, of all the blocks before it."""


@dataclass
class Structure:
    """What was found in one model."""

    flows: list[Flow]
    called: set[str]
    """The layers that the run reached."""

    used_directly: set[str]
    """The layers whose weights are used other than by calling them."""

    probe: Probe
    """The run that showed it."""

    rejected: dict[str, str]
    """Layers that seem to be of a flow and cannot be cut, with the reason."""


@torch.random.fork_rng(devices=[])
def find_structure(
    model: nn.Module,
    names: Mapping[nn.Module, str],
    tp: int,
    whole: Collection[str] = (),
    given: dict[str, Any] | None = None,
) -> Structure:
    """The flows of `model` that can be cut `tp` ways.

    Args:
        model: In memory or not.
        names: Of its layers.
        tp: Size of the tp axis.
        whole: Layers that are to stay whole, and may act on slices as they are.
        given: Inputs for it, where some are known (see `Probe`).

    Raises:
        ProbeError: The model cannot be run.
    """
    probe = Probe(model, {module: name for module, name in names.items() if name not in whole}, given)
    real_of = {twin: real for real, twin in probe.twin_of.items()}
    reached = _reached(probe)
    rejected: dict[str, str] = {}
    candidates = _candidates(probe, reached, tp, rejected)
    probe.drop_graph()
    groups: dict[object, list[Flow]] = {}
    direct = {
        name
        for module, name in [*probe.units.items(), *probe.embeddings.items()]
        if not probe.used.isdisjoint(module.parameters())
    }
    for flow in candidates:
        if used := direct.intersection(flow.units):
            rejected.update(dict.fromkeys(flow.units, f"the weight of {min(used)} is used without calling it"))
            continue
        key = tuple((pattern_of(name), flow.sources.get(name)) for name in flow.units)
        groups.setdefault(key, []).append(flow)
    kept: list[Flow] = []
    for group in groups.values():
        problem = _fit(probe, group, tp)
        if problem is None:
            kept += group
        else:
            rejected.update({name: problem for flow in group for name in flow.units})
    kept = proven(probe, kept, tp, range(tp), rejected)
    if kept and given is None:
        probe.run_otherwise()
        kept = proven(probe, kept, tp, (0, tp - 1), rejected)
    for flow in kept:
        flow.between = {(real_of[module], key): cut for (module, key), cut in flow.between.items()}
        flow.attributes = {real_of[module]: values for module, values in flow.attributes.items()}
    return Structure(kept, {call.unit for call in probe.calls}, direct, probe, rejected)


@dataclass
class _Reached:
    """The leaves of autograd's graph (stand-ins' outputs and parameters) that tensors directly depend on."""

    calls: list[frozenset[Tensor]]
    """Of what each call was fed."""

    outputs: frozenset[Tensor]


def _reached(probe: Probe) -> _Reached:
    known: dict[Any, frozenset[Tensor]] = {}
    calls = [_leaves(call.fed, known) for call in probe.calls]
    return _Reached(calls, frozenset().union(*(_leaves(output, known) for output in probe.outputs)))


def _leaves(tensor: Tensor, known: dict[Any, frozenset[Tensor]]) -> frozenset[Tensor]:
    if tensor.grad_fn is None:
        return frozenset([tensor]) if tensor.requires_grad else frozenset()
    stack = [tensor.grad_fn]
    while stack:
        node = stack[-1]
        if node in known:
            stack.pop()
            continue
        nexts = [each for each, _ in node.next_functions if each is not None]
        waiting = [each for each in nexts if each not in known]
        if waiting:
            stack += waiting
            continue
        own = [node.variable] if hasattr(node, "variable") else []
        known[node] = frozenset(own).union(*(known[each] for each in nexts))
        stack.pop()
    return known[tensor.grad_fn]


# ---------------------------------------------------------------------- candidates


def _candidates(probe: Probe, reached: _Reached, tp: int, rejected: dict[str, str]) -> list[Flow]:
    """What looks like a flow by its gradients."""
    call_of = {call.gave: index for index, call in enumerate(probe.calls)}
    linear = {name for module, name in probe.units.items() if is_linear(base_of(module))}
    fed_by = [sorted(call_of[leaf] for leaf in leaves if leaf in call_of) for leaves in reached.calls]
    exposed = {call_of[leaf] for leaf in reached.outputs if leaf in call_of}
    consumers: dict[int, set[int]] = {}
    for index, sources in enumerate(fed_by):
        for source in sources:
            consumers.setdefault(source, set()).add(index)

    needs: _Needs = {}
    between: dict[int, dict[Tensor, tuple[int, Selection] | None]] = {}
    for index, (call, sources) in enumerate(zip(probe.calls, fed_by, strict=True)):
        if call.unit not in linear or exposed.intersection(sources):
            continue
        if len(sources) > _MOST_SOURCES or not any(probe.calls[source].unit in linear for source in sources):
            continue
        found = _needed(probe, call, [probe.calls[source].gave for source in sources], reached.calls[index], tp)
        if isinstance(found, str):
            rejected[call.unit] = found
            continue
        rows, between[index] = found
        needs[index] = dict(zip(sources, rows, strict=True))
    needs = _pruned(probe, needs, consumers, exposed)
    needs = _pruned(probe, _disjoint(probe, needs), consumers, exposed)
    return _joined(probe, needs, between, rejected)


_Needs = dict[int, dict[int, list[list[int]]]]
"""By call of a sink: by call of a source, the features that each rank needs."""


def _pruned(probe: Probe, needs: _Needs, consumers: Mapping[int, set[int]], exposed: set[int]) -> _Needs:
    """Without what cannot be: a source feeds sinks and nothing else, and a layer is the same in all of its calls."""
    calls_of: dict[str, set[int]] = {}
    for index, call in enumerate(probe.calls):
        if index in consumers or index in exposed:  # else nothing comes of it
            calls_of.setdefault(call.unit, set()).add(index)
    while True:
        fed = {source for sources in needs.values() for source in sources}
        right = {
            index: sources
            for index, sources in needs.items()
            if calls_of.get(probe.calls[index].unit, set()) <= needs.keys()
            and all(consumers[source] <= needs.keys() for source in sources)
            and all(calls_of.get(probe.calls[source].unit, set()) <= fed for source in sources)
        }
        if len(right) == len(needs):
            return needs
        needs = right


def _disjoint(probe: Probe, needs: _Needs) -> _Needs:
    """Of chains, where a sink would be a source too, the pairs with the larger layers: what a sink gives is whole."""
    sizes = {
        name: sum(p.numel() for p in base_of(module).parameters(recurse=False)) for module, name in probe.units.items()
    }
    units = {
        index: (probe.calls[index].unit, {probe.calls[s].unit for s in sources}) for index, sources in needs.items()
    }
    weight = {index: sizes[sink] + sum(sizes[source] for source in sources) for index, (sink, sources) in units.items()}
    sinks: set[str] = set()
    fed: set[str] = set()
    for index in sorted(needs, key=lambda each: (-weight[each], each)):
        sink, sources = units[index]
        if sink not in fed and not sources & sinks:
            sinks.add(sink)
            fed |= sources
    return {index: sources for index, sources in needs.items() if units[index][0] in sinks and units[index][1] <= fed}


def _needed(
    probe: Probe, call: Call, sources: list[Tensor], leaves: frozenset[Tensor], tp: int
) -> tuple[list[list[list[int]]], dict[Tensor, tuple[int, Selection] | None]] | str:
    """Of each source, the features that each slice of what `call` was fed depends on; and the same of parameters."""
    width = call.fed.shape[-1]
    if width % tp:
        return f"its input has {width} features, no multiple of tp={tp}"
    parameters = [leaf for leaf in leaves if not any(leaf is source for source in sources)]
    used: list[list[Tensor]] = [[] for _ in sources]
    masks: list[list[Tensor]] = [[] for _ in parameters]
    for rank in range(tp):
        start, stop = chunk_bounds(width, tp, rank)
        direction = torch.zeros_like(call.fed)
        direction[..., start:stop] = torch.rand_like(direction[..., start:stop]) + 0.5
        grads = torch.autograd.grad(call.fed, [*sources, *parameters], direction, retain_graph=True, allow_unused=True)
        for found, source, grad in zip(used, sources, grads, strict=False):
            nothing = torch.zeros(source.shape[-1], dtype=torch.bool)
            found.append(nothing if grad is None else (grad != 0).flatten(0, -2).any(0))
        if all(found[rank].all() for found in used):
            return "each slice of its input depends on all features of the layers before it"
        for masked, parameter, grad in zip(masks, parameters, grads[len(sources) :], strict=True):
            masked.append(torch.zeros_like(parameter, dtype=torch.bool) if grad is None else grad != 0)
    for found in used:
        if len({int(each.sum()) for each in found}) > 1 or not torch.stack(found).any(0).all():
            return "the slices of its input do not depend on equally many features of the layers before it"
    cuts: dict[Tensor, tuple[int, Selection] | None] = {}
    for parameter, masked in zip(parameters, masks, strict=True):
        try:
            cuts[parameter] = _cut(masked)
        except ValueError as error:
            return str(error)
        if cuts[parameter] is not None and probe.parameters[parameter][0] not in probe.entered:
            return "a parameter on the way to its input is used other than by calling its module"
    return [[each.nonzero().flatten().tolist() for each in found] for found in used], cuts


def _cut(masks: list[Tensor]) -> tuple[int, Selection] | None:
    """How a parameter is cut whose elements in `masks` each rank needs; None: not at all.

    Raises:
        ValueError: Not along one dim.
    """
    if all(mask.all() for mask in masks):
        return None
    for dim in range(masks[0].dim()):
        others = [other for other in range(masks[0].dim()) if other != dim]
        lines = [mask.any(others) if others else mask for mask in masks]
        rows = [line.nonzero().flatten().tolist() for line in lines]
        if len({len(row) for row in rows}) > 1 or not 0 < len(rows[0]) < masks[0].shape[dim]:
            continue
        if all(mask.index_select(dim, torch.tensor(row)).all() for mask, row in zip(masks, rows, strict=True)):
            return dim, Selection.of(rows, masks[0].shape[dim])
    raise ValueError("a parameter on the way to its input cannot be cut along one dim")


def _joined(
    probe: Probe,
    needs: Mapping[int, Mapping[int, list[list[int]]]],
    between: Mapping[int, Mapping[Tensor, tuple[int, Selection] | None]],
    rejected: dict[str, str],
) -> list[Flow]:
    """One flow for all calls that share layers."""
    flows: list[Flow] = []
    for index, sources in needs.items():
        sink = probe.calls[index].unit
        selections: dict[str, Selection] = {}
        clash = False
        for source, rows in sources.items():
            call = probe.calls[source]
            selection = Selection.of(rows, call.gave.shape[-1])
            clash |= selections.setdefault(call.unit, selection) != selection
        cuts = {probe.parameters[leaf]: cut for leaf, cut in between[index].items()}
        flow = Flow({sink: None}, selections, dict(cuts))
        touching = [other for other in flows if set(other.units) & set(flow.units)]
        for other in touching:
            for name, selection in other.sources.items():
                clash |= flow.sources.setdefault(name, selection) != selection
            for key, cut in other.between.items():
                clash |= flow.between.setdefault(key, cut) != cut
            flow.sinks = {**other.sinks, **flow.sinks}
            flows.remove(other)
        if clash:
            rejected.update(dict.fromkeys(flow.units, "its calls need different features"))
        else:
            flows.append(flow)
    return flows


def _fit(probe: Probe, flows: Sequence[Flow], tp: int) -> str | None:
    """Find sizes with which alike flows can be cut, and note them; else say why there are none."""
    problem = None
    for heads, widths, configs in (
        (True, False, False),
        (False, False, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
    ):
        first = flows[0]
        first.attributes = sizes_on_a_rank(probe, first, tp, heads, widths, configs)
        # The others are proven together with all, once.
        failed = verify_rank(probe, [first], tp, 0, until=first) or verify_rank(probe, [first], tp, tp - 1, until=first)
        if failed is None:
            for flow in flows[1:]:
                flow.attributes = sizes_on_a_rank(probe, flow, tp, heads, widths, configs)
            return None
        problem = problem or failed
    return problem
