"""Give data-parallel processes their shares of batches and streams, and gather their values.

Every process reads the stream and keeps its rows, so that nothing is sent, and peers of one batch have the same.

`gather`, `gather_for_metrics` and `reduce` of an Accelerator, and `gather`, `gather_object` and `reduce` of
`accelerate.utils`, all call the three functions that `patches.py` replaces by those here. They know processes only, and
would repeat the values of peers of one batch (tensor, context and pipeline parallel ones), as if each had seen a batch
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler
from accelerate.utils import is_datasets_available, recursively_apply
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import seed_worker

from accelerate_plugin.parallelism import parallelism_within_batch

_DISPATCHED = (
    "dispatch_batches=True is not supported with tensor, context or pipeline parallelism: Accelerate would give every "
    "process the same batch, or peers of one batch different ones. Leave it None in an Accelerator, and pass False to "
    "prepare_data_loader; each process then reads its own share."
)


def check_dispatch(accelerator: Accelerator) -> None:
    """Refuse `dispatch_batches=True` where several processes see one batch, and leave no dispatching to Accelerate."""
    if parallelism_within_batch() is None:
        return
    config = accelerator.dataloader_config
    if config.dispatch_batches:
        raise ValueError(_DISPATCHED)
    if config.dispatch_batches is None:
        accelerator.dataloader_config = accelerator.replaced_config = replace(config, dispatch_batches=False)


def dispatcher_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a dataloader that dispatches batches, where several processes see one batch."""
    if parallelism_within_batch() is not None:
        raise ValueError(_DISPATCHED)
    original(self, *args, **kwargs)


def prepare_sampler(data_loader: DataLoader[Any], dp_rank: int, seedable: bool) -> None:
    """Make a dataloader shuffle the same way on every process, before Accelerate prepares it. Collective."""
    init = data_loader.worker_init_fn
    if isinstance(init, partial) and init.func is seed_worker:
        # Trainer seeds workers by process. Seed them by data-parallel process instead, so that tensor-parallel peers
        # draw the same augmentations.
        data_loader.worker_init_fn = partial(init.func, *init.args, **{**init.keywords, "rank": dp_rank})
    if isinstance(data_loader.batch_sampler, BatchRebalanceSampler):
        data_loader.batch_sampler.rank = dp_rank  # Trainer gave it the process's
    sampler = _sampler(data_loader)
    if type(sampler) is RandomSampler and sampler.generator is None and not seedable:
        # Accelerate makes a generator too, but not in a run with tensor parallelism only.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(_from_rank_zero(int(torch.empty((), dtype=torch.int64).random_())))


def resumable(loader: Any) -> Any:
    """Make a dataloader that Accelerate has prepared shuffle with rank 0's seed and resume in mid-epoch. Collective."""
    sampler = _sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = _from_rank_zero(sampler.initial_seed)
    elif type(sampler) is RandomSampler:
        _dealer(loader).sampler = _Resumable(sampler)
    shard = loader.dataset
    if isinstance(shard, IterableDatasetShard):  # Accelerate counts its rows by this process's share
        with suppress(TypeError, AttributeError):  # it has no length, or the loader no batches
            shard.total_dataset_length = len(shard.dataset)
            loader.batch_sampler.num_processes = shard.num_processes
    return loader


def _dealer(loader: Any) -> Any:
    """Return a dataloader's innermost batch sampler, inside of those of Accelerate that give each process its share."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches


def _sampler(loader: Any) -> Any:
    return getattr(_dealer(loader), "sampler", None)


def _from_rank_zero(seed: int) -> int:
    shared = [seed]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


class _Resumable(Sampler[int]):
    """Shuffle as a RandomSampler does, and remember the state that its generator had when the epoch began."""

    def __init__(self, sampler: RandomSampler) -> None:
        self.sampler = sampler
        self.began: torch.Tensor | None = None

    @property
    def generator(self) -> torch.Generator:
        return self.sampler.generator

    def __iter__(self) -> Iterator[int]:
        self.began = self.generator.get_state()
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


def batch_size(loader: Any) -> int | None:
    """Return the batch size of one process; None if the user's own sampler does not tell it."""
    size = getattr(_dealer(loader), "batch_size", None) or loader.batch_size
    return size if isinstance(size, int) else None


