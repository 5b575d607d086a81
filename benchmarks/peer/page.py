"""The page docs/comparison.md, and the results that it is written from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.peer.rows import Cell

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
RESULTS = ROOT / "benchmarks" / "out" / "peer.json"


def read_results() -> dict[str, Cell]:
    """Return the cells that have run, by row, library and mesh."""
    if not RESULTS.exists():
        return {}
    return {key: Cell(**cell) for key, cell in json.loads(RESULTS.read_text()).items()}


def write_results(results: dict[str, Cell]) -> None:
    """Keep the cells."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({key: asdict(cell) for key, cell in results.items()}, indent=1))


def write_page(results: dict[str, Cell]) -> None:
    """Write the page."""
