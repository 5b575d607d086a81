"""Dataloaders: the same shuffling on every process, and one that a run resumes in mid-epoch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler
from transformers.trainer_utils import seed_worker

from accelerate_plugin.accelerator import Own
from accelerate_plugin.parallelism import parallelism_of

__all__ = ["batch_size", "check_sampler", "prepare_data_loader", "restore_sampler", "sampler_state"]


def prepare_data_loader(own: Own, self: Accelerator, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> Any:
    """Accelerate deals out by data-parallel process; which order it deals in, rank 0 says. Collective."""
    parallelism = parallelism_of(self)
    if parallelism is None or getattr(data_loader, "_is_accelerate_prepared", False):
        return own(self, data_loader, *args, **kwargs)
    init = data_loader.worker_init_fn
    if isinstance(init, partial) and init.func is seed_worker:
        # By Trainer, for each process; tensor-parallel peers are to draw the same augmentations.
        data_loader.worker_init_fn = partial(init.func, *init.args, **{**init.keywords, "rank": parallelism.dp_rank})
    sampler = getattr(_dealer(data_loader), "sampler", None)
    if type(sampler) is RandomSampler and sampler.generator is None and not self.use_seedable_sampler:
        # Accelerate does so too, but not in a purely tensor-parallel run.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(_from_rank_zero(int(torch.empty((), dtype=torch.int64).random_())))
    loader = own(self, data_loader, *args, **kwargs)
    dealer = _dealer(loader)
    sampler = getattr(dealer, "sampler", None)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed = _from_rank_zero(sampler.initial_seed)
    elif type(sampler) is RandomSampler:
        dealer.sampler = _Resumable(sampler)
    return loader


def _dealer(loader: Any) -> Any:
    """What makes batches of a sampler's indices, inside of what gives each process its share of them."""
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches


def _from_rank_zero(seed: int) -> int:
    shared = [seed]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


class _Resumable(Sampler[int]):
    """A shuffling sampler that remembers where its generator stood as the epoch began."""

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
    """Of one process; None if a sampler of the user's has no such number."""
    size = getattr(_dealer(loader), "batch_size", None) or loader.batch_size
    return size if isinstance(size, int) else None


def sampler_state(accelerator: Accelerator, loader: Any) -> dict[str, Any] | None:
    """What makes a loader's sampler shuffle as it did, from the start of the epoch that it is in."""
    sampler = getattr(_dealer(loader), "sampler", None)
    active = accelerator.gradient_state.active_dataloader is loader
    if isinstance(sampler, SeedableRandomSampler):
        # Accelerate sets the sampler's epoch by the loader's count, which goes up once an epoch has been left.
        return {"epoch": loader.iteration + int(active and loader.end_of_dataloader), "seed": sampler.initial_seed}
    if not isinstance(sampler, _Resumable):
        return None
    inside = active and not loader.end_of_dataloader
    return {"generator": sampler.began if inside else sampler.generator.get_state()}


def check_sampler(loader: Any, saved: dict[str, Any] | None) -> None:
    """Check that a loader shuffles as the one that was saved.

    Raises:
        ValueError: It shuffles in another way.
    """
    sampler = getattr(_dealer(loader), "sampler", None)
    kind = "seed" if isinstance(sampler, SeedableRandomSampler) else "generator"
    present = isinstance(sampler, (SeedableRandomSampler, _Resumable))
    if (saved is not None and kind not in saved) or present != (saved is not None):
        raise ValueError(
            "a dataloader shuffles in another way than the one that was saved: keep shuffle= and use_seedable_sampler."
        )


def restore_sampler(loader: Any, saved: dict[str, Any] | None) -> None:
    """Shuffle as the saved sampler did."""
    sampler = getattr(_dealer(loader), "sampler", None)
    if saved is None:
        return
    if isinstance(sampler, SeedableRandomSampler):
        sampler.epoch = loader.iteration = saved["epoch"]
        sampler.initial_seed = saved["seed"]
    elif isinstance(sampler, _Resumable):
        sampler.generator.set_state(saved["generator"])
