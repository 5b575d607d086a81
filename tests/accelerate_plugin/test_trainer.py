"""transformers' Trainer, unchanged: the same training as in one process, checkpoints that any mesh goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from lora_parallel import load_checkpoint, save_checkpoint
from lora_parallel.state import state_of
from tests.accelerate_plugin.harness import Rows, environment, launched, plugin
from tests.cases import cases
from tests.logs import listening
from tests.oracle import dp_of, full, lora_config, ranks_of, relative_error, trained
from tests.oracle.quantised_rows import quantised
from tests.oracle.workers import Failure, attempt

ROWS = 8


def tokens(rows: int, seed: int) -> Rows:
    return Rows(torch.randint(0, 131, (rows, 12), generator=torch.Generator().manual_seed(seed)), uneven=True)


def metrics(prediction: Any) -> dict[str, float]:
    return {"rows": float(len(prediction.predictions)), "mean": float(np.abs(prediction.predictions).mean())}


def make(base: Path, output: Path, dp: int, lora: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    """A script's Trainer."""
    set_seed(3)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(model, lora_config(r=4, **(lora or {})))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, 0, 0.05)
    arguments = {
        "per_device_train_batch_size": ROWS // dp,
        "per_device_eval_batch_size": ROWS // dp,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "include_num_input_tokens_seen": "all",
        **settings,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(str(output), **arguments),
        train_dataset=tokens(40, 1),
        eval_dataset=tokens(16, 2),
        compute_metrics=metrics,
    )


def summary(trainer: Trainer) -> dict[str, Any]:
    history = trainer.state.log_history
    return {
        "loss": [each["loss"] for each in history if "loss" in each],
        "norm": [each["grad_norm"] for each in history if "grad_norm" in each],
        "rate": [each["learning_rate"] for each in history if "learning_rate" in each],
        "eval": [each["eval_loss"] for each in history if "eval_loss" in each],
        "rows": [each["eval_rows"] for each in history if "eval_rows" in each],
        "mean": [each["eval_mean"] for each in history if "eval_mean" in each],
        "speed": [
            round(each["eval_steps_per_second"] * each["eval_runtime"]) for each in history if "eval_runtime" in each
        ],
        "flos": trainer.state.total_flos,
        "tokens": trainer.state.num_input_tokens_seen,
        "batch": trainer.get_total_train_batch_size(trainer.args),
        "adapters": {name: full(p) for name, p in trained(trainer.model).items()},
    }


def trains(base: Path, output: Path, mesh: str, resume: str | None = None, **settings: Any) -> dict[str, Any]:
    """Train, predict, save; without a mesh by stock Trainer in one process."""
    with launched(**(environment(mesh) if mesh else {})):
        trainer = make(base, output, dp_of(mesh) if mesh else 1, **settings)
        assert next(trainer.model.get_base_model().parameters()).is_meta == bool(mesh)  # read by slices, later
        trainer.train(resume_from_checkpoint=resume)
        predicted = trainer.predict(tokens(13, 4))
        trainer.save_model(str(output / "final"))
        return {**summary(trainer), "predicted": predicted.predictions, "loss of 13": predicted.metrics["test_loss"]}


def compare_training(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
    assert got["norm"] == pytest.approx(want["norm"], rel=1e-4)
    assert got["rate"] == want["rate"]
    assert got["eval"] == pytest.approx(want["eval"], abs=1e-5)
    assert got["rows"] == want["rows"] == [16.0] * len(want["rows"])
    assert got["speed"] == want["speed"] == [2] * len(want["speed"])  # steps of an evaluation
    assert got["flos"] == want["flos"] > 0
    assert got["mean"] == pytest.approx(want["mean"], abs=1e-5)
    assert (got["tokens"], got["batch"]) == (want["tokens"], want["batch"])
    assert relative_error(got["adapters"], want["adapters"]) < 1e-3


def compare(got: dict[str, Any], want: dict[str, Any]) -> None:
    compare_training(got, want)
    assert got["predicted"].shape == want["predicted"].shape == (13, 12, 131)
    assert np.abs(got["predicted"] - want["predicted"]).max() < 1e-3


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory) -> dict[str, Any]:
    return trains(base, tmp_path_factory.mktemp("one"), "")


@pytest.mark.parametrize("mesh", cases("1x2", "1x1cp2", matrix=["2x1", "2x2x1", "1x2cp2", "2x1cp2"]))
def test_trainer_trains_as_in_one_process(pool, base, tmp_path, one_process, mesh):
    for got in pool.run(ranks_of(mesh), trains, base, tmp_path, mesh):
        compare(got, one_process)


