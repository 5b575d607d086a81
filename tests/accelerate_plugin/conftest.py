"""Ranks of Accelerate's and Trainer's tests run in processes that have imported the front ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle import causal_lm
from tests.oracle.workers import WorkerPool


@pytest.fixture(scope="session")
def pool(front_end_pool: WorkerPool) -> WorkerPool:
    """Processes to run ranks in."""
    return front_end_pool


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small model in float32; files with models of their own define another."""
    path = tmp_path_factory.mktemp("base")
    causal_lm(dtype=torch.float32).save_pretrained(path)
    return path
