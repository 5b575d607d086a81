"""A plan for a model that could not be run beforehand, tried on the first batch.

Nobody knows what such a model takes until it is called. A stand-in that was made of it before it was sharded is run on
the first batch then, and the plan is held against what that shows, before anything is computed with it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lora_parallel.probe import ProbeError, stand_in_for
from lora_parallel.selection import Selection
from lora_parallel.structure import find_structure
from lora_parallel.styles import STYLES, Style

__all__ = ["Trial"]

log = logging.getLogger(__name__)


class Trial:
    """What a plan says of one model.

    Args:
        model: In full, not sharded yet.
        names: Of its layers.
        tp: Size of the tp axis.
    """

    def __init__(self, model: nn.Module, names: Mapping[nn.Module, str], tp: int) -> None:
        self._tp = tp
        self._twin = stand_in_for(model)
        twins = dict(zip(model.modules(), self._twin.modules(), strict=True))
        self._names = {twins[module]: name for module, name in names.items() if module in twins}
        self._wanted: dict[str, tuple[Style, Selection | None]] = {}

    def expect(self, styles: Mapping[nn.Module, tuple[str, Style]], selections: Mapping[nn.Module, Selection]) -> None:
        """Note the plan."""
        self._wanted = {name: (style, selections.get(module)) for module, (name, style) in styles.items()}

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the stand-in on a batch.

        Raises:
            ValueError: The plan is not what the model computes.
        """
        given = tree_map_only(Tensor, _plain, {**kwargs, "args": args})
        between = {n for n, (style, _) in self._wanted.items() if style is STYLES["replicated_with_grad_allreduce"]}
        try:
            found = find_structure(self._twin, self._names, self._tp, between, given)
        except ProbeError as error:
            if not dist.is_initialized() or dist.get_rank() == 0:
                log.warning(
                    "tp_plan: the model could not be run on the first batch without its weights either (%s): its plan "
                    "holds unchecked. Compare a step with one process once.",
                    error,
                )
            return
        rows: dict[str, Selection | None] = {name: None for flow in found.flows for name in flow.sinks}
        for flow in found.flows:
            rows.update(flow.sources)
        for name in sorted(found.called):
            style, selection = self._wanted.get(name, (None, None))
            if style is None or not style.even:
                continue
            if name in rows and _alike(rows[name], selection):
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


def _alike(shown: Selection | None, planned: Selection | None) -> bool:
    return shown == planned or (planned is None and shown is not None and shown.is_chunked)


def _plain(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu()
    return plain.float() if plain.is_floating_point() else plain
