"""Fixtures that all tests share."""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from threading import Lock
from typing import TYPE_CHECKING, Any

import pytest

from tests.cores import share_cores

if TYPE_CHECKING:
    from tests.oracle.workers import WorkerPool

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # scripts that tests start would take the GPUs of this machine
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if (instructions := os.environ.get("ATEN_CPU_CAPABILITY")) is not None:
    # torch's cache of compiled code does not ask which instructions the code was made for.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"inductor_{instructions}"))

# Fixtures and hooks import what they need: the process that hands out the tests to others imports no torch.


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Processes to run ranks in."""
    from tests.oracle.workers import WorkerPool

    with closing(WorkerPool()) as workers:
        yield workers


@pytest.fixture(scope="session")
def front_end_pool() -> Iterator[WorkerPool]:
    """Processes that have imported the front ends: what `pool` is in the folders of their tests."""
    from tests.oracle.workers import FRONT_ENDS, WorkerPool

    with closing(WorkerPool(modules=FRONT_ENDS)) as workers:
        yield workers


@pytest.fixture(scope="session")
def impatient_pool() -> Iterator[WorkerPool]:
    """Processes for what leaves a rank waiting for a peer that does not come."""
    from tests.oracle.workers import IMPATIENT, WorkerPool

    with closing(WorkerPool(timeout=IMPATIENT)) as workers:
        yield workers


@pytest.fixture(scope="session")
def fake_pool() -> Iterator[WorkerPool]:
    """One process for rank 0 of any mesh, for refusals that need no peer; `pool` shows that they reach every rank."""
    from tests.oracle.workers import FAKE, WorkerPool

    with closing(WorkerPool(backend=FAKE)) as workers:
        yield workers


@pytest.fixture
def simulated_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans simulate their steps in this process, one at a time: another would import torch for seconds."""
    from lora_parallel.cost import simulations, worker

    jobs, lock = list[str](), Lock()
    answers = worker.answers_to(iter(jobs.pop, ""))

    def ask(self: simulations.Simulations, job: dict[str, Any]) -> dict[str, Any]:
        with lock:  # each job has a thread
            jobs.append(json.dumps(job))
            return json.loads(json.dumps(next(answers)))  # type: ignore[no-any-return]

    def start(self: simulations.Simulations, pairs: Any) -> tuple[int, Callable[[], object]]:
        return 2**30, bool  # a group that is never there

    monkeypatch.setattr(simulations, "_WORKERS", 1)
    monkeypatch.setattr(simulations.Simulations, "_start", start)
    monkeypatch.setattr(simulations.Simulations, "ask", ask)


IN_MAKE_TEST = pytest.StashKey[set[str]]()
"""Names of the tests without the mark `matrix` among those that were collected, whatever else chooses among them."""

POOLS = {"pool", "front_end_pool", "own_pool", "impatient_pool", "fake_pool"}
"""Fixtures that run ranks."""

MORE_OF_THE_SAME = {"4x1", "1x4", "2x1x2", "2x2x2"}
"""Meshes that have no mechanism which 1x1, 2x1, 1x2, 2x2, 2x1x1 and 2x2x1 lack."""


def pytest_configure() -> None:
    """Set how this process, its ranks and the commands it starts share the cores."""
    share_cores()
    gc.disable()  # what is imported and collected is kept


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fork the server of ranks, before tests import what ranks must not have; a process that runs no test has none."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("tx", None):
        from tests.oracle.workers import fork_server

        fork_server()


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected to itself: a collection of garbage walked through all of it."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--shard`."""
    parser.addoption("--shard", metavar="2/4", type=_shard, help="run the second quarter of the tests")


def _shard(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard: write 1/4, 2/4, 3/4 or 4/4 for a quarter")
    return int(number), int(count)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that run ranks as `processes`, and as `matrix` those on more ranks of the same kind.

    `make test-fast` leaves the former out; `make test` the latter, if a test has another mesh at all. A shard keeps the
    tests whose names it draws, the same on every machine and whatever else is chosen.
    """
    functions: dict[str, list[tuple[pytest.Item, bool]]] = defaultdict(list)
    for item in items:
        if not POOLS.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
        arguments = item.callspec.params.values() if hasattr(item, "callspec") else ()
        more = any(isinstance(value, str) and value in MORE_OF_THE_SAME for value in arguments)
        functions[item.nodeid.partition("[")[0]].append((item, more))
    for cases in functions.values():
        if not all(more for _, more in cases):
            for item, more in cases:
                if more:
                    item.add_marker("matrix")
    config.stash[IN_MAKE_TEST] = {item.nodeid for item in items if not item.get_closest_marker("matrix")}
    if shard := config.getoption("shard"):
        number, count = shard
        shards: list[list[pytest.Item]] = [[] for _ in range(count)]
        for item in items:
            shards[zlib.crc32(item.nodeid.encode()) % count].append(item)
        items[:] = shards.pop(number - 1)
        config.hook.pytest_deselected(items=[item for each in shards for item in each])
