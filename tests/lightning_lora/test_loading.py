"""`load_from_checkpoint` of what the strategy wrote, in one process without it."""

from __future__ import annotations

import inspect
import shutil
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import get_peft_model
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_lora.single_file_checkpoint import PACKED, unpacked
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Tokens, loader, tidy, trainer, tuner
from tests.oracle import causal_lm, fill_adapters, full, lora_config, trained
from tests.oracle.workers import attempt


class Saved(tuner()):  # type: ignore[misc]
    """Hyperparameters, adapters, a norm that trains beside them, and a counter."""

    build = staticmethod(m.adapted)

    def __init__(self, seed: int = 1, width: int = 3) -> None:
        super().__init__(self.build)
        self.model.register_buffer("seen", torch.zeros(2))
        self.save_hyperparameters()
        fill_adapters(self.model, seed)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_("lora_" in name or "model.norm" in name)
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.update(batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        """Rates are numbers of NumPy's, which weights_only=True does not read."""
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: np.cos(0.1 * epoch))]


class OfAnotherShape(Saved):
    """A factor of r = 1 would broadcast."""

    build = staticmethod(lambda: m.adapted(r=6))


class OfAnotherScale(Saved):
    build = staticmethod(lambda: m.adapted(lora_alpha=60))


class OnAnotherBase(Saved):
    build = staticmethod(lambda: get_peft_model(causal_lm(dtype=torch.float32, seed=77), lora_config()))


class Plain(tuner()):  # type: ignore[misc]
    """Its adapter is the strategy's."""

    def __init__(self) -> None:
        super().__init__(m.plain)


def save(folder: str) -> dict[str, Tensor]:
    with tidy():
        run = trainer("2x1", {"require_adapters": False}, max_epochs=1)
        half = trainer("2x1", {"require_adapters": False}, max_epochs=1, precision="bf16-true")
        half.fit(Saved(), loader(Tokens(2 * ROWS), "2x1"))
        half.save_checkpoint(f"{folder}/half.ckpt")
        run.fit(Saved(seed=4, width=7), loader(Tokens(2 * ROWS), "2x1"))
        run.lightning_module.model.seen.fill_(5)
        run.save_checkpoint(f"{folder}/saved.ckpt")
        return {name: full(p) for name, p in trained(run.lightning_module).items()}


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder / "saved.ckpt", pool.run(2, save, str(folder))[0]


def test_a_folder_is_loaded(saved):
    path, values = saved
    module = Saved.load_from_checkpoint(path)
    assert module.hparams == {"seed": 4, "width": 7}
    found = {name: p.detach() for name, p in trained(module).items()}
    assert found.keys() == values.keys()
    assert any("norm" in name for name in found)
    for name, tensor in values.items():
        assert torch.equal(found[name], tensor), name
    assert module.seen.weight == 2
    assert module.model.seen.tolist() == [5, 5]
    again = Saved.load_from_checkpoint(str(path), width=9)
    assert again.hparams["width"] == 9


def one_file(folder: str) -> dict[str, Any]:
    """A whole run that saves one file after each epoch, and one that goes on from the first."""
    found: dict[str, Any] = {}
    options = {"require_adapters": False, "save_distributed_checkpoint": False}
    with tidy():
        for name, path in (("whole", None), ("resumed", f"{folder}/epoch=0.ckpt")):
            module = Saved(seed=4 if path is None else 9, width=7)
            saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
            run = trainer("1x2", options, max_epochs=2, callbacks=[saver] * (path is None), enable_checkpointing=True)
            run.fit(module, loader(Tokens(2 * ROWS), "1x2"), ckpt_path=path)
            found[name] = {n: full(p) for n, p in trained(module).items()}
            found[f"{name}, seen"] = module.seen.weight.item()
            module.model.seen.fill_(5)
            if path is None:
                run.save_checkpoint(f"{folder}/epoch={1 + run.global_rank}.ckpt")  # over rank 0's file
                found["over another's"] = attempt(run.save_checkpoint, f"{folder}/notes.txt")
                found["entries"] = sorted(path.name for path in Path(folder).iterdir())
    return found


