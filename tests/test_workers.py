"""The ranks that tests run in say what went wrong in them."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.workers import WorkerError, WorkerPool


def crashing(how: str, once: str = "") -> int:
    if dist.get_rank() == 1 and not (once and Path(once).exists()):
        if once:
            Path(once).touch()
        if how == "SIGSEGV":
            ctypes.string_at(8)
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()
    return dist.get_rank()


def unlike() -> None:
    dist.all_gather([torch.zeros(1 + dist.get_rank())] * 2, torch.zeros(1 + dist.get_rank()))


@pytest.fixture
def own_pool() -> Iterator[WorkerPool]:
    workers = WorkerPool(again=1)
    yield workers
    workers.close()


@pytest.mark.parametrize("how", ["SIGSEGV", "SIGABRT"])
def test_a_rank_that_crashes_says_where(own_pool, how):
    with pytest.raises(WorkerError) as caught:
        own_pool.run(2, crashing, how)
    told = str(caught.value)
    first, second = told.index(f"rank 1: rank 1 of 2 died ({how})"), told.index("rank 0: Traceback")
    assert first < told.index("frame #0: ") < told.index("in crashing") < second
    assert own_pool.run(2, dist.get_rank) == [0, 1]


def test_one_crash_is_told_and_run_again(own_pool, tmp_path):
    assert own_pool.run(2, crashing, "SIGSEGV", str(tmp_path / "first")) == [0, 1]
    (crash,) = own_pool.crashes
    assert crash.startswith("tests.test_workers.crashing\nrank 1 of 2 died (SIGSEGV), having printed:")
    with pytest.raises(WorkerError, match="died"):
        own_pool.run(2, crashing, "SIGSEGV", str(tmp_path / "second"))


def test_ranks_that_make_unlike_collectives_are_not_run_again(own_pool):
    with pytest.raises(WorkerError):
        own_pool.run(2, unlike)
    assert own_pool.crashes == []
