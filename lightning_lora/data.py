"""Feed each rank the data of its data-parallel rank, and let a loader go on at its position on other meshes.

A loader's state has no public form: the private names of torchdata and Lightning that this needs are used in this file
only, and `tests/lightning_lora/test_loader_position.py` checks them. See https://github.com/meta-pytorch/data.
"""

from __future__ import annotations

import copyreg
import os
import sys
from collections.abc import Callable, Sized
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import Metric

from lora_parallel.integration import dp_size, group_named


def seed_workers(dataloader: object, rank: int, worker_init_function: Callable[..., Any]) -> None:
    """Seed loader workers by data-parallel rank, so that pp, cp and tp peers draw the same augmentations."""
    if not int(os.environ.get("PL_SEED_WORKERS", "0")) or not isinstance(dataloader, DataLoader):
        return
    present = dataloader.worker_init_fn  # Lightning's seeds by global rank: Fabric sets it before this call
    if present is None or (isinstance(present, partial) and present.func is worker_init_function):
        dataloader.worker_init_fn = partial(worker_init_function, rank=rank)


def check_shares(predict_loop: Any, mesh: DeviceMesh) -> None:
    """Check that each data-parallel rank has a sample to predict: without one it could not join the sharded forward."""
    # For loaders that were not passed to `predict` Lightning's sampler raises an error on the ranks without a sample.
    loaders = predict_loop._data_source.instance
    for loader in loaders if isinstance(loaders, (list, tuple)) else [loaders]:
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, Sized) and len(dataset) < dp_size(mesh):
            raise ValueError(
                f"predict was given {len(dataset)} samples for {dp_size(mesh)} data-parallel processes: give at least "
                "one a process, or predict on fewer."
            )


def sync_metrics(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let torchmetrics sync over data-parallel ranks only: over all ranks, values of peers would count twice."""
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    if not metrics:
        return
    replicas = mesh["dp_replicate"].size() > 1
    group = mesh["dp_replicate", "dp_shard"]._flatten().get_group() if replicas else mesh.get_group("dp_shard")
    # Torch has no way to copy a group.
    copyreg.pickle(dist.ProcessGroup, lambda group: (_group_of_this_process, (group.group_name,)))
    for metric in metrics:
        if metric.process_group is None:
            metric.process_group = group


def _group_of_this_process(name: str) -> dist.ProcessGroup:
    group = group_named(name)
    if group is None:
        raise RuntimeError(f"process group {name} is of another process: copy a metric in its own")
    return group


_found = _group_of_this_process  # its name in what earlier releases have pickled


class UnevenPrediction:
    """Keep all ranks in the sharded forward until the last has predicted its share, by running a last batch again."""

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
        """Run the last batch again until no rank has batches left; to be called once this rank has none."""
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


_HOLDERS = {"_snapshot", "_main_snapshot", "_sampler_iter_state", "_index_sampler_state"}
"""Keys in the state of a StatefulDataLoader under which the states of samplers are."""

_SAMPLERS = {"sampler_state", "sampler_iter_state"}
_ROWS = {"samples_yielded", "yielded"}  # numbers of rows that a rank's sampler has given out in the epoch
_SINCE = "_steps_since_snapshot"  # number of batches after the snapshot, which are fetched again at a resume


def seed_order(dataloader: object) -> None:
    """Let the order of rows of a shuffling StatefulDataLoader follow from the seed and the epoch alone."""
    # Lightning's sampler takes the order from torchdata's, which draws another one each time that it is asked: to
    # begin, and to go to the position of a checkpoint. In its place comes the one that torch's DataLoader would get.
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader.sampler")
    batches: Any = getattr(dataloader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    # Of Lightning's DistributedSamplerWrapper, whose dataset lists the sampler's indices.
    inner: Any = getattr(getattr(sampler, "dataset", None), "_sampler", None)
    shuffles = torchdata is not None and isinstance(inner, torchdata.RandomSampler) and not inner.replacement
    if isinstance(sampler, DistributedSampler) and shuffles and inner.num_samples == len(inner.data_source):
        names = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
        batches.sampler = DistributedSampler(inner.data_source, **{name: getattr(sampler, name) for name in names})


def moved_position(state: Any, before: int, after: int, of_sampler: bool = False) -> Any:
    """Return the state of a dataloader for another number of data-parallel ranks; torchdata counts rows of one rank."""
    if not isinstance(state, dict) or before == after:
        return state
    if _HOLDERS & state.keys() and state.get(_SINCE):
        raise ValueError(
            f"the checkpoint was saved {state[_SINCE]} batches after a snapshot of the dataloader, which only "
            f"{before} data-parallel ranks can go on from: resume with {before}, or from a checkpoint of the end of an "
            "epoch; save with snapshot_every_n_steps=1 (torchdata's default) to resume with another number."
        )
    moved = dict(state)
    for key, value in state.items():
        if key in _HOLDERS or (of_sampler and key in _SAMPLERS):
            moved[key] = moved_position(value, before, after, of_sampler=True)
        elif of_sampler and key in _ROWS and isinstance(value, int):
            rows, left = divmod(value * before, after)
            if left:
                raise ValueError(
                    f"the checkpoint was saved in mid-epoch, after {value * before} rows, which {after} data-parallel "
                    f"ranks do not divide: resume with {before}, or from a checkpoint of the end of an epoch."
                )
            moved[key] = rows
    return moved
