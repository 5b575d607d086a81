"""The benchmarks of host time, of `generate` and of dropout run, at small sizes, and their tables have every side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.workers import SCRIPT_LIMIT

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(name: str, output: Path, *options: str) -> tuple[str, dict]:
    """Run a benchmark; return its table and its record."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options, "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_LIMIT, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    table = (output / f"{name}.md").read_text()
    assert ran.stdout.splitlines()[0] in table
    return table, json.loads((output / f"{name}.json").read_text())


@pytest.mark.matrix
@pytest.mark.processes
def test_host(tmp_path):
    table, record = run("host", tmp_path, "--short")
    sides = {"2": ["plain PEFT", "FSDP2 by hand 2x1", "ours 2x1", "ours 1x2"], "4": ["plain PEFT", "ours 2x2"]}
    assert {ranks: list(samples) for ranks, samples in record["seconds"].items()} == sides
    assert all(f"| {ranks} | {side} | " in table for ranks, names in sides.items() for side in names)
    assert "ours 2x1 / FSDP2 by hand 2x1" in table


@pytest.mark.matrix
@pytest.mark.processes
def test_generate(tmp_path):
    table, record = run("generate", tmp_path, "--short")
    for dtype, samples in record["seconds"].items():
        assert list(samples) == ["ours", "fused=False", "plain PEFT"]
        assert all(len(seconds) == 3 and f"| {dtype} | {side} | " in table for side, seconds in samples.items())


@pytest.mark.matrix
@pytest.mark.processes
def test_dropout(tmp_path):
    table, record = run("dropout", tmp_path, "--features", "64", "128", "--tokens", "32")
    small, large, total = record["costs"].values()
    bytes_of_x = 64 * 32 * 2
    assert small["torch's fused dropout, as on a GPU"] == [[1, bytes_of_x * 5 // 2]] * 2
    for side, ((kernels, forward), (_, backward)) in small.items():
        assert f"| 64 features | {side} | " in table
        assert kernels >= 1
        assert forward >= bytes_of_x * 2 <= backward
        assert total[side][0] == [32 * (6 * kernels + large[side][0][0]), 32 * (6 * forward + large[side][0][1])]
