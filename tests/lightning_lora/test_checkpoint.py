"""Checkpoints: what is in them, that a resumed run goes on as if nothing had happened, and what bad ones do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.tuner import Tuner as RateFinder
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from lora_parallel import storage
from lora_parallel.adapters import adapter_folder as adapter_writer
from lora_parallel.adapters.inspection import adapter_parameters
from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import (
    ROWS,
    Gradients,
    Outcome,
    Resumable,
    Tokens,
    check,
    finish,
    global_means,
    loader,
    tidy,
    trainer,
    tuner,
)
from tests.oracle import causal_lm, dp_of, fill_adapters, full, lora_config, ranks_of, trained
from tests.oracle.workers import Failure, attempt

Tuner = tuner()
DOUBLE: dict[str, Any] = {"precision": "64-true"}
WIDE = {"vocab_size": 16000}


def wide() -> nn.Module:
    """A model whose base is much larger than its adapters."""
    model = m.get_peft_model(causal_lm(dtype=torch.float32, **WIDE), lora_config())
    fill_adapters(model)
    return model


def probe() -> Tensor:
    return Tokens(2, seed=77).ids


def logits(model: nn.Module) -> Tensor:
    """Of the whole model, on every rank."""
    with torch.no_grad():
        return model.eval()(input_ids=probe()).logits


def write(mesh: str, folder: str) -> tuple[str, Tensor]:
    """Train with Trainer's default ModelCheckpoint; where the checkpoint is, and the sharded model's logits."""
    module = Tuner(wide)
    with tidy():
        run = trainer(mesh, max_epochs=1, enable_checkpointing=True, default_root_dir=folder, **DOUBLE)
        run.fit(module, loader(Tokens(3 * ROWS), mesh))
        assert len(run.checkpoint_callbacks) == 1
        return run.checkpoint_callback.best_model_path, logits(module.model)  # type: ignore[union-attr]


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x1", "2x2"]))
def test_default_checkpoint_is_a_peft_adapter(pool, mesh, tmp_path):
    answers = pool.run(ranks_of(mesh), write, mesh, str(tmp_path))
    path = Path(answers[0][0])
    assert path.parent == tmp_path / "checkpoints"
    base = causal_lm(dtype=torch.float32, **WIDE).double()
    plain = logits(PeftModel.from_pretrained(base, path / "adapter"))
    for where, sharded in answers:
        assert where == str(path), "ranks disagree on the path"
        torch.testing.assert_close(sharded, plain, rtol=0, atol=1e-9)
    before = logits(wide().double())
    assert (plain - before).abs().max() > 1e-3, "training changed nothing"


def test_checkpoint_holds_what_trains_and_no_more(pool, tmp_path):
    path = Path(pool.run(2, write, "2x1", str(tmp_path))[0][0])
    assert {entry.name for entry in path.iterdir()} == {"adapter", "state", "extra.pt", "meta.json"}
    assert {entry.name for entry in (path / "adapter").iterdir()} == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "README.md",
    }
    assert [entry.name for entry in path.parent.iterdir()] == [path.name], "something was left beside it"

    model = wide().double()
    adapters = adapter_parameters(model)
    assert size(path) < sum(p.numel() * 8 for p in model.parameters()) / 10
    keys = FileSystemReader(path / "state").read_metadata().state_dict_metadata
    moments = {key for key in keys if key.endswith((".exp_avg", ".exp_avg_sq"))}
    assert len(moments) == 2 * len(adapters)
    assert all(".lora_" in key for key in keys if keys[key].__class__.__name__ == "TensorStorageMetadata")
    state = torch.load(path / "extra.pt", weights_only=True)["trainer"]
    assert "state_dict" not in state
    assert "optimizer_states" not in state
    meta = json.loads((path / "meta.json").read_text())
    assert meta["mesh"] == {"dp_replicate": 1, "dp_shard": 2, "tp": 1}


# ---------------------------------------------------------------------- resuming


class Scheduled(tuner()):  # type: ignore[misc]
    """Dropout, and a learning rate that changes every step."""

    def __init__(self, seed: int = 1, dropout: float = 0.1, lr: float = 1e-2) -> None:
        super().__init__(lambda: m.adapted(lora_dropout=dropout), lr=lr)
        fill_adapters(self.model, seed)
        self.rates: list[float] = []
        self.start: dict[str, Tensor] = {}

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_start(self) -> None:
        self.start = adapters(self)

    def on_train_batch_start(self, *args: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.loss(self, batch)
        self.log("val_loss", loss, sync_dist=True)


def adapters(module: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in trained(module).items()}


def resumable(mesh: str) -> Resumable:
    return loader(Tokens(3 * ROWS), mesh, kind=Resumable)  # type: ignore[return-value]


def every_two_steps(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)


def run_on(
    mesh: str, ckpt_path: str | None = None, folder: str | None = None, seed: int = 1, epochs: int = 2, **options: Any
) -> dict[str, Any]:
    """Two epochs of three steps, from the start or from a checkpoint."""
    module = Scheduled(seed, lr=1e-2 if ckpt_path is None else 5.0)  # a checkpoint's settings replace these
    callbacks = [] if folder is None else [every_two_steps(folder)]
    settings = {**DOUBLE, **options}
    with tidy():
        run = trainer(mesh, max_epochs=epochs, callbacks=callbacks, enable_checkpointing=folder is not None, **settings)
        run.fit(module, resumable(mesh), ckpt_path=ckpt_path)
        assert run.global_step == 3 * epochs
        return {
            "losses": global_means(module.losses),
            "rates": module.rates,
            "adapters": adapters(module),
            "start": module.start,
        }


def resume_all(mesh: str, folder: str, steps: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """A whole run, and runs of a differently initialised module from some of its checkpoints."""
    runs = {"whole": run_on(mesh, folder=folder)}
    for step in steps:
        runs[str(step)] = run_on(mesh, f"{folder}/step={step}.ckpt", seed=50 + step)
    return runs


@pytest.mark.parametrize(
    ("mesh", "steps"), cases(("2x1", (2,)), matrix=[("2x2", (2, 4)), ("1x2", (2, 4)), ("2x2x2", (2,))])
)
def test_a_resumed_run_equals_an_uninterrupted_one(pool, mesh, steps, tmp_path):
    """Bit for bit, in mid-epoch, with dropout and a scheduler, on the mesh that wrote it."""
    for runs in pool.run(ranks_of(mesh), resume_all, mesh, str(tmp_path), steps):
        whole = runs["whole"]
        assert len(set(whole["rates"])) == 6
        for step in steps:
            resumed = runs[str(step)]
            assert len(resumed["losses"]) == 6 - step
            assert resumed["losses"] == whole["losses"][step:]
            assert resumed["rates"] == whole["rates"][step:]
            assert resumed["adapters"].keys() == whole["adapters"].keys()
            assert all(torch.equal(resumed["adapters"][name], whole["adapters"][name]) for name in whole["adapters"])


@pytest.mark.parametrize("others", cases(["1x2"], matrix=[["1x4", "2x1", "1x1"]]))
def test_a_resumed_run_equals_one_on_another_mesh(pool, others, tmp_path):
    """A checkpoint of 2x2 goes on on others; dropout drops the same elements there."""
    whole = pool.run(4, run_on, "2x2", None, str(tmp_path))[0]
    for mesh in others:
        for resumed in pool.run(ranks_of(mesh), run_on, mesh, f"{tmp_path}/step=2.ckpt", None, 60):
            assert resumed["losses"] == pytest.approx(whole["losses"][2:], abs=1e-6)
            for name, tensor in whole["adapters"].items():
                torch.testing.assert_close(resumed["adapters"][name], tensor, rtol=1e-9, atol=1e-9)


def counted(mesh: str, folder: str, step: int = 0) -> list[float]:
    """Losses of an epoch of six batches in the order of Lightning's sampler, which torchdata's loader counts."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    dp = dp_of(mesh)
    module = Scheduled(seed=1 + step, dropout=0.0)
    callbacks = [] if step else [every_two_steps(folder)]
    with tidy():
        settings = {**DOUBLE, "use_distributed_sampler": True, "enable_checkpointing": not step}
        run = trainer(mesh, max_epochs=1, callbacks=callbacks, **settings)
        rows = StatefulDataLoader(Tokens(6 * ROWS), batch_size=ROWS // dp, shuffle=True)
        run.fit(module, rows, ckpt_path=f"{folder}/step={step}.ckpt" if step else None)
    return global_means(module.losses)


@pytest.mark.parametrize(("wrote", "others"), cases(("2x1", ["1x2"]), matrix=[("2x2", ["1x2", "2x1"])]))
def test_a_loaders_position_is_that_of_all_ranks(pool, wrote, others, tmp_path):
    pytest.importorskip("torchdata")
    whole = pool.run(ranks_of(wrote), counted, wrote, str(tmp_path))[0]
    for mesh in others:
        for losses in pool.run(2, counted, mesh, str(tmp_path), 2):
            assert losses == pytest.approx(whole[2:], abs=1e-6)


class Random(Scheduled):
    """A model that draws by itself: attention dropout, from the global random state."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.model = m.get_peft_model(causal_lm(dtype=torch.float32, attention_dropout=0.4), lora_config())
        fill_adapters(self.model, seed)


def random_runs(folder: str) -> dict[str, dict[str, Any]]:
    """A whole run, and runs that go on from mid-epoch and from the end of an epoch."""
    found = {}
    for name, step in (("whole", 0), ("mid-epoch", 2), ("end of epoch", 3), ("next epoch", 4)):
        torch.manual_seed(5 if not step else 1000 + step)
        module = Random(seed=1 + step)
        callbacks = [] if step else [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
        with tidy():
            run = trainer("2x1", max_epochs=2, callbacks=callbacks, enable_checkpointing=not step, **DOUBLE)
            run.fit(module, resumable("2x1"), ckpt_path=f"{folder}/step={step}.ckpt" if step else None)
        found[name] = {"step": step, "losses": global_means(module.losses), "adapters": adapters(module)}
    return found


def test_the_models_own_randomness_goes_on_where_it_was(pool, tmp_path):
    for runs in pool.run(2, random_runs, str(tmp_path)):
        whole = runs.pop("whole")
        for name, resumed in runs.items():
            assert resumed["losses"] == whole["losses"][resumed["step"] :], name
            assert same(resumed["adapters"], whole["adapters"]), name


def around_a_resumed_run(folder: str) -> dict[str, Any]:
    """What runs do after a run that resumed, without a path of their own."""
    path = f"{folder}/first.ckpt"
    held_out = loader(Tokens(2 * ROWS, seed=90), "2x1")
    found: dict[str, Any] = {}
    with tidy():
        first = Scheduled()
        run = trainer("2x1", max_epochs=1, **DOUBLE)
        run.fit(first, resumable("2x1"))
        run.save_checkpoint(path)
        saved = adapters(first)

        second = Scheduled(seed=9)
        run = trainer("2x1", max_epochs=2, **DOUBLE)
        run.fit(second, resumable("2x1"), ckpt_path=path)
        found["resumed from what was saved"] = same(second.start, saved)
        trained_on = adapters(second)
        found["trained on"] = not same(trained_on, saved)
        # The module has gradients and weights of its own, which the checkpoint replaces.
        trainer("2x1", max_epochs=2, **DOUBLE).fit(first, resumable("2x1"), ckpt_path=path)
        found["resumed over a trained module"] = same(first.start, saved) and same(adapters(first), trained_on)
        run.validate(second, held_out, verbose=False)
        found["validate keeps"] = same(adapters(second), trained_on)
        run.fit_loop.max_epochs = 3
        run.fit(second, resumable("2x1"))
        found["fit goes on"] = same(second.start, trained_on) and run.global_step == 9
        now = adapters(second)
        again = trainer("2x1", max_epochs=1, **DOUBLE)
        again.fit(second, resumable("2x1"))
        found["another Trainer goes on"] = same(second.start, now) and again.global_step == 3

        run.validate(second, held_out, ckpt_path=path, verbose=False)
        found["validate loads"] = same(adapters(second), saved)
        loaded = run.callback_metrics["val_loss"].item()
        run.validate(first, held_out, verbose=False)
        found["validate is of what it loaded"] = loaded != run.callback_metrics["val_loss"].item()
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_path_is_good_for_one_run(pool, tmp_path):
    for found in pool.run(2, around_a_resumed_run, str(tmp_path)):
        assert all(found.values()), found


def requeued(folder: str) -> dict[str, Any]:
    """What SLURM's signal handler saves before it requeues the job, and what the job resumes from."""
    with tidy():
        first = Scheduled()
        run = trainer("2x1", max_epochs=1, default_root_dir=folder, **DOUBLE)
        run.fit(first, resumable("2x1"))
        run.save_checkpoint(run._checkpoint_connector.hpc_save_path(folder))
        run.save_checkpoint(run._checkpoint_connector.hpc_save_path(folder))
        again = Scheduled(seed=8)
        run = trainer("2x1", max_epochs=2, default_root_dir=folder, **DOUBLE)
        run.fit(again, resumable("2x1"), ckpt_path="hpc")
        return {
            "entries": sorted(os.listdir(folder)),
            "resumed": same(again.start, adapters(first)),
            "steps": run.global_step,
        }


def test_a_requeued_job(pool, tmp_path):
    for found in pool.run(2, requeued, str(tmp_path)):
        assert found == {"entries": ["hpc_ckpt_1.ckpt", "hpc_ckpt_2.ckpt"], "resumed": True, "steps": 6}


def requeued_after_a_kill(folder: str) -> dict[str, Any]:
    """A save in one file that was killed while the file was written, and the job that comes after it."""
    one_file, own = {"save_distributed_checkpoint": False}, storage.Scratch.discard
    with tidy():
        first = Scheduled()
        run = trainer("2x1", one_file, max_epochs=1, default_root_dir=folder, **DOUBLE)
        run.fit(first, resumable("2x1"))
        run.save_checkpoint(run._checkpoint_connector.hpc_save_path(folder))
        real = torch.save
        torch.save = FullDisk(real, "packed")  # type: ignore[assignment]
        storage.Scratch.discard = storage.Scratch._release  # type: ignore[method-assign]
        try:
            killed = attempt(run.save_checkpoint, run._checkpoint_connector.hpc_save_path(folder))
        finally:
            torch.save, storage.Scratch.discard = real, own  # type: ignore[method-assign]
        dist.barrier()
        left = sorted(os.listdir(folder))
        again = Scheduled(seed=8)
        run = trainer("2x1", one_file, max_epochs=2, default_root_dir=folder, **DOUBLE)
        run.fit(again, resumable("2x1"), ckpt_path="hpc")
        run.save_checkpoint(f"{folder}/later.ckpt")
        return {
            "killed": isinstance(killed, Failure),
            "left": left,
            "resumed": same(again.start, adapters(first)),
            "entries": sorted(os.listdir(folder)),
        }


def test_a_requeued_job_after_a_killed_save_in_one_file(pool, tmp_path):
    for found in pool.run(2, requeued_after_a_kill, str(tmp_path)):
        assert found == {
            "killed": True,
            "left": [".hpc-ckpt-2.ckpt.writing", "hpc_ckpt_1.ckpt"],
            "resumed": True,
            "entries": ["hpc_ckpt_1.ckpt", "later.ckpt"],
        }


def best_and_last(folder: str) -> dict[str, Any]:
    """A monitored ModelCheckpoint that keeps one and a link to the last."""
    callback = ModelCheckpoint(
        folder, filename="{epoch}", monitor="val_loss", mode="max", save_top_k=1, save_last="link"
    )
    held_out = loader(Tokens(2 * ROWS, seed=90), "2x1")
    found: dict[str, Any] = {}
    with tidy():
        module = Scheduled()
        run = trainer("2x1", max_epochs=3, callbacks=[callback], enable_checkpointing=True, **DOUBLE)
        run.fit(module, resumable("2x1"), held_out)
        found["entries"] = sorted(os.listdir(folder))
        found["best"] = os.path.basename(callback.best_model_path)
        for which in ("best", "last"):
            run.validate(module, held_out, ckpt_path=which, verbose=False)
            found[f"{which} loss"] = run.callback_metrics["val_loss"].item()
        found["score"] = callback.best_model_score.item()  # type: ignore[union-attr]
        run.save_checkpoint(f"{folder}/last.ckpt")  # a link stands there
        found["after a save"] = [os.path.islink(f"{folder}/last.ckpt"), sorted(os.listdir(folder))]
        run.test(module, held_out, ckpt_path="best", verbose=False)
        found["test loss"] = run.callback_metrics["test_loss"].item()
        run.predict(module, held_out, ckpt_path="best")
    return found


def test_best_and_last(pool, tmp_path):
    for found in pool.run(2, best_and_last, str(tmp_path)):
        assert found["best loss"] == pytest.approx(found["score"], abs=1e-6)
        assert found["test loss"] == pytest.approx(found["score"], abs=1e-6)
        assert set(found["entries"]) == {found["best"], "last.ckpt"}
        assert found["after a save"] == [False, found["entries"]]


def weights_only(folder: str) -> list[Any]:
    path = f"{folder}/weights.ckpt"
    held_out = loader(Tokens(ROWS, seed=90), "2x1")
    with tidy():
        module = Scheduled()
        run = trainer("2x1", max_epochs=1, **DOUBLE)
        run.fit(module, resumable("2x1"))
        run.save_checkpoint(path, weights_only=True)
        fresh = Scheduled(seed=7)
        run.validate(fresh, held_out, ckpt_path=path, verbose=False)
        answer = [same(adapters(fresh), adapters(module)), os.path.exists(f"{path}/state")]
        return [*answer, attempt(trainer("2x1", max_epochs=2, **DOUBLE).fit, module, resumable("2x1"), ckpt_path=path)]


def test_weights_only(pool, tmp_path):
    for loads, has_state, failure in pool.run(2, weights_only, str(tmp_path)):
        assert loads
        assert not has_state
        assert failure.kind == "KeyError"
        assert "contains only the model" in failure.message


class Loose(m.Pair):
    """Two adapted models, of which norm weights train too; without tp also a head beside them."""

    def __init__(self, mesh: str, seed: int) -> None:
        super().__init__()
        fill_adapters(self, seed)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name or "input_layernorm" in name)
        if mesh == "2x1":
            torch.manual_seed(seed)
            self.head = nn.Linear(4, 3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if hasattr(self, "head"):
            loss = loss + self.head(torch.ones(1, 4)).square().mean()
        return loss


def several(mesh: str, folder: str) -> dict[str, Any]:
    path = f"{folder}/several.ckpt"
    with tidy():
        module, fresh, stopped = Loose(mesh, 1), Loose(mesh, 2), Loose(mesh, 3)
        lora = {"require_adapters": False}
        run = trainer(mesh, lora, max_epochs=1, **DOUBLE)
        run.fit(Loose(mesh, 1), resumable(mesh))
        run.save_checkpoint(path)
        first = adapters(run.lightning_module)
        trainer(mesh, lora, max_epochs=2, **DOUBLE).fit(module, resumable(mesh))
        trainer(mesh, lora, max_epochs=2, **DOUBLE).fit(fresh, resumable(mesh), ckpt_path=path)
        trainer(mesh, lora, **DOUBLE).validate(stopped, resumable(mesh), ckpt_path=path, verbose=False)
        before, after = Loose(mesh, 1).state_dict(), adapters(module)
        return {
            "loads": same(adapters(stopped), first),
            "resumes": same(adapters(fresh), after),
            "still": [name for name in after if torch.equal(after[name], before[name].double())],
            "names": sorted(after),
        }


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_several_models_and_what_no_adapter_holds(pool, mesh, tmp_path):
    for found in pool.run(ranks_of(mesh), several, mesh, str(tmp_path)):
        assert found["loads"]
        assert found["resumes"]
        assert not found["still"], "trained nothing"
        assert any(name.startswith("models.second.") and "input_layernorm" in name for name in found["names"])
        assert ("head.weight" in found["names"]) == (mesh == "2x1")
    folder = tmp_path / "several.ckpt" / "adapter"
    assert {path.parent.name for path in folder.glob("*/adapter_config.json")} == {"models.first", "models.second"}


# ---------------------------------------------------------------------- saving disturbs nothing


class SaveAlways(pl.Callback):
    """Saves before the first step and after every microbatch."""

    def __init__(self, folder: str) -> None:
        self.path = f"{folder}/now.ckpt"

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.path}-start")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.path)


