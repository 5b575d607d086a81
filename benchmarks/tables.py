"""Run a benchmark whose rows are data, and write its table into a page of the documentation."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from datetime import date
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path

import torch

__all__ = ["RESULTS", "dated", "run_table", "write_between"]

RESULTS = Path(__file__).parent.parent / "docs" / "results"
"""The folder of the pages that benchmarks write."""


def run_table(
    description: str | None,
    rows: Iterable[str],
    table: Callable[[list[str]], tuple[str, bool]],
    page: Path,
    mark: str,
    option: str = "rows",
) -> int:
    """Make the table of the rows that the command line asks for, print it, and write it if it has all rows.

    Args:
        description: What the command is for.
        rows: Names of all rows.
        table: Makes the table of some rows; says whether all of their cells are within their bounds.
        page: The page that the table is in.
        mark: The line before and after the table there.
        option: Name of the option that chooses rows by a glob.

    Returns:
        The exit code: 1 if a cell is not within its bound.
    """
    rows = list(rows)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(f"--{option}", dest="glob", default="*", metavar="GLOB", help=f"{option} by name")
    glob = parser.parse_args().glob
    torch.set_num_threads(1)
    chosen = [name for name in rows if fnmatch(name, glob)]
    if not chosen:
        parser.error(f"none of the {option} is called {glob!r}; there are {', '.join(rows)}")
    text, good = table(chosen)
    print(text)
    if glob == "*":
        within = "all within their bounds" if good else "**not all within their bounds**"
        write_between(page, mark, f"{dated(f'{len(chosen)} {option}, {within}')}\n\n{text}")
    return 0 if good else 1


def dated(total: str, packages: Iterable[str] = ("torch", "transformers", "peft")) -> str:
    """Return the first line of a page of results: the total, today's date, and the versions that are installed."""
    versions = ", ".join(f"{name} {re.sub('[+].*', '', version(name))}" for name in packages)
    return f"{total}. {date.today().isoformat()}, {versions}."


def write_between(page: Path, mark: str, text: str) -> None:
    """Write text into a page, between the two lines that are `mark`."""
    before, _, after = page.read_text().split(mark)
    page.write_text(f"{before}{mark}\n\n{text}\n\n{mark}{after}")
