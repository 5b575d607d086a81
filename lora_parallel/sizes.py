"""Sizes that modules keep (`num_heads`, `split_size`), as they are on a tp rank: guesses, which a run proves or not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from lora_parallel.flow import Flow
from lora_parallel.overlay import Overlay
from lora_parallel.probe import Probe

__all__ = ["sizes_on_a_rank"]

_HEADS = re.compile(r"^(num_|n_|n)?(attention_|attn_|q_|query_|encoder_attention_|decoder_attention_)?heads?$")
_KV_HEADS = re.compile(
    r"^(num_|n_)?(key_value_|kv_|k_|key_)heads$|^kv_n_heads$|^n_head_kv$|^num_key_value_head$|^multi_query_group_num$"
)
_HEAD_SIZE = re.compile(r"^(attention_)?head_(dim|size)$|^d_head$|^dim_head$|^key_value_proj_dim$|^d_kv$|^kv_channels$")
_GROUPS = re.compile(r"^(num_|n_)?(key_value_|kv_)groups$|^n_rep$")
_NOT_A_WIDTH = re.compile(r"head_dim|head_size|max|vocab|position|layer|idx|window|rank")


def sizes_on_a_rank(
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