def interrupted(mesh: str | None, folder: str | None) -> Outcome:
    """Accumulate over two microbatches; on a mesh, save and validate between any two."""
    watch, module = Gradients(), Tuner(m.adapted)
    callbacks = [watch] if folder is None else [watch, SaveAlways(folder)]
    extra = {} if folder is None else {"val_check_interval": 1}
    with tidy():
        run = trainer(mesh, max_epochs=1, accumulate_grad_batches=2, callbacks=callbacks, **extra, **DOUBLE)
        run.fit(module, loader(Tokens(4 * ROWS), mesh), None if folder is None else loader(Tokens(ROWS, seed=90), mesh))
        outcome = finish(module, run, watch.outcome)
        if folder is not None:  # what was saved first is the start
            fresh = Tuner(m.adapted)
            fill_adapters(fresh.model, seed=8)
            again = trainer(mesh, max_epochs=1, accumulate_grad_batches=2, **DOUBLE)
            again.fit(fresh, loader(Tokens(4 * ROWS), mesh), ckpt_path=f"{folder}/now.ckpt-start")
            assert again.global_step == 2
            assert same(adapters(fresh), outcome.adapters)
    return outcome


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1", "2x2"]))
def test_saving_disturbs_nothing(pool, mesh, tmp_path):
    want = interrupted(None, None)
    for got in pool.run(ranks_of(mesh), interrupted, mesh, str(tmp_path)):
        check(got, want)


