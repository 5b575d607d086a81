"""A real checkpoint and real sentences under Lightning: as in one process."""

from __future__ import annotations

import pytest
import torch

from tests.cases import cases
from tests.lightning_lora.harness import Outcome, check, fit, tidy, tuner
from tests.minilm import BATCH, RATE, STEPS, classifier, sentences
from tests.oracle import ranks_of


def loss_of(module, batch):
    return module.model(**batch).loss


def trains(mesh: str | None, late: bool = False, **lora) -> Outcome:
    passes = STEPS * BATCH // len(sentences())
    with tidy():
        module = tuner()(classifier, late=late, loss=loss_of, lr=RATE)
        return fit(module, mesh, STEPS, sentences(passes), lora=lora)


@pytest.fixture(scope="module")
def one_process() -> Outcome:
    return trains(None)


@pytest.mark.matrix
@pytest.mark.parametrize("late", cases(True, matrix=[False]))
def test_minilm_trains_as_in_one_process(pool, one_process, late):
    """Built in `__init__`, or in `configure_model` and read from the checkpoint by slices."""
    for got in pool.run(ranks_of("2x2"), trains, "2x2", late):
        check(got, one_process, close=1e-5)


@pytest.mark.matrix
def test_the_oracle_learns(one_process):
    """And so do all of its parts."""
    assert torch.tensor(one_process.losses[-3:]).mean() < 0.5 * one_process.losses[0]
    assert any("modules_to_save" in name for name in one_process.raw)
    assert all(gradient.norm() > 0 for name, gradient in one_process.raw.items() if "lora_A" not in name)