def by_name(base: Path, output: Path, mesh: str, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with launched(**(environment(mesh) if mesh else {})):
            settings: dict[str, Any] = {"eval_strategy": "no", "save_strategy": "no", "learning_rate": 1e-3}
            trainer = make(base, output, dp_of(mesh) if mesh else 1, optim=name, max_grad_norm=1.0, **settings)
            trainer.train()
            found[name] = {each: summary(trainer)[each] for each in ("loss", "adapters")}
    return found


OPTIMIZERS = """
    adamw_torch_fused adafactor adamw_torch_4bit adamw_torch_8bit ademamix sgd adagrad adamw_bnb_8bit ademamix_8bit
    lion_8bit lion_32bit paged_adamw_32bit paged_adamw_8bit paged_ademamix_8bit paged_lion_32bit paged_lion_8bit rmsprop
    rmsprop_bnb rmsprop_bnb_8bit schedule_free_radam schedule_free_adamw schedule_free_sgd
""".split()


@pytest.mark.matrix
@pytest.mark.parametrize("names", cases(["adafactor", "adagrad", "adamw_bnb_8bit"], matrix=[(OPTIMIZERS,)]))
def test_optimizers_by_name_step_as_in_one_process(pool, base, tmp_path, names):
    want = by_name(base, tmp_path / "one", "", names)
    for got in pool.run(4, by_name, base, tmp_path, "2x2", names):
        for name in names:
            assert got[name]["loss"] == pytest.approx(want[name]["loss"], abs=1e-5), name
            assert relative_error(got[name]["adapters"], want[name]["adapters"]) < 1e-5, name


def compiled(base: Path, output: Path, mesh: str) -> tuple[dict[str, Any], int]:
    """Train two steps, evaluate and save; without a mesh in stock Trainer, as it is."""
    counters.clear()
    asked = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if mesh else {}
    with launched(**(environment(mesh) if mesh else {})):
        trainer = make(base, output, 1, {"target_modules": ["o_proj"]}, max_steps=2, save_strategy="no", **asked)
        trainer.train()
        trainer.save_model()
        return summary(trainer), counters["stats"]["unique_graphs"]


def test_torch_compile_trains_as_in_one_process(pool, base, tmp_path):
    want, none = compiled(base, tmp_path / "one", "")
    assert none == 0
    for got, graphs in pool.run(2, compiled, base, tmp_path / "mesh", "1x2"):
        compare_training(got, want)
        assert graphs > 0
    saved, wanted = (load_file(tmp_path / run / "adapter_model.safetensors") for run in ("mesh", "one"))
    assert relative_error(saved, wanted) < 1e-3


def trains_from_slices(base: Path, output: Path, mesh: str) -> list[dict[str, Any]]:
    """With the logits of training in slices: with the model's own loss, and with Trainer's label smoothing."""
    found = []
    for smoothing in (0.0, 0.1):
        with launched():
            if mesh:
                Accelerator(fsdp_plugin=plugin(mesh, loss_parallel=True))
            dp = dp_of(mesh) if mesh else 1
            trainer = make(base, output, dp, label_smoothing_factor=smoothing, save_strategy="no")
            trainer.train()
            assert not mesh or state_of(trainer.model).config.loss_parallel
            found.append(summary(trainer))
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_trainer_trains_from_slices_of_the_logits(pool, base, tmp_path, mesh):
    """Some labels are ignored, batches are accumulated, and evaluation reads all logits."""
    want = trains_from_slices(base, tmp_path / "one", "")
    for found in pool.run(ranks_of(mesh), trains_from_slices, base, tmp_path / mesh, mesh):
        for mine, theirs in zip(found, want, strict=True):
            compare_training(mine, theirs)


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_a_quantised_base_trains_as_in_one_process_and_goes_on_on_another_mesh(pool, tmp_path, mesh):
    """A checkpoint that torchao quantised; each rank reads its slices. bitsandbytes rounds anew in evaluation."""
    folder = tmp_path / "quantised"
    model: Any = quantised("torchao int8")
    model.save_pretrained(folder)
    want = trains(folder, tmp_path / "one", "")
    for got in pool.run(ranks_of(mesh), trains, folder, tmp_path / mesh, mesh):
        compare(got, want)
    for got in pool.run(2, trains, folder, tmp_path / "1x2", "1x2", str(tmp_path / mesh / "checkpoint-2")):
        compare(got, want)


@pytest.mark.parametrize("others", cases(["1x2", "2x1"], matrix=[["2x2"]]))
def test_checkpoints_hold_an_adapter_and_go_on_on_other_meshes(pool, base, tmp_path, one_process, others):
    """With SHARDED_STATE_DICT, where Trainer itself writes no adapter."""
    written = tmp_path / "2x2"
    for got in pool.run(4, trains, base, written, "2x2"):
        compare(got, one_process)
    names = {"adapter_model.safetensors", "adapter_config.json", "trainer_state.json", "training_args.bin"}
    for step in (2, 4):
        assert {path.name for path in (written / f"checkpoint-{step}").iterdir()} == {
            *names,
            "README.md",
            "train_state",
        }
    last = load_file(written / "checkpoint-4" / "adapter_model.safetensors")
    final = load_file(written / "final" / "adapter_model.safetensors")
    assert last.keys() == final.keys()
    assert all(torch.equal(last[key], final[key]) for key in last)
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), written / "final")
    rows = tokens(13, 4)
    with torch.no_grad():
        logits = loaded.eval()(input_ids=rows.tokens).logits.numpy()
    assert np.abs(logits - one_process["predicted"]).max() < 1e-3
    for mesh in others:
        resume = str(written / "checkpoint-2")
        for got in pool.run(ranks_of(mesh), trains, base, tmp_path / f"on {mesh}", mesh, resume):
            compare(got, one_process)


