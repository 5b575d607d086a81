"""Deal the rows of an iterable dataset as Accelerate's first process does where it dispatches batches.

Every process reads the stream and keeps its rows, so that nothing is sent, and peers of one batch have the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from itertools import cycle, islice
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import is_datasets_available
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["deal_as_dispatched", "note_last_rows", "whole_stream"]


def whole_stream(data_loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a dataloader whose rows Accelerate will share out batch by batch, as it does without `datasets`.

    Accelerate gives each process some of the files of a `datasets.IterableDataset` if it has enough of them, and the
    rows of a step are then others than in one process.
    """
    if not is_datasets_available():
        return data_loader
    from datasets import IterableDataset as DatasetsStream

    if not isinstance(data_loader.dataset, DatasetsStream):
        return data_loader
    data_loader = copy(data_loader)
    vars(data_loader)["dataset"] = _Stream(data_loader.dataset)  # a dataloader refuses to have it set
    return data_loader


class _Stream(IterableDataset[Any]):
    """Read a stream of `datasets`; Accelerate does not see what it reads."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def set_epoch(self, epoch: int) -> None:
        self.stream.set_epoch(epoch)


def deal_as_dispatched(loader: Any) -> Any:
    """Make a prepared dataloader fill up a short last batch only to a multiple of the data-parallel processes.

    Returns:
        The dataloader, changed in place; as it is, if its dataset is not iterable.
    """
    shard = loader.dataset
    if type(shard) is IterableDatasetShard:
        shard.__class__ = _DispatchedShard
        shard.last_rows = torch.zeros((), dtype=torch.int64).share_memory_()  # a worker of the dataloader counts them
    return loader


def note_last_rows(loader: Any) -> None:
    """Tell Accelerate how many rows of the last batch are the stream's, once the stream has ended.

    `gather_for_metrics` leaves out the others, also where the stream has no length.
    """
    shard = getattr(loader, "dataset", None)
    if isinstance(shard, _DispatchedShard) and loader.end_of_dataloader and shard.last_rows:
        loader.remainder = int(shard.last_rows)


class _DispatchedShard(IterableDatasetShard):
    """Yield this process's rows of each batch, and of a last batch that is short an equal part."""

    last_rows: torch.Tensor
    """Number of the last batch's rows, without those that fill it up; 0 if it is whole."""

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if not hasattr(self.dataset, "set_epoch") and isinstance(generator, torch.Generator):
            generator.manual_seed(self.epoch)
        whole = self.batch_size if self.split_batches else self.batch_size * self.num_processes
        first: list[Any] = []
        rows: list[Any] = []
        self.last_rows.zero_()
        for row in self.dataset:
            rows.append(row)
            if len(rows) == whole:
                yield from self._mine(rows)
                first, rows = first or rows, []
        if rows and not self.drop_last:
            self.last_rows.fill_(len(rows))
            rows += islice(cycle(first or list(rows)), -len(rows) % self.num_processes)
            yield from self._mine(rows)

    def _mine(self, rows: list[Any]) -> list[Any]:
        size = len(rows) // self.num_processes
        return rows[self.process_index * size : (self.process_index + 1) * size]
