"""Give data-parallel processes their shares of batches, shuffled alike, and resume the shuffling in mid-epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import seed_worker

from accelerate_plugin.parallelism import parallelism_within_batch

__all__ = [
    "batch_size",
    "check_dispatch",
    "check_sampler",
    "dispatcher_init",
    "prepare_sampler",
    "restore_sampler",
    "resumable",
    "sampler_state",
]

_DISPATCHED = (
    "dispatch_batches=True is not supported with tensor, context or pipeline parallelism: Accelerate would give every "
    "process the same batch, or peers of one batch different ones. Leave it None in an Accelerator, and pass False to "
    "prepare_data_loader; each process then reads its own share."
)


def check_dispatch(accelerator: Accelerator) -> None:
    """Let each process read the batches that it needs, where several see one batch; refuse `dispatch_batches=True`.

    Where Accelerate's default would dispatch the batches of a stream, processes take the rows of each batch that they
    would have been given.

    Raises:
        ValueError: `dispatch_batches` is True.
    """
    if parallelism_within_batch() is None:
        return
    config = accelerator.dataloader_config
    if config.dispatch_batches:
        raise ValueError(_DISPATCHED)
    if config.dispatch_batches is None:
        accelerator.dataloader_config = accelerator.replaced_config = replace(config, dispatch_batches=False)


def dispatcher_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse a dataloader that dispatches batches, where several processes see one batch.

    Accelerators make none then. Accelerate's function `prepare_data_loader` makes one of an iterable dataset, unless it
    is told not to.

    Raises:
        ValueError: Several processes see one batch.
    """
    if parallelism_within_batch() is not None:
        raise ValueError(_DISPATCHED)
    original(self, *args, **kwargs)


def prepare_sampler(data_loader: DataLoader[Any], dp_rank: int, seedable: bool) -> None:
    """Make a dataloader shuffle the same way on every process; called before Accelerate prepares it. Collective.

    Args:
        data_loader: The dataloader of the user or of Trainer.
        dp_rank: The data-parallel rank of this process.
        seedable: True if Accelerate will replace the sampler by a `SeedableRandomSampler`.
    """
    init = data_loader.worker_init_fn
    if isinstance(init, partial) and init.func is seed_worker:
        # Trainer seeds workers by process. Seed them by data-parallel process instead, so that tensor-parallel peers
        # draw the same augmentations.
        data_loader.worker_init_fn = partial(init.func, *init.args, **{**init.keywords, "rank": dp_rank})
    if isinstance(data_loader.batch_sampler, BatchRebalanceSampler):
        data_loader.batch_sampler.rank = dp_rank  # Trainer gave it the process's
    sampler = getattr(_dealer(data_loader), "sampler", None)
    if type(sampler) is RandomSampler and sampler.generator is None and not seedable:
        # Accelerate makes a generator too, but not in a run with tensor parallelism only.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(_from_rank_zero(int(torch.empty((), dtype=torch.int64).random_())))


def resumable(loader: Any) -> Any:
    """Make a dataloader that Accelerate has prepared shuffle with the seed of rank 0, and resumable in mid-epoch.

    Of an iterable dataset that has a length it also knows how many rows of the last batch are none of the dataset's, so
    that `gather_for_metrics` leaves them out; Accelerate counts the rows of this process's share. Collective.

    Returns:
        The dataloader, changed in place.
    """
    dealer = _dealer(loader)
    sampler = getattr(dealer, "sampler", None)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = _from_rank_zero(sampler.initial_seed)
    elif type(sampler) is RandomSampler:
        dealer.sampler = _Resumable(sampler)
    shard = loader.dataset
    if isinstance(shard, IterableDatasetShard):
        with suppress(TypeError, AttributeError):  # it has no length, or the loader no batches
            shard.total_dataset_length = len(shard.dataset)
            loader.batch_sampler.num_processes = shard.num_processes
    return loader


def _dealer(loader: Any) -> Any:
    """Return the innermost batch sampler of a dataloader.

    Accelerate's samplers that give each process its share are wrapped around it.
    """
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches


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
    """Return the state with which a dataloader repeats its shuffling from the start of the current epoch.

    Returns:
        The epoch and the seed, or the state of the generator; None if the dataloader does not shuffle.
    """
    sampler = getattr(_dealer(loader), "sampler", None)
    active = accelerator.gradient_state.active_dataloader is loader
    if isinstance(sampler, SeedableRandomSampler):
        # Accelerate sets the sampler's epoch to `loader.iteration`, which goes up only after the loop over an epoch.
        return {"epoch": loader.iteration + int(active and loader.end_of_dataloader), "seed": sampler.initial_seed}
    if not isinstance(sampler, _Resumable):
        return None
    inside = active and not loader.end_of_dataloader
    return {"generator": sampler.began if inside else sampler.generator.get_state()}


def check_sampler(loader: Any, saved: dict[str, Any] | None) -> None:
    """Check that a dataloader shuffles in the same way as the saved one.

    Args:
        loader: The dataloader.
        saved: The result of `sampler_state` for the saved dataloader.

    Raises:
        ValueError: The two shuffle in different ways, or only one of them shuffles.
    """
    sampler = getattr(_dealer(loader), "sampler", None)
    kind = "seed" if isinstance(sampler, SeedableRandomSampler) else "generator"
    present = isinstance(sampler, (SeedableRandomSampler, _Resumable))
    if (saved is not None and kind not in saved) or present != (saved is not None):
        raise ValueError(
            "a dataloader shuffles in another way than the one that was saved: keep shuffle= and use_seedable_sampler."
        )


def restore_sampler(loader: Any, saved: dict[str, Any] | None) -> None:
    """Make a dataloader shuffle as the saved one did, from the state that `sampler_state` returned."""
    sampler = getattr(_dealer(loader), "sampler", None)
    if saved is None:
        return
    if isinstance(sampler, SeedableRandomSampler):
        sampler.epoch = loader.iteration = saved["epoch"]
        sampler.initial_seed = saved["seed"]
    elif isinstance(sampler, _Resumable):
        sampler.generator.set_state(saved["generator"])
