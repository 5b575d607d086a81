"""Make what applications need, and run their commands; what was done from the same files is not done again."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from benchmarks.applications.cases import Case, Run
from tests.mutants import product_files

__all__ = ["environment", "folder_of", "make_inputs", "run"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OUTPUT = ROOT / "benchmarks" / "out" / "applications"
INSTALL_SECONDS = 1800
RUN_SECONDS = 600
END_SECONDS = 45
PIP = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]


def make_inputs() -> None:
    """Make the models, the data and the configuration files of meshes."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    made, digest = OUTPUT / "made", _digest([HERE / "made.py"])
    if not _is_done(made, digest):
        from benchmarks.applications.made import make  # it imports transformers

        shutil.rmtree(made, ignore_errors=True)
        make(made)
        _set_done(made, digest)


def environment(folder: str) -> Path:
    """Return the virtual environment of an application, with this library in it, and make it if it is not there.

    The list of packages is whole and is installed without looking at what they require: applications exclude versions
    that work (`accelerate<=1.11`), and Axolotl the Python of this project.
    """
    made = OUTPUT / folder / "environment"
    lists = [HERE / "common.txt", HERE / folder / "requirements.txt"]
    python = str(made / "bin" / "python")
    constraints = str(ROOT / "tools" / "constraints" / "cpu.txt")
    if not _is_done(made, _digest(lists)):
        shutil.rmtree(made, ignore_errors=True)
        _checked([sys.executable, "-m", "venv", str(made)])
        # torch with what it requires: where an index has no build for a CPU, it is the one with CUDA's libraries.
        _checked([python, *PIP, "--constraint", constraints, "torch"])
        _checked([python, *PIP, "--no-deps", "--ignore-requires-python", "--requirement", str(lists[1])])
        _set_done(made, _digest(lists))
    library = made / "library"
    library.mkdir(exist_ok=True)
    if not _is_done(library, _library()):
        _checked([python, *PIP, "--no-deps", "--force-reinstall", str(_wheel())])
        _set_done(library, _library())
    return made


def run(case: Case, asked: Run) -> str:
    """Run a command of an application, unless it has run well before; return what went wrong, or nothing."""
    folder = OUTPUT / case.folder
    sources = [path for path in sorted((HERE / case.folder).iterdir()) if path.is_file()]
    for path in sources:
        shutil.copy(path, folder)
    words = [asked.command, str(case.variables), _library() if asked.mesh else ""]
    digest = _digest([HERE / "made.py", HERE / "common.txt", *sources], *words)
    out = folder_of(case, asked)
    if _is_done(out, digest):
        return ""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    variables = {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(OUTPUT / "hub"),
        **case.variables,
    }
    if asked.mesh:
        variables["LORA_PARALLEL"] = f"../made/mesh{asked.mesh}.yaml"
    variables["PATH"] = f"{folder / 'environment' / 'bin'}:{os.environ['PATH']}"
    kept = {name: each for name, each in os.environ.items() if not name.startswith(("ACCELERATE_", "LORA_PARALLEL"))}
    log = out.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            ["env", *shlex.split(asked.command)],
            cwd=folder,
            env={**kept, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return f"not done in {RUN_SECONDS} s: {log}"
        finally:
            _end(process)
    if code:
        return f"exit code {code}: {log}"
    _set_done(out, digest)
    return ""


def _end(process: subprocess.Popen) -> None:
    """End a command that still runs; torchrun ends its ranks, which are in sessions of their own, on SIGTERM only."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)


def folder_of(case: Case, run: Run) -> Path:
    """Return the folder that a run writes."""
    return OUTPUT / case.folder / case.out(run.name)


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, cwd=OUTPUT, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {done.stderr[-3000:]}")


def _digest(files: Iterable[Path], *words: str) -> str:
    found = hashlib.sha256(repr(words).encode())
    for path in files:
        found.update(path.read_bytes())
    return found.hexdigest()


@cache
def _library() -> str:
    """Return a digest of the sources of this library."""
    return _digest([*product_files(), ROOT / "accelerate_lora.py", ROOT / "pyproject.toml"])


@cache
def _wheel() -> Path:
    """Build this library's wheel, from a copy: a build leaves files behind."""
    folder = OUTPUT / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    names = ["lora_parallel", "accelerate_plugin", "lightning_lora", "pyproject.toml", "README.md", "LICENSE"]
    for name in [*names, *(path.name for path in ROOT.glob("*.py"))]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (folder / "source").mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    _checked([*command, str(folder / "source")])
    return next(folder.glob("*.whl"))


def _is_done(folder: Path, digest: str) -> bool:
    path = folder / "done"
    return path.exists() and path.read_text() == digest


def _set_done(folder: Path, digest: str) -> None:
    (folder / "done").write_text(digest)
