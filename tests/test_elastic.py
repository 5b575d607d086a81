"""`examples/elastic.py` under torchrun: a worker crashes, a machine is lost, a process is told to end.

In each case the adapter is that of a run in one process without interruption. `BOUND` is the largest relative error of
an adapter tensor, that of any two meshes in float32.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lora_parallel import latest_checkpoint
from tests.oracle import relative_error
from tests.oracle.workers import SCRIPT_LIMIT

ROOT = Path(__file__).parent.parent
SCRIPT, STEPS = str(ROOT / "examples" / "elastic.py"), 16
BOUND = 1e-3
TORCHRUN = [
    str(Path(sys.executable).parent / "torchrun"),
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "1",
    "--rdzv-backend",
    "c10d",
]

pytestmark = pytest.mark.processes


def command(folder: Path, *, tp: int = 1) -> list[str]:
    return [SCRIPT, "--steps", str(STEPS), "--save-every", "2", "--tp", str(tp), "--output", str(folder)]


@contextmanager
def started(*commands: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Start commands, each in a process group of its own as on a machine of its own; end what is left of them."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    processes = [
        subprocess.Popen(
            each, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        for each in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            for pid in [*workers(process), process.pid]:
                kill(pid)
            process.wait()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def workers(agent: subprocess.Popen[str]) -> list[int]:
    """The processes that an agent of torchrun has started, in the order of their ranks."""
    try:
        return [int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def wait_until(there: Callable[[], object], seconds: float = SCRIPT_LIMIT) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < until, "waited for too long"
        time.sleep(0.02)


def ended(process: subprocess.Popen[str]) -> str:
    """Wait for a process, which must end with 0, and return what it has printed."""
    printed, _ = process.communicate(timeout=SCRIPT_LIMIT)
    assert process.returncode == 0, printed[-20000:]
    return printed


def begun(printed: str) -> list[tuple[str, int]]:
    """The mesh, and the number of steps done before, of each start of the script."""
    return [
        (mesh, int(step)) for mesh, step in re.findall(r"^mesh ([\dx ]+) \(.*\): from step (\d+) of", printed, re.M)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapter of a run in one process that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    with started([sys.executable, *command(folder)]) as (run,):
        ended(run)
    return folder / "adapter"


def error(folder: Path, whole: Path) -> float:
    got, want = (load_file(path / "adapter_model.safetensors") for path in (folder / "adapter", whole))
    return relative_error(got, want)


@pytest.mark.matrix
def test_a_machine_is_lost_and_the_job_goes_on_with_the_other(tmp_path, whole):
    """Two agents are two machines. One of them and its workers are killed at once; the mesh 2x2 becomes 1x2."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agent = [*TORCHRUN, "--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    agent += ["--rdzv-id", "elastic"]
    hosts = ("is_host=1", "is_host=0")  # the first keeps the store in which the agents meet
    brisk = "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
    lines = [[*agent, "--rdzv-conf", f"{brisk},{host}", *command(tmp_path, tp=2)] for host in hosts]
    with started(*lines) as (stays, lost):
        wait_until(lambda: latest_checkpoint(tmp_path / "checkpoints"))
        assert stays.poll() is None
        for pid in [lost.pid, *workers(lost)]:
            kill(pid)
        since = time.monotonic()
        printed = ended(stays)
    print(f"{time.monotonic() - since:.1f} s from the loss to the end")
    starts = begun(printed)
    assert [mesh for mesh, _ in starts] == ["1 x 2 x 2", "1 x 1 x 2"]
    assert 0 < starts[1][1] < STEPS
    assert error(tmp_path, whole) <= BOUND


@pytest.mark.matrix
def test_a_worker_that_crashes_is_brought_back(tmp_path, whole):
    with started([*TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0", *command(tmp_path)]) as (agent,):
        wait_until(lambda: latest_checkpoint(tmp_path / "checkpoints"))
        kill(workers(agent)[1])
        printed = ended(agent)
    starts = begun(printed)
    assert [mesh for mesh, _ in starts] == ["1 x 2 x 1"] * 2
    assert 0 < starts[1][1] < STEPS
    assert error(tmp_path, whole) <= BOUND


@pytest.mark.matrix
def test_sigterm_on_one_rank_saves_on_all_and_ends_with_zero(tmp_path, whole):
    """The agent ends with 0 if all of its workers do, without a restart."""
    with started([*TORCHRUN, "--rdzv-endpoint", "127.0.0.1:0", *command(tmp_path)]) as (agent,):
        wait_until(lambda: latest_checkpoint(tmp_path / "checkpoints"))
        os.kill(workers(agent)[1], signal.SIGTERM)
        printed = ended(agent)
    stopped = re.findall(r"^stopped after step (\d+)$", printed, re.M)
    assert len(begun(printed)) == len(stopped) == 1
    with started([sys.executable, *command(tmp_path)]) as (again,):
        printed = ended(again)
    assert begun(printed) == [("1 x 1 x 1", int(stopped[0]))]
    assert error(tmp_path, whole) <= BOUND
