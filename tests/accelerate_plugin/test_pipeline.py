"""Pipeline parallelism through Accelerate, Trainer and TRL: the same training as in one process.

A rank has the tensors of its own stages only, so tensors are compared after those of all ranks were put together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from transformers import Seq2SeqTrainingArguments

from accelerate_plugin import LoRAParallelPlugin, cli, config_file
from tests.accelerate_plugin import test_checkpoint, test_data, test_launch, test_trainer
from tests.accelerate_plugin.harness import environment, launched, plugin, trains
from tests.cases import cases
from tests.oracle import Case, Run, causal_lm, ranks_of, reference, relative_error
from tests.oracle.workers import Failure, attempt

one_process = test_trainer.one_process
LOOPS = {
    "plain": Case(),
    "accumulated and clipped": Case(accumulate=2, clip=0.3),
    "float32": Case(dtype=torch.float32),
    "head saved": Case(lora={"modules_to_save": ["lm_head"]}),
}


def whole(parts: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


# ---------------------------------------------------------------------- a script's own loop


def loops(mesh: str, names: list[str], by_environment: bool) -> list[Run]:
    found = []
    for case in map(LOOPS.__getitem__, names):
        with launched(**(environment(mesh) if by_environment else {})):
            given = {} if by_environment else {"fsdp_plugin": plugin(mesh)}
            found.append(trains(case, Accelerator(gradient_accumulation_steps=case.accumulate, **given)))
    return found


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(
        ("1x2pp2", ["accumulated and clipped"]),
        ("1x1pp2", ["head saved"]),
        matrix=[(mesh, list(LOOPS)) for mesh in ("1x1pp2", "1x2pp2", "2x1pp2")],
    ),
)
def test_a_loop_trains_as_one_process_does(pool, mesh, names):
    answers = pool.run(ranks_of(mesh), loops, mesh, names, mesh != "1x2pp2")
    for name, runs in zip(names, zip(*answers, strict=True), strict=True):
        case = LOOPS[name]
        want, double = reference(case), case.dtype is torch.float64
        for run in runs:
            assert run.losses == pytest.approx(want.losses, abs=1e-6 if double else 1e-5), name
            assert run.norms == pytest.approx(want.norms, rel=1e-9), name
        gradients, adapters = whole([run.gradients for run in runs]), whole([run.adapters for run in runs])
        assert relative_error(gradients, want.gradients) < (1e-12 if double else 1e-5), name
        assert relative_error(adapters, want.adapters) < (1e-10 if double else 1e-3), name


def test_peers_of_a_pipeline_act_as_one_process(pool):
    """Pp is the outermost axis: ranks 2 and 3 of 2x1pp2 are the peers of ranks 0 and 1."""
    want = pool.run(2, test_data.seen, "2x1")[0]
    for found in pool.run(4, test_data.seen, "2x1pp2"):
        # of each process: whether it is the main one, and whether it is the last
        assert found.pop("ends") == [[True, False], [False, False], [False, False], [False, True]]
        for name in ("shuffled", "next epoch", "stream", "worker rank", "split", "padded", "indices", "draws"):
            assert found.pop(name) == want[name] * 2, name
        assert found == {name: value for name, value in want.items() if name in found}


def saved(mesh: str, folder: Path) -> list[Any]:
    """A run that saves in mid-epoch, and what else writes its adapter."""
    with launched():
        script = test_checkpoint.Script(mesh)
        losses = script.train(0, 3, folder / "state") + script.train(3, 6)
        script.accelerator.save_model(script.model, folder / "model")
        state = script.accelerator.get_state_dict(script.model)
        return [
            losses,
            script.adapters(),
            {name: (tuple(each.shape), each.device.type) for name, each in state.items()},
        ]


@pytest.mark.parametrize("others", cases(["1x2"], matrix=[["1x2pp2", "2x1", "2x1pp2", "1x1"]]))
def test_a_run_goes_on_without_a_pipeline_and_back(pool, tmp_path, others):
    with launched():
        script = test_checkpoint.Script("")
        losses, adapters = script.train(0, 6), script.adapters()
    answers = pool.run(2, saved, "1x1pp2", tmp_path / "pp")
    pool.run(2, saved, "1x2", tmp_path / "tp")
    assert relative_error(whole([answer[1] for answer in answers]), adapters) < 1e-10
    for rank, answer in enumerate(answers):
        assert answer[2] == {name: (tuple(t.shape), "meta" if rank else "cpu") for name, t in adapters.items()}
    loaded = PeftModel.from_pretrained(causal_lm(), tmp_path / "pp" / "model")
    values = {name.replace(".default", ""): tensor for name, tensor in adapters.items()}
    held = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert all(torch.allclose(p, values[name.replace(".default", "")]) for name, p in held.items())
    for mesh, folder in (*((each, "pp") for each in others), ("1x1pp2", "pp"), ("1x1pp2", "tp")):
        resumed = pool.run(ranks_of(mesh), test_checkpoint.resumed, mesh, tmp_path / folder)
        for got, _, count, _ in resumed:
            assert got == pytest.approx(losses[3:], abs=1e-6), (mesh, folder)
            assert count == 6
        assert relative_error(whole([each[1] for each in resumed]), adapters) < 1e-10, (mesh, folder)


# ---------------------------------------------------------------------- Trainer and TRL


def joined(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {**answers[0], "adapters": whole([each["adapters"] for each in answers])}


@pytest.mark.parametrize("mesh", cases("1x1pp2", matrix=["1x2pp2", "2x1pp2"]))
def test_trainer_trains_as_in_one_process_and_goes_on(pool, base, tmp_path, one_process, mesh):
    """It predicts 13 rows in batches of 8, of which two micro-batches do not divide the last one."""
    answers = pool.run(ranks_of(mesh), test_trainer.trains, base, tmp_path / "pp", mesh)
    test_trainer.compare(joined(answers), one_process)
    assert all(np.array_equal(each["predicted"], answers[0]["predicted"]) for each in answers)
    resume = str(tmp_path / "pp" / "checkpoint-2")
    for other in ("1x2", "1x1pp2"):
        answers = pool.run(2, test_trainer.trains, base, tmp_path / f"on {other}", other, resume)
        test_trainer.compare(joined(answers), one_process)
    written = load_file(tmp_path / "pp" / "final" / "adapter_model.safetensors")
    assert len(written) == len(one_process["adapters"])


@pytest.mark.matrix
def test_what_else_a_trainer_does(pool, base, tmp_path):
    """The best model is loaded at the end, activations are computed again, the head trains."""
    want = test_trainer.other_uses(base, tmp_path / "one", "")
    answers = pool.run(2, test_trainer.other_uses, base, tmp_path / "pp", "1x1pp2")
    for name in ("recomputed", "head", "after"):
        got = joined([each[name] for each in answers])
        assert got["loss"] == pytest.approx(want[name]["loss"], abs=1e-5), name
        assert relative_error(got["adapters"], want[name]["adapters"]) < 1e-2, name
    for got in answers:
        evaluated = got["best"]["eval"]  # at a rate that runs away, where rounding decides which of two is the best
        assert got["best step"] == f"checkpoint-{evaluated.index(min(evaluated)) + 1}"
        assert got["evaluated"] == pytest.approx(min(got["best"]["eval"]), abs=1e-6)


@pytest.fixture(scope="module")
def chat_base(tmp_path_factory) -> Path:
    pytest.importorskip("trl")
    from tests.oracle.trainer_rows import write_base

    return write_base(tmp_path_factory.mktemp("base"))


def packed_or_tuned(base: Path, output: Path, mesh: str, kinds: list[str]) -> dict[str, Any]:
    """As `tuned`. TRL packs a batch into one row, which is one micro-batch."""
    from tests.accelerate_plugin import test_trl

    count = {"PARALLELISM_CONFIG_PP_MICROBATCHES": "1"} if kinds == ["packing"] else {}
    test_trl.environment = partial(environment, **count)  # type: ignore[assignment]
    try:
        return test_trl.tuned(base, output, mesh, kinds)
    finally:
        test_trl.environment = environment


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(
        ("1x1pp2", ["plain", "dpo"]),
        matrix=[("1x2pp2", ["plain", "assistant only", "dpo"]), ("1x1pp2", ["packing"]), ("2x1pp2", ["plain"])],
    ),
)
def test_trainers_of_trl(pool, chat_base, tmp_path, mesh, kinds):
    from tests.accelerate_plugin import test_trl

    wanted = test_trl.tuned(chat_base, tmp_path / "one", "", kinds)
    answers = pool.run(ranks_of(mesh), packed_or_tuned, chat_base, tmp_path / "pp", mesh, kinds)
    same = ["loss", "grad_norm", "learning_rate", "num_tokens", "epoch", "entropy", "mean_token_accuracy"]
    for kind in kinds:
        got, want = joined([each[kind] for each in answers]), wanted[kind]
        assert "adapter_model.safetensors" in got["files"], kind
        for mine, theirs in zip(got["log"], want["log"], strict=True):
            for key in [each for each in same if each in theirs]:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-4), (kind, key)
        assert relative_error(got["adapters"], want["adapters"]) < 1e-3, kind


# ---------------------------------------------------------------------- the configuration

SIZES = {
    "parallelism_config_pp_size": 2,
    "parallelism_config_pp_microbatches": 4,
    "parallelism_config_pp_schedule": "interleaved",
    "parallelism_config_pp_stages_per_rank": 2,
}
SETTINGS = {"pp_size": 2, "pp_microbatches": 4, "pp_schedule": "interleaved", "pp_stages_per_rank": 2}


def test_the_keys_are_handed_on(tmp_path, monkeypatch):
    """`accelerate launch` drops them: each process reads them from the file, or finds them in the environment."""
    path = test_launch.written(tmp_path, parallelism_config=SIZES)
    monkeypatch.setattr(config_file, "_launched_with", lambda: path)
    monkeypatch.setattr(config_file, "check_config_file", config_file.check_config_file.__wrapped__)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    assert config_file.own_settings() == SETTINGS
    monkeypatch.setattr(cli, "launch_command", lambda options: None)
    for key in SIZES:
        monkeypatch.setenv(key.upper(), "")
        monkeypatch.delenv(key.upper())
    cli.launch(["--config_file", str(path), __file__])
    assert {key: os.environ[key.upper()] for key in SIZES} == {key: str(value) for key, value in SIZES.items()}
    monkeypatch.setenv("PARALLELISM_CONFIG_PP_MICROBATCHES", "four")
    with pytest.raises(ValueError, match="parallelism_config_pp_microbatches is 'four'"):
        config_file.own_settings()
    with pytest.raises(ValueError, match="did you mean parallelism_config_pp_schedule"):
        config_file.check_config(test_launch.written(tmp_path, parallelism_config={"pp_schedul": "gpipe"}))


def test_config_writes_a_pp_axis(tmp_path):
    path = tmp_path / "config.yaml"
    given = ["--num_processes", "8", "--num_machines", "1", "--tp_size", "2", "--dp_replicate_size", "1"]
    given = [
        "--config_file",
        str(path),
        "--force",
        *given,
        "--mixed_precision",
        "no",
        "--activation_checkpointing",
        "no",
    ]
    cli.config([*given, "--pp_size", "2", "--pp_microbatches", "4", "--pp_schedule", "gpipe"])
    assert yaml.safe_load(path.read_text())["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
        "parallelism_config_pp_size": 2,
        "parallelism_config_pp_microbatches": 4,
        "parallelism_config_pp_schedule": "gpipe",
        "parallelism_config_pp_stages_per_rank": 1,
    }
    assert config_file.check_config(path)
    for wrong, message in (
        (["--pp_size", "3"], "x pp_size 3 x dp_replicate_size 1 = 6 does not divide 8 processes"),
        (["--pp_size", "2", "--pp_schedule", "zigzag"], "pp_schedule='zigzag'"),
        (["--pp_size", "2", "--pp_schedule", "interleaved"], "pp_stages_per_rank=1"),
    ):
        with pytest.raises(ValueError, match=message):
            cli.config([*given, *wrong])


SCRIPT = """
import sys
from accelerate import Accelerator

