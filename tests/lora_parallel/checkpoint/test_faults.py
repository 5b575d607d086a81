"""A job that is killed, or whose disk fills up, at any instant, goes on from its last complete checkpoint.

One instant of each kind here; `make faults` tries twenty of each and says how many the job survived.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lora_parallel import latest_checkpoint, wait_for_save
from lora_parallel.checkpoint import writer
from tests.cases import cases
from tests.lora_parallel.checkpoint.resume import STEPS, Job, Trained
from tests.oracle import differing, ranks_of, relative_error
from tests.oracle.workers import Failure

COUNT = int(os.environ.get("FAULTS", "1"))
MESHES = ["2x2", "2x1", "1x2"] if COUNT > 1 else ["2x1", "1x2"]
"""The job runs on the first of them, and goes on on any."""
RANKS = ranks_of(MESHES[0])
SAVES = tuple(range(1, STEPS))


def killed(folder: Path, rank: int | None, seconds: float, in_background: bool) -> Trained:
    """Train and save after every step; some seconds into it `rank` (None: every rank) is killed."""
    death = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))

    def begin() -> None:
        if rank in (None, dist.get_rank()):
            death.start()

    try:
        answer = Job().on_mesh(MESHES[0], folder, SAVES, begin, keep_last=2, async_save=in_background)
        wait_for_save()
    except Exception:
        os._exit(1)  # as a job's processes do; a peer that lives on keeps others waiting
    death.cancel()
    return answer


def timed(folder: Path) -> tuple[Trained, float]:
    """An undisturbed run, and how many seconds its steps and saves took."""
    began: list[float] = []
    answer = Job().on_mesh(MESHES[0], folder, SAVES, lambda: began.append(time.monotonic()))
    return answer, time.monotonic() - began[0]


class Disk:
    """A disk that is full after so many writes of a rank."""

    def __init__(self, writes: int) -> None:
        self.left = writes

    def __call__(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")


def disk_fills_up(folder: Path, rank: int, writes: int) -> Trained:
    """Train and save after every step, until the disk of `rank` is full."""
    disk = Disk(writes if dist.get_rank() == rank else sys.maxsize)
    own_write, own_finish = dcp.FileSystemWriter.write_data, writer._Save.finish

    def write_data(self, *args):
        disk()
        return own_write(self, *args)

    def finish(self):
        disk()
        own_finish(self)

    with patch.object(dcp.FileSystemWriter, "write_data", write_data), patch.object(writer._Save, "finish", finish):
        return Job().on_mesh(MESHES[0], folder, SAVES, keep_last=2)


@pytest.fixture(scope="module")
def undisturbed(impatient_pool, tmp_path_factory) -> tuple[Trained, float]:
    """In the ranks that are killed afterwards: the first steps of a process take longer."""
    impatient_pool.run(RANKS, timed, tmp_path_factory.mktemp("warm"))
    answers: list[tuple[Trained, float]] = impatient_pool.run(RANKS, timed, tmp_path_factory.mktemp("undisturbed"))
    return answers[0]


def goes_on(pool, folder: Path, undisturbed: Trained, mesh: str) -> None:
    """Start the job again, and hold its end against the one that nothing happened to."""
    newest = latest_checkpoint(folder)
    for answer in pool.run(ranks_of(mesh), Job().on_mesh, mesh, folder, SAVES):
        assert len(answer.losses) == STEPS - (int(newest.name.split("-")[1]) if newest else 0)
        if mesh == MESHES[0]:
            assert not differing(answer.adapters, undisturbed.adapters)
        assert relative_error(answer.adapters, undisturbed.adapters) <= 1e-10
    left = sorted(path.name for path in folder.iterdir())
    assert all(name.startswith("step-") for name in left), left


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", cases("every rank", "disk", matrix=["one rank"]))
def test_a_disturbed_job_ends_as_an_undisturbed_one(pool, impatient_pool, tmp_path, undisturbed, kind, capsys):
    whole, seconds = undisturbed
    draw = random.Random(f"{kind} {COUNT}")
    survived, died, resumed = 0, 0, 0
    for index in range(COUNT + 4):
        if index >= COUNT and died:
            break  # else the run ended before its time, as the one that was timed had been slow: sooner, then
        latest = 0.7 * seconds / (1 + index // COUNT)
        folder = tmp_path / str(index)
        folder.mkdir()
        if kind == "disk":
            answers = pool.try_run(
                RANKS, disk_fills_up, folder, draw.randrange(RANKS), draw.randrange(1, 2 * STEPS - 4)
            )
        else:
            rank = draw.randrange(RANKS) if kind == "one rank" else None
            answers = impatient_pool.try_run(RANKS, killed, folder, rank, draw.uniform(0, latest), draw.random() < 0.5)
        died += any(isinstance(answer, Failure) for answer in answers)
        newest = latest_checkpoint(folder)
        resumed += newest is not None
        goes_on(pool, folder, whole, draw.choice(MESHES))
        survived += 1
    with capsys.disabled():
        print(f"\n{kind}: {survived} survived; {died} died, {resumed} had a checkpoint to go on from")
    assert died, "nothing happened to any"
