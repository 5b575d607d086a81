"""Trainer without adapters, and around them: a whole model that trains, a module around a PeftModel, an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from tests.accelerate_plugin.harness import Rows, environment, launched, plugin
from tests.cases import cases
from tests.logs import listening
from tests.oracle import causal_lm, dp_of, full, lora_config, ranks_of, relative_error, trained
from tests.oracle.workers import attempt

ROWS = 8
WHOLE = {"PARALLELISM_CONFIG_REQUIRE_ADAPTERS": "false"}


def tokens(rows: int, seed: int) -> Rows:
    return Rows(torch.randint(0, 131, (rows, 12), generator=torch.Generator().manual_seed(seed)))


class Around(nn.Module):
    """A module of the user's that computes its loss from a PeftModel."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.peft_model = get_peft_model(model, lora_config(r=4, modules_to_save=["lm_head"]))
        self.bias = nn.Parameter(torch.zeros(131))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.peft_model(input_ids=input_ids).logits + self.bias
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def make(kind: str, base: Path, output: Path, dp: int, **settings: Any) -> Trainer:
    set_seed(3)
    model = Around(base) if kind == "around" else LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    arguments = {
        "per_device_train_batch_size": ROWS // dp,
        "per_device_eval_batch_size": ROWS // dp,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": kind == "whole",  # so that the best is not the last
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **settings,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(str(output), **arguments),
        train_dataset=tokens(40, 1),
        eval_dataset=tokens(16, 2),
    )


def trains(kind: str, base: Path, output: Path, mesh: str, resume: str | None = None) -> dict[str, Any]:
    """Train, take the best model, and save it into a folder that holds something; without a mesh by stock Trainer."""
    with launched(**({**environment(mesh), **WHOLE} if mesh else {})):
        trainer = make(kind, base, output, dp_of(mesh) if mesh else 1)
        trainer.train(resume_from_checkpoint=resume)
        final = output / "final"
        if trainer.is_world_process_zero():
            final.mkdir(parents=True)
            (final / "notes.txt").write_text("the user's")
            (final / "model.safetensors.index.json").write_text("of an earlier save")
        trainer.accelerator.wait_for_everyone()
        trainer.save_model(str(final))
        return {
            "loss": [each["loss"] for each in trainer.state.log_history if "loss" in each],
            "eval": [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each],
            "best": trainer.state.best_global_step,
            "trained": {name: full(p) for name, p in trained(trainer.model).items()},
        }


@pytest.mark.parametrize("kind", ["whole", "around"])
@pytest.mark.parametrize("mesh", cases("2x1", matrix=["1x2", "2x2"]))
def test_what_trains_is_saved_resumed_and_the_best_taken(pool, base, tmp_path, kind, mesh):
    want = trains(kind, base, tmp_path / "one", "")
    assert want["best"] < 4
    written = tmp_path / mesh
    for got in pool.run(ranks_of(mesh), trains, kind, base, written, mesh):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)
        assert got["eval"] == pytest.approx(want["eval"], rel=1e-4)
        assert got["best"] == want["best"]
        assert relative_error(got["trained"], want["trained"]) < 1e-3
    final = written / "final"
    assert (final / "notes.txt").read_text() == "the user's"
    assert (final / "training_args.bin").is_file()
    model = LlamaForCausalLM.from_pretrained(base if kind == "around" else final, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(model, final) if kind == "around" else model
    if kind == "around":  # what PEFT's files do not hold
        beside = load_file(final / "trained_parameters.safetensors")
        assert relative_error(beside, {"bias": want["trained"].pop("bias")}) < 1e-3
        assert not (final / "model.safetensors").exists()  # which would hold the base
    names = {name.removeprefix("peft_model."): value for name, value in want["trained"].items()}
    got = {name: p.detach() for name, p in loaded.named_parameters() if name in names}
    assert relative_error(got, names) < 1e-3
    if kind == "whole":
        assert not (final / "model.safetensors.index.json").exists()  # which belongs to other weights
    resume = str(written / "checkpoint-2")
    for got in pool.run(ranks_of(mesh), trains, kind, base, tmp_path / "on", mesh, resume):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)
        assert relative_error({name: got["trained"][name] for name in want["trained"]}, want["trained"]) < 1e-3