class Rated(tuner()):  # type: ignore[misc]
    """A learning rate that `lr_find` can set."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        self.lr = 1e-2


def find_rate(folder: str) -> dict[str, Any]:
    """`lr_find` trains for a while and puts everything back."""
    module, other = Rated(), Rated()
    with tidy():
        run = trainer("2x1", max_epochs=1, default_root_dir=folder, **DOUBLE)
        found = RateFinder(run).lr_find(module, loader(Tokens(8 * ROWS), "2x1"), num_training=6, update_attr=False)
        assert found is not None
        before = adapters(module)
        trainer("2x1", max_epochs=1, **DOUBLE).fit(module, loader(Tokens(2 * ROWS), "2x1"))
        trainer("2x1", max_epochs=1, **DOUBLE).fit(other, loader(Tokens(2 * ROWS), "2x1"))
        start = {name: tensor.double() for name, tensor in Rated().model.named_parameters() if "lora_" in name}
        return {
            "rates": len(found.results["lr"]),
            "put back": same({n.removeprefix("model."): t for n, t in before.items()}, start),
            "trains as if nothing had been": same(adapters(module), adapters(other)),
            "left": os.listdir(folder),
        }


def test_lr_find(pool, tmp_path):
    for found in pool.run(2, find_rate, str(tmp_path)):
        assert found["rates"] >= 6
        assert found["put back"]
        assert found["trains as if nothing had been"]
        assert not found["left"]


# ---------------------------------------------------------------------- bad paths


def put_foreign(folder: Path, good: Path) -> dict[str, tuple[Path, str, str]]:
    """Broken checkpoints: where, and the type and text of the error."""
    bad: dict[str, tuple[Path, str, str]] = {
        "missing": (folder / "missing.ckpt", "FileNotFoundError", "no checkpoint at")
    }

    file = folder / "file.ckpt"
    torch.save({"state_dict": {}, "pytorch-lightning_version": "2.6.6"}, file)
    bad["another strategy's file"] = (file, "ValueError", "is not a checkpoint that this library wrote")

    def copied(name: str) -> Path:
        shutil.copytree(good, folder / name)
        return folder / name

    incomplete = copied("incomplete.ckpt")
    (incomplete / "meta.json").unlink()
    bad["no meta.json"] = (incomplete, "ValueError", "meta.json")
    future = copied("future.ckpt")
    (future / "meta.json").write_text(json.dumps({"format": 99}))
    bad["a later format"] = (future, "ValueError", "format 99")
    cut = copied("cut.ckpt")
    with open(cut / "adapter" / "adapter_model.safetensors", "r+b") as weights:
        weights.truncate(100)
    bad["cut adapter"] = (cut, "ValueError", "adapter_model.safetensors has 100 bytes")
    without = copied("without.ckpt")
    shutil.rmtree(without / "adapter")
    bad["no adapter"] = (without, "ValueError", "adapter_config.json is missing")
    other = copied("other.ckpt")
    config = json.loads((other / "adapter" / "adapter_config.json").read_text())
    (other / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "r": 8}))
    meta = json.loads((other / "meta.json").read_text())
    meta["files"]["adapter/adapter_config.json"] = (other / "adapter" / "adapter_config.json").stat().st_size
    del meta["checksums"]["adapter/adapter_config.json"]
    (other / "meta.json").write_text(json.dumps({**meta, "format": 1}))
    bad["another r"] = (other, "ValueError", "r=8")
    return bad


def resume_from(paths: dict[str, str], good: str) -> dict[str, Any]:
    """What each broken checkpoint raises, and that the process can still resume from a good one."""
    found: dict[str, Any] = {}
    with tidy():
        for name, path in paths.items():
            run = trainer("2x1", max_epochs=2, **DOUBLE)
            found[name] = attempt(run.fit, Scheduled(), resumable("2x1"), ckpt_path=path)
        real = torch.load
        if dist.get_rank() == 1:
            torch.load = FullDisk(real, "extra.pt", rank=1)  # type: ignore[assignment]
        try:
            run = trainer("2x1", max_epochs=2, **DOUBLE)
            found[ONE_RANK] = attempt(run.fit, Scheduled(), resumable("2x1"), ckpt_path=good)
        finally:
            torch.load = real
        run = trainer("2x1", max_epochs=2, **DOUBLE)
        run.fit(Scheduled(), resumable("2x1"), ckpt_path=good)
        found["good"] = run.global_step
    return found


ONE_RANK = "unreadable on one rank"


def save_one(folder: str) -> None:
    with tidy():
        run = trainer("2x1", max_epochs=1, **DOUBLE)
        run.fit(Scheduled(), resumable("2x1"))
        run.save_checkpoint(f"{folder}/good.ckpt")


def test_bad_checkpoints(pool, tmp_path):
    pool.run(2, save_one, str(tmp_path))
    good = tmp_path / "good.ckpt"
    bad = put_foreign(tmp_path, good)
    paths = {name: str(path) for name, (path, _, _) in bad.items()}
    bad[ONE_RANK] = (good, "OSError", "No space left")
    for found in pool.run(2, resume_from, paths, str(good)):
        assert found["good"] == 6
        for name, (_, kind, text) in bad.items():
            assert isinstance(found[name], Failure), f"{name} was accepted"
            assert found[name].kind == kind, (name, found[name])
            assert text in found[name].message, (name, found[name].message)


class FullDisk:
    """Stands in for a function that writes (or reads): fails on one rank, where its arguments name `file`."""

    def __init__(self, function: Any, file: str, rank: int = 0) -> None:
        self.function, self.file, self.rank = function, file, rank

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == self.rank and any(getattr(arg, "name", arg) == self.file for arg in args):
            raise OSError(28, "No space left on device")
        return self.function(*args, **kwargs)


_write_data = FileSystemWriter.write_data


def full_on_the_last_rank(writer: Any, *args: Any) -> Any:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise OSError(28, "No space left on device")
    return _write_data(writer, *args)


def no_space_for_extra(path: Path, data: bytes) -> int:
    if path.name == "extra.pt":
        raise OSError(28, "No space left on device")
    return path.open("wb").write(data)


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Let one part of a save fail."""
    owner, name, stand_in = {
        "adapter": (adapter_writer, "save_file", FullDisk(adapter_writer.save_file, "adapter_model.safetensors")),
        "state": (FileSystemWriter, "write_data", full_on_the_last_rank),
        "extra": (Path, "write_bytes", no_space_for_extra),
        "rename": (storage, "_exchanged", FullDisk(storage._exchanged, "kept.ckpt")),
    }[what]
    real = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, real)


