"""Feed each rank the data of its data-parallel rank: worker seeds, metrics, and prediction on uneven shares."""

from __future__ import annotations

import copyreg
import os
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lora_parallel.integration import dp_size, group_named

__all__ = ["UnevenPrediction", "check_shares", "seed_workers", "sync_metrics"]


def seed_workers(dataloader: object, rank: int, worker_init_function: Callable[..., Any]) -> None:
    """Seed loader workers by data-parallel rank, so that pp, cp and tp peers draw the same augmentations.

    Lightning sets a `worker_init_fn` that seeds by global rank, if there is none: Trainer after this call, Fabric
    before it.

    Args:
        dataloader: The dataloader. It stays as it is if the user has set a `worker_init_fn`, or if it is no DataLoader.
        rank: The data-parallel rank of this process.
        worker_init_function: Lightning's own function for `worker_init_fn`.
    """
    if not int(os.environ.get("PL_SEED_WORKERS", "0")) or not isinstance(dataloader, DataLoader):
        return
    present = dataloader.worker_init_fn
    if present is None or (isinstance(present, partial) and present.func is worker_init_function):
        dataloader.worker_init_fn = partial(worker_init_function, rank=rank)


def check_shares(predict_loop: Any, mesh: DeviceMesh) -> None:
    """Check that each data-parallel rank has at least one sample to predict.

    A rank without a sample could not take part in the sharded forward. Only loaders that were passed to `predict` are
    checked; for other loaders, Lightning's sampler raises an error on the ranks without a sample.

    Args:
        predict_loop: The Trainer's predict loop.
        mesh: The device mesh.

    Raises:
        ValueError: A dataset has fewer samples than there are data-parallel ranks.
    """
    source = getattr(predict_loop, "_data_source", None)
    loaders = source.instance if source is not None else None
    for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized) and len(dataset) < dp_size(mesh):
            raise ValueError(
                f"predict was given {len(dataset)} samples for {dp_size(mesh)} data-parallel processes: give at least "
                "one a process, or predict on fewer."
            )


def sync_metrics(module: nn.Module | None, mesh: DeviceMesh) -> None:
    """Let torchmetrics sync over data-parallel ranks only: over all ranks, values of peers would count twice.

    Copies of a metric (`clone`, MetricTracker) have the same process group.
    """
    metrics = [each for each in (module.modules() if module is not None else ()) if isinstance(each, Metric)]
    if not metrics:
        return
    replicas = mesh["dp_replicate"].size() > 1
    group = mesh["dp_replicate", "dp_shard"]._flatten().get_group() if replicas else mesh.get_group("dp_shard")
    copyreg.pickle(dist.ProcessGroup, _by_name)  # torch has no way to copy one
    for metric in metrics:
        if metric.process_group is None:
            metric.process_group = group


def _by_name(group: dist.ProcessGroup) -> tuple[Any, ...]:
    return _found, (group.group_name,)


def _found(name: str) -> dist.ProcessGroup:
    group = group_named(name)
    if group is None:
        raise RuntimeError(f"process group {name} is of another process: copy a metric in its own")
    return group


class UnevenPrediction:
    """Keep all ranks in the sharded forward until the last one has predicted its share.

    Lightning never repeats samples in `predict`, so data-parallel ranks may have different numbers of batches. A rank
    that stopped early would leave the others waiting for its shards of the weights. Instead, it runs its last batch
    again and discards the output.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._again: Callable[[], Any] | None = None

    def step(self, predict: Callable[[], Any]) -> Any:
        """Predict one batch while every other rank runs a batch too."""
        if dp_size(self._mesh) > 1:
            self._anyone(True)
            self._again = predict
        return predict()

    def finish(self) -> None:
        """Run the last batch again until no rank has batches left. Call it once this rank has none."""
        if dp_size(self._mesh) == 1:
            return
        while self._anyone(False):
            if self._again is not None:
                self._again()
        self._again = None

    def _anyone(self, busy: bool) -> bool:
        flag = torch.tensor(int(busy), device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
