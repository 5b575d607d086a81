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

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.collectives import chunk_bounds
from lora_parallel.layers import base_of, is_linear
from lora_parallel.overlay import Overlay, laid_over
from lora_parallel.probe import Call, FailedError, Probe, ProbeError
from lora_parallel.selection import Selection

__all__ = ["Flow", "Structure", "find_structure", "same"]

_MOST_SOURCES = 16
"""More layers than that feed a layer through the residual stream only, of all the blocks before it."""

_TOLERANCE = 1e-4
"""Of float32: the same operations on slices, where a mistake is of the order of 1."""


@dataclass(eq=False)
class Flow:
    """Layers that compute slices, from the whole tensors that the sources are fed to the sums that the sinks give."""

    sinks: dict[str, None]
    """Rowwise layers, by name."""

    sources: dict[str, Selection]
    """The layers before them, and the output features that each rank computes."""

    between: dict[tuple[nn.Module, str], tuple[int, Selection] | None] = field(default_factory=dict)
    """Parameters that act on slices (a norm of each head): by module and name there; the dim that is cut, if one is."""

    attributes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    """What modules say of their own sizes, on a rank; an `Overlay` for what their config says."""

    @property
    def units(self) -> Iterator[str]:
        """All layers."""
        yield from self.sources
        yield from self.sinks


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
        key = tuple((_pattern(name), flow.sources.get(name)) for name in flow.units)
        groups.setdefault(key, []).append(flow)
    kept: list[Flow] = []
    for group in groups.values():
        problem = _fit(probe, group, tp)
        if problem is None:
            kept += group
        else:
            rejected.update({name: problem for flow in group for name in flow.units})
    kept = _proven(probe, kept, tp, range(tp), rejected)
    if kept and given is None:
        probe.run_otherwise()
        kept = _proven(probe, kept, tp, (0, tp - 1), rejected)
    for flow in kept:
        flow.between = {(real_of[module], key): cut for (module, key), cut in flow.between.items()}
        flow.attributes = {real_of[module]: values for module, values in flow.attributes.items()}
    return Structure(kept, {call.unit for call in probe.calls}, direct, probe, rejected)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)


# ---------------------------------------------------------------------- what depends on what


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


# ---------------------------------------------------------------------- sizes that modules keep

_HEADS = re.compile(r"^(num_|n_|n)?(attention_|attn_|q_|query_|encoder_attention_|decoder_attention_)?heads?$")
_KV_HEADS = re.compile(
    r"^(num_|n_)?(key_value_|kv_|k_|key_)heads$|^kv_n_heads$|^n_head_kv$|^num_key_value_head$|^multi_query_group_num$"
)
_HEAD_SIZE = re.compile(r"^(attention_)?head_(dim|size)$|^d_head$|^dim_head$|^key_value_proj_dim$|^d_kv$|^kv_channels$")
_GROUPS = re.compile(r"^(num_|n_)?(key_value_|kv_)groups$|^n_rep$")
_NOT_A_WIDTH = re.compile(r"head_dim|head_size|max|vocab|position|layer|idx|window|rank")


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
        first.attributes = _sizes(probe, first, tp, heads, widths, configs)
        # The others are proven together with all, once.
        failed = _verify_rank(probe, [first], tp, 0, until=first) or _verify_rank(
            probe, [first], tp, tp - 1, until=first
        )
        if failed is None:
            for flow in flows[1:]:
                flow.attributes = _sizes(probe, flow, tp, heads, widths, configs)
            return None
        problem = problem or failed
    return problem


