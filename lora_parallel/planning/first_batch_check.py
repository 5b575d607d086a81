"""Check a plan on the first batch, for a model that could not be run while the plan was made.

The arguments that such a model takes are not known until it is called. So a copy of the model, made before it was
sharded, is run on the first batch, and the plan is compared with the layer groups that this run shows. The check comes
before the sharded model computes anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lora_parallel.distributed.rank_checks import is_rank_zero
from lora_parallel.layers.row_partition import RowPartition
from lora_parallel.layers.styles import STYLES, Style
from lora_parallel.tracing.stand_in import stand_in_for
from lora_parallel.tracing.structure import find_structure
from lora_parallel.tracing.trace_errors import TraceError

__all__ = ["FirstBatchCheck"]

log = logging.getLogger(__name__)


class FirstBatchCheck:
    """Compare the plan of one model with what the model computes on its first batch.

    Args:
        model: The whole model, before it is sharded. It is copied, and not changed.
        names: Names of the model's layers.
        tp: Size of the tp axis.
    """

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
        """Note the plan that `check` compares with.

        Args:
            styles: Name and style of each layer that has a style, by layer of the model.
            partitions: Output features of each rank, for colwise layers that are not cut into one chunk a rank.
        """
        self._wanted = {name: (style, partitions.get(module)) for module, (name, style) in styles.items()}

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the copy of the model on a batch and compare the layer groups that this shows with the plan.

        If the copy cannot be run either, rank 0 logs a warning and the plan holds unchecked.

        Args:
            args: Positional arguments of the model's first call.
            kwargs: Keyword arguments of the model's first call.

        Raises:
            ValueError: A layer's style in the plan is not what the model computes.
        """
        given = tree_map_only(Tensor, _plain, {**kwargs, "args": args})
        between = {n for n, (style, _) in self._wanted.items() if style is STYLES["replicated_with_grad_allreduce"]}
        try:
            found = find_structure(self._twin, self._names, self._tp, between, given)
        except TraceError as error:
            if is_rank_zero():
                log.warning(
                    "tp_plan: the model could not be run on the first batch without its weights either (%s): its plan "
                    "holds unchecked. Compare a step with one process once.",
                    error,
                )
            return
        rows: dict[str, RowPartition | None] = {
            name: None for layer_group in found.layer_groups for name in layer_group.consumers
        }
        for layer_group in found.layer_groups:
            rows.update(layer_group.producers)
        for name in sorted(found.called):
            style, partition = self._wanted.get(name, (None, None))
            if style is None or not style.requires_even_split:
                continue
            if name in rows and _alike(rows[name], partition):
                continue
            reason = found.rejected.get(name, "no layer takes such slices of what it computes")
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
