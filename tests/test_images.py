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
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

pytest.importorskip("trl")  # and `datasets`, which it needs

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from lora_parallel import export_merged, save_adapter
from tests.accelerate_plugin.harness import environment, launched
from tests.cases import cases
from tests.lightning_lora.harness import Shares, global_means, share, tidy, trainer, tuner
from tests.oracle import dp_of, full, ranks_of, relative_error, trained
from tests.oracle.image_rows import (
    collate,
    conversations,
    load_base,
    load_processor,
    pictures,
    write_family,
)

ROWS, STEPS, RATE = 8, 4, 1e-2
MICRO_BATCH = 4
"""Rows of a forward by a Trainer, in one process too: models that Trainer gives no number of labels of the whole batch
(`accepts_loss_kwargs = False`) compute a mean over the labels of a forward, and Trainer the mean of those means."""

EPSILON = 1e-3
"""AdamW's. With its default an element whose gradient is zero but for rounding moves as far as any other."""

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


def on_meta(model: Any, mesh: str) -> Any:
    """Return the model, whose base has to be on meta on a mesh: each rank reads its slices later."""
    assert next(model.get_base_model().parameters()).is_meta == bool(mesh)
    return model


def own_loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
    return module.model(**batch).loss


def lightning(name: str, base: Path, output: Path, mesh: str, resume: bool) -> tuple[Run, nn.Module]:
    """Fit a LightningModule that loads the model in `configure_model`, two epochs with a checkpoint after each."""
    with tidy():
        module = tuner()(
            lambda: on_meta(adapted(base), mesh),
            late=True,
            loss=own_loss,
            optimizer=partial(torch.optim.AdamW, eps=EPSILON),
            lr=RATE,
        )
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


