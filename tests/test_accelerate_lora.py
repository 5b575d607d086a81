"""The console script: help and versions need no torch, and every command is reached through it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import accelerate_lora
import accelerate_plugin
import lightning_lora
import lora_parallel
from tests.oracle.workers import SCRIPT_LIMIT

FILE = str(Path(__file__).parents[1] / "examples" / "fsdp2_tp.yaml")


def called(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it, and print whether torch was imported."""
    code = f"""
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, file=sys.stderr))
sys.argv = ["accelerate-lora", *{arguments!r}]
import accelerate_lora
accelerate_lora.main()
"""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SCRIPT_LIMIT, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--help"], 0, "usage: accelerate-lora"),
        (["-h"], 0, "usage: accelerate-lora"),
        (["--version"], 0, f"lightning-lora {lora_parallel.__version__}"),
        ([], 2, "usage: accelerate-lora"),
        (["lanch"], 2, "'lanch' is no command of accelerate-lora"),
    ],
)
def test_what_needs_no_torch_imports_none(arguments, code, text):
    answer = called(*arguments)
    assert answer.returncode == code, answer.stderr
    assert text in (answer.stderr if code else answer.stdout)
    assert answer.stderr.endswith("False\n")


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["check", "--help"], 0, "usage: accelerate-lora check"),
        (["check"], 2, "usage: accelerate-lora check"),
        (["check", "none.yaml"], 1, "accelerate-lora check: there is no file none.yaml"),
        (["check", FILE, "--num_processes", "3"], 1, "fsdp2_tp.yaml: dp_replicate=1 x dp_shard=2 x tp=2 = 4, but"),
        (
            ["launch", "--config_file", FILE, "--num-processes=3", __file__],
            1,
            "launch: " + FILE + ": dp_replicate=1 x dp_",
        ),
        (["launch", "--config_file", FILE, "--fsdp_version", "1", "-m", "a"], 1, "yaml: fsdp_version is 1"),
    ],
)
def test_what_cannot_work_ends_with_a_line(monkeypatch, capsys, arguments, code, text):
    monkeypatch.setattr(sys, "argv", ["accelerate-lora", *arguments])
    with pytest.raises(SystemExit) as ended:
        accelerate_lora.main()
    printed = capsys.readouterr()
    if code == 1:
        assert text in str(ended.value)
        assert "\n" not in str(ended.value)
    else:
        assert ended.value.code == code
        assert text in (printed.err if code else printed.out)


def test_commands_are_reached(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["accelerate-lora", "launch", "--config_file", str(tmp_path / "no"), "train.py"])
    with pytest.raises(SystemExit, match=r"accelerate-lora launch: there is no file .*no:"):
        accelerate_lora.main()
    monkeypatch.setattr(sys, "argv", ["accelerate-lora", "config", "--help"])
    with pytest.raises(SystemExit):
        accelerate_lora.main()
    assert "--main_process_ip" in capsys.readouterr().out


def test_versions_agree():
    assert accelerate_plugin.__version__ == lightning_lora.__version__ == lora_parallel.__version__
