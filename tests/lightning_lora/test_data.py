"""Who sees which samples: by data-parallel rank, never by process."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Tokens, share, tidy, trainer, tuner
from tests.oracle import parse_mesh, ranks_of
from tests.oracle.workers import Failure, attempt


class Listing(tuner()):  # type: ignore[misc]
    """Lists the indices of the samples it sees."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        self.seen: dict[str, list[list[int]]] = {"train": [], "validate": [], "test": []}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        while len(self.seen["train"]) <= self.current_epoch:
            self.seen["train"].append([])
        self.seen["train"][-1] += batch["index"].tolist()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen["validate"].append(batch["index"].tolist())
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen["test"].append(batch["index"].tolist())
        super().test_step(batch, batch_idx)


def listed(mesh: str) -> tuple[dict[str, list[list[int]]], dict[str, Any]]:
    """What this rank saw with the samplers that Lightning injects."""
    module = Listing()
    with tidy():
        pl.seed_everything(3)
        run = trainer(mesh, use_distributed_sampler=True, max_epochs=2, num_sanity_val_steps=0)
        run.fit(module, DataLoader(Tokens(16), batch_size=2, shuffle=True))
        sampler = run.train_dataloader.sampler  # type: ignore[union-attr]
        run.validate(module, DataLoader(Tokens(6), batch_size=1), verbose=False)
        run.test(module, DataLoader(Tokens(6), batch_size=1), verbose=False)
        return module.seen, {"kind": type(sampler).__name__, "size": sampler.num_replicas, "rank": sampler.rank}


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["1x2", "2x2x2"]))
def test_injected_samplers(pool, mesh):
    tp = parse_mesh(mesh)["tp"]
    size = ranks_of(mesh) // tp
    answers = pool.run(ranks_of(mesh), listed, mesh)
    for rank, (seen, sampler) in enumerate(answers):
        assert sampler == {"kind": "DistributedSampler", "size": size, "rank": rank // tp}
        assert seen == answers[rank // tp * tp][0], "tp peers saw different samples"
    shares = [seen for seen, _ in answers[::tp]]
    for epoch in range(2):
        assert sorted(i for seen in shares for i in seen["train"][epoch]) == list(range(16))
    assert shares[0]["train"][0] != shares[0]["train"][1], "not shuffled anew"
    for name in ("validate", "test"):
        assert {i for seen in shares for batch in seen[name] for i in batch} == set(range(6))
        assert len({len(seen[name]) for seen in shares}) == 1


def unequal_batches() -> list[Any]:
    """Peers over tp are given different batches: data shared out by process."""
    with tidy():
        run = trainer("1x2", max_epochs=1)
        by_process = torch.distributed.get_rank()
        return [attempt(run.fit, tuner()(m.adapted), DataLoader(Tokens(2, seed=by_process), batch_size=2))]


def test_data_by_process_is_refused(pool):
    for (failure,) in pool.run(2, unequal_batches):
        assert isinstance(failure, Failure)
        assert failure.kind == "RuntimeError"
        assert "fed different batches" in failure.message
        assert "data-parallel rank" in failure.message


class Endless(IterableDataset):
    """Rows without a length."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Any:
        return iter(Tokens(2 * ROWS, seed=self.rank))


def iterable(mesh: str) -> list[float]:
    module = tuner()(m.adapted)
    with tidy():
        run = trainer(mesh, use_distributed_sampler=True, max_steps=2)
        run.fit(module, DataLoader(Endless(share(mesh)[1]), batch_size=2))
        assert run.global_step == 2
    return [loss.item() for loss in module.losses]


def test_iterable_datasets(pool):
    """Lightning injects nothing there: the user's own split by data-parallel rank is kept."""
    answers = pool.run(4, iterable, "2x2")
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert answers[0] != answers[2]


def initialise(worker: int, note: list[int]) -> None:
    note.append(worker)


def worker_seeds() -> dict[str, Any]:
    """What the strategy makes of loaders, by `seed_everything`'s `workers` and the loader's own function."""
    found: dict[str, Any] = {}
    own = partial(initialise, note=[])
    for workers in (False, True):
        with tidy():
            pl.seed_everything(3, workers=workers)
            run = trainer("1x2", max_epochs=1, use_distributed_sampler=True)
            loaders = [
                DataLoader(Tokens(ROWS), batch_size=2),
                DataLoader(Tokens(ROWS), batch_size=2, worker_init_fn=own),
            ]
            found[f"{workers} env"] = os.environ["PL_SEED_WORKERS"]
            for which, data in zip(("none", "own"), loaders, strict=True):
                run.fit(tuner()(m.adapted), data)
                function = run.train_dataloader.worker_init_fn  # type: ignore[union-attr]
                if function is not None and which == "none":
                    found[f"{workers} {which}"] = function.keywords
                else:
                    found[f"{workers} {which}"] = function is not None and function.func is initialise
    return found


def test_worker_seeds_are_by_data_parallel_rank(pool):
    for found in pool.run(2, worker_seeds):
        assert found["False none"] is False
        assert found["True none"] == {"rank": 0}
        assert found["False own"] is True
        assert found["True own"] is True
