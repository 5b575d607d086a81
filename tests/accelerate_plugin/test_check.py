"""`accelerate-lora check`: what it refuses is what a run refuses, what it prints is what a run prints."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator

from accelerate_plugin import cli, launch
from tests.accelerate_plugin.harness import environment, launched
from tests.accelerate_plugin.test_launch import written
from tests.oracle import Case
from tests.oracle.workers import attempt

SIZES = {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}
GOOD = {"num_processes": 4, "parallelism_config": SIZES}
REPLICAS = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_tp_size": 2}
PIPELINE = {"parallelism_config_dp_shard_size": 2, "parallelism_config_pp_size": 2}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sizes": (
        {"num_processes": 3},
        "dp_shard=2 x tp=2 = 4, but the world size is 3: start 4 processes, or choose sizes whose product is 3.",
    ),
    "a size to change": ({"num_processes": 8}, "or set parallelism_config_dp_shard_size: 4."),
    "one key": ({"fsdp_config": {"fsdp_version": 2, "fsdp_reshard": True}}, "'fsdp_reshard', which"),
    "version": ({"fsdp_config": {"fsdp_version": 1}}, "fsdp_version is 1"),
    "no version": ({"fsdp_config": {}}, "fsdp_version is 1"),
    "precision": ({"mixed_precision": "fp16"}, "'fp16' is not supported by LoRAParallelPlugin (it needs loss"),
    "type": ({"distributed_type": "MULTI_GPU"}, "distributed_type: MULTI_GPU: set it to FSDP"),
    "schedule": (
        {"parallelism_config": {**PIPELINE, "parallelism_config_pp_schedule": "zigzag"}},
        "pp_schedule='zigzag'",
    ),
    "stages": (
        {"parallelism_config": {**PIPELINE, "parallelism_config_pp_stages_per_rank": 2}},
        '"interleaved" is for 2 stages',
    ),
    "size zero": ({"parallelism_config": {**SIZES, "parallelism_config_tp_size": 0}}, "tp_size is 0: give a positive"),
    "size -2": ({"parallelism_config": {**SIZES, "parallelism_config_tp_size": -2}}, "tp_size is -2: give a positive"),
    "size 2.5": ({"parallelism_config": {**SIZES, "parallelism_config_tp_size": 2.5}}, "tp_size is 2.5: give a"),
    "size null": ({"parallelism_config": {**SIZES, "parallelism_config_tp_size": None}}, "tp_size is None: give a"),
    "words": ({"parallelism_config": {**PIPELINE, "parallelism_config_pp_size": "two"}}, "pp_size is 'two': give a"),
    "method": ({"parallelism_config": {**SIZES, "parallelism_config_cp_method": "ring"}}, "cp_method is 'ring': give"),
    "no section": ({"fsdp_config": 2}, "fsdp_config is 2: give keys"),
    "no section of sizes": ({"parallelism_config": 2}, "parallelism_config is 2: give keys"),
    "number for a key": ({"fsdp_config": {2: 2}}, "fsdp_config has the key 2, which"),
    "version null": ({"fsdp_config": {"fsdp_version": None}}, "fsdp_version is None"),
    "version two": ({"fsdp_config": {"version": "two"}}, "fsdp_version is two"),
    "flag": (
        {"fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": "maybe"}},
        "fsdp_config has fsdp_activation_checkpointing: 'maybe': give true or false",
    ),
    "flag null": (
        {"fsdp_config": {"version": 2, "offload_params": None}},
        "fsdp_config has fsdp_offload_params: None: give true or false",
    ),
    "use_cpu": ({"use_cpu": "maybe"}, "use_cpu is 'maybe': give true or false"),
    "processes null": ({"num_processes": None}, "num_processes is missing: give"),
    "processes in words": ({"num_processes": "four"}, "num_processes is 'four': give"),
    "machines": ({"num_machines": 3}, "num_processes 4 on num_machines 3"),
    "no machine": ({"num_machines": 0}, "num_processes 4 on num_machines 0"),
    "no address": ({"num_machines": 2}, "main_process_ip is missing"),
    "machine": ({"num_machines": 2, "main_process_ip": "a", "machine_rank": 5}, "machine_rank 5 of 2 machines"),
    "address with a port": (
        {"num_machines": 2, "main_process_port": 1, "main_process_ip": "10.0.0.1:29500"},
        "main_process_ip is '10.0.0.1:29500': give the name or address of machine 0 alone",
    ),
    "port": ({"main_process_port": 99999999}, "main_process_port 99999999: give a free port"),
}
REFUSED_LATER = {
    "replicas": (
        {
            "parallelism_config": {
                **SIZES,
                "parallelism_config_dp_shard_size": 1,
                "parallelism_config_dp_replicate_size": 2,
            }
        },
        "pure data parallelism",
    ),
    "offload": ({"fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True}}, "has not run over NCCL yet"),
}

ROWS = """
from torch.utils.data import DataLoader
loaders = [DataLoader([0] * 6, batch_size=size) for size in (3, 1)]
"""

SCRIPT = """
import sys
import torch
from accelerate import Accelerator
from tests.oracle import Case

