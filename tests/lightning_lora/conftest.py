"""Ranks of Lightning's tests run in processes that have imported the front ends."""

from __future__ import annotations

import pytest

from tests.oracle.workers import WorkerPool


@pytest.fixture(scope="session")
def pool(front_end_pool: WorkerPool) -> WorkerPool:
    """Processes to run ranks in."""
    return front_end_pool
