"""Saves that a trainer's or a model's class overrides: each is called, and leaves the files of one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from lora_parallel.export.save_pretrained import TRAINED
from tests.accelerate_plugin.harness import Rows, environment, launched
from tests.cases import cases
from tests.logs import listening
from tests.oracle import dp_of, lora_config, ranks_of, relative_error
from tests.oracle.workers import attempt

ROWS = 4
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def tokens(rows: int, seed: int) -> Rows:
    return Rows(torch.randint(0, 131, (rows, 12), generator=torch.Generator().manual_seed(seed)))


class Noted(LlamaForCausalLM):
    """A model whose own save writes a file beside those of its class."""

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        super().save_pretrained(save_directory)
        (Path(save_directory) / "notes.txt").write_text(f"by the main process: {kwargs.get('is_main_process')}")


class Head(nn.Linear):
    """A layer whose own state dict has other keys."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        return state if args or kwargs else {f"head.{name}": tensor for name, tensor in state.items()}


class Pipeline(nn.Module):
    """Modules that each write their own folder, and a card with what the model computes, as sentence-transformers."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model.add_adapter(LORA)
        self.head = Head(131, 131)
        self.judge = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32).requires_grad_(False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.model(input_ids=input_ids).logits)
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    def save_pretrained(self, path: str) -> None:
        folder = Path(path)
        self.model.save_pretrained(path)
        self.judge.save_pretrained(folder / "2_Judge")
        (folder / "1_Head").mkdir(exist_ok=True)
        save_file(self.head.state_dict(), folder / "1_Head" / "model.safetensors")
        rows = tokens(2, 5).tokens
        with torch.inference_mode():
            self.eval()
            save_file({"loss": self(rows, labels=rows)["loss"].clone()}, folder / "card.safetensors")


class ByModel(Trainer):
    """A trainer that leaves its save to the model, and does not look at a state dict."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir)


class ByStateDict(Trainer):
    """A trainer that writes what trains a second time, from the state dict that it is given or else the model's."""

    seen: list[Any]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        values = self.model.state_dict() if state_dict is None else state_dict
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        save_file({name: values[name].clone() for name in trained}, Path(output_dir or "") / "again.safetensors")
        self.model.save_pretrained(output_dir, state_dict=state_dict, save_function=self.accelerator.save)
        self.accelerator.wait_for_everyone()
        self.seen = [self.args.should_save]
        self.seen += [attempt(self.accelerator.get_state_dict, self.model), attempt(torch.save, trained, BytesIO())]
        self.seen += [attempt(dist.all_reduce, torch.ones(1))]


def noted(base: Path) -> nn.Module:
    model = Noted.from_pretrained(base, dtype=torch.float32)
    model.add_adapter(LORA)
    return model


def with_head(base: Path) -> nn.Module:
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    return get_peft_model(model, lora_config(r=4, modules_to_save=["lm_head"]))


def whole(base: Path) -> nn.Module:
    return LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)


class ByEveryRank(Trainer):
    """A trainer that writes a file of its own beside what its class saves, from the main process."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            (Path(output_dir or self.args.output_dir) / "more.txt").write_text("more")


KINDS: dict[str, tuple[type[Trainer], Callable[[Path], nn.Module]]] = {
    "model's class": (Trainer, noted),
    "save_model": (ByEveryRank, noted),
    "both classes": (ByModel, Pipeline),
    "state dict": (ByStateDict, with_head),
    "whole state dict": (ByStateDict, whole),
}


def make(kind: str, base: Path, output: Path, dp: int) -> Trainer:
    set_seed(3)
    trainer, model = KINDS[kind]
    arguments = TrainingArguments(
        str(output),
        per_device_train_batch_size=ROWS // dp,
        max_steps=2,
        save_steps=2,
        learning_rate=1e-3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    return trainer(model(base), arguments, train_dataset=tokens(8, 1))


def trains(base: Path, output: Path, mesh: str) -> dict[str, Any]:
    """Train and save with each kind, by its trainer, and by its model in the user's own code."""
    found: dict[str, Any] = {}
    asked = {**environment(mesh), "PARALLELISM_CONFIG_REQUIRE_ADAPTERS": "false"} if mesh else {}
    for kind in KINDS:
        with launched(**asked), listening("lora_parallel.export.save_pretrained") as lines:
            trainer = make(kind, base, output / kind, dp_of(mesh) if mesh else 1)
            trainer.train()
            trainer.save_model(str(output / kind / "final"))
            if kind == "both classes":
                trainer.model.save_pretrained(str(output / kind / "by hand"))
            found[kind] = {"seen": getattr(trainer, "seen", None), "lines": list(lines)}
    return found


def files(folder: Path) -> dict[str, Path]:
    """Return the files in a folder that a trainer of one process and a trainer on a mesh both write, by name."""
    states = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "generation_config.json", TRAINED}
    inside = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in inside.items() if name not in states and "train_state" not in name}


def compare(got: Path, want: Path) -> None:
    assert files(got).keys() == files(want).keys(), want
    for name, path in files(want).items():
        if path.suffix == ".safetensors":
            assert relative_error(load_file(files(got)[name]), load_file(path)) < 1e-3, path
        elif path.suffix == ".txt":
            assert files(got)[name].read_text() == path.read_text()


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1", "2x2"]))
def test_each_leaves_the_files_of_one_process(pool, base, tmp_path, mesh):
    trains(base, tmp_path / "one", "")
    first, *others = pool.run(ranks_of(mesh), trains, base, tmp_path / "mesh", mesh)
    for kind in KINDS:
        for part in ("checkpoint-2", "final"):
            compare(tmp_path / "mesh" / kind / part, tmp_path / "one" / kind / part)
        assert not [other[kind]["seen"] for other in others if other[kind]["seen"]]  # of one process's files one writer
    both = tmp_path / "mesh" / "both classes"
    compare(both / "by hand", both / "final")
    asked, *refused = first["state dict"]["seen"]
    assert asked
    assert "accelerator.get_state_dict was called in a save that rank 0 runs alone" in refused[0].message
    assert "a DTensor of shape" in refused[1].message
    assert "allreduce" in refused[2].message
    for kind in ("model's class", "state dict"):
        assert not [line for line in first[kind]["lines"] if "state_dict()" in line]
    gathered = [line for line in first["whole state dict"]["lines"] if "state_dict()" in line]
    assert len(gathered) == 2
    assert "GB are gathered" in gathered[0]
    configs = [tmp_path / place / "state dict" / "final" / "adapter_config.json" for place in ("mesh", "one")]
    mesh_config, config = (json.loads(path.read_text()) for path in configs)
    assert mesh_config["auto_mapping"] == config["auto_mapping"]  # FSDP2's classes have other names
    loaded = PeftModel.from_pretrained(whole(base), tmp_path / "mesh" / "state dict" / "final")
    again = load_file(tmp_path / "mesh" / "state dict" / "final" / "again.safetensors")
    assert relative_error({name: p.detach() for name, p in loaded.named_parameters() if name in again}, again) == 0