def other_uses(base: Path, output: Path, mesh: str) -> dict[str, Any]:
    """What else people ask of a Trainer."""
    found: dict[str, Any] = {}
    with launched(**(environment(mesh) if mesh else {})):
        dp = dp_of(mesh) if mesh else 1
        settings: dict[str, Any] = {"eval_steps": 1, "save_steps": 1, "learning_rate": 3.0, "save_total_limit": 2}
        trainer = make(base, output / "best", dp, load_best_model_at_end=True, **settings)
        trainer.train()
        found["best"] = summary(trainer)
        found["best step"] = Path(trainer.state.best_model_checkpoint).name
        found["kept"] = sorted(path.name for path in (output / "best").iterdir())
        found["evaluated"] = trainer.evaluate()["eval_loss"]

        short: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no"}
        recompute = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        trainer = make(base, output / "recomputed", dp, **recompute, **short, save_strategy="no")
        trainer.train()
        found["recomputed"] = summary(trainer)

        head = {"modules_to_save": ["lm_head"], "bias": "none"}
        trainer = make(base, output / "head", dp, head, **short, save_strategy="no")
        trainer.train()
        trainer.save_model()
        found["head"] = summary(trainer)

        trainer = make(base, output / "light", dp, save_only_model=True, **short)
        trainer.train()
        found["light"] = sorted(path.name for path in (output / "light" / "checkpoint-2").iterdir())
        found["resumed light"] = attempt(trainer.train, resume_from_checkpoint=str(output / "light" / "checkpoint-2"))

        trainer = make(base, output / "before", dp, **short)
        found["before"] = trainer.evaluate()["eval_loss"]
        trainer.train()
        found["after"] = summary(trainer)
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_what_else_a_trainer_does(pool, base, tmp_path, mesh):
    want = other_uses(base, tmp_path / "one", "")
    for got in pool.run(ranks_of(mesh), other_uses, base, tmp_path / mesh, mesh):
        for name in ("recomputed", "head", "after"):
            assert got[name]["loss"] == pytest.approx(want[name]["loss"], abs=1e-5), name
            assert relative_error(got[name]["adapters"], want[name]["adapters"]) < 1e-2, name
        evaluated = got["best"]["eval"]  # at a rate that runs away, so that the last step is not the best
        best = evaluated.index(min(evaluated)) + 1
        assert best < 4
        assert got["kept"] == [got["best step"], "checkpoint-4"] == [f"checkpoint-{best}", "checkpoint-4"]
        assert got["evaluated"] == pytest.approx(min(got["best"]["eval"]), abs=1e-6)
        assert got["before"] == pytest.approx(want["before"], abs=1e-5)
        assert "train_state" not in got["light"]
        assert isinstance(got["resumed light"], Failure)
        assert "train_state" in got["resumed light"].message


def apart(base: Path, folder: Path) -> tuple[str, list[str]]:
    """Give each process an output_dir of its own, as a time of day or a random number in its name does."""
    with launched(**environment("2x1")), listening("accelerate_plugin.trainer") as lines:
        settings = {"eval_strategy": "no", "gradient_accumulation_steps": 1, "max_steps": 1, "save_steps": 1}
        trainer = make(base, folder / f"run {dist.get_rank()}", 2, **settings)
        trainer.train()
        return trainer.args.output_dir, list(lines)


def test_the_first_process_s_output_dir_is_used_with_a_line(pool, base, tmp_path):
    for rank, (output, lines) in enumerate(pool.run(2, apart, base, tmp_path)):
        assert output == str(tmp_path / "run 0")
        assert len(lines) == (rank == 0)
        assert all("output_dir differs between processes" in line and "run 1, for example" in line for line in lines)
    assert [path.name for path in tmp_path.iterdir()] == ["run 0"]
    assert (tmp_path / "run 0" / "checkpoint-1" / "train_state").is_dir()


