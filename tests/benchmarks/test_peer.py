"""The page of the comparison with other libraries: how results become cells."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peer.jobs import Job, labels_of, micro_batches
from benchmarks.peer.launch import Failure
from benchmarks.peer.notes import NOTES
from benchmarks.peer.page import cell_text, page
from benchmarks.peer.rows import ROWS, Cell, compared, failed

ROW = ROWS["gradients"]


def test_ranks_take_the_rows_of_a_step_between_them():
    job = Job(steps=2, accumulate=2, rows=16)
    taken = [micro for rank in range(2) for micro in micro_batches(job, 1, rank, 2)]
    assert {tuple(row.tolist()) for micro in taken for row in micro} == {tuple(row.tolist()) for row in job.data()[16:]}
    assert (labels_of(taken[0])[:, 0] == -100).all()


def test_a_cell_is_the_largest_error_of_any_rank():
    want = {"a": torch.ones(2, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}
    cell = compared(ROW, [want, {**want, "b": want["b"] * 1.5}], want)
    assert (cell.error, cell.good) == (0.5, False)
    assert compared(ROW, [want], want).good
    assert compared(ROW, [{"a": want["a"]}], want).words == "1 of 2 missing"
    assert not compared(ROW, [{**want, "a": torch.full((2,), float("nan"))}], want).good


@pytest.mark.parametrize(
    ("message", "refused"),
    [("DoRA does not support this.\nMore.", True), ("shape '[96, 12]' is invalid", False)],
)
def test_an_error_is_its_type_and_first_line(message, refused):
    cell = failed(Failure("ValueError", message, ""))
    assert (cell.failure, cell.refused) == (f"ValueError: {message.splitlines()[0]}", refused)


def test_the_page_numbers_its_notes():
    results = {
        "gradients | ours | 2x1": Cell(error=4e-16),
        "gradients | accelerate | 2x2": Cell(failure="RuntimeError: The parallel mesh requires 2 processes"),
        "DoRA | lightning | 2x1": Cell(failure="TypeError: other"),
        "dropout | transformers | 2x1": Cell(words="dp same", good=False),
    }
    text = page(results, 1e-12, 1e-6, "With nothing.")
    assert "| gradients | 4e-16 |" in text
    assert "**dp same** (1)" in text
    assert "2. `TypeError: other`" in text
    assert next(note.text for note in NOTES if note.peer == "accelerate") in text
    assert cell_text(None, 0) == ""
