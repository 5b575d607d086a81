"""`MeshCallback` under Trainer: what its log_history and a callback of report_to get on 2x1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from accelerate_plugin import MeshCallback
from tests.accelerate_plugin.harness import environment, launched
from tests.accelerate_plugin.test_trainer import ROWS, make
from tests.oracle import causal_lm

STEPS, TOKENS = 4, 12


class Reports(TrainerCallback):
    """Hear of logs as the callbacks of report_to do, which come before the callbacks that a user gives."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.entries.append(dict(logs))


class Seconds(MeshCallback):
    """Let the steps between two reads seem to have taken a second."""

    def read(self) -> dict[str, float]:
        if self._meter is not None:
            self._meter._seconds, self._meter._since = 1.0, None
        return super().read()


def run(base: Path, output: Path, mesh: str) -> list[list[dict[str, Any]]]:
    with launched(**(environment(mesh) if mesh else {})):
        trainer = make(base, output, 2 if mesh else 1, max_steps=STEPS, save_strategy="no")
        reports = Reports()
        trainer.callback_handler.callbacks.insert(0, reports)
        trainer.add_callback(Seconds(peak_flops=1e9, profile_every=3))
        trainer.train()
        return [trainer.state.log_history, reports.entries]


def test_the_numbers_are_in_the_entries_of_training(pool, tmp_path):
    causal_lm(dtype=torch.float32).save_pretrained(tmp_path / "base")
    alone = pool.run(1, run, tmp_path / "base", tmp_path / "alone", "")
    answers = pool.run(2, run, tmp_path / "base", tmp_path / "mesh", "2x1")
    for history, reported in [*alone, *answers]:
        entries = [entry for entry in history if "loss" in entry]
        assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
        for step, entry in enumerate(entries, 1):
            # Gradients of two batches are accumulated in a step. That of step 3 is profiled, and not in the speed.
            assert entry["mesh/tokens_per_second"] == (0 if step == 3 else 2 * ROWS * TOKENS)
            assert ("mesh/communication_share" in entry) == (step == 3)
            assert entry["mesh/memory_max_bytes"] >= entry["mesh/memory_min_bytes"] > 0
        assert [entry.get("mesh/mfu") for entry in reported if "loss" in entry] == [e["mesh/mfu"] for e in entries]
        assert not any("mesh/mfu" in entry for entry in history if "loss" not in entry)
    # Two devices do the same operations in the same second.
    assert answers[0][0][0]["mesh/mfu"] == pytest.approx(alone[0][0][0]["mesh/mfu"] / 2, rel=1e-3)
