"""Run applications alone and on meshes, compare, and write the table into docs/results/applications.md."""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

from tqdm import tqdm

from benchmarks.applications.cases import CASES, Case, Run
from benchmarks.applications.commands import environment, folder_of, make_inputs, run
from benchmarks.applications.comparison import Differences, compare, read
from benchmarks.tables import RESULTS, dated, write_between

PAGE = RESULTS / "applications.md"
MARK = "<!-- written by make suite NAME=applications -->"
HEAD = [
    "| application | started by | mesh | losses | gradient norms | adapter | |",
    "|---|---|---|---|---|---|---|",
]


def started_by(command: str) -> str:
    """Return the beginning of a command that says what starts the processes."""
    words = [word for word in command.split() if "=" not in word]
    launcher = "--launcher torchrun" if "--launcher" in words else ""
    return f"`{' '.join([*words[: 1 if words[0] == 'torchrun' else 2], launcher]).strip()}`"


def row(case: Case, done: Run, found: Differences | str) -> tuple[str, bool]:
    """Return a row of the table, and whether all of it is within the bounds. `found` is what went wrong, if a text."""
    if isinstance(found, str):
        cells, good = ["**FAILED**"] * 3, False
    else:
        pairs = [(found.losses, case.bound), (found.norms, case.bound), (found.adapter, case.bound_of_adapter)]
        cells = [f"{value:.1e}" if value <= bound else f"**FAILED** {value:.1e}" for value, bound in pairs]
        good = all(value <= bound for value, bound in pairs)
    about = [case.about, started_by(done.command), done.mesh]
    return f"| {' | '.join([*about, *cells, case.note])} |", good


def run_case(case: Case, progress: tqdm) -> list[tuple[str, bool]]:
    """Run all commands of an application; return its rows."""
    progress.set_description(f"{case.folder}, environment")
    environment(case.folder)
    alone, *others = case.runs()
    rows: list[tuple[str, bool]] = []
    for each in (alone, *others):
        progress.set_description(f"{case.about}, {each.name}")
        wrong = run(case, each)
        if wrong:
            tqdm.write(f"{case.about}, {each.name}: {wrong}", file=sys.stderr)
        progress.update()
        if each is alone:
            wrong_alone = wrong
            continue
        found: Differences | str = wrong_alone or wrong
        if not found:
            try:
                found = compare(read(folder_of(case, each)), read(folder_of(case, alone)))
            except ValueError as error:
                found = str(error)
                tqdm.write(f"{case.about}, {each.name}: {found}", file=sys.stderr)
        rows.append(row(case, each, found))
    return rows


def main() -> int:
    """Run what the command line asks for; return 1 if something fails or is not within its bounds."""
    names = sorted({case.folder for case in CASES})
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    chosen = parser.parse_args().names or names
    if unknown := set(chosen) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    make_inputs()
    cases = [case for case in CASES if case.folder in chosen]
    with tqdm(total=sum(len([*case.runs()]) for case in cases), unit="run", dynamic_ncols=True) as progress:
        rows = [each for case in cases for each in run_case(case, progress)]
    text = "\n".join([*HEAD, *(line for line, _ in rows)])
    print(text)
    if set(chosen) == set(names):
        within = sum(good for _, good in rows)
        total = dated(f"{len(rows)} runs, {within} within their bounds", ("torch", "accelerate", "peft"))
        write_between(PAGE, MARK, f"{total}\n\n{text}")
    return 0 if all(good for _, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