def sampler_state(accelerator: Accelerator, loader: Any) -> dict[str, Any] | None:
    """Return the state from which a dataloader shuffles its current epoch again; None if it does not shuffle."""
    sampler = _sampler(loader)
    active = accelerator.gradient_state.active_dataloader is loader
    if isinstance(sampler, SeedableRandomSampler):
        # Accelerate sets the sampler's epoch to `loader.iteration`, which goes up only after the loop over an epoch.
        return {"epoch": loader.iteration + int(active and loader.end_of_dataloader), "seed": sampler.initial_seed}
    if not isinstance(sampler, _Resumable):
        return None
    inside = active and not loader.end_of_dataloader
    return {"generator": sampler.began if inside else sampler.generator.get_state()}


def check_sampler(loader: Any, saved: dict[str, Any] | None) -> None:
    """Check that a dataloader shuffles in the same way as the one whose `sampler_state` was saved."""
    sampler = _sampler(loader)
    kind = "seed" if isinstance(sampler, SeedableRandomSampler) else "generator"
    present = isinstance(sampler, (SeedableRandomSampler, _Resumable))
    if (saved is not None and kind not in saved) or present != (saved is not None):
        raise ValueError(
            "a dataloader shuffles in another way than the one that was saved: keep shuffle= and use_seedable_sampler."
        )


def restore_sampler(loader: Any, saved: Any) -> None:
    """Make a dataloader shuffle as the saved one did, from the state that `sampler_state` returned."""
    sampler = _sampler(loader)  # one that shuffles if there is a saved state, and only then (see `check_sampler`)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.epoch = loader.iteration = saved["epoch"]
        sampler.initial_seed = saved["seed"]
    elif isinstance(sampler, _Resumable):
        sampler.generator.set_state(saved["generator"])


def whole_stream(data_loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a dataloader whose rows Accelerate will share out batch by batch, as it does without `datasets`."""
    # Accelerate gives each process some of the files of a `datasets.IterableDataset` if it has enough of them, and the
    # rows of a step are then others than in one process.
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
    """Make a dataloader of a stream fill up a short last batch only to a multiple of the data-parallel processes."""
    shard = loader.dataset
    if type(shard) is IterableDatasetShard:
        shard.__class__ = _DispatchedShard
        shard.last_rows = torch.zeros((), dtype=torch.int64).share_memory_()  # a worker of the dataloader counts them
    return loader


def note_last_rows(loader: Any) -> None:
    """Tell Accelerate how many rows of a stream's last batch are the stream's, for `gather_for_metrics`."""
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


def gather_tensors(original: Callable[..., Any], tensor: Any) -> Any:
    """Concatenate the tensors of all data-parallel processes, with one tensor for each batch."""
    gathered, parallelism = original(tensor), parallelism_within_batch()
    if parallelism is None:
        return gathered
    processes = parallelism.total_size

    def once(rows: Tensor) -> Tensor:
        return parallelism.one_per_batch(rows.unflatten(0, (processes, len(rows) // processes))).flatten(0, 1)

    return recursively_apply(once, gathered)


def gather_objects(original: Callable[..., Any], object: Any) -> Any:
    """Join the lists of all data-parallel processes, with one list for each batch."""
    parallelism = parallelism_within_batch()
    if parallelism is None:
        return original(object)
    return [value for values in parallelism.one_per_batch(original([object])) for value in values]


def reduce_tensors(original: Callable[..., Any], func: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function to all tensors of `data`; the one that reduces gets one tensor for each batch."""
    # `reduce` itself is imported by name, also before this package is. What it calls, `recursively_apply`, is not.
    parallelism, reduction = parallelism_within_batch(), kwargs.get("reduction")
    name = f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', '')}"
    reduces = name.startswith("accelerate.utils.operations.reduce.<locals>.")
    if not reduces or parallelism is None or reduction == "max":
        return original(func, data, *args, **kwargs)

    def once(tensor: Tensor, reduction: str, scale: float) -> Tensor:
        share = tensor if parallelism.is_first_of_batch else torch.zeros_like(tensor)
        total: Tensor = func(share, reduction="sum", scale=scale)
        return total / parallelism.dp_size if reduction == "mean" else total

    return original(once, data, *args, **kwargs)
