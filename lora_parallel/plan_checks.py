"""What holds of a plan, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from lora_parallel.adapter_forms import WORKS, cut_problem, problem_anywhere
from lora_parallel.collectives import chunk_bounds
from lora_parallel.layers import base_of, features_dim, is_linear, shared_parameters, unit_tensors
from lora_parallel.quantised.layer import Quantised
from lora_parallel.styles import Style

__all__ = ["check_kinds", "check_ties", "check_widths", "cut_as", "leaves_a_rank_empty"]


def cut_as(entry: tuple[str, Style] | None) -> str:
    """How a layer's weight is placed, in words; a layer without a style is whole."""
    return str(Replicate() if entry is None else entry[1].weight)


_LINEAR_STYLES = frozenset({"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"})


def check_kinds(styles: Mapping[nn.Module, tuple[str, Style]], tp: int) -> None:
    """A style must be for the kind of layer that it is given to, and for the adapter on it.

    Raises:
        ValueError: One is not.
    """
    for module, (name, style) in styles.items():
        style_name = style.name
        base = base_of(module)
        kind, adapted = type(base).__name__, isinstance(module, BaseTunerLayer)
        refused = problem_anywhere(module) or cut_problem(module, style)
        if refused is None and style_name in _LINEAR_STYLES and not is_linear(base):
            refused = f"{kind} is no nn.Linear, which {style_name} needs"
        if refused is None and style_name == "embedding_rowwise":
            if not isinstance(base, nn.Embedding):
                refused = f"{kind} is no nn.Embedding, which {style_name} needs"
            elif base.max_norm is not None:
                refused = "an embedding with max_norm rewrites its weights in forward"
        if refused is None and isinstance(base, Quantised):
            refused = base.cut_problem(style, tp)
        elif refused is None and any(not t.owner._parameters[t.key].is_floating_point() for t in unit_tensors(module)):  # type: ignore[union-attr]
            refused = f"{kind} holds quantised weights"
        if refused is not None:
            raise ValueError(
                f"tp={tp}: {name!r} cannot be {style_name}: {refused}. Use tp=1 (FSDP2 only), or leave it out of "
                f"target_modules and of tp_plan{_whole_remedy(module, style_name)}. {WORKS if adapted else ''}".rstrip()
            )


def _whole_remedy(module: nn.Module, style_name: str) -> str:
    if problem_anywhere(module) is not None or style_name == "replicate":
        return ""
    return ', or compute it in full on every tp rank (the style "replicate")'


def check_widths(
    names: Mapping[nn.Module, str], styles: Mapping[nn.Module, tuple[str, Style]], proven: set[nn.Module], tp: int
) -> None:
    """Widths that other code computes on in slices, and the attention heads inside them, must be multiples of tp,
    unless they were shown to work.
    """
    parents = {child: module for module in names for child in module.children()}
    sizes: dict[tuple[str, str], int] = {}
    sums: list[int] = []
    checked: set[str] = set()
    for module, (name, style) in styles.items():
        base: Any = base_of(module)
        if not style.even or not is_linear(base):
            continue
        split_out = style.weight == Shard(0)
        width = _cut_width(base, style)
        head_dim = getattr(parents.get(module), "head_dim", None)
        if isinstance(head_dim, int) and head_dim > 0 and width % head_dim == 0:
            size, what = width // head_dim, f"{width // head_dim} heads (of width {head_dim})"
        else:
            size, what = width, f"{'out' if split_out else 'in'}_features={width}"
        sizes[name, what] = size
        if not split_out:
            sums.append(size)
        if module not in proven:
            checked.add(name)
    bad = [(name, what) for (name, what), size in sizes.items() if size % tp and name in checked]
    if bad:
        # What sums up decides: of the layers before it, those with fewer heads than tp may be shared by ranks.
        common = gcd(*(sums or sizes.values()))
        if common % tp == 0:  # they are not shared here
            common = gcd(*sizes.values())
        possible = [str(n) for n in range(1, common + 1) if common % n == 0]
        name, what = bad[0]
        more = f" (and {len(bad) - 1} more layers)" if len(bad) > 1 else ""
        raise ValueError(
            f"tp={tp} does not divide {name!r}: {what}{more}. For this model tp can be {', '.join(possible)}."
        )


def _cut_width(base: Any, style: Style) -> int:
    """Return how many features of a linear layer, or rows or columns of an embedding, tp ranks share out."""
    if isinstance(base, nn.Embedding):
        return base.num_embeddings if style.weight == Shard(0) else base.embedding_dim
    if isinstance(base, Quantised):
        return base.out_features if style.weight == Shard(0) else base.in_features
    return base.weight.shape[features_dim(base) if style.weight == Shard(0) else 1 - features_dim(base)]


def leaves_a_rank_empty(module: nn.Module, style: Style, tp: int) -> bool:
    """Return True if a tp rank has nothing of a layer that is cut as `style` says: one of fewer features than ranks, or
    of few more (5 features on 4 ranks are 2, 2, 1 and none).
    """
    base = base_of(module)
    if not isinstance(style.weight, Shard) or not (is_linear(base) or isinstance(base, nn.Embedding)):
        return False
    width = _cut_width(base, style)
    return chunk_bounds(width, tp, tp - 1)[0] >= width


def check_ties(model: nn.Module, styles: Mapping[nn.Module, tuple[str, Style]]) -> None:
    """Layers that share a weight must place it alike, or the tie would be cut."""
    by_base = {base_of(module): entry for module, entry in styles.items()}
    for parameter, holders in shared_parameters(model).items():
        placements: dict[str, str] = {}
        for holder in holders:
            name = by_base[holder][0] if holder in by_base else type(holder).__name__
            placements[name] = cut_as(by_base.get(holder))
        if len(set(placements.values())) > 1:
            raise ValueError(
                f"tp_plan: the weight of shape {tuple(parameter.shape)} is tied, and its layers place it differently: "
                f"{', '.join(f'{name}: {placement}' for name, placement in placements.items())}. Give them styles that "
                "split it alike (colwise_gather_output and embedding_rowwise do), or leave it whole (replicate)."
            )
