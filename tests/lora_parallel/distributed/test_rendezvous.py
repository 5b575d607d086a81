"""Calls that every rank must make: what a rank says, and raises, that comes alone or to another call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lora_parallel import StopSignal, load_adapter, parallelize, save_adapter
from lora_parallel.distributed import meetings
from lora_parallel.distributed.meetings import limit_waiting, meet
from lora_parallel.distributed.torch_private import default_store, set_timeout
from tests.cases import cases
from tests.logs import listening
from tests.oracle import Case, on_mesh, ranks_of
from tests.oracle.workers import Failure, attempt

MESHES = cases("2x2", matrix=["2x1", "1x2"])


@contextmanager
def impatient() -> Iterator[None]:
    """Tell at once, and wait for a short time only."""
    before, meetings.TELL_SECONDS = meetings.TELL_SECONDS, (0.2, 0.4)
    limit_waiting(1.5)
    try:
        yield
    finally:
        meetings.TELL_SECONDS = before
        limit_waiting(60)


def calls(mesh_text: str, folder: Path) -> dict[str, Any]:
    mesh, config = on_mesh(mesh_text)
    rank, store, found = dist.get_rank(), default_store(), {}
    model = parallelize(Case().model(), mesh, config).eval()
    ids = torch.arange(8)[None]

    def generate() -> None:
        model.generate(input_ids=ids, max_new_tokens=1, pad_token_id=0)

    with listening(meetings.__name__) as told:
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
    current = meetings._current()
    assert current is not None
    keys = [
        f"lora_parallel/{number}/{key}"
        for number in range(current.number - 1)
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


def first_forward_alone() -> tuple[Failure, list[str]]:
    """Rank 0 makes the first forward of a model, and rank 1 none."""
    mesh, config = on_mesh("1x2")
    model = parallelize(Case().model(), mesh, config)
    if dist.get_rank() == 1:
        default_store().wait(["the first forward has failed"], timedelta(seconds=60))
        return attempt(lambda: model(input_ids=Case().batches()[0])), []
    with listening(meetings.__name__) as told, impatient():
        failed = attempt(lambda: model(input_ids=Case().batches()[0]))
    default_store().set("the first forward has failed", "")
    return failed, told


def test_a_rank_that_begins_the_first_forward_alone_says_whom_it_waits_for(pool):
    (first, told), (second, _) = pool.run(2, first_forward_alone)
    call = rf"the model's first forward \(called at {PLACE}\): every rank must call it"
    assert 1 <= len(told) <= 3
    for line in told:
        assert re.fullmatch(rf"WARNING waiting for ranks \[1\] in {call}", line)
    assert first.kind == "TimeoutError"
    assert re.fullmatch(rf"rank 0 waited \d s for ranks \[1\] in {call}.", first.message)
    assert second.kind == "RuntimeError"
    assert "and stopped; rank 1 came later" in second.message


def later_call_alone(what: str) -> None:
    """Rank 0 makes a call that comes with every step, and rank 1 has gone on without it."""
    mesh, config = on_mesh("1x2")
    model, batch = parallelize(Case().model(), mesh, config), Case().batches()[0]
    with StopSignal() as stop:
        for _ in range(2):
            model(input_ids=batch)
            stop.requested()
        dist.barrier()
        if dist.get_rank() == 0:
            set_timeout(mesh.get_group("tp") if what == "forward" else dist.group.WORLD, 1)
            model(input_ids=batch) if what == "forward" else stop.requested()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("forward", "inputs of the model's forward for training' over tp (ranks [0, 1])"),
        ("requested", "numbers of StopSignal.requested' over default_pg (ranks [0, 1])"),
    ],
)
def test_a_call_of_every_step_that_a_rank_makes_alone_is_named_by_its_timeout(pool, what, named):
    raised, gone_on = pool.try_run(2, later_call_alone, what)
    assert gone_on is None
    assert raised.kind == "RuntimeError"
    assert f"rank 0: the collective '{named} failed. Compare with what the other ranks name" in raised.message


def test_alone_in_a_job_of_one_process_nothing_waits():
    meet("anything")


def test_reminders_become_sparse(monkeypatch):
    """Wait on a clock that goes on as soon as somebody waits."""
    now, told = [0.0], []

    def log(text: str, *more: object) -> None:
        told.append(now[0])

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(meetings, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=wait))
    monkeypatch.setattr(meetings, "_log", SimpleNamespace(warning=log))
    monkeypatch.setattr(meetings, "_limits", {None: 2000})
    one_of_two = meetings._Meetings(0, (0, 1), dist.HashStore())
    one_of_two.store.set_timeout(timedelta(seconds=5000))
    with pytest.raises(TimeoutError, match=r"rank 0 waited 2000 s for ranks \[1\] in a call.* must call it. Try."):
        meetings._wait(one_of_two, 0, meetings._Announcement("a call", "here"), "Try.")
    assert told == pytest.approx([10, 30, 60, 300, 600, 1200], abs=0.5)
