"""Find the layer groups that tensor parallelism can cut with one reduction each, by running the model, and prove them.

A rowwise layer (an attention's output projection, an MLP's down projection) takes a slice of its input on each rank.
Each slice must therefore be computable from some output features of the layers before it (query, key and value; gate
and up). Autograd shows which features a slice needs: those with a gradient. So fused projections in any interleaving,
grouped and multi-query attention with fewer heads than tp, and plain pairs of layers are one case.

Then the model is run again for each rank, with only those features, and with the sizes that its modules keep
(`num_heads`, `split_size`) cut to match. The input of every layer must be the same as before, or the rank's slice of
it. A layer group that fails is left out, and the reason is noted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.layers.layer_parameters import base_of, without_block_numbers
from lora_parallel.layers.linear_classes import is_linear
from lora_parallel.layers.styles import RowPartition
from lora_parallel.tp.experts import holds_experts
from lora_parallel.tracing.inputs import TraceError
from lora_parallel.tracing.layer_groups import LayerGroup, proven, sizes_on_a_rank, verify_ranks
from lora_parallel.tracing.repeated_blocks import RepeatedBlocks, repeated_blocks
from lora_parallel.tracing.tracer import Call, Tracer

# Largest number of producers' calls that may feed a consumer. A layer with more takes the residual stream, which all
# blocks before it feed.
_MOST_SOURCES = 16


@dataclass
class Structure:
    """Hold the layer groups of one model, and what else its run showed."""

    layer_groups: list[LayerGroup]
    called: set[str]  # Names of the layers that the run called
    used_directly: set[str]  # Names of the layers whose weights are used in another way than by calling the layer
    tracer: Tracer  # Tracer that ran the model
    rejected: dict[str, str]  # Reason for each layer that seems to be of a layer group and cannot be cut, by its name

    def plan(self, within: str) -> dict[str, str]:
        """Return the styles of the layer groups, by globs of names relative to the module of the name `within`."""
        styles = {
            name: style
            for group in self.layer_groups
            for part, style in ((group.producers, "colwise"), (group.consumers, "rowwise"))
            for name in part
        }
        return {without_block_numbers(name.removeprefix(f"{within}.")): style for name, style in styles.items()}


@torch.random.fork_rng(devices=[])
def find_structure(
    model: nn.Module,
    names: Mapping[nn.Module, str],
    tp: int,
    whole: Collection[str] = (),
    inputs: dict[str, Any] | None = None,
    known: Mapping[str, str] | None = None,
) -> Structure:
    """Run `model` without its weights and return its layer groups that can be cut into `tp` parts."""
    # Layers in `whole` run as they are. With `inputs` the groups are proven on these alone. If the styles are `known`,
    # and found on few blocks, they are not looked for on all.
    layers = {module: name for module, name in names.items() if name not in whole}
    if known is not None and (blocks := repeated_blocks(model, names)).left_out:
        with suppress(TraceError):
            found = _structure(Tracer(model, layers, inputs, blocks), tp)
            if found.plan(names[model]) == known:
                return found
    return _structure(Tracer(model, layers, inputs), tp)


def _structure(tracer: Tracer, tp: int) -> Structure:
    real_of, blocks = tracer.real_of, tracer.blocks
    rejected: dict[str, str] = {}
    candidates = _candidates(tracer, tp, rejected)
    tracer.drop_graph()
    groups: dict[object, list[LayerGroup]] = {}
    direct = {
        name
        for module, name in [*tracer.layers.items(), *tracer.embeddings.items()]
        if not tracer.used.isdisjoint(module.parameters())
    }
    for layer_group in candidates:
        if used := direct.intersection(layer_group.layers):
            rejected.update(dict.fromkeys(layer_group.layers, f"the weight of {min(used)} is used without calling it"))
            continue
        key = tuple((without_block_numbers(name), layer_group.producers.get(name)) for name in layer_group.layers)
        groups.setdefault(key, []).append(layer_group)
    kept: list[LayerGroup] = []
    for group in groups.values():
        problem = _fit(tracer, group, tp)
        if problem is None:
            kept += group
        else:
            rejected.update({name: problem for layer_group in group for name in layer_group.layers})
    kept = proven(tracer, kept, tp, range(tp), rejected)
    if kept and tracer.given is None:
        tracer.run_otherwise()
        kept = proven(tracer, kept, tp, (0, tp - 1), rejected)
    for layer_group in kept:
        layer_group.between = {(real_of[module], key): cut for (module, key), cut in layer_group.between.items()}
        layer_group.attributes = {real_of[module]: values for module, values in layer_group.attributes.items()}
    return Structure(
        list(_of_all_blocks(kept, blocks)),
        set(blocks.names_of_all(call.layer for call in tracer.calls)),
        set(blocks.names_of_all(direct)),
        tracer,
        {like: reason for name, reason in rejected.items() for like in blocks.names_of_all([name])},
    )


def _of_all_blocks(groups: list[LayerGroup], blocks: RepeatedBlocks) -> Iterator[LayerGroup]:
    """Yield layer groups, each followed by those that it stands for."""
    for group in groups:
        yield group
        for kept, other, like in blocks.blocks_like([*group.layers]):
            yield LayerGroup(
                {other + name.removeprefix(kept): None for name in group.consumers},
                {other + name.removeprefix(kept): partition for name, partition in group.producers.items()},
                group.width,
                {(like.get(module, module), key): cut for (module, key), cut in group.between.items()},
                {like.get(module, module): values for module, values in group.attributes.items()},
            )


def _leaves(tensor: Tensor, known: dict[Any, frozenset[Tensor]]) -> frozenset[Tensor]:
    """Return the leaves of autograd's graph (stand-ins' outputs and parameters) that a tensor depends on."""
    if tensor.grad_fn is None:
        return frozenset([tensor]) if tensor.requires_grad else frozenset()
    stack = [tensor.grad_fn]
    while stack:
        node = stack[-1]
        if node in known:
            stack.pop()
            continue
        nexts = [before for before, _ in node.next_functions if before is not None]
        waiting = [before for before in nexts if before not in known]
        if waiting:
            stack += waiting
            continue
        leaf = [node.variable] if hasattr(node, "variable") else []
        known[node] = frozenset(leaf).union(*(known[before] for before in nexts))
        stack.pop()
    return known[tensor.grad_fn]


# ---------------------------------------------------------------------- candidates


def _candidates(tracer: Tracer, tp: int, rejected: dict[str, str]) -> list[LayerGroup]:
    """Return what looks like layer groups by the gradients; note in `rejected` why a layer cannot be a consumer."""
    known: dict[Any, frozenset[Tensor]] = {}
    reached = [_leaves(call.fed, known) for call in tracer.calls]
    reached_by_outputs = frozenset[Tensor]().union(*(_leaves(output, known) for output in tracer.outputs))
    call_of = {call.gave: index for index, call in enumerate(tracer.calls)}
    linear = {name for module, name in tracer.layers.items() if is_linear(base_of(module))}
    fed_by = [sorted(call_of[leaf] for leaf in leaves if leaf in call_of) for leaves in reached]
    exposed = {call_of[leaf] for leaf in reached_by_outputs if leaf in call_of}
    consumers: dict[int, set[int]] = {}
    for index, producers in enumerate(fed_by):
        for source in producers:
            consumers.setdefault(source, set()).add(index)

    needs: _Needs = {}
    between: dict[int, dict[Tensor, tuple[int, RowPartition] | None]] = {}
    for index, (call, producers) in enumerate(zip(tracer.calls, fed_by, strict=True)):
        if call.layer not in linear or exposed.intersection(producers):
            continue
        if len(producers) > _MOST_SOURCES or not any(tracer.calls[source].layer in linear for source in producers):
            continue
        needed = _needed(tracer, call, [tracer.calls[source].gave for source in producers], reached[index], tp)
        if isinstance(needed, str):
            rejected[call.layer] = needed
            continue
        rows, between[index] = needed
        needs[index] = dict(zip(producers, rows, strict=True))
    needs = _pruned(tracer, needs, consumers, exposed)
    needs = _pruned(tracer, _disjoint(tracer, needs), consumers, exposed)
    return _joined(tracer, needs, between, rejected)


# Indices of the output features that each rank needs, int64, by the index of the consumer's call and the index of the
# producer's call.
_Needs = dict[int, dict[int, list[Tensor]]]


def _pruned(tracer: Tracer, needs: _Needs, consumers: Mapping[int, set[int]], exposed: set[int]) -> _Needs:
    """Drop the consumers that cannot be cut, until all that are left can."""
    # A producer must feed consumers only, and a layer must be a consumer, or a producer, in all of its calls.
    calls_of: dict[str, set[int]] = {}
    for index, call in enumerate(tracer.calls):
        if index in consumers or index in exposed:  # other calls have no effect
            calls_of.setdefault(call.layer, set()).add(index)
    while True:
        fed = {source for producers in needs.values() for source in producers}
        right = {
            index: producers
            for index, producers in needs.items()
            if calls_of.get(tracer.calls[index].layer, set()) <= needs.keys()
            and all(consumers[source] <= needs.keys() for source in producers)
            and all(calls_of.get(tracer.calls[source].layer, set()) <= fed for source in producers)
        }
        if len(right) == len(needs):
            return needs
        needs = right


def _disjoint(tracer: Tracer, needs: _Needs) -> _Needs:
    """Choose among consumers that exclude each other: in a chain, a consumer would be the next one's producer too."""
    # The output of a consumer is whole, so it cannot feed slices. The larger layers are kept, with their producers.
    sizes = {
        name: sum(p.numel() for p in base_of(module).parameters(recurse=False))
        for module, name in tracer.layers.items()
    }
    layers = {
        index: (tracer.calls[index].layer, {tracer.calls[s].layer for s in producers})
        for index, producers in needs.items()
    }
    weight = {
        index: sizes[sink] + sum(sizes[source] for source in producers) for index, (sink, producers) in layers.items()
    }
    consumers: set[str] = set()
    fed: set[str] = set()
    for index in sorted(needs, key=lambda candidate: (-weight[candidate], candidate)):
        sink, producers = layers[index]
        if sink not in fed and not producers & consumers:
            consumers.add(sink)
            fed |= producers
    return {
        index: producers
        for index, producers in needs.items()
        if layers[index][0] in consumers and layers[index][1] <= fed
    }


