"""Check what the documentation shows: Python compiles, commands exist, scripts of the quick start run."""

from __future__ import annotations

import ast
import os
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from accelerate_plugin import cli

ROOT = Path(__file__).parent.parent
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
BLOCK = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.M | re.S)
NAME = "meta-llama/Llama-3.1-8B"
BINARIES = Path(sys.executable).parent


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """The title line and the text of each block of code in one of the languages; "" is a block of a shell."""
    found = BLOCK.findall(page.read_text())
    return [(title, textwrap.dedent(text)) for _, language, title, text in found if language in languages]


def commands(page: Path) -> list[list[str]]:
    lines = [line for _, text in blocks(page, "", "bash") for line in text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(("accelerate", "make ", "python ex"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_compiles(page):
    for _, text in blocks(page, "python"):
        ast.parse(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for words in commands(page):
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "python":
            assert (ROOT / words[1]).exists(), words
        elif words[:2] == ["accelerate-lora", "config"]:
            cli._parser().parse_args(words[2:])
        elif words[1] == "launch":
            launch_command_parser().parse_args(words[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_parses(page):
    for _, text in blocks(page, "yaml"):
        assert all(isinstance(document, dict) for document in yaml.safe_load_all(text))


def test_every_file_that_is_named_exists():
    for page in PAGES:
        for name in re.findall(r"`((?:examples|benchmarks|docs)/[\w/.]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), (page.name, name)


SCRIPTS = {title.split('"')[1]: text for title, text in blocks(ROOT / "docs" / "quick_start.md", "python") if title}
CONFIG = "--num_machines 1 --tp_size 2 --dp_replicate_size 1 --mixed_precision no --activation_checkpointing no"
LAUNCHES = {
    "torchrun_train.py": ["torchrun", "--nproc-per-node", "4"],
    "lightning_train.py": ["python"],
    "fabric_train.py": ["python"],
    "trl_train.py": ["accelerate-lora", "launch", "--config_file", "mesh.yaml"],
    "trainer_train.py": ["accelerate-lora", "launch", "--config_file", "mesh.yaml"],
    "accelerate_train.py": ["accelerate-lora", "launch", "--config_file", "mesh.yaml"],
}


def prepared(folder: Path, *names: str) -> dict[str, str]:
    """Write scripts with a small model in the place of the large one, and mesh.yaml; return the environment."""
    for name in names:
        (folder / name).write_text(SCRIPTS[name].replace(NAME, str(ROOT / "examples" / "base_model")))
    cli.config(["--config_file", str(folder / "mesh.yaml"), "--num_processes", "4", *CONFIG.split()])
    path = f"{BINARIES}:{os.environ['PATH']}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": path}


def run(folder: Path, environment: dict[str, str], *commands: list[str]) -> None:
    """Run commands at the same time; all must succeed."""
    started = [
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    for process in started:
        printed, _ = process.communicate(timeout=240)
        assert process.returncode == 0, printed[-6000:]


@pytest.mark.matrix
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_quick_start_runs(tmp_path, name):
    environment = prepared(tmp_path, name, "use_adapter.py")
    run(tmp_path, environment, [*LAUNCHES[name], name])
    run(tmp_path, environment, ["python", "use_adapter.py"])
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


def test_two_agents_of_torchrun(tmp_path):
    """Run as on two machines, with two processes each, in an empty folder; PEFT loads what comes out."""
    environment = prepared(tmp_path, "torchrun_train.py", "use_adapter.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    agent = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    run(tmp_path, environment, *([*agent, "--node-rank", rank, "torchrun_train.py"] for rank in "01"))
    run(tmp_path, environment, ["python", "use_adapter.py"])


def test_the_quick_start_is_whole():
    assert set(SCRIPTS) == {*LAUNCHES, "use_adapter.py"}