def evaluates(base: Path, output: Path, mesh: str) -> dict[str, Any]:
    """Evaluate and predict with a model that has no adapter, and then train it, where that is not asked for."""
    found: dict[str, Any] = {}
    with launched(**(environment(mesh) if mesh else {})):
        trainer = make(
            "whole",
            base,
            output,
            dp_of(mesh) if mesh else 1,
            save_strategy="no",
            eval_strategy="no",
            load_best_model_at_end=False,
        )
        found["loss"] = trainer.evaluate()["eval_loss"]
        found["predicted"] = torch.tensor(trainer.predict(tokens(5, 4)).predictions)
        if mesh:
            found["then"] = attempt(trainer.train)
    return found


def at_places_of_their_own(base: Path, output: Path) -> tuple[str, list[str]]:
    """A script that puts the time, or a random number, into `output_dir`."""
    with launched(**environment("1x2")), listening("accelerate_plugin.trainer") as lines:
        place = output / f"run of {dist.get_rank()}"
        trainer = make("whole", base, place, 1, save_strategy="no", eval_strategy="no", load_best_model_at_end=False)
        return trainer.args.output_dir, list(lines)


def test_every_process_takes_the_output_dir_of_the_first(pool, base, tmp_path):
    (first, lines), (second, none) = pool.run(2, at_places_of_their_own, base, tmp_path)
    assert first == second == str(tmp_path / "run of 0")
    assert none == []
    assert len(lines) == 1
    assert "output_dir differs between processes" in lines[0]
    assert str(tmp_path / "run of 1") in lines[0]


def prepares(mesh: str) -> dict[str, Any]:
    """Prepare models without an optimizer, and go on to train them."""
    found: dict[str, Any] = {}
    batch = torch.arange(24).view(2, 12)

    def forward(model: nn.Module) -> float:
        return model(input_ids=batch, labels=batch).loss.item()

    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh))
        bare = accelerator.prepare(causal_lm(dtype=torch.float32))
        with torch.no_grad():
            found["evaluated"] = forward(bare.eval())
        plain = torch.optim.SGD(bare.parameters(), 0.1)  # which is not prepared; the model stays in eval mode
        accelerator.backward(bare(input_ids=batch, labels=batch).loss)
        found["stepped"] = attempt(plain.step)
        found["trained"] = attempt(forward, bare.train())
        found["again"] = attempt(forward, bare)
        optimizer = torch.optim.SGD(bare.parameters(), 0.1)
        found["optimized"] = attempt(accelerator.prepare, optimizer)
        frozen = get_peft_model(causal_lm(dtype=torch.float32), lora_config()).requires_grad_(False)
        frozen = accelerator.prepare(frozen)
        with torch.no_grad():
            found["frozen"] = forward(frozen.eval())
        adapted = accelerator.prepare(get_peft_model(causal_lm(dtype=torch.float32), lora_config()))
        optimizer = accelerator.prepare(torch.optim.SGD(trained(adapted).values(), 0.1))
        found["adapted"] = forward(adapted.train())
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1"]))
def test_evaluation_asks_for_no_adapters_and_training_does(pool, base, tmp_path, mesh):
    want = evaluates(base, tmp_path, "")
    for got in pool.run(2, evaluates, base, tmp_path, mesh):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        torch.testing.assert_close(got["predicted"], want["predicted"], rtol=1e-4, atol=1e-4)
        assert got["then"].kind == "ValueError"
        assert "has no PEFT layers and no lora_config is given" in got["then"].message
    one = causal_lm(dtype=torch.float32)
    batch = torch.arange(24).view(2, 12)
    loss = one(input_ids=batch, labels=batch).loss.item()
    for got in pool.run(2, prepares, mesh):
        for name in ("evaluated", "frozen", "adapted"):
            assert got[name] == pytest.approx(loss, rel=1e-5), name
        for name in ("stepped", "trained", "again", "optimized"):
            assert "has no PEFT layers" in got[name].message, name