def mean_of_all_labels(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """Return the mean over the labels of the global batch, as docs/recipes.md has it."""
    logits, following = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    count = (following != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return cross_entropy(logits.float(), following, reduction="sum") / count


def transformers(
    name: str, base: Path, output: Path, mesh: str, resume: bool, whole: bool = False
) -> tuple[Run, nn.Module]:
    """Train by transformers' Trainer with a collator of the user's, on rows with other numbers of labels.

    Without `whole` one process computes in micro-batches of the size that ranks have.
    """
    arguments = TrainingArguments(
        str(output),
        **_arguments(mesh),
        max_grad_norm=0.3,
        eval_strategy="steps",
        eval_steps=STEPS,
        remove_unused_columns=False,
    )
    if whole and not mesh:
        arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps = ROWS, 1
    processor = load_processor(name, base)
    run = Trainer(
        model=adapted(base),
        args=arguments,
        train_dataset=pictures(32),  # type: ignore[arg-type]
        eval_dataset=pictures(ROWS),  # type: ignore[arg-type]
        data_collator=partial(collate, processor),
        processing_class=processor,
        compute_loss_func=mean_of_all_labels if whole else None,
    )
    return _trained(run, output, mesh, resume)


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
    return _trained(run, output, mesh, resume)


def _arguments(mesh: str) -> dict[str, Any]:
    dp = dp_of(mesh) if mesh else 1
    return {
        "per_device_train_batch_size": MICRO_BATCH,
        "per_device_eval_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": ROWS // MICRO_BATCH // dp,
        "max_steps": STEPS,
        "save_steps": STEPS // 2,
        "learning_rate": RATE,
        "adam_epsilon": EPSILON,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }


class Steps(TrainerCallback):
    """Count the steps that a run takes itself."""

    count = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1


def _trained(run: Trainer, output: Path, mesh: str, resume: bool) -> tuple[Run, nn.Module]:
    on_meta(run.model, mesh)
    steps = Steps()
    run.add_callback(steps)
    run.train(resume_from_checkpoint=str(output / f"checkpoint-{STEPS // 2}") if resume else None)
    assert steps.count == (STEPS // 2 if resume else STEPS)
    keys = ("loss", "eval_loss")
    losses = [each[key] for each in run.state.log_history for key in keys if key in each]
    return Run(losses, _adapters(run.model)), run.model


def _adapters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in trained(model).items()}


WHOLE = "transformers, a mean over all labels"
TRAINERS: dict[str, Callable[..., tuple[Run, nn.Module]]] = {
    "lightning": lightning,
    "transformers": transformers,
    "trl": trl,
    WHOLE: partial(transformers, whole=True),
}
KINDS = [kind for kind in TRAINERS if kind != WHOLE]


def trains(name: str, kinds: list[str], base: Path, output: Path, mesh: str, resume: bool = False) -> dict[str, Run]:
    """Train with each trainer, save the adapter and the merged model; without a mesh in one process."""
    found = {}
    for kind in kinds:
        place = output / kind
        with launched(**(environment(mesh) if mesh and kind != "lightning" else {})):
            found[kind], model = TRAINERS[kind](name, base, place, mesh, resume)
            if not resume and mesh:
                save_adapter(model, place / "adapter")
                export_merged(model, place / "merged")
            elif not mesh:
                model.save_pretrained(place / "adapter")  # type: ignore[operator]
    return found


@pytest.fixture
def base(tmp_path, name) -> Path:
    return write_family(name, tmp_path / "base")


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize(
    ("name", "mesh", "other", "resumed"),
    cases(
        ("Qwen2.5-VL", "2x1", "1x2", ["lightning", "transformers"]),
        matrix=[
            ("Gemma 3", "2x2", "1x2", KINDS),
            ("Idefics3", "2x2", "2x1", KINDS),
            ("Qwen2.5-VL", "2x2", "2x1", KINDS),
            ("LLaVA", "2x2", "1x2", KINDS),
        ],
    ),
)
def test_images_train_and_go_on_as_in_one_process(front_end_pool, base, tmp_path, name, mesh, other, resumed):
    """Adapters on towers too, other numbers of images in each row, and of patches or tiles on each rank."""
    want = trains(name, KINDS, base, tmp_path / "one", "")
    for found in front_end_pool.run(ranks_of(mesh), trains, name, KINDS, base, tmp_path / "mesh", mesh):
        for kind, got in found.items():
            compare(got, want[kind], kind)
    batch = collate(load_processor(name, base), pictures(2))
    for kind in KINDS:
        one, ours = (tmp_path / run / kind for run in ("one", "mesh"))
        saved, wanted = (load_file(place / "adapter" / "adapter_model.safetensors") for place in (ours, one))
        assert relative_error(saved, wanted) < 1e-4, kind
        merged: Any = PeftModel.from_pretrained(load_base(base), ours / "adapter").merge_and_unload()
        exported, expected = ({"logits": logits(model, batch)} for model in (load_base(ours / "merged"), merged))
        assert relative_error(exported, expected) < 1e-5, kind
    for found in front_end_pool.run(ranks_of(other), trains, name, resumed, base, tmp_path / "mesh", other, True):
        for kind, got in found.items():
            compare(got, want[kind], kind)


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Gemma 3"])
def test_a_mean_over_all_labels_does_not_depend_on_the_number_of_processes(front_end_pool, base, tmp_path, name):
    """The models' own losses are means over the labels of a process: see MICRO_BATCH."""
    want = trains(name, [WHOLE], base, tmp_path / "one", "")
    for found in front_end_pool.run(2, trains, name, [WHOLE], base, tmp_path / "mesh", "2x1"):
        compare(found[WHOLE], want[WHOLE], WHOLE)


def compare(got: Run, want: Run, kind: str) -> None:
    """Compare the losses and the adapters of a run, or of the second half of it, with one process."""
    assert len(got.losses) in (len(want.losses), len(want.losses) - STEPS // 2), kind
    assert got.losses == pytest.approx(want.losses[-len(got.losses) :], abs=1e-5), kind
    assert relative_error(got.adapters, want.adapters) < 1e-4, kind
