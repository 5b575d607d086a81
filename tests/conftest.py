"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # scripts that tests start would take the GPUs of this machine
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.workers import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Processes to run ranks in."""
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def impatient_pool() -> Iterator[WorkerPool]:
    """The same, for what leaves a rank waiting for a peer that does not come."""
    workers = WorkerPool(timeout=20)
    yield workers
    workers.close()


MORE_OF_THE_SAME = {"4x1", "1x4", "2x1x2", "2x2x2"}
"""Meshes that have no mechanism which 1x1, 2x1, 1x2, 2x2, 2x1x1 and 2x2x1 lack."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that run ranks as `processes`, and as `matrix` those on more ranks of the same kind.

    `make test-fast` leaves the former out; `make test` the latter, if a test has another mesh at all.
    """
    functions: dict[str, list[tuple[pytest.Item, bool]]] = defaultdict(list)
    for item in items:
        if {"pool", "own_pool", "impatient_pool"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
        arguments = item.callspec.params.values() if hasattr(item, "callspec") else ()
        more = any(isinstance(value, str) and value in MORE_OF_THE_SAME for value in arguments)
        functions[item.nodeid.partition("[")[0]].append((item, more))
    for cases in functions.values():
        if not all(more for _, more in cases):
            for item, more in cases:
                if more:
                    item.add_marker("matrix")