def test_one_file(pool, tmp_path):
    (tmp_path / "notes.txt").write_text("precious")
    for found in pool.run(2, one_file, str(tmp_path)):
        assert found["entries"] == ["epoch=0.ckpt", "epoch=1.ckpt", "notes.txt"]
        assert found["over another's"].kind == "FileExistsError"
        for name, tensor in found["whole"].items():
            assert torch.equal(found["resumed"][name], tensor), name
    assert (tmp_path / "notes.txt").read_text() == "precious"
    state = torch.load(tmp_path / "epoch=1.ckpt", weights_only=True)["state_dict"]
    assert found["whole, seen"] == found["resumed, seen"] == state["seen.weight"] == 4
    first, last = (Saved.load_from_checkpoint(tmp_path / f"epoch={epoch}.ckpt") for epoch in (0, 1))
    for name, tensor in found["whole"].items():
        assert torch.equal(state[name], tensor), name
        assert torch.equal(last.get_parameter(name).detach(), tensor), name
        assert not torch.equal(first.get_parameter(name).detach(), tensor), name
    assert (first.seen.weight, last.seen.weight) == (2, 4)
    assert state["model.seen"].tolist() == last.model.seen.tolist() == [5, 5]
    assert first.model.seen.tolist() == [0, 0]
    for other, text in UNLIKE.items():
        with pytest.raises(ValueError, match=text):
            other.load_from_checkpoint(tmp_path / "epoch=1.ckpt")


UNLIKE = {
    OfAnotherShape: r"does not fit OfAnotherShape: .* has shape \(3, .*\) in it and \(6, ",
    OfAnotherScale: "does not fit OfAnotherScale: .* was trained with lora_alpha=6, .* has lora_alpha=60",
    OnAnotherBase: "does not fit OnAnotherBase: it was trained on another base model",
}


def test_a_module_that_is_built_otherwise_is_refused(saved):
    path, _ = saved
    for other, text in UNLIKE.items():
        with pytest.raises(ValueError, match=text):
            other.load_from_checkpoint(path)
    assert isinstance(Saved.load_from_checkpoint(path.with_name("half.ckpt")), Saved), "the base was cast to train"


@pytest.mark.parametrize("name", ["/{tmp}/evil", "../evil", "adapter/../../evil"])
def test_a_file_that_would_be_written_elsewhere_is_refused(tmp_path, monkeypatch, name):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    evil = name.format(tmp=tmp_path)
    data = torch.zeros(3, dtype=torch.uint8)
    torch.save({PACKED: {"extra.pt": data, evil: data}, "state_dict": {}}, tmp_path / "evil.ckpt")
    for load in (Saved.load_from_checkpoint, lambda path: unpacked(path, weights_only=True)):
        with pytest.raises(ValueError, match=r"evil.ckpt holds a file .*, outside of its own folder"):
            load(tmp_path / "evil.ckpt")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["evil.ckpt"]


def test_a_module_that_does_not_fit_is_refused(saved):
    path, _ = saved
    with pytest.raises(ValueError, match=r"does not fit Plain: .* are not in the module"):
        Plain.load_from_checkpoint(path)
    assert isinstance(Plain.load_from_checkpoint(path, strict=False), nn.Module)


def test_a_damaged_folder_is_refused(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "cut.ckpt")
    (tmp_path / "cut.ckpt" / "extra.pt").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"extra\.pt has 3 bytes"):
        Saved.load_from_checkpoint(tmp_path / "cut.ckpt")


def test_files_are_loaded_as_ever(tmp_path):
    module = Saved(seed=2)
    run = trainer(None, max_epochs=1)
    run.strategy.connect(module)
    run.save_checkpoint(tmp_path / "file.ckpt")
    loaded = Saved.load_from_checkpoint(tmp_path / "file.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_what_is_replaced_has_the_same_parameters(package):
    saving: Any = import_module(f"{package}.core.saving")
    for name, parameters in (
        ("pl_load", ["path_or_url", "map_location", "weights_only"]),
        ("_load_state", ["cls", "checkpoint", "strict", "cls_kwargs_new"]),
    ):
        own = getattr(saving, name).__wrapped__
        assert list(inspect.signature(own).parameters) == parameters
        assert name in inspect.getsource(saving._load_from_checkpoint)
