"""The oracle table: gradients of one step on meshes against plain PEFT in one process, for families and features.

    python -m benchmarks.oracle                                      # all: about an hour on 2 cores
    python -m benchmarks.oracle --rows 'gemma*' --meshes 1x2 2x2     # a look; pass --output too, or it is the page

- The rows are data, in `tests/oracle/rows.py`; the processes are those of the tests.
- A cell is the largest relative error of a gradient, or what the refusal says, or FAILED, and then so does the command.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from contextlib import closing
from fnmatch import fnmatch
from html import escape
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import torch
from tqdm import tqdm

from benchmarks.tables import RESULTS, dated
from tests.oracle.rows import Cell, Row, compare, one_process, rows
from tests.oracle.workers import Failure, WorkerPool, attempt

MESHES = ["2x1", "1x2", "2x2", "2x2 whole", "1x4", "2x2x2", "1x1cp2", "1x2cp2", "2x1cp2", "1x1cp4", "2x2cp2"]
STAGES = [
    "1x1pp2",
    "1x1pp2 gpipe 2",
    "1x1pp2 interleaved",
    "1x2pp2",
    "2x1pp2 1f1b 2",
    "1x1cp2pp2",
    "1x1pp4",
    "2x2pp2 1f1b 2",
]
PAGE = RESULTS / "oracle.md"
TITLE = "# Model families and features\n\n"
CAPTION = """\
`make table NAME=oracle` writes this page ([how](../fidelity.md#how-results-are-made)). A row is a tiny model in
float64. A mesh is dp_shard x tp, or dp_replicate x dp_shard x tp; behind it stand the sizes of cp and pp, and for
pp the schedule (1f1b) and the number of micro-batches (4). "whole" is `shard_base=False`.

A cell is **a number**, the largest relative error of the gradient of any trained parameter against one process of
plain PEFT (bound 1e-12, unless `~` stands before it); **refused**, before anything is computed, with the number of
the reason below the table; or **FAILED**.

"""
NOISY = """A `~` before a number: {note} There rounding is not that of float64, and the bound is {bound:.0e}{deep}.

"""

TITLES = {
    "family": "Model families",
    "experts": "Mixtures of experts",
    "quantised": "Quantised bases",
    "feature": "Features",
}


def reason(message: str) -> str:
    """The first sentence of a refusal, without what differs between meshes and models only."""
    sentence = re.split(r"(?<=[\w)'\"\]])\.\s", " ".join(message.split()), maxsplit=1)[0].rstrip(".")
    sentence = re.sub(r"^([ctp]p)=\d+", r"\1=n", sentence)
    sentence = re.sub(r"\b[A-Z]\w+(For[A-Z]\w+|Model)\b", "the model", sentence)
    sentence = re.sub(r"'([^']+)'", r"`\1`", sentence)
    return "".join(part if index % 2 else escaped(part) for index, part in enumerate(re.split("(`[^`]*`)", sentence)))


def escaped(text: str) -> str:
    """Placeholders and stars are no markup."""
    return escape(text, quote=False).replace("*", "&#42;")


def page(cells: dict[tuple[str, str], Cell], chosen: list[Row], meshes: list[str]) -> str:
    """The page."""
    numbers = sum(cell.error is not None for cell in cells.values())
    refused = sum(cell.refusal is not None for cell in cells.values())
    failed = len(cells) - numbers - refused
    total = f"{len(chosen)} rows, {len(cells)} cells: {numbers} right, {refused} refused, {failed} failed"
    text = f"{TITLE}{dated(total)}\n\n{CAPTION}"
    for group, title in TITLES.items():
        of_group = [row for row in chosen if row.group == group]
        if not of_group:
            continue
        refusals: dict[str, int] = {}
        lines = [f"## {title}", ""]
        if group == "feature":
            lines += ["On a tiny Llama, all seven linear layers adapted, unless the row names another model.", ""]
        lines += [f"| | {' | '.join(meshes)} |", "|---" * (len(meshes) + 1) + "|"]
        for row in of_group:
            line = []
            for mesh in meshes:
                cell = cells[row.name, mesh]
                if cell.error is not None:
                    line.append(f"{'~' if row.tolerance > 1e-12 else ''}{cell.error:.0e}")
                elif cell.refusal is not None:
                    number = refusals.setdefault(reason(cell.refusal), len(refusals) + 1)
                    line.append(f"refused ({number})")
                else:
                    line.append("**FAILED**")
            lines.append(f"| {row.name} | {' | '.join(line)} |")
        lines.append("")
        if refusals:
            lines += [f"{number}. {said}" for said, number in refusals.items()] + [""]
        text += "\n".join(lines) + "\n"
    noisy = {row.note: row for row in chosen if row.tolerance > 1e-12}
    for note, row in noisy.items():
        deep = f" ({row.deep_tolerance:.0e} with eight blocks, which amplify it)" if row.deep_tolerance else ""
        text += NOISY.format(note=note, bound=row.tolerance, deep=deep)
    return text.rstrip("\n") + "\n"


def main() -> int:
    """Run, print progress, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", metavar="GLOB", help="rows by name")
    parser.add_argument(
        "--meshes",
        nargs="+",
        default=[*MESHES, *STAGES],
        help="dp_shard x tp, or dp_replicate in front; cp2 for a cp axis, pp2 for a pp axis ('1x1pp2 gpipe 4'); whole: "
        "shard_base=False",
    )
    parser.add_argument("--output", type=Path, default=PAGE, help="the page to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [row for row in rows().values() if fnmatch(row.name, args.rows)]
    if not chosen:
        parser.error(f"no row is called {args.rows!r}; there are {', '.join(rows())}")
    cells: dict[tuple[str, str], Cell] = {}
    depths = {"pp" in mesh: mesh for mesh in args.meshes}  # models with a pp axis have more blocks
    want = {
        (row.name, deep): attempt(one_process, row.name, mesh)
        for deep, mesh in depths.items()
        for row in tqdm(chosen, desc="one process")
    }
    for mesh in args.meshes:
        with closing(WorkerPool()) as pool:  # its processes end with the mesh
            for row in tqdm(chosen, desc=mesh):
                reference = want[row.name, "pp" in mesh]
                if isinstance(reference, Failure):
                    cell = Cell(failure=f"one process: {reference.message}\n{reference.trace}")
                else:
                    cell = compare(pool, row, mesh, reference)
                cells[row.name, mesh] = cell
                if cell.failure is not None:
                    tqdm.write(f"FAILED {row.name} on {mesh}: {cell.failure}")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(cells, chosen, args.meshes))
    failed = [key for key, cell in cells.items() if cell.failure is not None]
    print(f"{len(cells)} cells, {len(failed)} failed; written to {args.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
