"""Check what the documentation shows: Python compiles, commands exist, scripts of the quick start run."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import shlex
import socket
import subprocess
import sys
import textwrap
from functools import cache
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser

from accelerate_plugin import cli
from tests.oracle.workers import SCRIPT_LIMIT

ROOT = Path(__file__).parent.parent
REPORTS = (ROOT / "docs" / "upstream").glob("*.md")
PAGES = sorted({*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - {*REPORTS})
BLOCK = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", re.M | re.S)
NAME = "meta-llama/Llama-3.1-8B"
BINARIES = Path(sys.executable).parent


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """The title line and the text of each block of code in one of the languages; "" is a block of a shell."""
    found = BLOCK.findall(page.read_text())
    return [(title, textwrap.dedent(text)) for _, language, title, text in found if language in languages]


PROGRAMS = ("accelerate", "accelerate-lora", "make", "python", "torchrun", "pip")
ELSEWHERE = ("vllm", "srun", "hf", "docker", "kubectl", "sbatch", "trl", "llamafactory-cli", "axolotl", "swift")
"""Programs that are not installed with the tests: a page must say of their blocks that they were not run."""
SHELL = re.compile(r"^(?P<mark><!-- not run: [^\n]* -->\n)?```(?:bash)?\n(?P<text>.*?)^```$", re.M | re.S)


def lines_of(block: re.Match[str]) -> list[str]:
    """The lines of a shell block, from the program on: without the variables that stand before it."""
    lines = block["text"].replace("\\\n", " ").splitlines()
    return [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line) for line in lines]


def commands(page: Path) -> list[list[str]]:
    """Every command of the page's shell blocks, and those that stand in a sentence, in words."""
    text = page.read_text()
    lines = [
        line
        for block in SHELL.finditer(text)
        for line in lines_of(block)
        if block["mark"] is None or line.split(" ")[0] in PROGRAMS
    ]
    prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S)
    lines += [found.replace("\n", " ") for found in re.findall(r"`([^`]+)`", prose)]
    starts = tuple(f"{name} " for name in PROGRAMS)
    return [shlex.split(line, comments=True) for line in lines if line.startswith(starts)]


def flags_of(script: Path) -> set[str]:
    """The options that a script of ours adds to its argparse parser."""
    return {"--help", *re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", script.read_text())}


def check_script(words: list[str]) -> None:
    """`words` begin with a script, or with -m and a module. Those of this project must have the options."""
    if words[0] == "-m":
        path = ROOT / words[1].replace(".", "/")
        script, rest = path / "__main__.py" if path.is_dir() else path.with_suffix(".py"), words[2:]
        if words[1].split(".")[0] not in ("benchmarks", "examples", "accelerate_plugin"):
            return
    else:
        script, rest = ROOT / words[0], words[1:]
        if words[0] == "-c" or "/" not in words[0]:  # train.py and the like are the reader's
            return
    assert script.exists(), words
    unknown = {word.split("=")[0] for word in rest if word.startswith("--")} - flags_of(script)
    assert not unknown, (words, unknown)


@cache
def help_of(*command: str) -> str:
    return subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True, check=True).stdout


def check_command(words: list[str]) -> None:
    """Raise an error if a program, a target, an option or a file of the command does not exist."""
    name, *rest = words
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    if name == "make":
        targets = [word for word in rest if "=" not in word]
        assert set(targets) <= set(re.findall(r"^([a-z-]+):", makefile, re.M)), words
        known = set(re.findall(r"^([A-Z]+) \?=|\$\(([A-Z]+)\)", makefile, re.M))
        assert {word.split("=")[0] for word in rest if "=" in word} <= {each for pair in known for each in pair}, words
    elif name == "python":
        check_script(rest)
    elif name == "torchrun":
        given = get_args_parser().parse_args(rest)
        check_script([given.training_script, *given.training_script_args])
    elif name == "pip":
        options = {word.split("=")[0] for word in rest[1:] if word.startswith("--")}
        assert all(option in help_of("-m", "pip", rest[0]) for option in options), words
        for extra in re.findall(r"\.\[(\w+)\]", " ".join(rest)):
            assert re.search(rf"^{extra} = \[", project, re.M), words
    elif rest[0].startswith("-"):
        assert set(rest) <= {"--version", "--help"}, words
    elif rest[0] == "launch":
        launch_command_parser().parse_args(rest[1:] or ["train.py"])
    elif words[:2] == ["accelerate-lora", "config"]:
        cli._parser().parse_args(rest[1:])
    elif any(word.startswith("--") for word in rest):  # other commands of either program, with options
        program = "accelerate_lora" if name == "accelerate-lora" else "accelerate.commands.accelerate_cli"
        told = help_of("-m", program, rest[0])
        assert all(word.split("=")[0] in told for word in rest[1:] if word.startswith("--")), words


