"""Guess the sizes that modules keep as attributes (`num_heads`, `split_size`), as they are on a tp rank.

A run of the model with these values proves a guess or rejects it (see `lora_parallel.tracing.rank_simulation`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from lora_parallel.tracing.config_view import ConfigView
from lora_parallel.tracing.layer_group import LayerGroup
from lora_parallel.tracing.tracer import Tracer

__all__ = ["sizes_on_a_rank"]

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
    """Return new values for the attributes that hold a layer group's sizes, as they are on a rank.

    Args:
        tracer: The run that showed the layer group.
        layer_group: Its producers and consumers. Attributes are looked for on the modules around them.
        tp: Size of the tp axis.
        heads: Change numbers of attention heads.
        widths: Change other ints that equal the width of a consumer's input or of a producer's output.
        configs: Change numbers of heads in the config that a module holds too, by a `ConfigView`.

    Returns:
        For each module of the tracer's copy of the model with something to change: the new values by attribute name.
    """
    width = layer_group.width
    found: dict[nn.Module, dict[str, Any]] = {}
    for module in _around(tracer, layer_group.layers):
        holders: list[tuple[Any, str | None]] = [(module, None)]
        config = getattr(module, "config", None)
        if config is not None:
            holders.append((config, "config"))
        count = next(
            (
                value
                for holder, _ in holders
                for key, value in _ints(holder)
                if _HEADS.match(key) and value > 1 and width % value == 0
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
                    new = _fewer_heads(key, value, count, kv, width, layer_group, tp)
                if new is None and widths and attribute is None and not _NOT_A_WIDTH.search(key):
                    new = _narrower(value, width, layer_group, tp)
                if new is not None and new != value:
                    own[key] = new
            if attribute is None:
                changes.update(own)
            elif own:
                changes[attribute] = ConfigView(own)
        if changes:
            found[module] = changes
    return found


def _ints(holder: Any) -> list[tuple[str, int]]:
    values = vars(holder) if isinstance(holder, nn.Module) else holder.__dict__
    return [(key, value) for key, value in values.items() if isinstance(value, int) and not isinstance(value, bool)]


def _fewer_heads(
    key: str, value: int, count: int, kv: int | None, width: int, layer_group: LayerGroup, tp: int
) -> int | None:
    mine = count // tp
    if _HEADS.match(key) and value == count:
        return mine if count % tp == 0 else None
    kv_mine = _kv_heads(count, kv, width, layer_group, tp)
    if _KV_HEADS.match(key):
        return kv_mine
    if _GROUPS.match(key) and kv_mine:
        return mine // kv_mine
    return None


def _kv_heads(count: int, kv: int | None, width: int, layer_group: LayerGroup, tp: int) -> int | None:
    """Return the number of key-value heads on a rank, from the producers' row partitions, or None if it is unknown."""
    if not kv:
        return None
    head = width // count
    for partition in layer_group.producers.values():
        if partition.size == kv * head:
            return partition.width // head
        if partition.size == (count + 2 * kv) * head:  # a fused query-key-value projection
            return (partition.width // head - count // tp) // 2
    return None


def _narrower(value: int, width: int, layer_group: LayerGroup, tp: int) -> int | None:
    if value == width:
        return width // tp
    return next((each.width for each in layer_group.producers.values() if each.size == value), None)


def _around(tracer: Tracer, layers: Iterable[str]) -> list[nn.Module]:
    """Return the modules around the layers: the smallest that holds all of them, and those in it that hold one."""
    chosen = [tracer.paths[tracer.modules[layer]].split(".") for layer in layers]
    shared = 0
    while all(len(path) > shared + 1 and path[: shared + 1] == chosen[0][: shared + 1] for path in chosen):
        shared += 1
    inside = {".".join(path[:depth]): None for path in chosen for depth in range(shared, len(path))}
    return [tracer.twin.get_submodule(path) for path in inside]
