"""What is replaced in Accelerate and transformers: checked against the installed versions, undone without a trace."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from accelerate_plugin import patches
from accelerate_plugin.patches import PATCHES, check, patched, unpatched
from tests.accelerate_plugin.harness import Rows, launched
from tests.oracle import Case, trained


def test_the_installed_versions_are_those_it_was_written_for():
    check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "prepare_everything"}, "it is gone"),
        ({"parameters": "self models"}, r"its parameters are \(self args device_placement\), not \(self models\)"),
        ({"line": "result = self._prepare_fsdp3(*args)"}, "has no line"),
    ],
)
def test_a_changed_method_is_named(monkeypatch, change, message):
    [prepare] = [patch for patch in PATCHES if patch.name == "prepare"]
    monkeypatch.setattr(patches, "PATCHES", (replace(prepare, **change),))
    with pytest.raises(ImportError, match=r"accelerate .* changed accelerate\.accelerator\.Accelerator\.") as error:
        check()
    assert error.match(message)
    with pytest.raises(ImportError), patched():
        pass  # and nothing is replaced


def test_an_old_version_is_refused(monkeypatch):
    monkeypatch.setattr(patches, "version", lambda package: "1.14.0")
    with pytest.raises(ImportError, match=r"accelerate_plugin needs accelerate >= 1\.15, and 1\.14\.0 is installed"):
        check()


def test_each_has_a_reason_and_a_test_of_its_own():
    assert len({(patch.owner, patch.name) for patch in PATCHES}) == len(PATCHES)
    assert all(len(patch.reason) > 10 for patch in PATCHES)


UNDONE = """
from accelerate import Accelerator
from transformers import PreTrainedModel, Trainer
before = [dict(vars(kind)) for kind in (Accelerator, Trainer, PreTrainedModel)]
import os
os.environ["ACCELERATE_USE_FSDP"] = "true"
from accelerate_plugin import patches
assert Accelerator.prepare is not before[0]["prepare"]
assert vars(PreTrainedModel)["from_pretrained"] is not before[2]["from_pretrained"]
with patches.unpatched():
    assert before == [dict(vars(kind)) for kind in (Accelerator, Trainer, PreTrainedModel)]
assert Accelerator.prepare is not before[0]["prepare"]
print("undone")
"""


def test_they_can_be_undone():
    done = subprocess.run([sys.executable, "-c", UNDONE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("undone\n", 0), done.stderr
    assert "Error" not in done.stderr


def stock() -> tuple[list[float], dict[str, Any]]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = Case(lora={"lora_dropout": 0.3}).model()
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader: Any = DataLoader(Rows(torch.cat(Case().batches())), batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()).item())
    return losses, accelerator.get_state_dict(model)


def test_a_run_without_the_flag_is_what_it_was(monkeypatch):
    with launched():
        with_patches = stock()
    monkeypatch.setattr(patches, "check", lambda: None)
    with unpatched():
        assert not any(hasattr(vars(patch.target)[patch.name], patches._STANDS_IN) for patch in PATCHES)
        monkeypatch.setattr(patches, "PATCHES", ())
        with launched():
            losses, state = stock()
        monkeypatch.undo()
    assert with_patches[0] == losses
    assert with_patches[1].keys() == state.keys()
    assert all(torch.equal(with_patches[1][name], state[name]) for name in state)