PARTS = ["adapter", "state", "extra", "rename"]


def fail_to_save(folder: str) -> dict[str, Any]:
    """Saves that cannot work, over a checkpoint that is there; and one that can, after them."""
    found: dict[str, Any] = {}
    path = f"{folder}/kept.ckpt"
    with tidy():
        module = Scheduled()
        run = trainer("2x1", max_epochs=1, **DOUBLE)
        run.fit(module, resumable("2x1"))
        run.save_checkpoint(path)
        saved = adapters(module)
        run.fit_loop.max_epochs = 2
        run.fit(module, resumable("2x1"))

        def stored() -> dict[str, Tensor]:
            fresh = Scheduled(seed=3)
            trainer("2x1", **DOUBLE).validate(fresh, resumable("2x1"), ckpt_path=path, verbose=False)
            return adapters(fresh)

        found["a file in the way"] = attempt(run.save_checkpoint, f"{folder}/file/inside.ckpt")
        for part in PARTS:
            with failing(part):
                found[part] = attempt(run.save_checkpoint, path)
            found[f"intact after {part}"] = os.path.isdir(path) and same(stored(), saved)
        run.save_checkpoint(path)
        found["replaced"] = same(stored(), adapters(module)) and not same(adapters(module), saved)
        found["left"] = sorted(os.listdir(folder))
    return found


