"""Hold `examples/miniature.py` against one process, with the sum of partial gradients and without it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[1] / "examples" / "miniature.py"


def miniature() -> ModuleType:
    spec = importlib.util.spec_from_file_location("miniature", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def errors() -> tuple[float, float]:
    right, broken = miniature(), miniature()
    broken.finish = lambda factors, group: None
    return right.largest_error(), broken.largest_error()


def test_the_miniature_trains_as_one_process(pool):
    for right, broken in pool.run(4, errors):
        assert right < 1e-10
        assert broken > 1e-3


def test_the_miniature_has_at_most_100_lines():
    assert len(FILE.read_text().splitlines()) <= 100
