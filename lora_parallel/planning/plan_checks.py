"""Check the rules that every plan must follow, at once or, for a model that could not be run, on the first batch.

The arguments that such a model takes are not known until it is called. So a copy of the model, made before it was
sharded, is run on the first batch, and the plan is compared with the layer groups that this run shows. The check comes
before the sharded model computes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import gcd
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_map_only

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.distributed.rank_checks import is_rank_zero
from lora_parallel.layers.layer_parameters import base_of, layer_tensors, shared_parameters
from lora_parallel.layers.linear_classes import (
    WORKS,
    QuantisedLayer,
    cut_problem,
    features_dim,
    is_linear,
    problem_anywhere,
)
from lora_parallel.layers.styles import STYLES, RowPartition, Style
from lora_parallel.tracing.inputs import TraceError, stand_in_for
from lora_parallel.tracing.prove_feature_slices import find_structure


def cut_as(entry: tuple[str, Style] | None) -> str:
    """Return the placement of a layer's weight over tp, as text."""
    return str(Replicate() if entry is None else entry[1].weight)


_LINEAR_STYLES = frozenset({"colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"})


def check_kinds(styles: Mapping[nn.Module, tuple[str, Style]], tp: int) -> None:
    """Refuse a style that does not fit the kind of its layer, or the adapter on the layer."""
    for module, (name, style) in styles.items():
        style_name = style.name
        base = base_of(module)
        kind, works = type(base).__name__, WORKS if isinstance(module, BaseTunerLayer) else ""
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
                f"target_modules and of tp_plan{_whole_remedy(module, style_name)}. {works}".rstrip()
            )


def _whole_remedy(module: nn.Module, style_name: str) -> str:
    if problem_anywhere(module) is not None or style_name == "replicate":
        return ""
    return ', or compute it in full on every tp rank (the style "replicate")'


def check_widths(
    names: Mapping[nn.Module, str], styles: Mapping[nn.Module, tuple[str, Style]], proven: set[nn.Module], tp: int
) -> None:
    """Refuse a tp that does not divide the width, or the heads, of an unproven layer whose slices others use."""
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
    """Return True if the last tp rank has no features of a cut layer, as of 5 on 4 ranks: 2, 2, 1 and 0."""
    base = base_of(module)
    if not isinstance(style.weight, Shard) or not (is_linear(base) or isinstance(base, nn.Embedding)):
        return False
    width = _cut_width(base, style)
    return chunk_bounds(width, tp, tp - 1)[0] >= width


def check_ties(model: nn.Module, styles: Mapping[nn.Module, tuple[str, Style]]) -> None:
    """Refuse styles that place a tied weight differently, so that it could not stay shared."""
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


log = logging.getLogger(__name__)


class FirstBatchCheck:
    """Compare the plan of one model with what the model computes on its first batch."""

    @torch.random.fork_rng(devices=[])
    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], tp: int) -> None:
        self._tp = tp
        self._twin = stand_in_for(model)
        twins = dict(zip(model.modules(), self._twin.modules(), strict=True))
        self._names = {twins[module]: name for module, name in names.items() if module in twins}
        self._wanted: dict[str, tuple[Style, RowPartition | None]] = {}

    def expect(
        self, styles: Mapping[nn.Module, tuple[str, Style]], partitions: Mapping[nn.Module, RowPartition]
    ) -> None:
        """Note the plan that `check` compares with."""
        self._wanted = {name: (style, partitions.get(module)) for module, (name, style) in styles.items()}

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a plan that is not what a copy of the model computes on a batch; warn if it cannot be run."""
        inputs = tree_map_only(Tensor, _plain, {**kwargs, "args": args})
        between = {n for n, (style, _) in self._wanted.items() if style is STYLES["replicated_with_grad_allreduce"]}
        try:
            structure = find_structure(self._twin, self._names, self._tp, between, inputs)
        except TraceError as error:
            if is_rank_zero():
                log.warning(
                    "tp_plan: the model could not be run on the first batch without its weights either (%s): its plan "
                    "holds unchecked. Compare a step with one process once.",
                    error,
                )
            return
        rows: dict[str, RowPartition | None] = {
            name: None for layer_group in structure.layer_groups for name in layer_group.consumers
        }
        for layer_group in structure.layer_groups:
            rows.update(layer_group.producers)
        for name in sorted(structure.called):
            style, partition = self._wanted.get(name, (None, None))
            if style is None or not style.requires_even_split:
                continue
            if name in rows and _alike(rows[name], partition):
                continue
            reason = structure.rejected.get(name, "no layer takes such slices of what it computes")
            if name in rows:
                reason = "several matrices are in it, each of which has to be cut by itself"
            raise ValueError(
                f"tp_plan: {name!r} is {style.name}, which is not what the model computes on the first batch: "
                f"{reason}. "
                'For two matrices in one there is "packed_colwise"; "colwise_gather_output" and "rowwise_split_input" '
                "are right for any linear layer."
            )


def _alike(shown: RowPartition | None, planned: RowPartition | None) -> bool:
    return shown == planned or (planned is None and shown is not None and shown.is_chunked)


def _plain(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu()
    return plain.float() if plain.is_floating_point() else plain