def _needed(
    tracer: Tracer, call: Call, producers: list[Tensor], leaves: frozenset[Tensor], tp: int
) -> tuple[list[list[Tensor]], dict[Tensor, tuple[int, RowPartition] | None]] | str:
    """Return the features of each producer that each slice of a call's input needs, and the cuts of parameters."""
    # The features are indices for each producer and rank; a cut is None if the parameter stays whole. Text is the
    # reason why the layer cannot be cut.
    width = call.fed.shape[-1]
    if width % tp:
        return f"its input has {width} features, no multiple of tp={tp}"
    parameters = [leaf for leaf in leaves if not any(leaf is source for source in producers)]
    if any(holds_experts(tracer.parameters[leaf][0]) for leaf in parameters):
        return "it takes what experts compute"
    used: list[list[Tensor]] = [[] for _ in producers]
    masks: list[list[Tensor]] = [[] for _ in parameters]
    directions = [torch.zeros_like(call.fed) for _ in range(tp)]
    for rank, direction in enumerate(directions):
        start, stop = chunk_bounds(width, tp, rank)
        direction[..., start:stop] = torch.rand_like(direction[..., start:stop]) + 0.5
        grads = torch.autograd.grad(call.fed, producers, direction, retain_graph=True, allow_unused=True)
        for used_by_rank, source, grad in zip(used, producers, grads, strict=True):
            nothing = torch.zeros(source.shape[-1], dtype=torch.bool)
            used_by_rank.append(nothing if grad is None else (grad != 0).flatten(0, -2).any(0))
        if all(used_by_rank[rank].all() for used_by_rank in used):
            return "each slice of its input depends on all features of the layers before it"
    for used_by_rank in used:
        if len({int(mask.sum()) for mask in used_by_rank}) > 1 or not torch.stack(used_by_rank).any(0).all():
            return "the slices of its input do not depend on equally many features of the layers before it"
    for direction in directions if parameters else ():
        grads = torch.autograd.grad(call.fed, parameters, direction, retain_graph=True, allow_unused=True)
        for masked, parameter, grad in zip(masks, parameters, grads, strict=True):
            masked.append(torch.zeros_like(parameter, dtype=torch.bool) if grad is None else grad != 0)
    cuts: dict[Tensor, tuple[int, RowPartition] | None] = {}
    for parameter, masked in zip(parameters, masks, strict=True):
        try:
            cuts[parameter] = _cut(masked)
        except ValueError as error:
            return str(error)
        if cuts[parameter] is not None and tracer.parameters[parameter][0] not in tracer.entered:
            return "a parameter on the way to its input is used other than by calling its module"
    return [[mask.nonzero().flatten() for mask in used_by_rank] for used_by_rank in used], cuts


