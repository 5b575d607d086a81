"""sentence-transformers' own trainer, whose losses hold the model: as in one process.

Losses that compare the rows of a batch with each other see the rows of their data-parallel rank, as under DDP. So one
process takes the same batches one after the other, and accumulates.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from torch import nn
from transformers import set_seed

pytest.importorskip("datasets")
pytest.importorskip("sentence_transformers")

from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from accelerate_plugin import trainer
from tests.accelerate_plugin.harness import environment, launched
from tests.accelerate_plugin.test_own_saves import compare
from tests.cases import cases
from tests.minilm import FOOD, PATH, SKY, SPORT
from tests.oracle import dp_of, full, ranks_of, relative_error, trained

TEXTS = ["a line", "soup and bread for the evening"]
BATCH, BATCHES, STEPS = 4, 2, 3  # rows of a batch, batches of a step, steps
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # each rank would draw its own


def pairs(scored: bool) -> Dataset:
    """Pairs of sentences on one subject; with scores, every other pair is of two subjects."""
    food, sport, sky = (text.strip().splitlines() for text in (FOOD, SPORT, SKY))
    first, second = [*food[::2], *sport[::2], *sky[::2]], [*food[1::2], *sport[1::2], *sky[1::2]]
    if not scored:
        return Dataset.from_dict({"anchor": first, "positive": second})
    second[::2] = [*second[8::2], *second[:8:2]]
    return Dataset.from_dict({"sentence1": first, "sentence2": second, "score": [0.0, 1.0] * (len(first) // 2)})


LOSSES: dict[str, tuple[Any, bool]] = {
    "cosine": (losses.CosineSimilarityLoss, True),
    "ranking": (losses.MultipleNegativesRankingLoss, False),
    "cached ranking": (lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2), False),
}


def make(output: Path, mesh: str, name: str, **more: Any) -> SentenceTransformerTrainer:
    """A script's trainer, of a model whose pooling its folder has to say: it is not the default."""
    set_seed(3)
    transformer = Transformer(str(PATH), config_kwargs=NO_DROPOUT)
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="cls")
    model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
    model.add_adapter(LoraConfig(r=4, target_modules=["query", "value", "dense"], task_type="FEATURE_EXTRACTION"))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, 0, 0.02)
    loss, scored = LOSSES[name]
    arguments = SentenceTransformerTrainingArguments(
        str(output / name),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=BATCHES // dp_of(mesh) if mesh else BATCHES,
        max_steps=STEPS,
        save_steps=more.pop("save_steps", STEPS - 1),
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **more,
    )
    data = pairs(scored)
    return SentenceTransformerTrainer(model, arguments, train_dataset=data, eval_dataset=data, loss=loss(model))


def trains(output: Path, mesh: str, names: list[str]) -> dict[str, Any]:
    """Train a model with each loss, and the last steps again; without a mesh by the trainer alone, in one process."""
    found = {}
    for name in names:
        with launched(**(environment(mesh) if mesh else {})):
            made = make(output, mesh, name)
            made.train()
            made.save_model(str(output / name / "saved"))
            encoded = made.model.encode(TEXTS)  # in inference mode
            history = [each for each in made.state.log_history if "loss" in each]
            found[name] = {
                "loss": [each["loss"] for each in history],
                "norm": [each["grad_norm"] for each in history],
                "adapters": {key: full(p) for key, p in trained(made.model).items()},
                "encoded": encoded,
            }
            if mesh:
                again = make(output, mesh, name)
                again.train(resume_from_checkpoint=str(output / name / f"checkpoint-{STEPS - 1}"))
                found[name]["resumed"] = {key: full(p) for key, p in trained(again.model).items()}
    return found


def test_a_loss_that_gathers_from_peers_of_one_batch_is_refused(monkeypatch):
    """It takes their rows, which are the same, for others to tell apart."""
    inner = nn.ModuleDict({"loss": nn.Identity()})
    inner["loss"].gather_across_devices = True
    trainer._refuse_gathering_losses(inner)
    monkeypatch.setattr(trainer, "parallelism_within_batch", object)
    for held in (inner, {"first": nn.Identity(), "second": inner}):
        with pytest.raises(ValueError, match=r"Identity\(gather_across_devices=True\)"):
            trainer._refuse_gathering_losses(held)
    trainer._refuse_gathering_losses({"first": nn.Identity()})
    trainer._refuse_gathering_losses(None)


