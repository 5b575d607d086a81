"""Launchers end the ranks that wait for one that is lost, which nothing reaches over NCCL; here they sleep.

Lightning's launcher: `tests/lightning_lora/test_launch.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.oracle.workers import SCRIPT_LIMIT

SCRIPT = """
import sys, time
import torch.distributed as dist
from lora_parallel import ParallelConfig, StopSignal, build_mesh

if sys.argv[1] == "accelerate":
    from accelerate import Accelerator
    Accelerator()
else:
    build_mesh(ParallelConfig(tp=2), "cpu")
rank = dist.get_rank()
with StopSignal() as stop:  # so that SIGTERM alone does not end the process
    assert not stop.requested()
    print("lost at", time.time(), flush=True)
    if rank == 1:
        raise ValueError("this rank is lost")
    time.sleep(1000)
"""
FILE = {
    **{"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "use_cpu": True, "num_processes": 2},
    **{"num_machines": 1, "mixed_precision": "no", "main_process_port": 0},
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "parallelism_config": {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 1},
}


@pytest.mark.matrix
@pytest.mark.processes
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_lost_rank_ends_the_other_one(tmp_path, launcher):
    """Torchrun sends SIGTERM, which is recorded here, and after 30 seconds SIGKILL; so does `accelerate launch`."""
    script, file = tmp_path / "train.py", tmp_path / "mesh.yaml"
    script.write_text(SCRIPT)
    file.write_text(yaml.safe_dump(FILE))
    commands = {
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        "accelerate": ["accelerate_lora", "launch", "--config_file", str(file)],
    }
    root = str(Path(__file__).parents[3])
    found = subprocess.run(
        [sys.executable, "-m", *commands[launcher], str(script), launcher],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SCRIPT_LIMIT,
        check=False,
    )
    ended = time.time()
    assert found.returncode != 0
    assert "this rank is lost" in found.stderr
    lost = max(float(line.split()[-1]) for line in found.stdout.splitlines() if line.startswith("lost at"))
    assert ended - lost < 60