def _cut(masks: list[Tensor]) -> tuple[int, RowPartition] | None:
    """Return the dim and the row partition by which a parameter is cut, or None if every rank needs all of it."""
    if all(mask.all() for mask in masks):
        return None
    for dim in range(masks[0].dim()):
        others = [other for other in range(masks[0].dim()) if other != dim]
        lines = [mask.any(others) if others else mask for mask in masks]
        rows = [line.nonzero().flatten() for line in lines]
        if len({len(row) for row in rows}) > 1 or not 0 < len(rows[0]) < masks[0].shape[dim]:
            continue
        if all(mask.index_select(dim, row).all() for mask, row in zip(masks, rows, strict=True)):
            return dim, RowPartition.of(rows, masks[0].shape[dim])
    raise ValueError("a parameter on the way to its input cannot be cut along one dim")


def _joined(
    tracer: Tracer,
    needs: Mapping[int, Mapping[int, list[Tensor]]],
    between: Mapping[int, Mapping[Tensor, tuple[int, RowPartition] | None]],
    rejected: dict[str, str],
) -> list[LayerGroup]:
    """Join the calls that share layers into layer groups; reject a group whose calls need different features."""
    layer_groups: list[LayerGroup] = []
    for index, producers in needs.items():
        sink = tracer.calls[index].layer
        partitions: dict[str, RowPartition] = {}
        clash = False
        for source, rows in producers.items():
            call = tracer.calls[source]
            partition = RowPartition.of(rows, call.gave.shape[-1])
            clash |= partitions.setdefault(call.layer, partition) != partition
        cuts = {tracer.parameters[leaf]: cut for leaf, cut in between[index].items()}
        layer_group = LayerGroup({sink: None}, partitions, tracer.calls[index].fed.shape[-1], cuts)
        touching = [other for other in layer_groups if set(other.layers) & set(layer_group.layers)]
        for other in touching:
            for name, partition in other.producers.items():
                clash |= layer_group.producers.setdefault(name, partition) != partition
            for key, cut in other.between.items():
                clash |= layer_group.between.setdefault(key, cut) != cut
            layer_group.consumers = {**other.consumers, **layer_group.consumers}
            layer_groups.remove(other)
        if clash:
            rejected.update(dict.fromkeys(layer_group.layers, "its calls need different features"))
        else:
            layer_groups.append(layer_group)
    return layer_groups


def _fit(tracer: Tracer, layer_groups: Sequence[LayerGroup], tp: int) -> str | None:
    """Find the sizes that modules keep with which like layer groups can be cut, and note them on the groups."""
    problem = None
    for heads, widths, configs in (
        (True, False, False),
        (False, False, False),
        (True, True, False),
        (True, False, True),
        (True, True, True),
    ):
        first = layer_groups[0]
        first.attributes = sizes_on_a_rank(tracer, first, tp, heads, widths, configs)
        # The other layer groups are proven once, later, together with those of all kinds.
        failed = verify_ranks(tracer, [first], tp, (0, tp - 1), until=first)
        if failed is None:
            for layer_group in layer_groups[1:]:
                layer_group.attributes = sizes_on_a_rank(tracer, layer_group, tp, heads, widths, configs)
            return None
        problem = problem or failed
    return problem
