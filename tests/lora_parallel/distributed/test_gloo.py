"""Test the workarounds of gloo: an upgrade that makes one needless, or breaks it, is to fail here."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lora_parallel.distributed import torch_private
from tests.oracle.workers import SCRIPT_LIMIT


def gloo_threads():
    cpu = torch.device("cpu")
    with torch_private.one_gloo_thread():
        inside = dist.new_group()
    after = dist.new_group()
    summed = torch_private.all_reduce_sum(torch.ones(1), inside).item()
    return [group._get_backend(cpu).options._threads for group in (inside, after, dist.group.WORLD)], summed


def test_gloo_groups_can_be_made_with_one_thread(pool):
    """The day it gives up its second thread, or locks what the two write, `one_gloo_thread` can go."""
    assert pool.run(2, gloo_threads) == [([1, 2, 1], 2.0)] * 2


ENDS = """
import atexit, os, sys, time
import torch, torch.distributed as dist
from lora_parallel import ParallelConfig, build_mesh

for fails in (False, True):
    for rank in (0, 1):
        if os.fork() == 0:
            dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{fails}", rank=rank, world_size=2)
            if rank == 0:
                atexit.register(lambda: print(f"fails: {fails}, finished: {work.is_completed()}", flush=True))
            mesh = build_mesh(ParallelConfig(), "cpu")
            time.sleep(rank * (4 if fails else 1))  # rank 0 has ended by then, or waits for this rank
            work = dist.all_reduce(torch.ones(1), async_op=True, group=mesh.get_group("dp_shard"))
            if fails:
                raise RuntimeError("on purpose")
            sys.exit()
    os.wait(), os.wait()
"""


@pytest.mark.matrix
@pytest.mark.processes
def test_a_process_waits_for_gloos_threads_as_it_ends_without_an_error(tmp_path):
    """Otherwise some end with SIGABRT: docs/upstream/gloo_exit.md. After an error a peer may never come."""
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_LIMIT)
    assert "RuntimeError: on purpose" in done.stderr
    assert done.stdout.splitlines() == ["fails: False, finished: True", "fails: True, finished: False"], done.stderr


def of_no_elements():
    """Make them on rank 1 only when rank 0 has ended; messages of a group are counted, so both make as many."""
    store = torch_private.default_store()
    if dist.get_rank() == 1:
        store.wait(["all-reduces of no elements"])
    for _ in range(3):
        dist.all_reduce(torch.empty(0))
    store.set("all-reduces of no elements", "done")
    return dist.get_rank()


def references_while_a_group_has_it():
    """Count the Python references to the tensor of `finish_groups` before a message of it, and while it is sent."""
    before = sys.getrefcount(torch_private._NOTHING)
    work = dist.all_reduce(torch_private._NOTHING, async_op=True)
    during = sys.getrefcount(torch_private._NOTHING)
    work.wait()
    plain = torch.empty(0)
    alone = sys.getrefcount(plain)
    view = plain.view(0)
    return before, during, sys.getrefcount(plain) - alone, view.numel()


def test_the_end_of_a_process_needs_no_python_reference_from_gloos_thread(pool):
    """A first reference in C++ holds one in Python (the third number), which only who has the GIL can let go of."""
    for before, during, held, _ in pool.run(2, references_while_a_group_has_it):
        assert during == before
        assert held == 1


def test_an_all_reduce_of_no_elements_waits_for_no_peer(pool):
    """Check what `finish_groups` relies on."""
    assert pool.run(2, of_no_elements) == [0, 1]


@pytest.mark.parametrize(
    ("backends", "failed", "ended"),
    [("cpu:gloo,cuda:nccl", False, True), ("cpu:gloo,cuda:nccl", True, False), ("cpu:gloo", False, False)],
)
def test_groups_with_nccl_are_destroyed_at_a_good_end(monkeypatch, backends, failed, ended):
    """NCCL's communicators are then closed by all ranks; after an error peers may never come."""
    destroyed: list[bool] = []
    monkeypatch.setattr(torch_private, "process_groups", lambda: ["a group"])
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: SimpleNamespace(wait=lambda timeout: True))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(True))
    if failed:
        monkeypatch.setattr(sys, "last_value", ValueError("lost"), raising=False)
    torch_private.finish_groups()
    assert bool(destroyed) is ended