@pytest.mark.parametrize(
    ("mesh", "names"), cases(("1x2", ["cosine"]), matrix=[("1x2", list(LOSSES)[1:]), ("2x2", list(LOSSES))])
)
def test_its_trainer_trains_as_in_one_process(pool, tmp_path, mesh, names):
    wanted = trains(tmp_path / "one", "", names)
    for answers in pool.run(ranks_of(mesh), trains, tmp_path / "mesh", mesh, names):
        for name in names:
            got, want = answers[name], wanted[name]
            assert got["loss"] == pytest.approx(want["loss"], abs=1e-5), name
            assert got["norm"] == pytest.approx(want["norm"], rel=1e-4), name
            assert relative_error(got["adapters"], want["adapters"]) < 1e-3, name
            assert relative_error(got["resumed"], want["adapters"]) < 1e-3, name
            assert np.abs(got["encoded"] - want["encoded"]).max() < 1e-3, name
    for name in names:
        for part in ("saved", f"checkpoint-{STEPS - 1}"):
            compare(tmp_path / "mesh" / name / part, tmp_path / "one" / name / part)
        loaded = SentenceTransformer(str(tmp_path / "mesh" / name / "saved"), device="cpu").encode(TEXTS)
        assert np.abs(loaded - wanted[name]["encoded"]).max() < 1e-3


def takes_the_best(output: Path, mesh: str) -> dict[str, Any]:
    """Train with steps that make the loss greater, and return what is loaded at the end."""
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    with launched(**(environment(mesh) if mesh else {})):
        made = make(output, mesh, "cosine", metric_for_best_model="loss", greater_is_better=True, **settings)
        made.train()
        return {
            "best": made.state.best_global_step,
            "adapters": {key: full(p) for key, p in trained(made.model).items()},
        }


@pytest.mark.parametrize("mesh", cases(matrix=["1x2", "2x1"]))
def test_its_trainer_takes_the_best_model(pool, tmp_path, mesh):
    want = takes_the_best(tmp_path / "one", "")
    assert want["best"] < STEPS
    for got in pool.run(ranks_of(mesh), takes_the_best, tmp_path / "mesh", mesh):
        assert got["best"] == want["best"]
        assert relative_error(got["adapters"], want["adapters"]) < 1e-3


def scores(output: Path, mesh: str) -> Any:
    """Train a model that scores pairs, whose head is in the adapter, and save it."""
    with launched(**(environment(mesh) if mesh else {})):
        set_seed(3)
        model = CrossEncoder(str(PATH), num_labels=1, device="cpu", config_kwargs=NO_DROPOUT)
        lora = {"target_modules": ["query", "value"], "modules_to_save": ["classifier"], "task_type": "SEQ_CLS"}
        model.add_adapter(LoraConfig(r=4, init_lora_weights=False, **lora))
        arguments = CrossEncoderTrainingArguments(
            str(output),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2 // dp_of(mesh) if mesh else 2,
            max_steps=2,
            save_steps=1,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        made = CrossEncoderTrainer(model, arguments, train_dataset=pairs(scored=True))
        made.train()
        made.save_model(str(output / "saved"))
        return made.model.predict([("a line", TEXTS[1])])


@pytest.mark.parametrize("mesh", cases(matrix=["1x2", "2x1"]))
def test_a_cross_encoder_is_saved_as_in_one_process(pool, tmp_path, mesh):
    want = scores(tmp_path / "one", "")
    for got in pool.run(ranks_of(mesh), scores, tmp_path / "mesh", mesh):
        assert np.abs(got - want).max() < 1e-4
    for part in ("saved", "checkpoint-1"):
        compare(tmp_path / "mesh" / part, tmp_path / "one" / part)
    loaded = CrossEncoder(str(tmp_path / "mesh" / "saved"), device="cpu").predict([("a line", TEXTS[1])])
    assert np.abs(loaded - want).max() < 1e-4
