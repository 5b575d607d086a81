"""The commands, as a user types them: scripts that know nothing of us, on processes that `accelerate` starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from accelerate.commands import launch as accelerate_launch
from accelerate.commands.config import config_args
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from accelerate_plugin import LoRAParallelPlugin, cli, config_file, launch
from accelerate_plugin.patches import patched
from tests.accelerate_plugin.harness import environment
from tests.cases import cases
from tests.oracle.workers import SCRIPT_LIMIT

ROOT = Path(__file__).parents[2]


def command(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "FSDP_"))}
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=cwd,
        env={**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HOME": str(cwd), **environment},
        capture_output=True,
        text=True,
        timeout=SCRIPT_LIMIT,
        check=False,
    )


def written(folder: Path, **changes: Any) -> Path:
    """A file that `accelerate-lora config` writes, changed; for processes that share a machine with other tests."""
    path = folder / "config.yaml"
    answers = ["--num_processes", "2", "--num_machines", "1", "--tp_size", "2", "--dp_replicate_size", "1"]
    cli.config(["--config_file", str(path), "--force", *answers, "--mixed_precision", "no", "--activation_", "no"])
    content = {**yaml.safe_load(path.read_text()), "main_process_port": 0, **changes}
    path.write_text(yaml.safe_dump(content))
    return path


def test_config_writes_what_stock_accelerate_reads(tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.yaml"
    answers = iter(["8", "", "2", "2", "", "yes", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    cli.config(["--config_file", str(path)])
    read = ClusterConfig.from_yaml_file(str(path))
    assert (read.distributed_type, read.num_processes, read.mixed_precision) == ("FSDP", 8, "bf16")
    assert read.fsdp_config["fsdp_version"] == 2
    assert read.fsdp_config["fsdp_activation_checkpointing"] is True
    assert read.parallelism_config == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
    }
    assert config_file.check_config(path)
    assert "accelerate-lora launch --config_file" in capsys.readouterr().out
    with pytest.raises(FileExistsError, match="--force"):
        cli.config(["--config_file", str(path)])


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["6", "1", "4"], "does not divide 6"),
        (["4", "1", "2", "2"], "nothing to shard"),
        (["x"], "'x'"),
        (["4", "1", "2", "1", "fp16"], "'fp16': give no or bf16"),
        (["4", "1", "2", "1", "no", "maybe"], "'maybe': give yes or no"),
        (["4", "1", "2", "1", "no", "no", "some"], "require_adapters is 'some': give yes or no"),
        (["4", "3"], "num_processes 4 on num_machines 3"),
        (["4", "1", "3"], "tp_size 3 x cp_size 1 x pp_size 1 x dp_replicate_size 1 = 3 does not divide 4"),
        (["4", "2", "0", "10.0.0.1:29500", ""], "main_process_ip is '10.0.0.1:29500'"),
    ],
)
def test_answers_that_cannot_work(tmp_path, monkeypatch, answers, message):
    given = iter(answers)
    monkeypatch.setattr("builtins.input", lambda question: next(given))
    with pytest.raises(ValueError, match=message):
        cli.config(["--config_file", str(tmp_path / "config.yaml")])
    assert not [*given]  # each answer is checked as it comes
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no terminal to ask on: give --num_processes."),
        (["--machine_rank", "1"], "--machine_rank is for several machines"),
        (["--main_process_ip", "a"], "--main_process_ip is for several machines"),
        (["--pp_microbatches", "4"], "--pp_microbatches is for a pipeline"),
        (["--pp_schedule", "gpipe"], "--pp_schedule is for a pipeline"),
    ],
)
def test_options_of_config_that_cannot_work(tmp_path, monkeypatch, options, message):
    def nobody(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    sizes = ["--num_processes", "4", "--num_machines", "1", "--tp_size", "2"] if options else []
    with pytest.raises(ValueError, match=message):
        cli.config(["--config_file", str(tmp_path / "config.yaml"), *sizes, *options])
    with pytest.raises(IsADirectoryError, match="is a folder: give"):
        cli.config(["--config_file", str(tmp_path), "--force"])
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_foward": True}},
            "did you mean fsdp_reshard_after",
        ),
        ({"fsdp_config": {"version": 2, "cpu_offload_params": True}}, "'cpu_offload_params'"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_fullgraph": True}}, "did you mean dynamo_use_fullg"),
        ({"parallelism_config": {"tp_size": 2}}, "did you mean parallelism_config_tp_size"),
    ],
)
def test_a_key_that_accelerate_drops(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        config_file.check_config(written(tmp_path, **changes))


def test_the_method_of_context_parallelism_is_handed_on(tmp_path, monkeypatch):
    """`accelerate launch` does not know the key and drops it: it is read from the file, or put in the environment."""
    sizes = {"parallelism_config_cp_size": 2, "parallelism_config_cp_method": "all_gather"}
    path = written(tmp_path, parallelism_config=sizes)
    assert config_file.check_config(path)["parallelism_config"] == sizes
    monkeypatch.setattr(config_file, "_launched_with", lambda: path)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setattr(config_file, "check_config_file", config_file.check_config_file.__wrapped__)
    assert config_file.own_settings() == {"cp_method": "all_gather"}
    monkeypatch.setattr(cli, "launch_command", lambda options: None)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_METHOD", "")
    monkeypatch.delenv("PARALLELISM_CONFIG_CP_METHOD")
    script = tmp_path / "train.py"
    script.touch()
    cli.launch(["--config_file", str(path), str(script)])
    assert os.environ["PARALLELISM_CONFIG_CP_METHOD"] == "all_gather"


STYLES = {"*.q_proj": "colwise_gather_output", "lm_head": "replicate"}


def test_what_trains_and_how_layers_are_cut_are_handed_on(tmp_path, monkeypatch):
    """By the file, and as `accelerate-lora launch` writes them to the environment; the plugin may say the same."""
    want = {"require_adapters": False, "shard_base": False, "fused": False, "tp_plan": STYLES}
    mine = {f"parallelism_config_{key}": value for key, value in want.items()}
    path = written(tmp_path, parallelism_config={"parallelism_config_tp_size": 2, **mine})
    monkeypatch.setattr(config_file, "_launched_with", lambda: path)
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setattr(config_file, "check_config_file", config_file.check_config_file.__wrapped__)
    assert config_file.own_settings() == want
    monkeypatch.setattr(cli, "launch_command", lambda options: None)
    for key in mine:
        monkeypatch.setenv(key.upper(), "")
        monkeypatch.delenv(key.upper())
    script = tmp_path / "train.py"
    script.touch()
    cli.launch(["--config_file", str(path), str(script)])
    monkeypatch.setattr(config_file, "_launched_with", lambda: None)
    settings = config_file.own_settings()
    assert settings == want
    config = LoRAParallelPlugin().parallel_config({"tp": 2}, "no", configured=settings)
    assert (config.require_adapters, config.shard_base, config.fused, config.tp_plan) == (False, False, False, STYLES)
    with pytest.raises(ValueError, match="require_adapters is True by LoRAParallelPlugin and False by the config"):
        LoRAParallelPlugin(require_adapters=True).parallel_config({"tp": 2}, "no", configured=settings)


def test_a_mesh_that_accelerate_drops_beside_flags_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path)
    monkeypatch.setattr(config_file, "_launched_with", lambda: path)
    monkeypatch.delenv("ACCELERATE_USE_PARALLELISM_CONFIG", raising=False)
    with pytest.raises(ValueError, match="parallelism_config, which `accelerate launch` drops where --use_fsdp"):
        config_file.check_config_file.__wrapped__()


@pytest.mark.parametrize("asked", [True, False])
def test_processes_of_a_machine_without_accelerators_are_joined_where_a_mesh_is_asked_for(monkeypatch, asked):
    for name, value in {**(environment("1x2") if asked else {}), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with patched():
        joined = PartialState._prepare_backend(object.__new__(PartialState))
    assert joined == (("gloo", DistributedType.MULTI_CPU) if asked else (None, DistributedType.NO))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("require_adapters", "maybe", "require_adapters is 'maybe': give true or false"),
        ("tp_plan", "colwise", "tp_plan is 'colwise': give auto, or a style for each glob"),
        ("tp_plan", {"*.q_proj": 2}, "give auto, or a style for each glob of module names"),
        ("tp_plan", ["*.q_proj"], "give auto, or a style for each glob of module names"),
    ],
)
def test_values_of_these_keys_that_cannot_work(tmp_path, key, value, message):
    path = written(tmp_path, parallelism_config={f"parallelism_config_{key}": value})
    with pytest.raises(ValueError, match=message):
        cli.launch(["--config_file", str(path), "train.py"])


def test_config_writes_that_something_else_trains(tmp_path):
    path = written(tmp_path)
    assert "parallelism_config_require_adapters" not in yaml.safe_load(path.read_text())["parallelism_config"]
    options = ["--num_machines", "1", "--tp_size", "1", "--dp_replicate_size", "1", *REST]
    more = ["--require_adapters", "no", "--shard_base", "no", "--fused", "no"]
    cli.config(["--config_file", str(path), "--force", "--num_processes", "2", *options, *more])
    found = yaml.safe_load(path.read_text())["parallelism_config"]
    assert found["parallelism_config_require_adapters"] is found["parallelism_config_shard_base"] is False
    assert found["parallelism_config_fused"] is False
    assert config_file.check_config(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trl", "sft", "--dataset", "d"], "is a command: launch its module, -m trl.scripts.sft"),
        (["torchrun", "train.py"], "is a command that launches processes: launch the script"),
        (["accelerate", "launch", "train.py"], "is a command that launches processes: launch the script"),
        (["accelerate-lora", "launch", "train.py"], "is a command that launches processes: launch the script"),
    ],
)
def test_what_to_launch_in_place_of_a_console_script_is_named(tmp_path, words, message):
    if words[0] == "trl":
        pytest.importorskip("trl")
    with pytest.raises(FileNotFoundError, match=f"{words[0]} {message}"):
        cli.launch(["--config_file", str(written(tmp_path)), *words])


LAUNCHES = {
    "accelerate": "from accelerate.commands.launch import launch_command\nlaunch_command(None)\n",
    "torchrun": "from torch.distributed.run import parse_args, run\nrun(parse_args(['train.py']))\n",
    "torchrun from its command line": "from torch.distributed.run import main\nmain(['train.py'])\n",
}


@pytest.mark.parametrize("module", ["torch.distributed.run", "accelerate.commands.launch", "accelerate_lora"])
def test_a_module_that_launches_again_is_refused(monkeypatch, module):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(RuntimeError, match="launch the module that trains"):
        launch.main(["-m", module, "train.py"])


@pytest.mark.parametrize("inside", LAUNCHES)
def test_a_script_that_launches_again_is_refused(tmp_path, monkeypatch, inside):
    script = tmp_path / "again.py"
    script.write_text(LAUNCHES[inside])
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = accelerate_launch.launch_command
    with pytest.raises(RuntimeError, match="launch the module that trains"):
        launch.main([str(script)])
    assert accelerate_launch.launch_command is before


SEVERAL = ["--num_processes", "16", "--num_machines", "2", "--tp_size", "8", "--dp_replicate_size", "1"]
REST = ["--mixed_precision", "bf16", "--activation_checkpointing", "no"]


def test_config_asks_how_several_machines_meet(tmp_path, monkeypatch, capsys):
    path = tmp_path / "config.yaml"
    answers = iter(["1", "10.0.0.1", ""])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    cli.config(["--config_file", str(path), *SEVERAL, *REST])
    read = ClusterConfig.from_yaml_file(str(path))
    assert (read.num_machines, read.machine_rank, read.num_processes) == (2, 1, 16)
    assert (read.main_process_ip, read.main_process_port, read.rdzv_backend) == ("10.0.0.1", 29500, "static")
    assert "--machine_rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--machine_rank", "2", "--main_process_ip", "a", "--main_process_port", "1"], "machine_rank 2 of 2 machines"),
        (["--machine_rank", "0", "--main_process_ip", "", "--main_process_port", "1"], "main_process_ip is missing"),
        (["--machine_rank", "0", "--main_process_ip", "a", "--main_process_port", "70000"], "main_process_port 70000"),
        (["--num_machines", "3", "--machine_rank", "0", "--main_process_ip", "a", "--main_process_port", "1"], "16 on"),
    ],
)
def test_machines_that_cannot_meet(tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        cli.config(["--config_file", str(tmp_path / "config.yaml"), *SEVERAL, *REST, *given])
    assert not (tmp_path / "config.yaml").exists()


def test_config_writes_a_cp_axis(tmp_path):
    path = tmp_path / "config.yaml"
    answers = ["--num_processes", "8", "--num_machines", "1", "--tp_size", "2", "--dp_replicate_size", "1"]
    cli.config(["--config_file", str(path), *answers, "--mixed_p", "no", "--activation_", "no", "--cp_size", "2"])
    assert ClusterConfig.from_yaml_file(str(path)).parallelism_config == {
        "parallelism_config_cp_size": 2,
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 2,
    }


def test_the_file_that_accelerate_launch_reads(tmp_path, monkeypatch):
    path = written(tmp_path)
    assert config_file.config_file_of(["--config_file", str(path), "train.py"]) == path
    assert config_file.config_file_of([f"--config-file={path}", "train.py"]) == path
    script = ["--config_file", str(path), "train.py", "--config_file", "the_scripts_own.yaml"]
    assert config_file.config_file_of(script) == path
    for launcher in (["accelerate", "launch"], ["/bin/accelerate-launch"], ["-m", "accelerate.commands.launch"]):
        assert config_file._launcher_arguments(["python", *launcher, *script]) == script
    assert config_file._launcher_arguments(["python", "launch.py", *script]) is None
    monkeypatch.setattr(config_args, "default_config_file", str(path))
    assert config_file.config_file_of(["train.py", "--flag"]) == path
    monkeypatch.setattr(config_args, "default_config_file", str(tmp_path / "none"))
    assert config_file.config_file_of(["train.py"]) is None


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        (["--cpu"], {}, "--cpu starts one process"),
        ([], {"distributed_type": "MULTI_GPU"}, "distributed_type: MULTI_GPU"),
        ([], {"fsdp_config": {"fsdp_versions": 2}}, "did you mean fsdp_version"),
        (["--num_processes", "3"], {}, "tp=2 = 2, but the world size is 3: start 2 processes, or choose sizes whose"),
        (["--num_processes", "4"], {}, "or set parallelism_config_dp_shard_size: 2."),
        (["--parallelism_config_tp_size", "4"], {}, "tp=4 = 4, but the world size is 2"),
        (["--num_machines", "2"], {}, "main_process_ip is missing"),
        (["mesh.yaml"], {}, "mesh.yaml is no script, but a configuration file: give it as --config_file mesh.yaml"),
    ],
)
def test_what_launch_refuses(tmp_path, arguments, changes, message):
    """No process is started."""
    path = written(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        cli.launch(["--config_file", str(path), *arguments, "train.py"])
    with pytest.raises(FileNotFoundError, match=r"nothere.py is not there"):
        cli.launch(["--config_file", str(written(tmp_path)), "nothere.py"])
    with pytest.raises(FileNotFoundError, match="accelerate-lora config"):
        cli.launch(["--config_file", str(tmp_path / "none.yaml"), "train.py"])


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["train.py"], {}, "distributed_type: FSDP"),
        (["train.py"], {"ACCELERATE_USE_CPU": "True"}, "Leave --cpu out"),
        ([], {"ACCELERATE_USE_FSDP": "true"}, "usage:"),
        (["none.py"], {"ACCELERATE_USE_FSDP": "true"}, "no such script"),
    ],
)
def test_the_module_says_why_it_will_not_run(monkeypatch, words, environment, message):
    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(key)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "argv", sys.argv)
    with pytest.raises(SystemExit, match=message):
        launch.main(words)


@pytest.mark.matrix
@pytest.mark.processes
def test_the_module_is_a_command(tmp_path):
    (tmp_path / "train.py").write_text("print('trained')")
    launcher = ["accelerate_plugin.launch", "train.py"]
    done = command(*launcher, cwd=tmp_path, ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


SCRIPT = """
import sys
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import PartialState