@pytest.mark.matrix
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    for words in commands(page):
        check_command(words)


@pytest.mark.parametrize(
    "command",
    [
        "make tset",
        "make gpu ARG=--quick",
        "python examples/qlora.py --strategi auto",
        "python -m benchmarks.oracle --row gemma",
        "torchrun --nproc-per-nodes 4 train.py",
        "pip install '.[trll]'",
        "accelerate launch --config_files mesh.yaml train.py",
        "accelerate-lora config --tensor_parallel_size 2",
        "accelerate-lora --verson",
    ],
)
def test_a_wrong_command_is_found(command):
    with pytest.raises((AssertionError, SystemExit)):
        check_command(shlex.split(command))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_was_not_run_says_so(page):
    for block in SHELL.finditer(page.read_text()):
        if any(line.split(" ")[0] in ELSEWHERE for line in lines_of(block)):
            assert block["mark"], block["text"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_is_read(page):
    for _, text in blocks(page, "yaml"):
        document = yaml.safe_load(text)
        assert document
        assert isinstance(document, dict)


def test_every_file_that_is_named_exists():
    for page in PAGES:
        for name in re.findall(r"`((?:examples|benchmarks|docs)/[\w/.]+\.\w+)`", page.read_text()):
            assert (ROOT / name).exists(), (page.name, name)


SCRIPTS = {
    title.split('"')[1]: text
    for page in ("quick_start.md", "migrating.md")
    for title, text in blocks(ROOT / "docs" / page, "python")
    if title
}
CONFIG = "--num_machines 1 --tp_size 2 --dp_replicate_size 1 --mixed_precision no --activation_checkpointing no"
LAUNCHES = {
    "torchrun_train.py": ["torchrun", "--nproc-per-node", "4"],
    "lightning_train.py": ["python"],
    "fabric_train.py": ["python"],
    "trl_train.py": ["accelerate-lora", "launch", "--config_file", "mesh.yaml"],
    "trainer_train.py": ["accelerate-lora", "launch", "--config_file", "mesh.yaml"],
    "accelerate_train.py": ["accelerate-lora", "launch", "--config_file", "mesh.yaml"],
    "sft.py": ["accelerate-lora", "launch", "--config_file", "mesh.yaml"],
}


def prepared(folder: Path, *names: str) -> dict[str, str]:
    """Write scripts with a small model in the place of the large one, and their files; return the environment."""
    for name in names:
        (folder / name).write_text(SCRIPTS[name].replace(NAME, str(ROOT / "examples" / "base_model")))
    (folder / "train.jsonl").write_text('{"text": "A text that stands for yours."}\n' * 32)
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
        printed, _ = process.communicate(timeout=SCRIPT_LIMIT)
        assert process.returncode == 0, printed[-6000:]


@pytest.mark.matrix
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_quick_start_runs(tmp_path, name):
    environment = prepared(tmp_path, name, "use_adapter.py")
    run(tmp_path, environment, [*LAUNCHES[name], name])
    run(tmp_path, environment, ["python", "use_adapter.py"])
    assert (tmp_path / "adapter" / "adapter_config.json").exists()


@pytest.mark.matrix  # test_elastic.py starts two agents too
@pytest.mark.processes
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


def message_templates() -> list[str]:
    """Every text in the packages, with NUL in the place of what is filled in."""

    def template(node: ast.AST) -> str | None:
        match node:
            case ast.Constant(value=str(text)):
                return re.sub(r"%[sd]|%\.\d+f", "\0", text)
            case ast.JoinedStr():
                return "".join(template(part) or "\0" for part in node.values)
            case ast.BinOp(op=ast.Add()):
                return f"{template(node.left) or chr(0)}{template(node.right) or chr(0)}"
        return None

    files = [
        path
        for name in ("lora_parallel", "lightning_lora", "accelerate_plugin")
        for path in (ROOT / name).rglob("*.py")
    ] + [*ROOT.glob("*.py")]
    found = (template(node) for path in files for node in ast.walk(ast.parse(path.read_text())))
    return [each for each in found if each]


def test_the_messages_of_troubleshooting_exist():
    """Each heading and each first cell of a table begins a message in the sources, or says in brackets whose it is."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### (.+)$", page, re.M)
    templates = message_templates()
    lost = []
    for heading in [*headings, *re.findall(r"^\| (`.+?`) \|", page, re.M)]:
        plain = re.sub(r" \{#[^}]*\}$", "", heading)
        if not plain.startswith("`") or plain.endswith(")*"):
            continue
        parts = re.sub(r"^(`+)(.*)\1$", r"\2", plain).strip().split("...")
        pattern = re.compile(".+?".join(map(re.escape, parts)), re.S)
        if not any(pattern.match(each) for each in templates):
            lost.append(plain)
    assert not lost
    assert len(headings) > 40


SVG = "{http://www.w3.org/2000/svg}"


def outside(picture: Path, widen: float = 1.1) -> list[str]:
    """The texts of an SVG that a wide font (DejaVu Sans, `widen` times as wide) would carry out of the viewBox."""
    pytest.importorskip("matplotlib")
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    root = ElementTree.parse(picture).getroot()
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    rules = dict(re.findall(r"([.\w]+) \{ ([^}]*) \}", root.find(f"{SVG}style").text))
    shifts = {text: group for group in root.iter(f"{SVG}g") for text in group.iter(f"{SVG}text")}
    found = []
    for text in root.iter(f"{SVG}text"):
        style = ";".join([rules["text"], *(rules.get(f".{name}", "") for name in text.get("class", "").split())])
        given = {key.strip(): value.strip() for key, _, value in (each.partition(":") for each in style.split(";"))}
        font = FontProperties(family="DejaVu Sans", weight=int(given.get("font-weight", 400)))
        size = float(given["font-size"].removesuffix("px"))
        extent = widen * TextPath((0, 0), text.text, size=size, prop=font).get_extents().width
        start = 0.0 if given["text-anchor"] == "start" else -extent / 2
        x, y = float(text.get("x", 0)), float(text.get("y", 0))
        moved = [
            float(each)
            for holder in (text, shifts.get(text))
            if holder is not None
            for each in re.findall(r"translate\(([\d.]+) ([\d.]+)\)", holder.get("transform", ""))
            for each in each
        ]
        x, y = x + sum(moved[::2]), y + sum(moved[1::2])
        if "rotate(-90)" in text.get("transform", ""):
            corners = (x - size, x + size, y + start, y + start + extent)
        else:
            corners = (x + start, x + start + extent, y - size, y + size / 3)
        if corners[0] < left or corners[1] > left + width or corners[2] < top or corners[3] > top + height:
            found.append(text.text)
    return found


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "assets").glob("*.svg")), ids=lambda path: path.name)
def test_no_text_of_a_picture_is_clipped(picture):
    assert not outside(picture)
    assert outside(picture, widen=2)


@pytest.mark.parametrize("package", ["lora_parallel", "lightning_lora", "accelerate_plugin"])
def test_every_public_name_is_in_the_reference(package):
    public = set(import_module(package).__all__) - {"__version__"}
    page = (ROOT / "docs" / "api" / f"{package}.md").read_text()
    shown = re.findall(r"^::: [\w.]*?(\w+)$", page, re.M) + re.findall(r"^      heading: (\w+)$", page, re.M)
    assert not public - set(shown)
    for name in re.findall(r"^::: ([\w.]+)$", page, re.M):
        assert pkgutil.resolve_name(name), name
