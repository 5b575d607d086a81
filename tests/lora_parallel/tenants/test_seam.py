"""The engine runs without the folder of tenants."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from tests.oracle import Case, on_mesh
from tests.oracle.workers import WorkerPool, attempt


@pytest.fixture
def own_pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool()) as workers:
        yield workers


class Blocked:
    """Finds no folder of tenants."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.startswith("lora_parallel.tenants"):
            raise ModuleNotFoundError(name)


def trained_without() -> str:
    """Import the engine anew, train with it, and return what is raised for the class that is not there."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "lora_parallel":
            del sys.modules[name]
    sys.meta_path.insert(0, Blocked())  # type: ignore[arg-type]
    import lora_parallel
    import lora_parallel.integration

    mesh, config = on_mesh("1x1")
    model = lora_parallel.parallelize(Case().model(), mesh, config)
    (batch,) = Case(steps=1).batches()
    model(input_ids=batch, labels=batch).loss.backward()
    return attempt(lambda: lora_parallel.TenantPool).kind


def test_without_the_folder(own_pool):
    assert own_pool.run(1, trained_without) == ["ModuleNotFoundError"]