def over_others(folder: str, names: list[str]) -> list[Any]:
    """Attempts to save in the place of what is no checkpoint, and over links that may be replaced."""
    with tidy():
        run = trainer("2x1", max_epochs=1, **DOUBLE)
        run.fit(Scheduled(), resumable("2x1"))
        found = [attempt(run.save_checkpoint, f"{folder}/{name}") for name in names]
        for name in ("good.ckpt", "last.ckpt", "dangling.ckpt"):
            run.save_checkpoint(f"{folder}/{name}")
        return [*found, attempt(run.save_checkpoint, "s3://a/b.ckpt")]


def test_what_is_no_checkpoint_is_not_replaced(pool, tmp_path):
    for name in ("mine", "described"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "precious.txt").write_text("precious")
    (tmp_path / "described" / "meta.json").write_text('{"my": "own"}')
    (tmp_path / "notes.txt").write_text("precious too")
    (tmp_path / "results").symlink_to("mine")
    (tmp_path / "link.ckpt").symlink_to("described")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "dangling.ckpt").symlink_to("nowhere")
    (tmp_path / "last.ckpt").symlink_to("good.ckpt")
    kept = ["mine", "described", "notes.txt", "results", "link.ckpt", "dangling"]
    for *failures, url in pool.run(2, over_others, str(tmp_path), kept):
        assert [failure.kind for failure in failures] == ["FileExistsError"] * len(kept)
        assert url.kind == "ValueError"
    for name in ("mine", "described", "results"):
        assert (tmp_path / name / "data" / "precious.txt").read_text() == "precious"
    assert (tmp_path / "notes.txt").read_text() == "precious too"
    assert all((tmp_path / name).is_symlink() for name in ("results", "link.ckpt", "dangling"))
    for name in ("good.ckpt", "last.ckpt", "dangling.ckpt"):
        assert (tmp_path / name).is_dir(), name
        assert not (tmp_path / name).is_symlink(), name


