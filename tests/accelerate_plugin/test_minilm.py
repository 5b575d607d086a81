"""A real checkpoint and real sentences under transformers' Trainer: as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Trainer, TrainingArguments

from tests.accelerate_plugin.harness import environment, launched
from tests.minilm import BATCH, RATE, STEPS, classifier, sentences
from tests.oracle import full, ranks_of, relative_error, trained


def trains(output: Path, mesh: str) -> dict[str, Any]:
    """A script's Trainer; without a mesh, stock Trainer in one process."""
    with launched(**(environment(mesh) if mesh else {})):
        model = classifier()
        dp = ranks_of(mesh) // int(mesh.split("x")[-1]) if mesh else 1
        arguments = TrainingArguments(
            str(output),
            per_device_train_batch_size=BATCH // dp,
            per_device_eval_batch_size=BATCH // dp,
            max_steps=STEPS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            logging_steps=1,
            # Otherwise Trainer multiplies the loss of a BERT classifier by the number of data-parallel processes, as
            # under DDP: the model takes `num_items_in_batch` and does not divide by it.
            average_tokens_across_devices=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=sentences())
        trainer.train()
        history = [each for each in trainer.state.log_history if "loss" in each]
        return {
            "loss": [each["loss"] for each in history],
            "norm": [each["grad_norm"] for each in history],
            "adapters": {name: full(p) for name, p in trained(trainer.model).items()},
            "predicted": trainer.predict(sentences()).predictions,
        }


@pytest.fixture(scope="module")
def one_process(tmp_path_factory) -> dict[str, Any]:
    return trains(tmp_path_factory.mktemp("one"), "")


@pytest.mark.matrix
def test_minilm_trains_as_in_one_process(pool, tmp_path, one_process):
    want = one_process
    for got in pool.run(ranks_of("2x2"), trains, tmp_path, "2x2"):
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert got["norm"] == pytest.approx(want["norm"], rel=1e-4)
        assert relative_error(got["adapters"], want["adapters"]) < 1e-3
        assert np.abs(got["predicted"] - want["predicted"]).max() < 1e-3


@pytest.mark.matrix
def test_the_oracle_learns(one_process):
    labels = sentences().columns["labels"].numpy()
    assert np.mean(one_process["loss"][-3:]) < 0.5 * one_process["loss"][0]
    assert (one_process["predicted"].argmax(-1) == labels).mean() > 0.9