class Exporting(TrainerCallback, ExportableState):
    """Has a state, and draws once a checkpoint is there."""

    count, drawn = 0, 0.0

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.drawn = torch.rand(()).item()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


def goes_on(base: Path, output: Path) -> tuple[int, bool]:
    with launched(**environment("2x1")):
        settings: dict[str, Any] = {"max_steps": 1, "save_steps": 1, "eval_strategy": "no"}
        trainer, callback = make(base, output, 2, gradient_accumulation_steps=1, **settings), Exporting()
        trainer.add_callback(callback)
        trainer.train()
        checkpoint = output / "checkpoint-1"
        torch.manual_seed(99)
        trainer._load_rng_state(str(checkpoint))
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        return state.stateful_callbacks["Exporting"]["attributes"]["count"], torch.rand(()).item() == callback.drawn


def test_states_of_callbacks_and_random_numbers_go_on(pool, base, tmp_path):
    assert pool.run(2, goes_on, base, tmp_path) == [(1, True)] * 2


class FullDisk(TrainerCallback):
    """When a checkpoint is nearly there."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        def save_to_json(path: str) -> None:
            raise OSError(28, "No space left on device")

        if state.global_step == 4:
            state.save_to_json = save_to_json


def interrupted(base: Path, output: Path) -> list[Any]:
    with launched(**environment("2x1")):
        trainer = make(base, output, 2)
        trainer.add_callback(FullDisk())
        failure = attempt(trainer.train)
    return [failure.kind, get_last_checkpoint(str(output))]


def test_no_half_written_checkpoint_is_ever_the_last_one(pool, base, tmp_path):
    for kind, last in pool.run(2, interrupted, base, tmp_path):
        assert kind == "OSError"
        assert Path(last).name == "checkpoint-2"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


def foreign(base: Path, output: Path, stock: Path) -> list[Any]:
    with launched(**environment("2x1")):
        return [attempt(make(base, output, 2).train, resume_from_checkpoint=str(stock / "checkpoint-2"))]


def test_a_checkpoint_of_stock_trainer_is_refused_by_name(pool, base, tmp_path):
    with launched():
        make(base, tmp_path / "stock", 1).train()
    for [failure] in pool.run(2, foreign, base, tmp_path / "ours", tmp_path / "stock"):
        assert failure.kind == "ValueError", failure.trace
        assert "checkpoint-2 has no train_state" in failure.message


def exchanged(base: Path, output: Path) -> dict[str, Any]:
    """What each of three readers makes of what another has written."""
    answers = {}
    with launched(**environment("2x1")):
        trainer = make(base, output, 2, max_steps=1, save_steps=1, eval_strategy="no")
        trainer.train()
        trainers, model, optimizer = output / "checkpoint-1", trainer.model, trainer.optimizer.optimizer
        save_checkpoint(model, optimizer, output / "engine")
        answers["engine of trainer"] = attempt(load_checkpoint, model, optimizer, trainers)
        answers["engine of all"] = attempt(load_checkpoint, model, optimizer, output)
        for name in ("trainer of engine", "trainer of accelerator"):
            if name == "trainer of accelerator":
                trainer.accelerator.save_state(output / "state")
                answers["engine of accelerator"] = attempt(load_checkpoint, model, optimizer, output / "state")
            place = output / ("engine" if name == "trainer of engine" else "state")
            answers[name] = attempt(trainer.train, resume_from_checkpoint=str(place))
        answers["accelerator of trainer"] = attempt(trainer.accelerator.load_state, trainers)
        answers["accelerator of engine"] = attempt(trainer.accelerator.load_state, output / "engine")
    return answers


def test_each_checkpoint_says_who_wrote_it_and_who_reads_it(pool, base, tmp_path):
    reads = {
        "trainer": f"trainer.train(resume_from_checkpoint={str(tmp_path / 'checkpoint-1')!r}) reads it",
        "engine": f"lora_parallel.load_checkpoint(model, optimizer, {str(tmp_path / 'engine')!r}) reads it",
        "accelerator": f"accelerator.load_state({str(tmp_path / 'state')!r}) reads it",
    }
    for answers in pool.run(2, exchanged, base, tmp_path):
        for name, answer in answers.items():
            assert isinstance(answer, Failure), name
            assert answer.kind == "ValueError", f"{name}: {answer.trace}"
            wrote = name.split()[-1]
            want = reads.get(wrote, f"give the path of one. lora_parallel.latest_checkpoint({str(tmp_path)!r})")
            assert want in answer.message, f"{name}: {answer.message}"


def test_the_adapter_matters(base, one_process):
    """Or equal predictions would say nothing of it."""
    with torch.no_grad():
        bare = LlamaForCausalLM.from_pretrained(base).eval()(input_ids=tokens(13, 4).tokens).logits.numpy()
    assert np.abs(bare - one_process["predicted"]).max() > 0.1