def test_failed_saves(pool, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for found in pool.run(2, fail_to_save, str(tmp_path)):
        for name in ["a file in the way", *PARTS]:
            assert isinstance(found[name], Failure), f"{name}: no error on this rank"
            assert found[name].kind in ("OSError", "NotADirectoryError", "FileExistsError"), (name, found[name])
        for part in PARTS:
            assert "No space left" in found[part].message
            assert found[f"intact after {part}"], part
        assert found["replaced"]
        assert found["left"] == ["file", "kept.ckpt"]


class Failing(Scheduled):
    """A step that fails on every rank."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 2:
            raise RuntimeError("the third step fails")
        return super().training_step(batch, batch_idx)


def on_exception(folder: str) -> list[Any]:
    """What ModelCheckpoint saves then."""
    with tidy():
        callback = ModelCheckpoint(folder, save_on_exception=True)
        run = trainer("2x1", max_epochs=1, callbacks=[callback], enable_checkpointing=True, **DOUBLE)
        module, fresh = Failing(), Scheduled(seed=33)
        failure = attempt(run.fit, module, resumable("2x1"))
        entries = sorted(os.listdir(folder))
        path = f"{folder}/{entries[0]}"
        trainer("2x1", **DOUBLE).validate(fresh, resumable("2x1"), ckpt_path=path, verbose=False)
        return [failure, entries, same(adapters(fresh), adapters(module))]


def test_saved_on_exception(pool, tmp_path):
    for failure, entries, equal in pool.run(2, on_exception, str(tmp_path)):
        assert failure.message == "the third step fails"
        assert len(entries) == 1
        assert equal


class Remembering(pl.Callback):
    """A callback with state of its own."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Noting(Scheduled):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.note = "none"

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = "kept"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.note = checkpoint["note"]


def user_state(folder: str) -> list[Any]:
    """State of a callback and a hook; then hyperparameters that are objects."""
    path = f"{folder}/noted.ckpt"
    with tidy():
        run = trainer("2x1", max_epochs=1, callbacks=[Remembering()], **DOUBLE)
        run.fit(Noting(), resumable("2x1"))
        run.save_checkpoint(path)
        memory, module = Remembering(), Noting()
        trainer("2x1", max_epochs=2, callbacks=[memory], **DOUBLE).fit(module, resumable("2x1"), ckpt_path=path)

        path = f"{folder}/objects.ckpt"
        run.lightning_module.save_hyperparameters({"lora": lora_config()})
        run.save_checkpoint(path)
        again = trainer("2x1", max_epochs=2, **DOUBLE)
        failure = attempt(again.fit, Noting(), resumable("2x1"), ckpt_path=path)
        again = trainer("2x1", max_epochs=2, **DOUBLE)
        again.fit(Noting(), resumable("2x1"), ckpt_path=path, weights_only=False)
    return [module.note, memory.count, failure, again.global_step]


def test_state_of_callbacks_and_hooks(pool, tmp_path):
    for note, count, failure, steps in pool.run(2, user_state, str(tmp_path)):
        assert (note, count, steps) == ("kept", 6, 6)
        assert failure.kind == "ValueError"
        assert "weights_only=False" in failure.message
    state = torch.load(tmp_path / "noted.ckpt" / "extra.pt", weights_only=True)["trainer"]
    assert state["hyper_parameters"] == {"width": 3}


class Meddling(Scheduled):
    """Its hook does something to the state_dict of a checkpoint."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        given = checkpoint["state_dict"]
        first = next(iter(given))
        if self.what == "drops":
            del given[first]
        elif self.what == "adds" or dist.get_rank() == 1:
            given["average"] = torch.ones(2)
        elif self.what == "changes":
            given[first] = given[first].clone()


def hooked(folder: str) -> dict[str, Any]:
    answers = {}
    with tidy():
        for what in ("drops", "adds", "adds on one rank", "changes"):
            run = trainer("2x1", max_epochs=1, **DOUBLE)
            run.fit(Meddling(what), resumable("2x1"))
            answers[what] = attempt(run.save_checkpoint, f"{folder}/{what}.ckpt")
    return answers


def test_what_a_hook_puts_into_the_state_dict_is_refused(pool, tmp_path):
    """It is written from the module: what stands there would be lost."""
    for answers in pool.run(2, hooked, str(tmp_path)):
        assert not isinstance(answers.pop("drops"), Failure)
        for failure in answers.values():
            assert failure.kind == "ValueError"
            assert "checkpoint['mine']" in failure.message
    assert [path.name for path in tmp_path.iterdir()] == ["drops.ckpt"]
