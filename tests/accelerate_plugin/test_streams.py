"""Trainer on streams of `datasets`: the rows and losses are those of stock DDP on two processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

pytest.importorskip("datasets")

from datasets import IterableDataset

from tests.accelerate_plugin.harness import environment, launched
from tests.accelerate_plugin.test_trainer import make
from tests.cases import cases
from tests.oracle import full, ranks_of, relative_error, trained

FILES, ROWS = 4, 8  # files of a stream, and rows of each
SHORT, PREDICTED = 27, 13  # rows that leave a last batch of an odd number


def rows(files: list[int]) -> Iterator[dict[str, list[int]]]:
    """Yield the rows of some files; the first token of a row is its number."""
    for file in files:
        for row in range(file * ROWS, (file + 1) * ROWS):
            tokens = torch.randint(0, 131, (12,), generator=torch.Generator().manual_seed(row))
            tokens[0] = row
            yield {"input_ids": tokens.tolist(), "labels": tokens.tolist()}


def stream(shuffled: bool = False, kept: int = FILES * ROWS, seed: int | None = 5) -> IterableDataset:
    made = IterableDataset.from_generator(rows, gen_kwargs={"files": list(range(FILES))})
    made = made if kept == FILES * ROWS else made.take(kept)
    return (made.shuffle(seed, buffer_size=ROWS) if shuffled else made).with_format("torch")


class Recording(Trainer):
    """Note the rows of each batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rows: list[list[int]] = []

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self.rows.append(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


DEALS: dict[str, dict[str, Any]] = {
    "by default": {},
    "files by process": {"accelerator_config": {"dispatch_batches": False}},
}


def trains(base: Path, output: Path, mesh: str, dp: int, shuffled: bool, deal: str, kept: int) -> dict[str, Any]:
    """Train for more than an epoch of a stream, and predict; without a mesh in stock Trainer, on all processes."""
    settings = {"eval_strategy": "no", "save_strategy": "no", "gradient_accumulation_steps": 1, **DEALS[deal]}
    with launched(**(environment(mesh) if mesh else {})):
        made = make(base, output, dp, {"target_modules": ["o_proj"]}, max_steps=6, **settings)
        trainer = Recording(made.model, made.args, train_dataset=stream(shuffled, kept))
        trainer.train()
        # Where each process has files of its own, stock processes would gather uneven shares.
        held_out = stream(kept=PREDICTED if deal == "by default" else FILES * ROWS)
        predicted = trainer.predict(held_out)
        return {
            "predicted": predicted.label_ids[:, 0].tolist(),
            "test loss": predicted.metrics["test_loss"],
            "place": trainer.accelerator.process_index,
            "rows": trainer.rows,
            "losses": [each["loss"] for each in trainer.state.log_history if "loss" in each],
            "adapters": {name: full(p) for name, p in trained(trainer.model).items()},
        }


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["2x1", "2x1cp2", "2x1pp2"]))
@pytest.mark.parametrize(
    ("shuffled", "deal", "kept"),
    cases(
        (False, "files by process", FILES * ROWS),
        (True, "by default", SHORT),
        matrix=[(True, "by default", FILES * ROWS), (False, "by default", SHORT)],
    ),
)
def test_rows_and_losses_are_those_of_ddp_on_two_processes(pool, base, tmp_path, mesh, shuffled, deal, kept):
    """An epoch is four steps, so that the next one begins, and shuffles anew."""
    want = pool.run(2, trains, base, tmp_path / "ddp", "", 2, shuffled, deal, kept)
    alone = trains(base, tmp_path / "one", "", 1, shuffled, deal, kept)
    dealt = [a + b for a, b in zip(want[0]["rows"], want[1]["rows"], strict=True)]
    assert (dealt == alone["rows"]) == (deal == "by default" and kept == FILES * ROWS)
    assert sorted({row for batch in dealt[:4] for row in batch}) == list(range(kept))
    assert len(dealt[3]) == (8 if kept != SHORT else 4), "three rows, and one that fills them up"
    if deal == "by default":
        assert alone["predicted"] == want[0]["predicted"] == list(range(PREDICTED))
    assert (dealt[4:] == dealt[:2]) == (not shuffled)
    got = pool.run(ranks_of(mesh), trains, base, tmp_path / "ours", mesh, 2, shuffled, deal, kept)
    assert {found["place"] for found in got} == {0, 1}
    for found in got:
        place = want[found["place"]]
        assert found["rows"] == place["rows"]
        assert found["predicted"] == place["predicted"]
        assert found["test loss"] == pytest.approx(place["test loss"], abs=1e-5)
        assert found["losses"] == pytest.approx(place["losses"], abs=1e-5)
        if "pp" not in mesh:
            assert relative_error(found["adapters"], place["adapters"]) < 1e-3
