"""Show a progress bar while torch's checkpoints write the shards of rank 0."""

from __future__ import annotations

from math import prod
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from lora_parallel.storage.progress import saving_bar

__all__ = ["SavePlanner"]


class SavePlanner(DefaultSavePlanner):
    """Plan a save as torch does, and show on rank 0 how many bytes of its shards are written."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._bar = saving_bar("Saving states", sum(map(_bytes, plan.items)))
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        self._bar.update(_bytes(write_item))
        if self._bar.n == self._bar.total:
            self._bar.close()
        return data


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize
