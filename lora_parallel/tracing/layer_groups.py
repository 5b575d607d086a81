"""Describe layer groups: colwise layers and the rowwise layers that they feed; and prove that tp ranks can cut them.

The model is run as each tp rank would run it, with that rank's parameters and sizes of modules (`rank_simulation.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.layers.layer_parameters import without_block_numbers
from lora_parallel.layers.styles import RowPartition
from lora_parallel.replaced import replaced_entries
from lora_parallel.tracing.inputs import ConfigView, FailedError, TraceError, viewed_with
from lora_parallel.tracing.rank_simulation import Part, RankTable, all_of, run_as_rank
from lora_parallel.tracing.tracer import Call, Tracer


@dataclass(eq=False)
class LayerGroup:
    """Hold colwise producers and the rowwise consumers of their output: between them each rank computes a slice."""

    consumers: dict[str, None]  # Names of the rowwise layers, in order; the values are None
    # Output features that each rank computes, for each layer that feeds the consumers, by its name.
    producers: dict[str, RowPartition]
    width: int  # Number of features of a consumer's whole input
    # Parameters that act on slices (a norm of each head), by module and name in it. The value is the dim that is cut
    # and the rows of each rank, or None if the parameter stays whole.
    between: dict[tuple[nn.Module, str], tuple[int, RowPartition] | None] = field(default_factory=dict)
    # Sizes that modules keep (`num_heads`) as they are on a rank, by module and attribute name. The value for a
    # module's config is a `ConfigView`.
    attributes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)

    @property
    def layers(self) -> Iterator[str]:
        """Yield the names of all layers, producers first."""
        yield from self.producers
        yield from self.consumers


_HEADS = re.compile(r"^(num_|n_|n)?(attention_|attn_|q_|query_|encoder_attention_|decoder_attention_)?heads?$")
_KV_HEADS = re.compile(
    r"^(num_|n_)?(key_value_|kv_|k_|key_)heads$|^kv_n_heads$|^n_head_kv$|^num_key_value_head$|^multi_query_group_num$"
)
_HEAD_SIZE = re.compile(r"^(attention_)?head_(dim|size)$|^d_head$|^dim_head$|^key_value_proj_dim$|^d_kv$|^kv_channels$")
_GROUPS = re.compile(r"^(num_|n_)?(key_value_|kv_)groups$|^n_rep$")
_NOT_A_WIDTH = re.compile(r"head_dim|head_size|max|vocab|position|layer|idx|window|rank")


def sizes_on_a_rank(
    tracer: Tracer, layer_group: LayerGroup, tp: int, heads: bool, widths: bool, configs: bool
) -> dict[nn.Module, dict[str, Any]]:
    """Return new values for the attributes that hold a layer group's sizes, as they are on a rank."""
    # `heads`: numbers of attention heads. `widths`: other ints that equal the width of a consumer's input or of a
    # producer's output. `configs`: numbers of heads in a module's config too.
    width = layer_group.width
    producers = reversed(layer_group.producers.values())
    narrower = {producer.size: producer.width for producer in producers} | {width: width // tp} if widths else {}
    sizes_of: dict[nn.Module, dict[str, Any]] = {}
    for module in _around(tracer, layer_group.layers):
        of_module, shared = _ints(module), _ints(getattr(module, "config", None))
        sizes = [*of_module, *shared]
        counts = (value for key, value in sizes if _HEADS.match(key) and value > 1 and width % value == 0)
        by_size = (width // v for key, v in sizes if _HEAD_SIZE.match(key) and v > 0 and width % v == 0)
        count = next(counts, None) or next(by_size, None)
        kv = next((value for key, value in sizes if _KV_HEADS.match(key)), None)
        fewer = partial(_fewer_heads, count=count if heads else None, kv=kv, layer_group=layer_group, tp=tp)
        changes: dict[str, Any] = {}
        for key, value in of_module:
            new = fewer(key, value)
            if new is None and not _NOT_A_WIDTH.search(key):
                new = narrower.get(value)
            if new not in (None, value):
                changes[key] = new
        in_config = {key: new for key, value in shared if (new := fewer(key, value)) not in (None, value)}
        if configs and in_config:
            changes["config"] = ConfigView(in_config)
        if changes:
            sizes_of[module] = changes
    return sizes_of


def _ints(holder: Any) -> list[tuple[str, int]]:
    values = getattr(holder, "__dict__", {})
    return [(key, value) for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool)]


def _fewer_heads(
    key: str, value: int, count: int | None, kv: int | None, layer_group: LayerGroup, tp: int
) -> int | None:
    if count is None:
        return None
    mine = count // tp
    if _HEADS.match(key) and value == count:
        return mine if count % tp == 0 else None
    kv_mine = _kv_heads(count, kv, layer_group, tp)
    if _KV_HEADS.match(key):
        return kv_mine
    return mine // kv_mine if _GROUPS.match(key) and kv_mine else None


def _kv_heads(count: int, kv: int | None, layer_group: LayerGroup, tp: int) -> int | None:
    """Return the number of key-value heads on a rank, from the producers' row partitions, or None if it is unknown."""
    if not kv:
        return None
    head = layer_group.width // count
    for partition in layer_group.producers.values():
        if partition.size == kv * head:
            return partition.width // head
        if partition.size == (count + 2 * kv) * head:  # a fused query-key-value projection
            return (partition.width // head - count // tp) // 2
    return None


def _around(tracer: Tracer, layers: Iterable[str]) -> list[nn.Module]:
    """Return the modules around the layers: the smallest that holds all of them, and those in it that hold one."""
    chosen = [tracer.paths[tracer.modules[layer]].split(".") for layer in layers]
    shared = 0
    while all(len(path) > shared + 1 and path[: shared + 1] == chosen[0][: shared + 1] for path in chosen):
        shared += 1
    inside = {".".join(path[:depth]): None for path in chosen for depth in range(shared, len(path))}
    return [tracer.twin.get_submodule(path) for path in inside]


def verify_ranks(
    tracer: Tracer, layer_groups: Sequence[LayerGroup], tp: int, ranks: Iterable[int], until: LayerGroup | None = None
) -> str | None:
    """Run the model (`until` a group is done) as each rank would; return the first problem, or None if all is right."""
    problems = (_verify_rank(tracer, layer_groups, tp, rank, until) for rank in ranks)
    return next((problem for problem in problems if problem is not None), None)


def proven(
    tracer: Tracer, layer_groups: list[LayerGroup], tp: int, ranks: Collection[int], rejected: dict[str, str]
) -> list[LayerGroup]:
    """Return the layer groups that the model can be cut by; note in `rejected` why other layers cannot be."""
    # If all together fail, kinds of groups (equal names but for numbers) are added one after the other.
    if verify_ranks(tracer, layer_groups, tp, ranks) is None:
        return layer_groups
    kinds: dict[tuple[str, ...], list[LayerGroup]] = {}
    for layer_group in layer_groups:
        kinds.setdefault(tuple(without_block_numbers(name) for name in layer_group.layers), []).append(layer_group)
    kept: list[LayerGroup] = []
    for group in kinds.values():
        problem = verify_ranks(tracer, [*kept, *group], tp, ranks)
        if problem is None:
            kept += group
        else:
            rejected.update({name: problem for layer_group in group for name in layer_group.layers})
    return kept


class _EnoughError(TraceError):
    """End a run early, since everything that was to be checked has been checked."""


def _verify_rank(
    tracer: Tracer, layer_groups: Sequence[LayerGroup], tp: int, rank: int, until: LayerGroup | None
) -> str | None:
    consumers = {name for layer_group in layer_groups for name in layer_group.consumers}
    producers = {
        name: partition.ranks[rank] for layer_group in layer_groups for name, partition in layer_group.producers.items()
    }
    last = -1 if until is None else max(index for index, call in enumerate(tracer.calls) if call.layer in until.layers)

    def parts(index: int, call: Call) -> tuple[Part, Part]:
        if until is not None and index > last:
            raise _EnoughError
        mine, cuts = slice(*chunk_bounds(call.fed.shape[-1], tp, rank)), producers.get(call.layer)
        return (
            (lambda x: x[..., mine]) if call.layer in consumers else all_of,
            (lambda x: torch.cat([x[..., a:b] for a, b in cuts], -1)) if cuts is not None else all_of,
        )

    with replaced_entries(_cuts(layer_groups, rank)):
        try:
            run_as_rank(tracer, RankTable("what it should be by a rank's share of the features", parts))
        except _EnoughError:
            pass
        except FailedError as error:
            return f"with a rank's share of the features the code around it fails ({error})"
        except TraceError as error:
            return str(error)
    return None


def _cuts(layer_groups: Iterable[LayerGroup], rank: int) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the entries of the tracer's copy of the model that give it the parameters and sizes of a rank."""
    for layer_group in layer_groups:
        for module, values in layer_group.attributes.items():
            for key, value in values.items():
                yield module.__dict__, key, viewed_with(module.__dict__[key], value)
        for (module, key), cut in layer_group.between.items():
            if cut is not None:
                dim, partition = cut
                parameter: Any = module._parameters[key]
                part = parameter.detach().index_select(dim, partition.rows(rank))
                yield module._parameters, key, nn.Parameter(part)