accelerator = Accelerator()
assert accelerator.num_processes == 2 and sys.argv[1:] == ["--rows", "2"], sys.argv
model = Case().model()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
raise AssertionError("the script went on")
"""


def checked(*arguments: object) -> None:
    """Run the command as if it was alone in the process; the environment is put back."""
    path, argv = [*sys.path], [*sys.argv]
    try:
        with launched():
            cli.check([str(each) for each in arguments])
    finally:
        sys.path[:], sys.argv = path, argv


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_LATER])
def test_a_file_that_cannot_work(tmp_path, name):
    """What the file alone tells is one line that begins with its path."""
    changes, message = {**REFUSED, **REFUSED_LATER}[name]
    path = written(tmp_path, **{**GOOD, **changes})
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        checked(path)
    if name in REFUSED:
        assert str(error.value).startswith(str(path))
        assert "\n" not in str(error.value)
        with pytest.raises(ValueError, match=re.escape(message)) as launched_error:
            cli.launch(["--config_file", str(path), "-m", "package.train"])
        assert str(launched_error.value) == str(error.value)


def test_num_processes_of_the_command_line(tmp_path):
    path = written(tmp_path, **GOOD)
    with pytest.raises(ValueError, match="the world size is 8"):
        checked(path, "--num_processes", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml"], "there is no file none.yaml"),
        (["--config_file", "none.yaml", "train.py"], "there is no file none.yaml"),
    ],
)
def test_a_file_that_is_not_there(arguments, message):
    with pytest.raises(FileNotFoundError, match=message):
        checked(*arguments)


@pytest.mark.parametrize(
    ("content", "message"), [(b"a: [", "is no YAML"), (b"text", "is no configuration"), (b"\x89\xff\0", "is no YAML")]
)
def test_a_file_that_is_something_else(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"config.yaml {message}\b.*\Z"):
        checked(path)


def test_without_a_parallelism_config_all_processes_shard(tmp_path, capsys):
    path = written(tmp_path, num_processes=6)
    content = yaml.safe_load(path.read_text())
    del content["parallelism_config"]
    path.write_text(yaml.safe_dump(content))
    checked(path)
    assert "dp_shard 6, 6 ranks\n" in capsys.readouterr().out


def test_a_file_that_can_work(tmp_path, capsys):
    """Accelerate adds the prefix of a section to keys that lack it; an unquoted `no` is false in YAML."""
    path = written(
        tmp_path, num_processes=4, parallelism_config=PIPELINE, fsdp_config={"version": 2}, mixed_precision=False
    )
    capsys.readouterr()
    checked(path)
    out = capsys.readouterr().out
    assert out.startswith("pp 2 x dp_shard 2, 4 ranks\n")
    assert "batch         0  1  0  1\n" in out
    assert f"{path} can work." in out


def prepared() -> str:
    """Return what a run prints."""
    with launched(**environment("2x2")), contextlib.redirect_stderr(io.StringIO()) as said:
        accelerator = Accelerator()
        model = Case().model()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return said.getvalue()


def test_a_script_is_described_as_its_run_describes_itself(pool, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    checked("--config_file", written(tmp_path, **GOOD), script, "--rows", "2")
    *lines, verdict = capsys.readouterr().out.splitlines()
    first, *others = pool.run(4, prepared)
    assert "tensor-parallel plan, 16 layers" in lines
    assert lines[-len(first.splitlines()) :] == first.splitlines()
    assert others == ["", "", ""]
    assert verdict.startswith("The set-up can work: 4 processes")


MORE_AXES = {
    "pp 2 x dp_replicate 2 x dp_shard 2 x tp 2, 16 ranks": {
        **PIPELINE,
        "parallelism_config_tp_size": 2,
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_pp_microbatches": 2,
    },
    "dp_shard 4 x cp 2, 8 ranks": {"parallelism_config_cp_size": 2, "parallelism_config_dp_shard_size": 4},
    "dp_shard 256, 256 ranks": {"parallelism_config_dp_shard_size": 256},
}


@pytest.mark.parametrize("mesh", [*MORE_AXES])
def test_a_script_on_more_axes(tmp_path, capsys, mesh):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("accelerator.num_processes == 2 and ", ""))
    processes = int(mesh.split()[-2])
    path = written(tmp_path, num_processes=processes, parallelism_config=MORE_AXES[mesh])
    checked("--config_file", path, script, "--rows", "2")
    out = capsys.readouterr().out
    assert f"LlamaForCausalLM on {mesh} (cpu)\n" in out
    assert f"The set-up can work: {processes} processes" in out


LIGHTNING = """
import lightning as L
import lightning_lora
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader
from tests.oracle import Case

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Case(dtype=torch.float32).model()

    def training_step(self, batch, index):
        raise AssertionError("the script went on")

    def configure_optimizers(self):
        raise AssertionError("the script went on")

