"""The ranks that tests run in say what went wrong in them."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.workers import WorkerError, WorkerPool


def crashing(how: str) -> int:
    if dist.get_rank() == 1:
        if how == "SIGSEGV":
            ctypes.string_at(8)
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()
    return dist.get_rank()


@pytest.fixture
def own_pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
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


class Interrupted(BaseException):
    pass


def test_answers_that_come_late_are_no_answers_of_the_next_run(own_pool):
    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        own_pool.run(1, dist.get_rank)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Interrupted):
            own_pool.run(1, time.sleep, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert own_pool.run(1, dist.get_rank) == [0]
