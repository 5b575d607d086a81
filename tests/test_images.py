"""Models that read images, from a saved folder, by each trainer: as stock software trains them in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments, set_seed

pytest.importorskip("trl")  # and `datasets`, which it needs

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from lora_parallel import export_merged, save_adapter
from tests.accelerate_plugin.harness import environment, launched
from tests.cases import cases
from tests.lightning_lora.harness import Shares, global_means, share, tidy, trainer, tuner
from tests.oracle import dp_of, full, ranks_of, relative_error, trained
from tests.oracle.image_rows import (
    FAMILIES,
    collate,
    conversations,
    load_base,
    load_processor,
    pictures,
    write_family,
)

ROWS, STEPS, RATE = 8, 4, 1e-2
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}


@dataclass
class Run:
    """Hold what a trainer computed."""

    losses: list[float]
    adapters: dict[str, Tensor]


def adapted(folder: Path) -> nn.Module:
    """Load a folder's model and put adapters on every linear layer of text and tower."""
    set_seed(3)
    return get_peft_model(load_base(folder), LoraConfig(**LORA))


def own_loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module.model(**batch).loss


def lightning(name: str, base: Path, output: Path, mesh: str, resume: bool) -> tuple[Run, nn.Module]:
    """Fit a LightningModule that loads the model in `configure_model`, two epochs with a checkpoint after each."""
    with tidy():
        module = tuner()(partial(adapted, base), late=True, loss=own_loss, lr=RATE)
        rows = pictures(STEPS // 2 * ROWS)
        loader: Any = DataLoader(
            rows,  # type: ignore[arg-type]
            batch_sampler=Shares(len(rows), *share(mesh or None)),
            collate_fn=partial(collate, load_processor(name, base), answers_only=True),
        )
        saver = ModelCheckpoint(output, filename="{epoch}", save_top_k=-1)
        run = trainer(mesh or None, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
        run.fit(module, loader, ckpt_path=str(output / "epoch=0.ckpt") if resume else None)
        assert run.global_step == STEPS
        return Run(global_means(module.losses), _adapters(module.model)), module.model


def transformers(name: str, base: Path, output: Path, mesh: str, resume: bool) -> tuple[Run, nn.Module]:
    """Train by transformers' Trainer with a collator of the user's, on rows with other numbers of labels."""
    arguments = TrainingArguments(
        str(output),
        **_arguments(mesh),
        max_grad_norm=0.3,
        eval_strategy="steps",
        eval_steps=STEPS,
        remove_unused_columns=False,
    )
    processor = load_processor(name, base)
    run = Trainer(
        model=adapted(base),
        args=arguments,
        train_dataset=pictures(32),  # type: ignore[arg-type]
        eval_dataset=pictures(ROWS),  # type: ignore[arg-type]
        data_collator=partial(collate, processor),
        processing_class=processor,
    )
    return _trained(run, output, resume)


def trl(name: str, base: Path, output: Path, mesh: str, resume: bool) -> tuple[Run, nn.Module]:
    """Train by TRL's SFTTrainer on a column of images, prompts and completions; it loads the model itself."""
    arguments = SFTConfig(
        str(output), **_arguments(mesh), bf16=False, max_length=None, model_init_kwargs={"dtype": "float32"}
    )
    run = SFTTrainer(
        model=str(base),
        args=arguments,
        train_dataset=Dataset.from_list(conversations(pictures(32))),
        processing_class=load_processor(name, base),
        peft_config=LoraConfig(**LORA),
    )
    return _trained(run, output, resume)


def _arguments(mesh: str) -> dict[str, Any]:
    rows = ROWS // dp_of(mesh) if mesh else ROWS
    return {
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "learning_rate": RATE,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }


def _trained(run: Trainer, output: Path, resume: bool) -> tuple[Run, nn.Module]:
    run.train(resume_from_checkpoint=str(output / f"checkpoint-{STEPS // 2}") if resume else None)
    keys = ("loss", "eval_loss")
    losses = [each[key] for each in run.state.log_history for key in keys if key in each]
    return Run(losses, _adapters(run.model)), run.model


def _adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in trained(model).items()}


TRAINERS: dict[str, Callable[..., tuple[Run, nn.Module]]] = {
    "lightning": lightning,
    "transformers": transformers,
    "trl": trl,
}


def trains(names: list[str], kinds: list[str], bases: Path, output: Path, mesh: str, resume: bool = False) -> Any:
    """Train each family with each trainer, save the adapter and the merged model; without a mesh in one process."""
    found = {}
    for name in names:
        for kind in kinds:
            place = output / name / kind
            with launched(**(environment(mesh) if mesh and kind != "lightning" else {})):
                found[name, kind], model = TRAINERS[kind](name, bases / name, place, mesh, resume)
                if not resume and mesh:
                    save_adapter(model, place / "adapter")
                    export_merged(model, place / "merged")
                elif not mesh:
                    model.save_pretrained(place / "adapter")
    return found


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for name in FAMILIES:
        write_family(name, folder / name)
    return folder


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize(
    ("names", "kinds", "other"),
    cases(
        (["Qwen2.5-VL"], list(TRAINERS), "1x2"),
        matrix=[
            (["LLaVA", "Gemma 3", "Idefics3"], list(TRAINERS), "2x1"),
        ],
    ),
)
def test_images_train_as_in_one_process_and_go_on_on_another_mesh(front_end_pool, bases, tmp_path, names, kinds, other):
    want = trains(names, kinds, bases, tmp_path / "one", "")
    for found in front_end_pool.run(4, trains, names, kinds, bases, tmp_path / "mesh", "2x2"):
        for which, got in found.items():
            compare(got, want[which], which)
    for name in names:
        batch = collate(load_processor(name, bases / name), pictures(ROWS))
        for kind in kinds:
            one, ours = (tmp_path / run / name / kind for run in ("one", "mesh"))
            saved, wanted = (load_file(place / "adapter" / "adapter_model.safetensors") for place in (ours, one))
            assert relative_error(saved, wanted) < 1e-4, (name, kind)
            merged: Any = PeftModel.from_pretrained(load_base(bases / name), ours / "adapter").merge_and_unload()
            exported = load_base(ours / "merged")
            assert relative_error({"logits": logits(exported, batch)}, {"logits": logits(merged, batch)}) < 1e-5
    for found in front_end_pool.run(ranks_of(other), trains, names, kinds, bases, tmp_path / "mesh", other, True):
        for which, got in found.items():
            compare(got, want[which], which)


def compare(got: Run, want: Run, which: tuple[str, str]) -> None:
    """Compare the losses and the adapters of a run, or of the second half of it, with one process."""
    assert len(got.losses) in (len(want.losses), len(want.losses) - STEPS // 2), which
    assert got.losses == pytest.approx(want.losses[-len(got.losses) :], abs=1e-5), which
    assert relative_error(got.adapters, want.adapters) < 1e-4, which