accelerator = Accelerator()
sizes = accelerator.parallelism_config
config = sizes.config
said = sizes.pp_size, sizes.total_size, accelerator.num_processes, config.pp_microbatches, config.pp_schedule
sys.stdout.write(" ".join(map(str, said)) + "\\n")
accelerator.end_training()
"""


@pytest.mark.matrix
@pytest.mark.processes
def test_plain_accelerate_launch_with_the_keys(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    keys = {**SIZES, "parallelism_config_pp_schedule": "gpipe", "parallelism_config_pp_stages_per_rank": 1}
    path = test_launch.written(tmp_path, parallelism_config=keys)
    done = test_launch.command(*test_launch.launched_with(path), "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 2 1 4 gpipe"] * 2


# ---------------------------------------------------------------------- refusals


def with_environment(mesh: str = "1x2pp2", given: Any = None, **variables: str) -> Any:
    os.environ.update({**environment(mesh), **variables})
    return Accelerator(fsdp_plugin=given() if given else None)


def seven_rows() -> Any:
    accelerator = Accelerator(fsdp_plugin=plugin("1x2pp2"))
    model = accelerator.prepare(Case().model())
    tokens = torch.ones(7, 4, dtype=torch.long)
    return model(input_ids=tokens, labels=tokens)


def generates() -> Any:
    os.environ.update(environment("1x2pp2"))
    return Seq2SeqTrainingArguments("out", predict_with_generate=True, report_to=[])


def generates_later() -> Any:
    Accelerator(fsdp_plugin=plugin("1x2pp2"))
    return Seq2SeqTrainingArguments("out", predict_with_generate=True, report_to=[])


BAD: dict[str, tuple[Any, str]] = {
    "another size": (
        lambda: with_environment(given=lambda: LoRAParallelPlugin(pp_size=4)),
        "pp_size is 4 by LoRAParallelPlugin and 2 by parallelism_config",
    ),
    "another number": (
        lambda: with_environment(given=lambda: LoRAParallelPlugin(pp_microbatches=4)),
        "pp_microbatches is 4 by LoRAParallelPlugin and 2 by the configuration",
    ),
    "another schedule": (
        lambda: with_environment(
            given=lambda: LoRAParallelPlugin(pp_schedule="gpipe"), PARALLELISM_CONFIG_PP_SCHEDULE="1f1b"
        ),
        "pp_schedule is 'gpipe' by LoRAParallelPlugin and '1f1b' by the configuration",
    ),
    "sizes": (
        lambda: with_environment("1x2pp4"),
        "pp=4 x dp_replicate=1 x dp_shard=1 x tp=2 = 8, but the world size is 4",
    ),
    "no schedule": (lambda: with_environment(PARALLELISM_CONFIG_PP_SCHEDULE="zigzag"), "pp_schedule='zigzag'"),
    "no number": (lambda: with_environment(PARALLELISM_CONFIG_PP_SIZE="two"), "parallelism_config_pp_size is 'two'"),
    "no size": (lambda: LoRAParallelPlugin(pp_size=0), "pp_size=0: give a positive int"),
    "another name": (lambda: LoRAParallelPlugin(pipeline_microbatches=2), "did you mean pp_microbatches"),
    "a split": (lambda: LoRAParallelPlugin(pp_size=2, pp_split=["a", "b"]), "names 2 blocks that begin a stage"),
    "rows": (seven_rows, "a batch has 7 rows, which pp_microbatches=2 does not divide"),
    "texts": (generates, "predict_with_generate=True generates texts"),
    "texts after an Accelerator": (generates_later, "predict_with_generate=True generates texts"),
}


def tried() -> dict[str, Any]:
    answers = {}
    for name, (make, _) in BAD.items():
        with launched():
            answers[name] = attempt(make)
    return answers


def test_bad_input_is_one_error_on_every_rank(pool):
    for rank, answers in enumerate(pool.run(4, tried)):
        for name, answer in answers.items():
            assert isinstance(answer, Failure), f"{name}: nothing was raised on rank {rank}"
            assert answer.kind in ("ValueError", "TypeError"), f"{name}:\n{answer.trace}"
            assert BAD[name][1] in answer.message, f"{name} on rank {rank}: {answer.message}"
