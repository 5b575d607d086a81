"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.workers import WorkerPool

_CRASHES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Processes to run ranks in."""
    workers = WorkerPool(again=1)
    request.config.stash[_CRASHES] = workers.crashes
    yield workers
    workers.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell what crashed and was run again."""
    for crash in config.stash.get(_CRASHES, []):
        terminalreporter.section("A RANK CRASHED; RUN AGAIN", red=True)
        terminalreporter.write_line(crash)
