"""The ranks that tests run in say what went wrong in them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.oracle import workers
from tests.oracle.workers import Failure, WorkerError, WorkerPool

ROOT = Path(__file__).parent.parent


def crashing(how: str) -> int:
    if dist.get_rank() == 1:
        if how == "SIGSEGV":
            ctypes.string_at(8)
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()
    return dist.get_rank()


@pytest.fixture
def own_pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool(timeout=20)) as workers:
        yield workers


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


def raising(how: str) -> None:
    if how == "in one group out of step":
        halves = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        if dist.get_rank():
            dist.all_reduce(torch.zeros(1), group=halves[1], async_op=True)
    if how == "with a message left over" and dist.get_rank() == 0:
        dist.isend(torch.zeros(1), 1)
    if how in ("alike", "with a message left over") or dist.get_rank() or "step" in how:
        raise ValueError(f"on rank {dist.get_rank()}")
    if how == "of another kind":
        raise TypeError("on rank 0")


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ("alike", True),
        ("on one rank", False),
        ("of another kind", False),
        ("in one group out of step", False),
        ("with a message left over", False),
    ],
)
def test_ranks_that_raise_alike_and_meet_again_are_kept(own_pool, how, kept):
    before = own_pool.run(2, os.getpid)
    raised = [answer for answer in own_pool.try_run(2, raising, how) if isinstance(answer, Failure)]
    assert any(answer.message == "on rank 1" for answer in raised)
    assert (own_pool.run(2, os.getpid) == before) is kept
    assert own_pool.run(2, dist.get_rank) == [0, 1]


def test_ranks_that_fail_where_none_should_are_not_kept(own_pool):
    before = own_pool.run(2, os.getpid)
    with pytest.raises(WorkerError, match="2 of 2 ranks failed"):
        own_pool.run(2, raising, "alike")
    assert not set(own_pool.run(2, os.getpid)) & set(before)


def test_a_rank_that_died_since_its_last_answer_is_named(own_pool):
    os.kill(own_pool.run(2, os.getpid)[1], signal.SIGKILL)
    assert own_pool._ranks[2][1].pipe.poll(10)  # its end: what is sent from now on breaks the pipe
    with pytest.raises(WorkerError, match=r"rank 1 of 2 died \(SIGKILL\)"):
        own_pool.run(2, dist.get_rank)
    assert own_pool.run(2, dist.get_rank) == [0, 1]


_kept: list[torch.Tensor] = []


def allocate() -> int:
    """Hold 200 MB in small blocks, and free all but the last, above which the heap ends; return the bytes held."""
    blocks = [torch.ones(1000) for _ in range(50_000)]
    _kept.append(blocks[-1])
    return psutil.Process().memory_info().rss


def test_memory_that_a_call_has_freed_is_given_back(own_pool):
    [most] = own_pool.run(1, allocate)
    [rank] = own_pool._ranks[1]
    deadline = time.monotonic() + 10
    while rank.size > most - 150e6 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert rank.size < most - 150e6


def test_a_group_that_has_grown_too_large_is_ended(own_pool, monkeypatch):
    before = own_pool.run(1, os.getpid)
    assert own_pool.run(1, os.getpid) == before
    monkeypatch.setattr(workers, "MOST_BYTES", 2**20)
    assert own_pool.run(1, os.getpid) == before  # the last answer of this one
    assert own_pool.run(1, os.getpid) != before


def test_of_too_many_groups_those_are_kept_that_were_used_last(own_pool, monkeypatch):
    monkeypatch.setattr(workers, "MOST_RANKS", 4)
    one, three = own_pool.run(1, os.getpid), own_pool.run(3, os.getpid)
    assert own_pool.run(1, os.getpid) == one
    own_pool.run(2, os.getpid)
    assert own_pool.run(1, os.getpid) == one
    assert not set(own_pool.run(3, os.getpid)) & set(three)


def imported(names: list[str]) -> list[bool]:
    return [sys.modules.get(name) is not None for name in names]


def test_ranks_of_engine_tests_have_not_imported_the_front_ends(own_pool, front_end_pool):
    names = ["lora_parallel", "accelerate_plugin", "lightning_lora", "lightning", "trl"]
    assert own_pool.run(1, imported, names) == [[True, *[False] * 4]]
    assert front_end_pool.run(1, imported, [*names, "bitsandbytes"]) == [[True] * 6]
    for front_end in workers.OURS:
        (failure,) = own_pool.try_run(1, import_module, front_end)
        assert failure.kind == "ModuleNotFoundError", "it would patch what the next tests of the engine run on"


@pytest.mark.processes
@pytest.mark.matrix
def test_a_process_that_ends_without_closing_its_pool_leaves_no_rank(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom tests.oracle.workers import WorkerPool\n"
        "if __name__ == '__main__':\n    print(*WorkerPool(modules=()).run(2, os.getpid))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=workers.SCRIPT_LIMIT
    )
    assert ended.returncode == 0, ended.stderr
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
