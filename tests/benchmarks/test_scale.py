"""The simulation of many ranks runs, on tiny shapes: it counts messages, and no rank holds much more than another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracle.workers import SCRIPT_LIMIT

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"


@pytest.mark.matrix
@pytest.mark.processes
def test_simulated_ranks(tmp_path):
    """With r = 3 on four dp ranks, a factor that is cut along its rows would leave a rank without any of it."""
    options = ["--models", "tiny", "--ranks", "8", "--tp", "2", "--r", "3", "--check", "--output", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=SCRIPT_LIMIT, env=environment
    )
    assert run.returncode == 0, run.stderr[-3000:]
    (found,) = json.loads((tmp_path / "scale.json").read_text())["results"]
    first, last = found["first"], found["last"]
    assert found["mesh"] == "4x2"
    assert found["messages"] == 3  # a reduce-scatter over dp for each of two layers, and one all-reduce over tp
    assert first["whole_base"] / 8 <= first["base"] <= first["whole_base"] / 8 * 1.01
    assert first["adapters"] <= last["adapters"] * 1.1
    assert "a Llama of 2 layers" in (tmp_path / "scale.md").read_text()
    assert (tmp_path / "scale.png").exists()
