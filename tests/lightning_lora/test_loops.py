"""Validate, test and predict around fit, in any order: the same numbers, and nothing that fit could stumble over.

Under gloo Lightning evaluates with `no_grad`; on GPUs with `inference_mode`, whose tensors can never be trained with.
So the exemption for gloo is taken away here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch.loops.utilities as loops
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import (
    ROWS,
    Gradients,
    Outcome,
    Tokens,
    check,
    finish,
    loader,
    share,
    tidy,
    trainer,
    tuner,
)
from tests.oracle import parse_mesh, ranks_of
from tests.oracle.workers import Failure, attempt

Tuner = tuner()


@contextmanager
def without_gloo_exemption() -> Iterator[None]:
    """Evaluation loops decide as they do on GPUs."""
    real = loops._distributed_is_initialized
    loops._distributed_is_initialized = lambda: False
    try:
        yield
    finally:
        loops._distributed_is_initialized = real


class Watched(Tuner):
    """Notes in which mode evaluation ran."""

    def validation_step(self, *args: Any) -> None:
        self.inference = torch.is_inference_mode_enabled()
        super().validation_step(*args)


def sequence(mesh: str | None, order: list[str], **lora: Any) -> tuple[Outcome, bool]:
    """Calls of one Trainer on one module, in this order; each fit is two steps on other data."""
    module, watch = Watched(m.adapted), Gradients()
    with tidy(), without_gloo_exemption():
        run = trainer(mesh, lora, max_epochs=0, precision="64-true", callbacks=[watch], num_sanity_val_steps=1)
        metrics: dict[str, float] = {}
        for index, call in enumerate(order):
            held_out = loader(Tokens(2 * ROWS, seed=90), mesh)
            if call == "fit":
                run.fit_loop.max_epochs += 1
                run.fit(module, loader(Tokens(2 * ROWS, seed=index), mesh), held_out)
            else:
                result = getattr(run, call)(module, held_out, **({} if call == "predict" else {"verbose": False}))
                if call == "predict":
                    logits = torch.stack([batch["logits"].double().square().mean() for batch in result]).mean()
                    metrics[f"{index} {call}"] = mean_over_ranks(logits)
            metrics.update({f"{index} {name}": float(value) for name, value in run.callback_metrics.items()})
        assert run.global_step == 2 * order.count("fit")
        outcome = finish(module, run, watch.outcome)
        outcome.metrics = metrics
        return outcome, getattr(module, "inference", False)


def mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


ORDERS = [
    ["validate", "fit", "test", "predict", "fit", "validate"],
    ["predict", "test", "fit"],
    ["fit", "predict", "fit", "test"],
]


@pytest.mark.parametrize(
    ("mesh", "orders"),
    cases(("2x1", ORDERS[:2]), matrix=[("2x1", ORDERS[2:]), ("2x2", ORDERS), ("1x2", ORDERS[:1])]),
)
def test_evaluation_leaves_training_as_it_was(pool, mesh, orders):
    for order in orders:
        want, _ = sequence(None, order)
        for got, inference in pool.run(ranks_of(mesh), sequence, mesh, order):
            check(got, want)
            assert got.metrics == pytest.approx(want.metrics, abs=1e-6)
            assert inference == (order[-1] == "validate")  # the loop of a fit has it off


# ---------------------------------------------------------------------- prediction on uneven shares


def predictions(mesh: str | None, samples: int, batch_size: int, loaders: int = 1) -> list[list[tuple[int, Tensor]]]:
    """(index, logits) of each sample that this rank predicted, for each loader; twice with one Trainer, then fit."""
    module = Tuner(m.adapted)
    with tidy(), without_gloo_exemption():
        run = trainer(mesh, use_distributed_sampler=True, max_epochs=1, precision="64-true")
        data = [DataLoader(Tokens(samples + i), batch_size=batch_size) for i in range(loaders)]
        for _ in range(2):
            batches = run.predict(module, data if loaders > 1 else data[0])
        assert batches is not None
        if mesh is not None:  # nothing is left over that the next run could trip on
            run.fit(module, DataLoader(Tokens(2), batch_size=1))
    found = []
    for each in batches if loaders > 1 else [batches]:
        pairs = [(i, row) for batch in each for i, row in zip(batch["index"].tolist(), batch["logits"], strict=True)]
        found.append(pairs)
    return found


@pytest.mark.parametrize(
    ("mesh", "samples", "batch_size", "loaders"),
    cases(
        ("2x2", 5, 1, 2),
        ("2x1", 5, 2, 1),
        matrix=[("2x2", 5, 2, 1), ("2x1", 3, 1, 1), ("1x2", 3, 2, 1), ("2x2x2", 5, 2, 1)],
    ),
)
def test_every_sample_is_predicted_once(pool, mesh, samples, batch_size, loaders):
    want = predictions(None, samples, batch_size, loaders)
    tp = parse_mesh(mesh)["tp"]
    answers = pool.run(ranks_of(mesh), predictions, mesh, samples, batch_size, loaders)
    for which, wanted in enumerate(want):
        found = [pair for answer in answers[::tp] for pair in answer[which]]
        assert sorted(index for index, _ in found) == list(range(samples + which))
        for index, logits in found:
            torch.testing.assert_close(logits, wanted[index][1], rtol=0, atol=1e-9)
    for rank, answer in enumerate(answers):  # tp peers predict the same samples
        assert [[i for i, _ in pairs] for pairs in answer] == [[i for i, _ in p] for p in answers[rank // tp * tp]]


def too_few() -> list[Any]:
    with tidy():
        run = trainer("2x1", use_distributed_sampler=True, max_epochs=1)
        module = Tuner(m.adapted)
        failure = attempt(run.predict, module, DataLoader(Tokens(1), batch_size=1))
        again = run.predict(module, DataLoader(Tokens(2), batch_size=1))
        return [failure, len(again or [])]


def test_fewer_samples_than_data_parallel_ranks(pool):
    for failure, batches in pool.run(2, too_few):
        assert isinstance(failure, Failure)
        assert failure.kind == "ValueError"
        assert "1 samples for 2 data-parallel processes" in failure.message
        assert batches == 1


# ---------------------------------------------------------------------- what ranks tell one another


class Talking(Tuner):
    """Logs and gathers values that say which data-parallel rank they come from."""

    def __init__(self, mesh: str) -> None:
        super().__init__(m.adapted)
        self.share = share(mesh)
        self.rows_seen, self.mean_rank = SumMetric(), MeanMetric()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        rank = float(self.share[1])
        for name in ("mean", "sum", "max", "min"):
            self.log(name, rank + 1, sync_dist=True, reduce_fx=name)
        self.log("rows", torch.tensor(float(len(batch["index"]))), sync_dist=True, reduce_fx="sum")
        self.log("epoch_mean", rank + 10 * batch_idx, on_step=False, on_epoch=True, sync_dist=True)
        self.log("unsynced", rank)
        self.rows_seen(len(batch["index"]))
        self.mean_rank(rank)
        self.log("rows_seen", self.rows_seen, on_step=False, on_epoch=True)
        self.log("mean_rank", self.mean_rank, on_step=False, on_epoch=True)
        gathered = self.all_gather({"rank": torch.tensor([rank, -1.0]), "index": batch["index"]})
        self.gathered = {name: tensor.tolist() for name, tensor in gathered.items()}
        return super().training_step(batch, batch_idx)


def talk(mesh: str) -> tuple[dict[str, float], dict[str, Any]]:
    module = Talking(mesh)
    with tidy():
        run = trainer(mesh, max_epochs=1)
        run.fit(module, loader(Tokens(2 * ROWS), mesh))
    return {name: float(value) for name, value in run.callback_metrics.items()}, module.gathered


@pytest.mark.parametrize("mesh", ["2x2", "1x4", "2x2x2"])
def test_logged_and_gathered_values_are_over_data_parallel_ranks(pool, mesh):
    tp = parse_mesh(mesh)["tp"]
    size = ranks_of(mesh) // tp
    for rank, (metrics, gathered) in enumerate(pool.run(ranks_of(mesh), talk, mesh)):
        assert metrics["mean"] == sum(range(1, size + 1)) / size
        assert metrics["sum"] == sum(range(1, size + 1))
        assert metrics["max"] == size
        assert metrics["min"] == 1
        assert metrics["rows"] == ROWS
        assert metrics["epoch_mean"] == (size - 1) / 2 + 5
        assert metrics["unsynced"] == rank // tp
        assert metrics["rows_seen"] == 2 * ROWS, "torchmetrics counted tp peers"
        assert metrics["mean_rank"] == (size - 1) / 2
        assert gathered["rank"] == [[float(r), -1.0] for r in range(size)]
        # In the order of data-parallel ranks, the shares make up the global batch.
        assert [i for share in gathered["index"] for i in share] == list(range(ROWS, 2 * ROWS))


def gathered_gradient() -> tuple[list[float], list[float], list[Any]]:
    """d/dx of sum_i w_i x_i over the gathered x, on this rank; its share of the whole. And the gather of a view."""
    with tidy():
        run = trainer("2x2", max_epochs=1)
        module = Tuner(m.adapted)
        run.fit(module, loader(Tokens(ROWS), "2x2"))
        x = torch.tensor([1.0, 2.0], requires_grad=True)
        rows = module.all_gather(x, sync_grads=True)
        (rows * torch.tensor([[3.0], [5.0]])).sum().backward()
        turned = torch.arange(6.0).view(2, 3).T + dist.get_rank() // 2
        assert not turned.is_contiguous()
        return rows.flatten().tolist(), x.grad.tolist(), module.all_gather(turned).tolist()  # type: ignore[union-attr]


def test_gather_with_gradients(pool):
    """As under DDP: backward sums what the data-parallel ranks' losses say of this rank's row."""
    for rank, (rows, gradient, turned) in enumerate(pool.run(4, gathered_gradient)):
        assert turned == [[[row + share, row + 3.0 + share] for row in range(3)] for share in range(2)]
        assert rows == [1.0, 2.0, 1.0, 2.0]
        weight = 2 * [3.0, 5.0][rank // 2]
        assert gradient == [weight, weight]


class Stopping(Tuner):
    """Monitors a value that only the last rank sees rise."""

    def on_train_epoch_end(self) -> None:
        worse = dist.get_rank() == dist.get_world_size() - 1 and self.current_epoch == 1
        self.log("monitored", 9.0 if worse else 1.0 - 0.1 * self.current_epoch)


def stop_early() -> tuple[int, bool, list[bool]]:
    with tidy():
        callback = EarlyStopping("monitored", patience=1, check_on_train_epoch_end=True)
        run = trainer("1x2", max_epochs=5, callbacks=[callback])
        run.fit(Stopping(m.adapted), loader(Tokens(ROWS), "1x2"))
        reduce, mine = run.strategy.reduce_boolean_decision, dist.get_rank() == 1
        decisions = [reduce(mine), reduce(mine, all=False), reduce(True), reduce(False, all=False)]
        return run.current_epoch, run.should_stop, decisions


def test_all_ranks_stop_together(pool):
    """One tp rank alone asks to stop: decisions count every process, not every data-parallel rank."""
    for epochs, should_stop, decisions in pool.run(2, stop_early):
        assert epochs == 2
        assert should_stop
        assert decisions == [False, True, True, False]
