"""Pipeline parallelism by Trainer's and Fabric's strategies: the same as plain Lightning in one process.

A rank has the tensors of its own stages only, so tensors are compared after those of all ranks were put together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from peft import get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_lora import LoRAParallelStrategy
from lora_parallel.integration import mesh_sizes
from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora import test_fabric as f
from tests.lightning_lora import test_training as t
from tests.lightning_lora.harness import (
    ROWS,
    Gradients,
    Outcome,
    Tokens,
    check,
    fabric,
    finish,
    fit,
    joined,
    loader,
    tidy,
    trainer,
    tuner,
)
from tests.lightning_lora.test_checkpoint import run_on
from tests.lightning_lora.test_registry import command_line
from tests.oracle import causal_lm, fill_adapters, lora_config, ranks_of, relative_error
from tests.oracle.workers import Failure, attempt

Tuner = tuner()
DOUBLE: dict[str, Any] = {"precision": "64-true"}


def in_halves(mesh: str | None) -> Outcome:
    """Five batches make three steps, the last of one."""
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, **DOUBLE}
    return fit(Tuner(m.adapted), mesh, dataset=Tokens(5 * ROWS), **options)


def in_thirds(mesh: str | None) -> Outcome:
    """Under 1F1B a third is taken of gradients that went through float32 before, so it is not exact there."""
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, **DOUBLE}
    lora = {"lora": {"pipeline_schedule": "gpipe"}} if mesh else {}
    return fit(Tuner(m.adapted), mesh, dataset=Tokens(8 * ROWS), **options, **lora)


def interleaved(mesh: str | None) -> Outcome:
    """Two stages on each rank, of one block each, and a split by name."""
    starts = [f"model.layers.{index}" for index in (1, 2, 3)]
    settings = {"pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2, "pipeline_split": starts}
    return fit(Tuner(four_blocks, late=True), mesh, **({"lora": settings} if mesh else {}), **DOUBLE)


def four_blocks() -> nn.Module:
    model = get_peft_model(causal_lm(dtype=torch.float32, num_hidden_layers=4), lora_config())
    fill_adapters(model)
    return model


TRAINER: dict[str, list[Callable[[Any], Outcome]]] = {
    "1x1pp2": [t.from_lora_config, t.frozen_teacher, t.toggled, t.clipped_by_value, t.fit_twice, interleaved],
    "1x2pp2": [t.loss_from_slices],
    "2x1pp2": [in_halves],
}
MORE = {
    "1x1pp2": [t.in_init, t.in_configure_model, t.manual, in_halves, in_thirds, t.unseeded, t.float32, t.recomputed],
    "1x2pp2": [t.in_init, t.from_lora_config, t.manual, in_halves, t.clipped_by_norm, t.frozen_teacher, t.fit_twice],
    "2x1pp2": [t.in_init, t.clipped_by_norm, t.manual, t.toggled],
}


def trainers(mesh: str, chosen: list[Callable[[Any], Outcome]]) -> list[Outcome]:
    return [t.run_case(case, mesh) for case in chosen]


@pytest.mark.parametrize(("mesh", "chosen"), cases(*TRAINER.items(), matrix=MORE.items()))
def test_training_equals_plain_lightning(pool, mesh, chosen):
    answers = pool.run(ranks_of(mesh), trainers, mesh, chosen)
    wrong = {}
    for case, each in zip(chosen, zip(*answers, strict=True), strict=True):
        try:
            got = t.without_peft_prefix(joined(each))
            check(got, t.without_peft_prefix(t.oracle(case)), close=t.FLOATS.get(case, 1e-12))
        except AssertionError as error:
            wrong[case.__name__] = str(error)
    assert not wrong


# ---------------------------------------------------------------------- around training


class Judged(tuner()):  # type: ignore[misc]
    """Metrics of evaluation that read the logits beside a loss, which the last stage has until they are read."""

    def __init__(self) -> None:
        super().__init__(m.adapted, lr=0.3)
        self.accuracy = MeanMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        output = self.model(input_ids=batch["input_ids"], labels=batch["labels"])
        right = (output.logits.argmax(-1) == batch["labels"]).double().mean(1)
        self.accuracy.update(right)
        self.log("val_loss", output.loss, sync_dist=True)
        self.log("accuracy", self.accuracy)
        self.log("square", output.logits.double().square().mean(), sync_dist=True, reduce_fx="max")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss


def evaluated(mesh: str | None, folder: str) -> tuple[Outcome, dict[str, Any]]:
    """A metric decides what is kept and when training stops, on 13 rows in batches of 5, which two micro-batches do not
    divide. Then test, predict, and the best checkpoint.
    """
    module, watch, held_out = Judged(), Gradients(), DataLoader(Tokens(13, seed=90), batch_size=5)
    kept = ModelCheckpoint(folder, monitor="val_loss", filename="{epoch}", save_top_k=1)
    callbacks = [watch, kept, EarlyStopping("val_loss", patience=1)]
    with tidy():
        run = trainer(mesh, callbacks=callbacks, max_epochs=6, enable_checkpointing=True, **DOUBLE)
        run.fit(module, loader(Tokens(2 * ROWS), mesh), held_out)
        outcome = finish(module, run, watch.outcome)
        outcome.metrics |= run.test(module, held_out, verbose=False)[0]
        predicted = run.predict(module, held_out)
        best = run.validate(module, held_out, ckpt_path="best", verbose=False)[0]
        outcome.metrics |= {f"best {name}": value for name, value in best.items()}
        found = {
            "epochs": run.current_epoch,
            "best": Path(kept.best_model_path).name,
            "rows": torch.cat([batch["index"] for batch in predicted]).tolist(),
            "predicted": torch.cat([batch["logits"] for batch in predicted]),
        }
        if mesh is not None:
            mine = torch.tensor([1.0])
            found["values"] = (
                run.strategy.reduce(mine, reduce_op="sum").item(),
                module.all_gather(mine).flatten().tolist(),
                [run.strategy.reduce_boolean_decision(run.global_rank == 1, all=each) for each in (True, False)],
                run.strategy.distributed_sampler_kwargs,
            )
    return outcome, found


@pytest.mark.parametrize("mesh", cases("1x1pp2", matrix=["1x2pp2"]))
def test_evaluation_and_what_follows_from_it(pool, tmp_path, mesh):
    want, expected = evaluated(None, str(tmp_path / "one"))
    answers = pool.run(ranks_of(mesh), evaluated, mesh, str(tmp_path / mesh))
    got = joined([outcome for outcome, _ in answers])
    check(got, want)
    assert got.metrics == pytest.approx(want.metrics, abs=1e-6)
    assert expected["epochs"] < 6, "training was not stopped early"
    for _, found in answers:
        assert (found["epochs"], found["best"], found["rows"]) == (expected["epochs"], expected["best"], [*range(13)])
        assert torch.allclose(found["predicted"], expected["predicted"], atol=1e-6)
        assert found["values"] == (1.0, [1.0], [False, True], {"num_replicas": 1, "rank": 0})


def seeds_and_shares(mesh: str) -> list[Any]:
    """The batches of a shuffled loader that Lightning deals, and how its workers are seeded."""
    with tidy():
        run = fabric(mesh)
        run.seed_everything(3, verbose=False)
        data = run.setup_dataloaders(DataLoader(Tokens(16), batch_size=2, shuffle=True))
        rank = torch.tensor([run.strategy.distributed_sampler_kwargs["rank"]])
        rows = [index for batch in data for index in batch["index"].tolist()]
        return [
            rows,
            data.worker_init_fn.keywords,
            run.all_gather(rank).flatten().tolist(),
            run.all_reduce(rank, reduce_op="sum").item(),
        ]


def test_peers_of_a_pipeline_see_one_batch(pool):
    """Pp is the outermost axis: rank 2 of 2x1pp2 is a peer of rank 0."""
    answers = pool.run(4, seeds_and_shares, "2x1pp2")
    assert answers[:2] == answers[2:]
    assert sorted(answers[0][0] + answers[1][0]) == list(range(16))
    assert [answer[1:] for answer in answers] == [[{"rank": rank}, [0, 1], 1] for rank in (0, 1, 0, 1)]


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    "resumes",
    cases(
        [("1x2", "a"), ("1x1pp2", "a"), ("1x1pp2", "b")],
        matrix=[[("1x2pp2", "a"), ("1x2pp2", "b")]],
    ),
)
def test_a_run_goes_on_without_a_pipeline_and_back(pool, tmp_path, resumes):
    """With dropout, which drops the same elements in micro-batches."""
    whole = merged(pool.run(2, run_on, "1x1pp2", None, str(tmp_path / "a")))
    pool.run(2, run_on, "1x2", None, str(tmp_path / "b"))
    for mesh, folder in resumes:
        resumed = merged(pool.run(ranks_of(mesh), run_on, mesh, f"{tmp_path}/{folder}/step=2.ckpt", None, 60))
        assert resumed["losses"] == pytest.approx(whole["losses"][2:], abs=1e-6), (mesh, folder)
        assert relative_error(resumed["adapters"], whole["adapters"]) < 1e-9, (mesh, folder)


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {**answers[0], "adapters": {name: t for each in answers for name, t in each["adapters"].items()}}


# ---------------------------------------------------------------------- Fabric


GPIPE = {"pipeline_schedule": "gpipe"}
LOOPS = {
    "joint": f.CASES["joint"],
    "in thirds": replace(f.CASES["joint, accumulated and clipped"], lora=GPIPE),
    "separate": f.CASES["separate, accumulated and clipped"],
    "by value": f.CASES["by value"],
    "module": f.CASES["module"],
    "legacy": f.CASES["legacy"],
}


def loops(mesh: str | None, names: list[str]) -> list[Outcome]:
    outcomes = []
    for name in names:
        with tidy():
            outcomes.append(f.oracle_run(LOOPS[name]) if mesh is None else f.fabric_run(LOOPS[name], mesh))
    return outcomes


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(
        ("1x2pp2", ["in thirds"]),
        ("1x1pp2", ["separate", "by value", "module"]),
        matrix=[(mesh, list(LOOPS)) for mesh in ("1x1pp2", "1x2pp2", "2x1pp2")],
    ),
)
def test_a_fabric_loop_equals_one_process(pool, mesh, names):
    answers = pool.run(ranks_of(mesh), loops, mesh, names)
    for name, want, each in zip(names, loops(None, names), zip(*answers, strict=True), strict=True):
        got = joined(each)
        try:
            check(got, want)
            assert got.metrics == pytest.approx(want.metrics, rel=1e-9)
        except AssertionError as error:
            raise AssertionError(f"{name} on {mesh}") from error


# ---------------------------------------------------------------------- refusals


REFUSED = {
    "uneven": (ValueError, "a batch has 7 rows, which pp_microbatches=2 does not divide"),
    "split": (ValueError, "'model.layers.9' is no block of the model"),
    "generate": (ValueError, "generate"),
}


def refused() -> dict[str, Any]:
    found = {}
    with tidy():
        for name in REFUSED:
            lora = {"pipeline_split": ["model.layers.9"]} if name == "split" else {}
            run = trainer("1x1pp2", lora, max_steps=1)
            module = Texts(m.adapted) if name == "generate" else Tuner(m.adapted)
            found[name] = attempt(run.fit, module, DataLoader(Tokens(7), batch_size=7 if name == "uneven" else 4))
    return found


class Texts(tuner()):  # type: ignore[misc]
    """Generates texts as training starts."""

    def on_train_start(self) -> None:
        self.model.generate(input_ids=torch.ones(2, 3, dtype=torch.long), max_new_tokens=2)


def test_what_is_refused(pool):
    for found in pool.run(2, refused):
        for name, (kind, text) in REFUSED.items():
            assert isinstance(found[name], Failure), name
            assert (found[name].kind, text in found[name].message) == (kind.__name__, True), (name, found[name].trace)
    with pytest.raises(ValueError, match='pp_schedule="interleaved" with pp_stages_per_rank=1'):
        LoRAParallelStrategy(pipeline_parallel_size=2, pipeline_schedule="interleaved")
    with pytest.raises(TypeError, match="did you mean pipeline_parallel_size"):
        LoRAParallelStrategy(pp=2)


def test_the_arguments_of_the_command_line():
    words = ["pipeline_parallel_size=2", "pipeline_microbatches=4", "pipeline_schedule=gpipe"]
    words = [f"--trainer.strategy.{word}" for word in (*words, 'pipeline_split=["model.layers.1"]')]
    made = command_line(("lightning.pytorch", "lightning_lora"), words, 4)
    config = made.config
    assert (config.pp, config.pp_microbatches, config.pp_schedule) == (2, 4, "gpipe")
    assert (config.pp_stages_per_rank, config.pp_split) == (1, ["model.layers.1"])
    assert mesh_sizes(config, 4)["dp_shard"] == 2
