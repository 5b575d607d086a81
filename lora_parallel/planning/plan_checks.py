"""Check the rules that every plan must follow, whether the model or the user gave it."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.layers.adapter_support import WORKS, cut_problem, problem_anywhere
from lora_parallel.layers.layer_parameters import base_of, features_dim, is_linear, layer_tensors, shared_parameters
from lora_parallel.layers.quantised_layer import QuantisedLayer
from lora_parallel.layers.styles import Style

__all__ = ["check_kinds", "check_ties", "check_widths", "cut_as", "leaves_a_rank_empty"]


def cut_as(entry: tuple[str, Style] | None) -> str:
    """Return the placement of a layer's weight over tp, as text.

    Args:
        entry: The layer's name and style; None if it has no style, and its weight is whole on every rank.
    """
    return str(Replicate() if entry is None else entry[1].weight)


_LINEAR_STYLES = frozenset({"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"})


def check_kinds(styles: Mapping[nn.Module, tuple[str, Style]], tp: int) -> None:
    """Check that each style fits the kind of its layer and the adapter on the layer.

    Args:
        styles: Name and style of each layer.
        tp: Size of the tp axis.

    Raises:
        ValueError: A style does not fit its layer, or the layer's adapter.
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
        if refused is None and isinstance(base, QuantisedLayer):
            refused = base.cut_problem(style, tp)
        elif refused is None and any(not t.owner._parameters[t.key].is_floating_point() for t in layer_tensors(module)):  # type: ignore[union-attr]
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
    """Check that tp divides the widths that code outside of the layers computes on in slices, and the heads in them.

    Args:
        names: Names of the model's modules.
        styles: Name and style of each layer.
        proven: Layers that were shown to work by running the model. Their widths are not checked.
        tp: Size of the tp axis.

    Raises:
        ValueError: A width, or a number of attention heads, is no multiple of tp.
    """
    parents = {child: module for module in names for child in module.children()}
    sizes: dict[tuple[str, str], int] = {}
    sums: list[int] = []
    checked: set[str] = set()
    for module, (name, style) in styles.items():
        base: Any = base_of(module)
        if not style.requires_even_split or not is_linear(base):
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
        # Rowwise layers decide which tp is possible: several ranks may share the heads of a layer before them that has
        # fewer heads than tp.
        common = gcd(*(sums or sizes.values()))
        if common % tp == 0:  # a layer that ranks cannot share here is the reason
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
    if isinstance(base, QuantisedLayer):
        return base.out_features if style.weight == Shard(0) else base.in_features
    return base.weight.shape[features_dim(base) if style.weight == Shard(0) else 1 - features_dim(base)]


def leaves_a_rank_empty(module: nn.Module, style: Style, tp: int) -> bool:
    """Return True if the last tp rank has no features of a layer that is cut as `style` says.

    The layer has fewer features than there are ranks, or few more (5 features on 4 ranks are 2, 2, 1 and 0).
    """
    base = base_of(module)
    if not isinstance(style.weight, Shard) or not (is_linear(base) or isinstance(base, nn.Embedding)):
        return False
    width = _cut_width(base, style)
    return chunk_bounds(width, tp, tp - 1)[0] >= width


def check_ties(model: nn.Module, styles: Mapping[nn.Module, tuple[str, Style]]) -> None:
    """Check that layers that share a weight place it alike over tp, so that it can stay shared.

    Args:
        model: The model, in full shapes.
        styles: Name and style of each layer.

    Raises:
        ValueError: Layers that share a weight place it differently.
    """
    by_base = {base_of(module): entry for module, entry in styles.items()}
    for parameter, places in shared_parameters(model).items():
        placements: dict[str, str] = {}
        for holder, _ in places:
            name = by_base[holder][0] if holder in by_base else type(holder).__name__
            placements[name] = cut_as(by_base.get(holder))
        if len(set(placements.values())) > 1:
            raise ValueError(
                f"tp_plan: the weight of shape {tuple(parameter.shape)} is tied, and its layers place it differently: "
                f"{', '.join(f'{name}: {placement}' for name, placement in placements.items())}. Give them styles that "
                "split it alike (colwise_gather_output and embedding_rowwise do), or leave it whole (replicate)."
            )
