"""The page docs/results/comparison.md, and the results that it is written from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.peer.jobs import Mesh
from benchmarks.peer.launch import SECONDS
from benchmarks.peer.notes import NOTES, Note
from benchmarks.peer.rows import PEERS, ROWS, Cell

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "comparison.md"
RESULTS = ROOT / "benchmarks" / "out" / "peer.json"
MESHES = [Mesh(2, 1), Mesh(1, 2), Mesh(2, 2)]
TITLES = {
    Mesh(2, 1): "2x1: FSDP2 over two ranks",
    Mesh(1, 2): "1x2: tensor parallelism over two ranks",
    Mesh(2, 2): "2x2: both",
}
TITLE = "# Compared with others\n\n"
CAPTION = """\
`make table NAME=peer` writes this page ([how](../fidelity.md#how-results-are-made)). A cell compares a library on a
mesh (dp_shard x tp) with one process of plain PEFT and the same global batch, for tiny models in float64 on CPUs.

A cell is **a number**, the largest relative error of any tensor that trains, on any rank, in bold above the row's
bound ({exact:.0e}; {routed:.0e} for mixtures of experts); **words**, where no number is asked for; **refused** by
the library; or **error**: it raises something else, or does not end in {seconds} seconds. Numbers in parentheses
are those of the [notes](#notes).

"""


def read_results() -> dict[str, Cell]:
    """Return the cells that have run, by row, library and mesh."""
    if not RESULTS.exists():
        return {}
    return {key: Cell(**cell) for key, cell in json.loads(RESULTS.read_text()).items()}


def write_results(results: dict[str, Cell]) -> None:
    """Keep the cells."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps({key: asdict(cell) for key, cell in results.items()}, indent=1))
    part.rename(RESULTS)  # at once: another run may read it


class Numbers:
    """Numbers of notes, in the order in which cells need them."""

    def __init__(self, notes: Iterable[Note]) -> None:
        self.notes = list(notes)
        self.texts: dict[str, int] = {}

    def of(self, row: str, peer: str, mesh: str, cell: Cell) -> int:
        """Return the number of the note for a cell that is not good."""
        said = f"`{cell.failure.replace('`', '')}`" if cell.failure else ""
        for note in self.notes:
            if note.fits(row, peer, mesh, cell):
                said = note.text
                break
        return self.texts.setdefault(said, len(self.texts) + 1) if said else 0


def cell_text(cell: Cell | None, number: int) -> str:
    """Return what stands in the table."""
    if cell is None:
        return ""
    note = f" ({number})" if number else ""
    if cell.failure:
        return f"{'refused' if cell.refused else '**error**'}{note}"
    text = cell.words or f"{cell.error:.0e}"
    return (text if cell.good else f"**{text}**") + note


def table(results: dict[str, Cell], mesh: Mesh, numbers: Numbers) -> str:
    """Return one mesh's table."""
    lines = [f"## {TITLES[mesh]}", "", f"| | {' | '.join(PEERS)} |", "|---" * (len(PEERS) + 1) + "|"]
    for row in ROWS.values():
        cells = []
        for peer in PEERS:
            cell = results.get(f"{row.name} | {peer} | {mesh}")
            wanting = cell is not None and (cell.failure or not cell.good)
            cells.append(cell_text(cell, numbers.of(row.name, peer, str(mesh), cell) if cell and wanting else 0))
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def totals(results: dict[str, Cell]) -> str:
    """Return how many cells of each library are right."""
    by_peer = {peer: [cell for key, cell in results.items() if key.split(" | ")[1] == peer] for peer in PEERS}
    return f"Right: {', '.join(f'{p} {sum(c.good for c in cells)} of {len(cells)}' for p, cells in by_peer.items())}."


def page(results: dict[str, Cell], exact: float, routed: float, versions: str) -> str:
    """Return the page."""
    numbers = Numbers(NOTES)
    tables = [table(results, mesh, numbers) for mesh in MESHES]
    rows = [f"- **{row.name}**: {row.about};" for row in ROWS.values()]
    rows[-1] = rows[-1].rstrip(";") + "."
    notes = [f"{number}. {text}" for text, number in numbers.texts.items()]
    parts = [
        f"{TITLE}{totals(results)} {versions}",
        CAPTION.format(exact=exact, routed=routed, seconds=SECONDS) + "The rows:\n\n" + "\n".join(rows),
        *tables,
        "## Notes\n\n" + "\n".join(notes),
    ]
    return "\n\n".join(parts) + "\n"


def write_page(results: dict[str, Cell]) -> None:
    """Write the page, with today's date and the versions that are installed."""
    from benchmarks.peer.rows import EXACT, ROUTED

    names = ("torch", "transformers", "peft", "accelerate", "lightning")
    versions = ", ".join(f"{name} {re.sub('[+].*', '', version(name))}" for name in names)
    PAGE.write_text(page(results, EXACT, ROUTED, f"{date.today().isoformat()}, {versions}."))
