"""Applications are compared by what their Trainer logs and saves; the page has the commands that start them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.applications.__main__ import row, started_by
from benchmarks.applications.cases import CASES
from benchmarks.applications.comparison import Differences, Outcome, compare, read

PAGE = Path(__file__).parents[2] / "docs" / "accelerate.md"
WANT = Outcome([3.0, 2.0], [1.0, 0.5], {"q": torch.zeros(2, 2)})


def test_an_output_folder_is_read(tmp_path):
    history = [{"loss": 3.0, "grad_norm": 1.0, "step": 1}, {"loss": 2.0, "grad_norm": 0.5}, {"train_loss": 2.5}]
    for folder, seen in ("checkpoint-1", history[:1]), ("checkpoint-2", history):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trainer_state.json").write_text(json.dumps({"log_history": seen}))
    save_file({"q": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    found = read(tmp_path)
    assert (found.losses, found.norms) == ([3.0, 2.0], [1.0, 0.5])
    assert [*found.adapter] == ["adapter_model.safetensors q"]


def test_the_largest_differences():
    got = Outcome([3.0, 2.25], [1.5, 0.5], {"q": torch.tensor([[0.0, -0.125], [0.0, 0.0]])})
    assert compare(got, WANT) == Differences(losses=0.25, norms=0.5, adapter=0.125)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"losses": [3.0]}, "1 steps in the place of 2"),
        ({"adapter": {"k": torch.zeros(2, 2)}}, "other tensors"),
        ({"adapter": {"q": torch.zeros(2)}}, "other tensors"),
    ],
)
def test_what_cannot_be_compared(changed, message):
    with pytest.raises(ValueError, match=message):
        compare(replace(WANT, **changed), WANT)


def test_a_row_says_what_failed():
    case = CASES[0]
    alone, first, *_ = case.runs()
    assert (alone.mesh, first.mesh) == ("", "1x2")
    assert row(case, first, Differences(1e-6, 2e-6, 1e-4)) == (
        "| TRL 1.16.0, sft | `torchrun` | 1x2 | 1.0e-06 | 2.0e-06 | 1.0e-04 |  |",
        True,
    )
    text, good = row(case, first, Differences(1e-4, float("nan"), 1e-4))
    assert "| **FAILED** 1.0e-04 | **FAILED** nan | 1.0e-04 |" in text
    assert not good
    assert row(case, first, "exit code 1")[1] is False


def test_data_parallel_processes_share_the_rows():
    for case in CASES:
        assert ["{" in run.command for run in case.runs()] == [False] * len([*case.runs()])
    rows = {run.name: re.search(r"train_batch_size (\d)", run.command)[1] for run in CASES[0].runs()}
    assert rows == {"alone": "8", "1x2": "8", "2x2": "4", "own0": "8"}


def test_the_page_has_each_command():
    page = PAGE.read_text()
    for run in (run for case in CASES for run in case.runs() if run.mesh):
        assert started_by(run.command).strip("`").partition(" --")[0] in page