import beside

PartialState()  # as data sets do, long before the Accelerator is made
accelerator = Accelerator()
said = beside.NAME, sys.argv[1:], Path(__file__).name, accelerator.parallelism_config.tp_size, accelerator.device.type
sys.stdout.write(" ".join(map(str, said)) + "\\n")  # at once: there are two of us
accelerator.end_training()
"""


class Parent:
    """A launcher, whose own parent may not be looked at."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    def parent(self) -> Parent:
        return Parent(self.depth + 1)

    def cmdline(self) -> list[str]:
        if self.depth > 1:
            raise psutil.AccessDenied(1)
        return ["python", "-m", "accelerate.commands.launch", "--config_file", "mine.yaml", "train.py"]

    def cwd(self) -> str:
        if self.depth > 1:
            raise psutil.AccessDenied(1)
        return "/"


def test_the_file_is_found_in_a_container_whose_first_process_is_closed(monkeypatch, tmp_path):
    (tmp_path / "mine.yaml").write_text("distributed_type: FSDP")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(config_file.psutil, "Process", Parent)
    assert config_file._launched_with() == Path("/mine.yaml")


def launched_with(path: Path) -> list[str]:
    return ["accelerate.commands.launch", "--config_file", str(path), "-m", "accelerate_plugin.launch"]


@pytest.mark.parametrize("use_cpu", cases(True, matrix=[False]))
@pytest.mark.processes
def test_a_script_on_a_machine_without_accelerators(tmp_path, use_cpu):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").write_text("NAME = 'beside'")
    path = written(tmp_path, use_cpu=use_cpu)
    done = command(*launched_with(path), "scripts/train.py", "--rate", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["beside ['--rate', '3'] train.py 2 cpu"] * 2


@pytest.mark.matrix
@pytest.mark.processes
def test_a_key_that_accelerate_drops_ends_every_process(tmp_path):
    (tmp_path / "train.py").write_text("import accelerate\naccelerate.Accelerator()\n")
    path = written(tmp_path, fsdp_config={"fsdp_version": 2, "fsdp_reshard": True})
    done = command(*launched_with(path), "train.py", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("ValueError") >= 2
    assert "fsdp_config has the key 'fsdp_reshard'" in done.stderr