callbacks = [OnExceptionCheckpoint("exception"), L.pytorch.callbacks.ModelCheckpoint("last", save_on_exception=True)]
trainer = L.Trainer(devices=4, accelerator="cpu", strategy="lora_fsdp2_tp2", max_steps=1, callbacks=callbacks)
try:
    trainer.fit(Module(), DataLoader(Case().batches(), batch_size=None))
except Exception:
    trainer.save_checkpoint("caught")
"""
FABRIC = """
import lightning as L
from lightning_lora import FabricLoRAParallelStrategy
from tests.oracle import Case

fabric = L.Fabric(devices=4, accelerator="cpu", strategy=FabricLoRAParallelStrategy(tensor_parallel_size=2))
fabric.launch()
fabric.setup(Case().model())
raise AssertionError("the script went on")
"""
LOOP = """
import torch.distributed as dist
from lora_parallel import ParallelConfig, build_mesh, parallelize
from tests.oracle import Case

dist.init_process_group("gloo")
config = ParallelConfig(tp=2)
try:
    parallelize(Case().model(), build_mesh(config, "cpu"), config)
    raise AssertionError("the script went on")
finally:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("text", [LIGHTNING, FABRIC, LOOP], ids=["Trainer of Lightning", "Fabric", "loop"])
def test_a_script_of_another_trainer_ends_where_its_model_is_sharded(tmp_path, monkeypatch, capsys, text):
    """Nothing is trained, and nothing is written: no checkpoint of a callback, no log."""
    path, script, folder = written(tmp_path, **GOOD), tmp_path / "train.py", tmp_path / "here"
    script.write_text(text)
    folder.mkdir()
    monkeypatch.chdir(folder)
    checked("--config_file", path, script)
    out = capsys.readouterr().out
    assert "LlamaForCausalLM on dp_shard 2 x tp 2, 4 ranks (cpu)\n" in out
    assert out.endswith("The set-up can work: 4 processes would train this model. Nothing was trained.\n")
    assert not [*folder.iterdir()]


def test_a_script_that_shards_nothing_is_told_what_it_uses(tmp_path):
    script, start = tmp_path / "train.py", LIGHTNING.index("callbacks =")
    plain = 'L.Trainer(devices=4, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Module(), [0])'
    script.write_text(LIGHTNING[:start] + plain)
    with pytest.raises(SystemExit, match="in DistributedDataParallel, and no model was sharded"):
        checked("--config_file", written(tmp_path, **GOOD), script)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "prepare(model := Case(adapters=False).model(), SGD(model.parameters(), 0.1))",
            "accelerate-lora check: the model (LlamaForCausalLM) has no PEFT",
        ),
        ("wait_for_everyone()", "train.py has ended, and no model was prepared"),
        ("end_training()\nraise SystemExit(0)", "train.py has ended, and no model was prepared"),
        ("wait_for_everyone()\nraise SystemExit('mine')", "mine"),
    ],
)
def test_a_script_that_cannot_work_ends_with_a_line(tmp_path, lines, message):
    script = tmp_path / "train.py"
    imports = "from accelerate import Accelerator\nfrom torch.optim import SGD\nfrom tests.oracle import Case\n"
    script.write_text(f"{imports}Accelerator().{lines}\n")
    with pytest.raises(SystemExit) as caught:
        checked("--config_file", written(tmp_path, **GOOD), script, "8")
    assert message in str(caught.value)


