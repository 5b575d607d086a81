"""`examples/image_sft.py` alone, and as its first lines launch it: stock TRL's losses both times."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.accelerate_plugin.test_launch import command

ROOT = Path(__file__).parents[1]
LAUNCH = ("accelerate_lora", "launch", "--config_file", "examples/fsdp2_tp.yaml")


def losses(output: Path, *words: str) -> list[float]:
    """Run the example and return the losses that it prints."""
    done = command(*words, "--output", str(output), "--steps", "10", cwd=ROOT, HF_HOME=str(output))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line[line.index("{'loss'") :] for line in done.stdout.splitlines() if "{'loss'" in line]
    return [float(ast.literal_eval(line)["loss"]) for line in lines]


@pytest.mark.matrix
@pytest.mark.processes
def test_the_example_logs_the_same_losses_in_one_process_and_on_four(tmp_path):
    pytest.importorskip("trl")
    one = losses(tmp_path / "one", "examples.image_sft")
    four = losses(tmp_path / "four", *LAUNCH, "examples/image_sft.py", "--batch-size", "4")
    assert len(one) == 2
    assert one[1] < one[0]
    assert four == pytest.approx(one, abs=1.5e-3), "printed with three decimals"
    for output in (tmp_path / "one", tmp_path / "four"):
        assert (output / "adapter" / "adapter_model.safetensors").exists()
