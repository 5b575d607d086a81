"""The real thing: a script that Lightning's own launcher starts, with one flag and Lightning's defaults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from torch.utils.data import Subset

from lightning_lora import strategy_base
from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import Tokens, fit, tidy, tuner
from tests.oracle import relative_error
from tests.oracle.workers import SCRIPT_LIMIT

STEPS = 3

# An ordinary training script: samplers, workers, checkpoint and logging are what Lightning makes of its defaults.
SCRIPT = """
import json, random, sys
import lightning as L
import torch
import lightning_lora
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import Tokens

torch.set_num_threads(1)

class Noisy(Tokens):
    def __getitem__(self, index):
        noise = torch.tensor([torch.rand(()).item(), random.random()])
        return {**super().__getitem__(index), "noise": noise}

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.seen = None, {"losses": [], "index": [], "noise": []}

    def configure_model(self):
        if self.model is None:
            self.model = m.adapted()

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        self.seen["losses"].append(loss.item())
        for name in ("index", "noise"):
            self.seen[name].append(batch[name].tolist())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)

if __name__ == "__main__":
    out = sys.argv[1]
    L.seed_everything(21, workers=True)
    trainer = L.Trainer(
        strategy=sys.argv[2], accelerator="cpu", devices=int(sys.argv[3]), max_epochs=1, precision="64-true",
        default_root_dir=out, log_every_n_steps=1,
    )
    module = Module()
    loader = torch.utils.data.DataLoader(Noisy(24), batch_size=4, shuffle=True, num_workers=1)
    trainer.fit(module, loader)
    sampler = trainer.train_dataloader.sampler
    found = {
        **module.seen,
        "world": trainer.world_size,
        "mesh": list(trainer.strategy.device_mesh.shape),
        "sampler": [type(sampler).__name__, sampler.num_replicas, sampler.rank],
        "checkpoint": trainer.checkpoint_callback.best_model_path,
        "logged": trainer.callback_metrics["loss"].item(),
        "types": sorted({type(p).__name__ for p in module.model.parameters()}),
    }
    with open(f"{out}/{trainer.global_rank}.json", "w") as file:
        json.dump(found, file)
"""


def launch(script: Path, *arguments: str) -> None:
    """Run a script in a session of its own, which ends with it whatever happens."""
    root = str(Path(__file__).parents[2])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(
        [sys.executable, str(script), *arguments],
        env=variables,
        cwd=script.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SCRIPT_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"no end in {SCRIPT_LIMIT} s:\n{process.communicate()[0][-4000:]}")
    assert process.returncode == 0, output[-4000:]


@pytest.mark.processes
@pytest.mark.parametrize(("flag", "tp"), cases(("lora_fsdp2", 1), matrix=[("lora_fsdp2_tp", 2)]))
def test_one_flag(tmp_path, flag, tp):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launch(script, str(tmp_path), flag, str(2 * tp))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2 * tp)]

    for rank, found in enumerate(ranks):
        assert found["world"] == 2 * tp
        assert found["mesh"] == [1, 2, tp]
        assert found["sampler"] == ["DistributedSampler", 2, rank // tp]
        assert found["types"] == ["DTensor"]
        assert found["checkpoint"] == ranks[0]["checkpoint"]
        assert len(found["losses"]) == STEPS

    # tp peers saw the same samples, augmented alike; data-parallel ranks others, augmented otherwise.
    for row in (ranks[:tp], ranks[tp:]):
        assert all(peer["index"] == row[0]["index"] and peer["noise"] == row[0]["noise"] for peer in row)
    one, other = ranks[0], ranks[tp]
    assert not set(flat(one["index"])) & set(flat(other["index"]))
    assert not {tuple(pair) for pair in flat(one["noise"])} & {tuple(pair) for pair in flat(other["noise"])}

    # One process, fed each step's samples of both data-parallel ranks.
    order = [i for first, second in zip(one["index"], other["index"], strict=True) for i in (*first, *second)]
    assert sorted(order) == list(range(24))
    with tidy():
        want = fit(tuner()(m.adapted, late=True), None, STEPS, Subset(Tokens(24), order), precision="64-true")
    losses = [(first + second) / 2 for first, second in zip(one["losses"], other["losses"], strict=True)]
    assert losses == pytest.approx(want.losses, abs=1e-6)
    assert one["logged"] == pytest.approx(want.losses[-1], abs=1e-6)
    saved = PeftModel.from_pretrained(m.plain().double(), Path(one["checkpoint"]) / "adapter")
    assert relative_error(adapter(saved), {n.removeprefix("model."): t for n, t in want.adapters.items()}) <= 1e-10


# Where a peer is lost, a rank that waits over NCCL waits on: nothing reaches it. Here it sleeps.
FAILING = """
import sys, time
import lightning as L
import lightning_lora
import torch
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import Tokens

torch.set_num_threads(1)

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = m.adapted()

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            if self.trainer.global_rank == int(sys.argv[2]):
                time.sleep(1)  # so that the other one waits
                raise ValueError("this rank is lost")
            time.sleep(1000)
        return self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=1e-2)

if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="lora_fsdp2_tp", accelerator="cpu", devices=2, max_steps=4, default_root_dir=sys.argv[1],
        enable_checkpointing=False, logger=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Tokens(24), batch_size=4))
"""


@pytest.mark.matrix
@pytest.mark.processes
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_other_one(tmp_path, lost):
    """Lightning ends all if a process that it started is lost, and not if the one that started them is."""
    script = tmp_path / "train.py"
    script.write_text(FAILING)
    with pytest.raises(AssertionError, match="this rank is lost"):
        launch(script, str(tmp_path), str(lost))


def test_an_error_is_told_before_it_ends_the_processes_that_were_started(monkeypatch):
    told: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: told.append((error[1], waiting.poll())))
    monkeypatch.setattr(strategy_base, "_PATIENCE", 0.2)
    ending, waiting = (subprocess.Popen(["sleep", seconds]) for seconds in ("0.01", "100"))
    strategy_base.end_after_an_error([ending, waiting])
    error = ValueError("this rank is lost")
    sys.excepthook(ValueError, error, None)
    assert told == [(error, None)]
    assert (ending.wait(5), waiting.wait(5)) == (0, -signal.SIGKILL)


def flat(nested: list[list]) -> list:
    return [item for inner in nested for item in inner]


def adapter(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if "lora_" in name}