REFUSALS = {
    "spread": (
        "AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map='auto')",
        "spreads a model over the devices",
    ),
    "merged on disk": ("adapted(); model.merge_adapter()", "would write into a weight that is still on disk"),
    "merged": (
        "os.environ['LORA_PARALLEL_DEFER'] = '0'; adapted(); model.merge_adapter()",
        "is merged into the base of",
    ),
    "unloaded": ("adapted(); model = model.unload()", "no parameter of the model (LlamaForCausalLM) trains, as after"),
    "no adapter": (
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])",
        "has no PEFT layers and no lora_config",
    ),
    "unloaded, in a loop": (
        "from accelerate import Accelerator\nadapted()\nmodel = model.unload()\n"
        "Accelerator().prepare(model, torch.optim.SGD(model.parameters()))",
        "no parameter of the optimizer (SGD) trains, as after",
    ),
    "in DDP": (
        "adapted(); torch.nn.parallel.DistributedDataParallel(model)",
        "in DistributedDataParallel, and no model was sharded",
    ),
}
REFUSED_SCRIPT = """
import os, sys, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def adapted():
    global model
    base = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"]))

{}
Trainer(model, TrainingArguments(sys.argv[2], use_cpu=True, report_to=[]), train_dataset=[0]).train()
"""


def run_scripts(folder: Path, base: Path) -> dict[str, Any]:
    """Run each script as a rank of the mesh."""
    found, argv = {}, [*sys.argv]
    for name in REFUSALS:
        with launched(**environment("1x2")):
            found[name] = attempt(launch.main, [str(folder / f"{name}.py"), str(base), str(folder / "out")])
        os.environ.pop("LORA_PARALLEL_DEFER", None)
    sys.argv[:] = argv
    return found


def test_what_a_script_s_run_refuses_check_refuses_in_the_same_words(front_end_pool, tmp_path, base, monkeypatch):
    sizes = {"parallelism_config_dp_shard_size": 1, "parallelism_config_tp_size": 2}
    path = written(tmp_path, num_processes=2, parallelism_config=sizes)
    for name, (lines, _) in REFUSALS.items():
        (tmp_path / f"{name}.py").write_text(REFUSED_SCRIPT.format(lines))
    ranks = front_end_pool.run(2, run_scripts, tmp_path, base)
    for name, (_, text) in REFUSALS.items():
        monkeypatch.delenv("LORA_PARALLEL_DEFER", raising=False)
        with pytest.raises(SystemExit) as caught:
            checked("--config_file", path, tmp_path / f"{name}.py", base, tmp_path / "out")
        assert text in str(caught.value), name
        for found in ranks:
            assert str(caught.value) == f"accelerate-lora check: {found[name].message}", name


def test_a_script_that_starts_other_processes_than_the_file(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(FABRIC.replace("devices=4", "devices=2"))
    with pytest.raises(SystemExit, match="check: devices and num_nodes of the script ask for 2 processes, and the con"):
        checked("--config_file", written(tmp_path, **GOOD), script)


def test_an_error_of_the_script_itself_is_not_swallowed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import json\njson.loads('')\n")
    with pytest.raises(ValueError, match="Expecting value"):
        checked("--config_file", written(tmp_path, **GOOD), script)


@pytest.mark.usefixtures("simulated_here")
def test_the_memory_of_a_step_is_predicted(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(f"{ROWS}{SCRIPT.replace('float64', 'float32')}")
    path = written(tmp_path, **GOOD)
    for options, said in (
        ((), ("3 x 16 tokens", "the script's batch_size")),
        (("--rows", "2"), ("2 x 16 tokens", "--rows")),
    ):
        checked("--config_file", path, "--seq", "16", *options, script, "--rows", "2")
        out = capsys.readouterr().out
        assert all(text in out for text in said), out


def test_where_a_script_stands_in_the_command_line():
    """Hold that options behind the script are the script's own, also where `check` has one of the name."""
    own = ["--lr", "1", "--seq", "8", "--config_file", "b.yaml", "-m", "--num_processes", "2", "rest"]
    given = cli.read_arguments(["--config_file", "a.yaml", "-m", "package.train", *own])
    assert (given.module, given.script, given.config_file) == (True, "package.train", "a.yaml")
    assert (given.seq, given.num_processes, given.rest) == (None, None, own)
    for wrong in (
        ["a.yaml", "--seq", "16"],
        ["a.yaml", "--rows", "2", "train.py"],
        ["a.yaml", "--lr", "1"],
        ["--config_file", "a.yaml", "b.yaml"],
    ):
        with pytest.raises(SystemExit):
            cli.read_arguments(wrong)
    alone = cli.read_arguments(["a.yaml", "--num_processes", "4"])
    assert (alone.script, alone.config_file, alone.num_processes) == ("", "a.yaml", 4)
    given = cli.read_arguments(["a.yaml", "--seq", "16", "-m", "package.train", *own])
    assert (given.module, given.script, given.config_file, given.seq) == (True, "package.train", "a.yaml", 16)
    assert given.rest == own
    given = cli.read_arguments(["a.yaml", "train.py", *own])
    assert (given.script, given.config_file, given.seq, given.rest) == ("train.py", "a.yaml", None, own)