def _sizes(
    probe: Probe, flow: Flow, tp: int, heads: bool, widths: bool, configs: bool
) -> dict[nn.Module, dict[str, Any]]:
    """Of the modules around a flow, the attributes that tell its sizes, as they are on a rank."""
    units = {name: module for module, name in probe.units.items()}
    width = next(call.fed.shape[-1] for call in probe.calls if call.unit in flow.sinks)
    found: dict[nn.Module, dict[str, Any]] = {}
    for module in _around(probe, [units[name] for name in flow.units]):
        holders: list[tuple[Any, str | None]] = [(module, None)]
        config = getattr(module, "config", None)
        if config is not None:
            holders.append((config, "config"))
        count = next(
            (
                value
                for holder, _ in holders
                for key, value in _ints(holder)
                if _HEADS.match(key) and width % value == 0 and value > 1
            ),
            None,
        )
        if count is None:
            sizes = (value for holder, _ in holders for key, value in _ints(holder) if _HEAD_SIZE.match(key))
            count = next((width // value for value in sizes if value > 0 and width % value == 0), None)
        kv = next((value for holder, _ in holders for key, value in _ints(holder) if _KV_HEADS.match(key)), None)
        changes: dict[str, Any] = {}
        for holder, attribute in holders:
            if attribute is not None and not configs:
                continue
            own: dict[str, Any] = {}
            for key, value in _ints(holder):
                new = None
                if heads and count is not None:
                    new = _fewer_heads(key, value, count, kv, width, flow, tp)
                if new is None and widths and attribute is None and not _NOT_A_WIDTH.search(key):
                    new = _narrower(value, width, flow, tp)
                if new is not None and new != value:
                    own[key] = new
            if attribute is None:
                changes.update(own)
            elif own:
                changes[attribute] = Overlay(own)
        if changes:
            found[module] = changes
    return found


def _ints(holder: Any) -> list[tuple[str, int]]:
    values = vars(holder) if isinstance(holder, nn.Module) else holder.__dict__
    return [(key, value) for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool)]


def _fewer_heads(key: str, value: int, count: int, kv: int | None, width: int, flow: Flow, tp: int) -> int | None:
    mine = count // tp
    if _HEADS.match(key) and value == count:
        return mine if count % tp == 0 else None
    kv_mine = _kv_heads(count, kv, width, flow, tp)
    if _KV_HEADS.match(key):
        return kv_mine
    if _GROUPS.match(key) and kv_mine:
        return mine // kv_mine
    return None


def _kv_heads(count: int, kv: int | None, width: int, flow: Flow, tp: int) -> int | None:
    """Key-value heads on a rank, as the features of the layers before say."""
    if not kv:
        return None
    head = width // count
    for selection in flow.sources.values():
        if selection.size == kv * head:
            return selection.width // head
        if selection.size == (count + 2 * kv) * head:  # fused
            return (selection.width // head - count // tp) // 2
    return None


def _narrower(value: int, width: int, flow: Flow, tp: int) -> int | None:
    if value == width:
        return width // tp
    return next((each.width for each in flow.sources.values() if each.size == value), None)


def _around(probe: Probe, units: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules from the smallest that holds all units down to those that hold one, without the units."""
    paths = {module: name.split(".") if name else [] for module, name in probe.paths.items()}
    chosen = [paths[unit] for unit in units]
    shared = 0
    while all(len(path) > shared + 1 and path[: shared + 1] == chosen[0][: shared + 1] for path in chosen):
        shared += 1
    inside = {tuple(path[:depth]) for path in chosen for depth in range(shared, len(path))}
    return [module for module, path in paths.items() if tuple(path) in inside]


# ---------------------------------------------------------------------- proof


def _verify(probe: Probe, flows: Sequence[Flow], tp: int, ranks: Iterable[int]) -> str | None:
    """Run as ranks would: None if every layer is fed what it was fed before, or its slice; else what differs."""
    for rank in ranks:
        problem = _verify_rank(probe, flows, tp, rank)
        if problem is not None:
            return problem
    return None


def _proven(probe: Probe, flows: list[Flow], tp: int, ranks: Collection[int], rejected: dict[str, str]) -> list[Flow]:
    """The flows that `_verify` finds no fault with: all, as a rule, or else kind by kind."""
    if _verify(probe, flows, tp, ranks) is None:
        return flows
    kinds: dict[tuple[str, ...], list[Flow]] = {}
    for flow in flows:
        kinds.setdefault(tuple(_pattern(name) for name in flow.units), []).append(flow)
    kept: list[Flow] = []
    for group in kinds.values():
        problem = _verify(probe, [*kept, *group], tp, ranks)
        if problem is None:
            kept += group
        else:
            rejected.update({name: problem for flow in group for name in flow.units})
    return kept


class _EnoughError(ProbeError):
    """A run need not go on."""


def _verify_rank(probe: Probe, flows: Sequence[Flow], tp: int, rank: int, until: Flow | None = None) -> str | None:
    """As `_verify`, for one rank; if asked, only `until` a flow has been run."""
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
