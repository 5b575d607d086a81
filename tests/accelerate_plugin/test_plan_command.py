"""`accelerate-lora plan` prints a plan, and what it says to write is taken by what reads it."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace

import pytest
import yaml
from transformers import LlamaConfig

from accelerate_plugin import check_and_plan, cli
from accelerate_plugin.config_file import check_config
from lightning_lora import LoRAParallelStrategy
from lora_parallel import MemoryPlan, MeshCost
from lora_parallel.cost.mesh_cost import GPUS

SIZES = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
OPTIONS = {"activation_checkpointing": True, "loss_parallel": True}
COST = MeshCost(SIZES, OPTIONS, 1, 4, total=2**30, seconds=1.0, sent={"tp": 2**20}, fits=True)


def planned(cost: MeshCost) -> MemoryPlan:
    return MemoryPlan("model", 32, 8192, 16, "LoRA r=16", GPUS["H100"], [cost])


@pytest.fixture
def model(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes, vocab_size=64, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.usefixtures("simulated_here")
def test_the_command_prints_a_table_and_what_to_write(model, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    cli.main("plan", [model, "--gpus", "2", "--seq", "64", "--batch", "4", "--plot", str(picture)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "4 rows of 64 tokens a step on 2 GPUs of 80 GiB" in printed
    assert "80 GiB, weights in bfloat16" in printed
    assert "mixed_precision: 'no' # in the dtype of the weights, bfloat16: load them so" in printed
    assert "Why: " in printed
    assert "More rows: with --rows 2 and twice the batch it would take " in printed
    for text in ("tp 2", "dp_shard 2", "pp 2", "Recommended:", "--num_processes 2", "fsdp_version: 2", "Trainer("):
        assert text in printed, text
    assert picture.stat().st_size > 1000


@pytest.mark.processes
@pytest.mark.matrix
def test_json_holds_every_mesh(model, capsys):
    cli.main(
        "plan", [model, "--gpus", "1", "--seq", "64", "--gpu-memory", "0.0001", "--json", "--quantization", "8bit"]
    )
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] is None
    assert {each["options"]["activation_checkpointing"] for each in found["meshes"]} == {True, False}
    assert all(each["total"] > 0 for each in found["meshes"])


def test_the_reason_is_against_the_next_mesh_of_other_sizes():
    other = replace(COST, sizes={**SIZES, "tp": 1}, seconds=1.24, between_machines=2**31)
    whole = replace(COST, options={"shard_base": False})
    said = check_and_plan._reason(COST, [COST, whole, other])
    assert said.startswith("Why: a step takes 1.00 s by prediction; with pp 2 x dp_replicate 2 x dp_shard 2 x cp 2 ")
    assert said.endswith("the next, it takes 1.24 s and sends 2.0 GiB between machines.")
    assert "no mesh of other sizes" in check_and_plan._reason(COST, [COST, whole, replace(other, fits=False)])


def test_twice_the_rows_are_said_to_fit_or_not():
    for more, text in (
        (replace(COST, rows=2, seconds=1.6), "it would take 1.0 GiB, and 1.25 times as many rows a second."),
        (replace(COST, rows=2, fits=False, total=2**37), "need 128.0 GiB, which do not fit"),
    ):
        assert text in check_and_plan._more_rows(COST, more)


def test_no_mesh_fits_is_said_with_remedies(capsys):
    check_and_plan._print(planned(replace(COST, fits=False, total=90 * 2**30)), None)
    assert "No mesh fits. The smallest needs 90.0 GiB of 80 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("pipeline", [True, False])
def test_what_it_says_to_write_is_taken(pipeline, tmp_path):
    """Without a pipeline all parameters train."""
    whole = replace(COST, options={**COST.options, "shard_base": False})
    cost = whole if pipeline else replace(COST, sizes={**SIZES, "pp": 1}, options={"activation_checkpointing": False})
    plan = planned(cost) if pipeline else replace(planned(cost), training="all parameters")
    texts = check_and_plan.snippets(plan)
    path = tmp_path / "mesh.yaml"
    path.write_text(texts["mesh.yaml"])
    assert check_config(path)["parallelism_config"]["parallelism_config_cp_size"] == 2
    command = next(line for line in texts["Commands"].splitlines() if line.startswith("accelerate-lora config"))
    arguments = shlex.split(command, comments=True)[2:]
    arguments[1] = str(tmp_path / "asked.yaml")
    if not pipeline:
        arguments[arguments.index("--num_processes") + 1] = "16"
        arguments[arguments.index("--num_machines") + 1] = "2"
    cli.main("config", arguments)
    asked = yaml.safe_load((tmp_path / "asked.yaml").read_text())
    written = yaml.safe_load(texts["mesh.yaml"])
    assert asked["parallelism_config"].items() >= written["parallelism_config"].items()
    meeting = ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend", "same_network")
    assert [asked[name] for name in meeting] == [written[name] for name in meeting]
    assert "machine_rank: 0  # 0..3" in texts["mesh.yaml"]
    names: dict[str, object] = {"Trainer": dict, "LoRAParallelStrategy": LoRAParallelStrategy}
    trainer = eval(texts["Python"].splitlines()[-1], names)
    assert isinstance(trainer["strategy"], LoRAParallelStrategy)
    assert trainer["strategy"]._options["require_adapters"] is pipeline
    assert (" --require_adapters no" in texts["Commands"]) is not pipeline
    assert trainer["strategy"]._options["shard_base"] is not pipeline
    assert ("parallelism_config_shard_base" in written["parallelism_config"]) is pipeline
    assert trainer.get("accumulate_grad_batches", 1) == (1 if pipeline else 4)


@pytest.mark.usefixtures("simulated_here")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["/nowhere", "--gpus", "2", "--seq", "64"], "nowhere"),
        (["{model}", "--gpus", "0", "--seq", "64"], "gpus=0"),
        (["{model}", "--gpus", "2", "--seq", "64", "--hardware", "TPU"], "give one of A100-40"),
        (["{model}", "--gpus", "2", "--seq", "64", "--plot", "plan.xyz"], "--plot plan.xyz: .* ends in .*png"),
        (["{model}", "--gpus", "2", "--seq", "64", "--plot", "{model}/config.json/plan.png"], "config.json"),
        (["{model}", "--gpus", "3", "--seq", "64", "--batch", "1"], "No mesh is possible: .*heads"),
    ],
)
def test_bad_arguments_end_with_one_line(arguments, text, model):
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    with pytest.raises(SystemExit, match=text):
        cli.main("plan", [each.format(model=model) for each in arguments])


def test_matplotlib_is_asked_for_before_the_work(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    with pytest.raises(SystemExit, match="pip install matplotlib"):
        cli.main("plan", [model, "--gpus", "2", "--seq", "64", "--plot", "plan.png"])
