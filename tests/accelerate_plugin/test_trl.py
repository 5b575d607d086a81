"""TRL's trainers, and its own script as a user launches it: the same training as stock TRL in one process."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

pytest.importorskip("trl")  # and `datasets`, which it needs

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.accelerate_plugin.harness import environment, launched
from tests.accelerate_plugin.test_launch import command
from tests.cases import cases
from tests.oracle import dp_of, full, ranks_of, relative_error, trained
from tests.oracle.trainer_rows import conversations, plain, preferences, write_base

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


STEPS = 2
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
KINDS: dict[str, Any] = {
    "plain": (SFTTrainer, SFTConfig, lambda: plain(32), {}),
    "packing": (SFTTrainer, SFTConfig, lambda: plain(96), {"packing": True}),
    "assistant only": (SFTTrainer, SFTConfig, lambda: conversations(32), {"assistant_only_loss": True}),
    "dpo": (DPOTrainer, DPOConfig, lambda: preferences(32), {}),
}


def tuned(base: Path, output: Path, mesh: str, kinds: list[str]) -> dict[str, Any]:
    """What each trainer logs, and the adapter it ends with; without a mesh stock TRL in one process."""
    found = {}
    for kind in kinds:
        with launched(**(environment(mesh) if mesh else {})):
            trainer_class, config_class, rows, settings = KINDS[kind]
            dp = dp_of(mesh) if mesh else 1
            arguments = config_class(
                str(output / kind),
                per_device_train_batch_size=8 // dp,
                max_steps=STEPS,
                max_length=32,
                learning_rate=1e-2,
                logging_steps=1,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                bf16=False,
                **settings,
            )
            torch.manual_seed(4)
            model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
            peft_config: LoraConfig | None = LoraConfig(**LORA)
            if kind == "packing":  # a model that has its adapter already
                model, peft_config = get_peft_model(model, peft_config), None
            trainer = trainer_class(
                model=model,
                args=arguments,
                train_dataset=Dataset.from_list(rows()),
                processing_class=PreTrainedTokenizerFast.from_pretrained(base),
                peft_config=peft_config,
            )
            trainer.train()
            trainer.save_model()
            found[kind] = {
                "log": [each for each in trainer.state.log_history if "loss" in each],
                "adapters": {name: full(p) for name, p in trained(trainer.model).items()},
                "files": sorted(path.name for path in (output / kind / f"checkpoint-{STEPS}").iterdir()),
            }
    return found


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(
        ("1x2", ["packing", "assistant only"]),
        matrix=[
            ("1x2", ["plain", "dpo"]),
            ("1x1cp2", list(KINDS)),
            ("2x2", list(KINDS)),
            ("2x1", ["plain", "dpo"]),
            ("1x2cp2", list(KINDS)),
        ],
    ),
)
def test_trainers_of_trl(pool, base, tmp_path, mesh, kinds):
    wanted = tuned(base, tmp_path / "one", "", kinds)
    for answers in pool.run(ranks_of(mesh), tuned, base, tmp_path / "mesh", mesh, kinds):
        for kind in kinds:
            got, want = answers[kind], wanted[kind]
            assert "adapter_model.safetensors" in got["files"], kind
            assert "train_state" in got["files"], kind
            same = ["loss", "grad_norm", "learning_rate", "num_tokens", "epoch"]
            for mine, theirs in zip(got["log"], want["log"], strict=True):
                for key in same:
                    assert mine[key] == pytest.approx(theirs[key], rel=1e-4), (kind, key)
            assert relative_error(got["adapters"], want["adapters"]) < 1e-3, kind


# ---------------------------------------------------------------------- TRL's own script


def run(
    base: Path, folder: Path, config: dict[str, Any] | None, *words: str, ours: bool = True
) -> list[dict[str, Any]]:
    """Launch TRL's script; return what it logs."""
    asked: list[str] = []
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config))
        asked += ["accelerate.commands.launch", "--config_file", str(folder / "config.yaml"), "-m"]
        asked += ["accelerate_plugin.launch", "-m"] if ours else []
    asked += ["trl.scripts.sft", "--model_name_or_path", str(base), "--dataset_name", str(base / "data")]
    asked += ["--use_peft", "--lora_r", "4", "--lora_dropout", "0", "--lora_target_modules", "all-linear"]
    asked += ["--max_steps", "4", "--logging_steps", "1", "--save_steps", "2", "--learning_rate", "1e-2"]
    asked += ["--report_to", "none", "--bf16", "False", "--disable_tqdm", "True", "--dtype", "float32", *words]
    done = command(*asked, cwd=folder, HF_DATASETS_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{'loss'")]
    return [{key: float(value) for key, value in ast.literal_eval(line).items()} for line in lines]


def configured(shard: int, tp: int) -> dict[str, Any]:
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "parallelism_config": {"parallelism_config_dp_shard_size": shard, "parallelism_config_tp_size": tp},
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": shard * tp,
        "main_process_port": 0,
    }


@pytest.mark.matrix
@pytest.mark.processes
@pytest.mark.parametrize("goes_on", cases(False, matrix=[True]))
def test_the_script_of_trl_trains_on_2x1_and_goes_on_on_1x2(base, tmp_path, goes_on):
    def folder(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    whole = run(base, folder("one"), None, "--use_cpu", "--per_device_train_batch_size", "8", "--output_dir", "out")
    place = folder("2x1")
    sharded = run(base, place, configured(2, 1), "--per_device_train_batch_size", "4", "--output_dir", "out")
    assert sharded == whole, "as printed"
    if not goes_on:
        return
    resume = ["--resume_from_checkpoint", str(place / "out" / "checkpoint-2")]
    words = ["--per_device_train_batch_size", "8", "--output_dir", "out", *resume]
    resumed = run(base, folder("1x2"), configured(1, 2), *words)
    counted = "num_tokens"  # TRL counts from the resume on
    for mine, theirs in zip(resumed, whole[2:], strict=True):
        assert {k: v for k, v in mine.items() if k != counted} == {k: v for k, v in theirs.items() if k != counted}
    with pytest.raises(AssertionError):  # the control: the same command without this package
        run(base, folder("control"), configured(2, 1), "--output_dir", "out", ours=False)
