"""Calls that every rank must make: what a rank says, and raises, that comes alone or to another call."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lora_parallel import load_adapter, parallelize, save_adapter
from lora_parallel.distributed import rank_checks
from lora_parallel.distributed.rank_checks import is_done, limit_waiting, meet, wait_for
from lora_parallel.distributed.torch_private import default_store
from tests.cases import cases
from tests.logs import listening
from tests.oracle import Case, on_mesh, ranks_of
from tests.oracle.workers import Failure, attempt

MESHES = cases("2x2", matrix=["2x1", "1x2"])


@contextmanager
def impatient() -> Iterator[None]:
    """Tell at once, and wait for a short time only."""
    before, rank_checks.TELL_SECONDS = rank_checks.TELL_SECONDS, (0.2, 0.4)
    limit_waiting(1.5)
    try:
        yield
    finally:
        rank_checks.TELL_SECONDS = before
        limit_waiting(60)


def calls(mesh_text: str, folder: Path) -> dict[str, Any]:
    mesh, config = on_mesh(mesh_text)
    rank, store, found = dist.get_rank(), default_store(), {}
    model = parallelize(Case().model(), mesh, config).eval()
    ids = torch.arange(8)[None]

    def generate() -> None:
        model.generate(input_ids=ids, max_new_tokens=1, pad_token_id=0)

    with listening(rank_checks.__name__) as told:
        save_adapter(model, folder / "normal")
        generate()
        if rank == 0:
            with impatient():
                found["alone"] = attempt(lambda: save_adapter(model, folder / "alone"))
            found["told"] = told[:]
            told.clear()
            store.set(f"{folder} stopped", "")
            found["apart"] = attempt(lambda: save_adapter(model, folder / "other"))
        else:
            store.wait([f"{folder} stopped"], timedelta(seconds=60))
            found["late"] = attempt(lambda: save_adapter(model, folder / "alone"))
            found["apart"] = attempt(generate)
        wrong = "s3://bucket/adapter" if rank == 1 else folder / "refused"
        found["refused"] = attempt(save_adapter, model, wrong)
        load_adapter(model, folder / "normal")  # the numbers are in step all the same
        meet("the end")
        found["told otherwise"] = told[:]
    meetings = rank_checks._current()
    assert meetings is not None
    keys = [
        f"lora_parallel/{number}/{key}"
        for number in range(meetings.number - 1)
        for key in (*range(4), "call", "arrived", "open")
    ]
    dist.barrier()
    found["left"] = [key for key in keys if store.check([key])]
    return found


PLACE = r"tests/lora_parallel/distributed/test_rendezvous.py:\d+"


@pytest.mark.parametrize("mesh", MESHES)
def test_calls_that_a_rank_makes_alone_or_that_differ(pool, tmp_path, mesh):
    size = ranks_of(mesh)
    others = list(range(1, size))
    call = rf"save_adapter \(called at {PLACE}\)"
    for rank, found in enumerate(pool.run(size, calls, mesh, tmp_path)):
        if rank == 0:
            assert found["alone"].kind == "TimeoutError"
            assert re.fullmatch(
                rf"rank 0 waited \d s for ranks {re.escape(str(others))} in {call}: every rank must call it.",
                found["alone"].message,
            )
            assert 1 <= len(found["told"]) <= 3  # after 0.2, 0.4 and 0.8 s of 1.5
            for line in found["told"]:
                assert re.fullmatch(
                    rf"WARNING waiting for ranks {re.escape(str(others))} in {call}: every rank must call it", line
                )
        else:
            assert found["late"].kind == "RuntimeError"
            assert re.search(
                rf"rank 0 waited \d s in {call} and stopped; rank {rank} came later", found["late"].message
            )
        assert isinstance(found["apart"], Failure)
        assert found["apart"].kind == "RuntimeError"
        assert re.search(
            rf"different calls: rank 0 {call}, rank \d generate \(called at {PLACE}\)", found["apart"].message
        )
        assert found["refused"].kind == "ValueError"
        assert "is a URL" in found["refused"].message
        assert found["told otherwise"] == []
        assert found["left"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["normal"]


def collective() -> tuple[list[str], bool]:
    """Rank 0 waits in a collective, and rank 1 in a call; once both have told, rank 1 joins the collective."""
    rank, store = dist.get_rank(), default_store()
    with listening(rank_checks.__name__) as told, impatient():
        limit_waiting(60)
        if rank == 0:
            wait_for(dist.all_reduce(torch.ones(1), async_op=True), "pool.step", "cpu")
            meet("save")
        else:
            store.wait(["lora_parallel/waits/0"], timedelta(seconds=60))
            helper = threading.Timer(2, dist.all_reduce, [torch.ones(1)])
            helper.start()
            meet("save")
            helper.join()
    return told, store.check(["lora_parallel/waits/0"])


def test_a_rank_that_waits_in_a_collective_says_where_the_others_wait(pool):
    (first, left), (second, _) = pool.run(2, collective)
    assert not left
    step, save = (rf"{name} \(called at {PLACE}\): every rank must call it" for name in ("pool.step", "save"))
    assert any(re.match(rf"WARNING waiting for ranks \[1\] in {step}; rank 1 waits in save", line) for line in first)
    assert re.fullmatch(rf"WARNING waiting for ranks \[0\] in {save}", second[0])


def test_alone_in_a_job_of_one_process_nothing_waits():
    meet("anything")


def test_reminders_become_sparse():
    reminders = rank_checks._reminders()
    assert [next(reminders) for _ in range(6)] == [10, 30, 60, 300, 600, 1200]


def waits_for_the_dead() -> tuple[str, int]:
    """Wait in a reduce-scatter whose peer is killed: the error, and how often the wait was begun."""
    output, given = torch.empty(2), torch.ones(4)
    dist.reduce_scatter_tensor(output, given)  # the ranks are connected
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.reduce_scatter_tensor(output, given, async_op=True)
    for begun in range(10):
        try:
            if is_done(work, "cpu", time.monotonic() + 3):
                return "no error", begun
        except RuntimeError as error:
            return str(error), begun
    return "none of ten waits ended", 10


def test_a_wait_ends_when_the_peer_is_killed(pool):
    """Gloo's reduce-scatter is never complete then, but each wait for it fails at once."""
    first, second = pool.try_run(2, waits_for_the_dead)
    assert "SIGKILL" in second.message
    error, begun = first
    assert "Connection" in error
    assert begun <= 1
