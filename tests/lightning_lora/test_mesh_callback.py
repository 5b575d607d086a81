"""`MeshCallback` under Lightning: what a CSVLogger writes on 1x2, with accumulation and validation."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_lora import MeshCallback
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, TOKENS, Tokens, loader, tidy, trainer, tuner

STEPS, ACCUMULATE = 4, 2


def run(folder: str) -> tuple[list[tuple[int, float]], dict[str, float]]:
    """Return the steps that were read and the tokens of each read, and the last numbers."""
    tokens: list[tuple[int, float]] = []

    class Counted(MeshCallback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            before = self.metrics
            if self._meter is not None:
                self._meter._seconds, self._meter._since = 1.0, None  # as if a step took a second
            super().on_train_batch_end(trainer, *args)
            if self.metrics is not before:
                tokens.append((trainer.global_step, self.metrics["mesh/tokens_per_second"]))

    callback = Counted(peak_flops=1e12, profile_every=3)
    with tidy():
        made = trainer(
            "1x2",
            callbacks=[callback],
            logger=CSVLogger(folder, flush_logs_every_n_steps=1),
            max_epochs=1,
            log_every_n_steps=1,
            accumulate_grad_batches=ACCUMULATE,
        )
        data = Tokens(STEPS * ACCUMULATE * ROWS)
        made.fit(tuner()(m.adapted), loader(data, "1x2"), loader(Tokens(ROWS), "1x2"))
    return tokens, callback.metrics


def test_a_csv_logger_gets_the_numbers(pool, tmp_path):
    answers = pool.run(2, run, str(tmp_path))
    reads, _ = answers[0]
    assert [step for step, _ in reads] == [1, 2, 3, 4]
    for step, tokens in reads:  # step 3 was profiled
        assert tokens == (0 if step == 3 else ROWS * TOKENS * ACCUMULATE)
    assert all(answer == answers[0] for answer in answers)
    (file,) = Path(tmp_path).rglob("metrics.csv")
    rows = {int(row["step"]): row for row in csv.DictReader(file.open()) if row["mesh/memory_max_bytes"]}
    assert sorted(rows) == [1, 2, 3, 4]
    assert float(rows[2]["mesh/tokens_per_second"]) > 0
    assert 0 < float(rows[2]["mesh/mfu"]) < 1
    assert 0 < float(rows[3]["mesh/communication_share"]) < 1
    assert rows[2]["mesh/communication_share"] == ""
    assert float(rows[1]["mesh/memory_max_bytes"]) >= float(rows[1]["mesh/memory_min_bytes"]) > 0


@pytest.mark.parametrize("package", ["lightning_lora", "lightning_lora.legacy"])
def test_it_is_a_callback_of_each_namespace(package):
    pytest.importorskip("lightning.pytorch" if package == "lightning_lora" else "pytorch_lightning")
    namespace = "lightning.pytorch" if package == "lightning_lora" else "pytorch_lightning"
    assert issubclass(import_module(package).MeshCallback, import_module(namespace).Callback)
