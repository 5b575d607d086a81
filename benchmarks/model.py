"""The table of every model: one training step of each class of transformers on meshes against plain PEFT.

    python -m benchmarks.model                                      # runs what is missing, hours on 2 cores
    python -m benchmarks.model --classes 'Qwen*' --columns 1x2      # a look, which is kept too
    python -m benchmarks.model --shard 1/4                          # a part of the classes
    python -m benchmarks.model --again failed                       # runs cells anew: failed, refused or all
    python -m benchmarks.model --page                               # writes the page from what is known

- Rows are made by rules, in `tests/oracle/model_rows.py`; the processes are those of the tests.
- Results are data: `benchmarks/models/results.json` has a line for each class, with transformers' version and the
  commits that its cells were run at. A class that another version of transformers was run with counts as missing.
- A class is run in one process first, with the fullest inputs and in the widest dtype that its code can compute with.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from contextlib import closing
from datetime import date
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import torch
import transformers
from filelock import FileLock
from tqdm import tqdm

from benchmarks.oracle import escaped, reason
from tests.conftest import _shard
from tests.oracle import relative_error, workers
from tests.oracle.model_rows import FLOAT32_BOUND, MIXED, model_classes
from tests.oracle.rows import Cell, Step, compare, one_process, row_named
from tests.oracle.rows import _step as compute_step
from tests.oracle.workers import Failure, WorkerError, WorkerPool, attempt

ONE = "one process"
COLUMNS = {
    "2x1": "2x1",
    "1x2": "1x2",
    "2x2": "2x2",
    "1x2 sequence": "sequence parallel 1x2",
    "1x1cp2": "cp 2",
    "1x1pp2 1f1b 2": "pp 2",
}
"""Columns of the oracle table that every class is run in, and what the page calls them."""

RESULTS = Path(__file__).parent / "models" / "results.json"
PAGE = Path(__file__).parent.parent / "docs" / "results" / "models.md"
SAME_ROWS = 1e-3  # relative error of a gradient that is summed in another order, in float32 too
PATIENCE = 120  # seconds in which a process must have answered
LENGTH = 400  # characters of an error that are kept

DTYPES = ["float64", MIXED, "float32"]
"""Where a row with one of them fails by what rounding to float32 may be worth, the next one is taken."""

Results = dict[str, dict[str, Any]]


# ---------------------------------------------------------------------- results


def read_results(path: Path = RESULTS) -> Results:
    """Return what is known of each class: its row, and a number, a refusal or a failure for each column."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_results(results: Results, path: Path = RESULTS) -> None:
    """Write results as JSON with one line a class; the file is replaced as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {_without_folders(json.dumps(results[name]))}" for name in sorted(results))
    new = path.with_suffix(".new")
    new.write_text(f"{{\n{lines}\n}}\n")
    new.replace(path)


def keep(name: str, known: dict[str, Any], path: Path) -> None:
    """Add what is known of a class to the results; processes of several shards may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        write_results(read_results(path) | {name: known}, path)


def commit() -> str:
    """Return the commit that is checked out."""
    shown = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return shown.stdout.strip() or "unknown"


def kept(cell: Cell) -> float | str:
    """Return a cell as it is kept: the error, or the text of the refusal or failure."""
    if cell.error is not None:
        return float(f"{cell.error:.1e}")
    kind, text = ("refused", cell.refusal) if cell.refusal is not None else ("FAILED", cell.failure or "")
    return f"{kind}: {_brief(text)}"


def _without_folders(text: str) -> str:
    """Return a text in which files are named from their package on, without the folders of a machine."""
    return re.sub(
        r"(?<=[\s\"'(])/[^\s\"']*/(?=(?:transformers|torch|peft|lora_parallel|tests|benchmarks|huggingface_hub)/)",
        "",
        text,
    )


def _brief(text: str) -> str:
    """Return an error's first lines, and the last of its trace, which says where it was raised."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ")]
    return " | ".join([" ".join(lines)[:LENGTH], *where[-1:]])


def state_of(value: Any) -> str:
    """Return what a cell came to: right, refused, failed or missing."""
    if value is None:
        return "missing"
    if isinstance(value, str):
        return "refused" if value.startswith("refused") else "failed"
    return "right"


# ---------------------------------------------------------------------- one process


def first_step(name: str) -> dict[str, Any]:
    """Find the fullest row of a class that trains in one process, and return its inputs, its dtype and its loss."""
    errors = []
    for inputs in ("full", "text"):
        for dtype in DTYPES:
            step = attempt(one_process, f"{name} {inputs} {dtype}")
            if isinstance(step, Failure):
                where = step.trace.strip().splitlines()
                place = [line.strip() for line in where if line.strip().startswith("File ")][-1:]
                errors.append(f"{inputs} {dtype}: {step.kind}: {' '.join(step.message.split())[:200]} {place}")
                continue
            if problem := _unfit(step) or mixed_rows(f"{name} {inputs} {dtype}", step):
                errors.append(f"{inputs} {dtype}: {problem}")
                continue
            found = {"inputs": inputs, "dtype": dtype, ONE: float(f"{step.loss:.4g}")}
            return found | ({"tried": errors[0][:LENGTH]} if errors else {})
    return {ONE: f"FAILED: {' || '.join(errors[:1] + errors[len(DTYPES) : len(DTYPES) + 1])[: 2 * LENGTH]}"}


def mixed_rows(name: str, whole: Step) -> str:
    """Return why the mean over halves of a batch is not that over the batch: what a mesh with two batches computes."""
    row = row_named(name)
    one, other = (compute_step(row, row.build(), half, 2).gradients for half in range(2))
    mean = {key: (one[key] + other[key]) / 2 for key in one.keys() & other.keys()}
    if mean.keys() != whole.gradients.keys():
        return "halves of the batch have gradients for other parameters"
    error = relative_error(mean, whole.gradients)
    return "" if error < SAME_ROWS else f"rows are not independent: in halves gradients differ by {error:.1e}"


def _unfit(step: Step) -> str:
    """Return why a step says nothing: gradients that are not finite, or none at all."""
    norms = [gradient.double().norm().item() for gradient in step.gradients.values()]
    if not all(norm < float("inf") for norm in norms):  # NaN is not less, either
        return "gradients are not finite"
    return "" if any(norms) else "no adapter has a gradient"


# ---------------------------------------------------------------------- running


def run(chosen: list[str], columns: list[str], again: str, path: Path = RESULTS) -> None:
    """Run the missing cells of classes, and write the results after each class."""
    workers.ANSWER_TIMEOUT = PATIENCE
    here, today = commit(), date.today().isoformat()
    results = read_results(path)
    with closing(WorkerPool()) as pool:
        for name in tqdm(chosen):
            known = results.get(name, {})
            if known.get("transformers") != transformers.__version__:
                known = {}
            if ONE not in known or again == "all" or again == state_of(known[ONE]) == "failed":
                answer = _on_one(pool, first_step, name)
                first = answer if isinstance(answer, dict) else {ONE: f"FAILED: {_brief(answer.message)}"}
                if any(first.get(key) != known.get(key) for key in ("inputs", "dtype")):
                    known = {}
                known = {**{k: v for k, v in known.items() if k != "tried"}, **first}
                commits = known.get("commit", "").split() if known.keys() & COLUMNS.keys() else []
                known |= {"transformers": transformers.__version__, "commit": " ".join(dict.fromkeys([*commits, here]))}
                keep(name, known | {"date": today}, path)
            if state_of(known[ONE]) != "right":
                continue
            wanted = [each for each in columns if each not in known or again in (state_of(known[each]), "all")]
            if not wanted:
                continue
            cells: dict[str, Cell] = {}
            for dtype in DTYPES[DTYPES.index(known["dtype"]) :]:
                if dtype != known["dtype"]:  # its own numbers were of another dtype
                    wanted = [each for each in COLUMNS if each in {**known, **cells}]
                    known["dtype"] = dtype
                cells = _cells(pool, f"{name} {known['inputs']} {dtype}", wanted)
                if not any(map(is_of_float32, cells.values())):
                    break
            others = known["commit"].split() if known.keys() & COLUMNS.keys() - cells.keys() else []
            known |= {column: kept(cell) for column, cell in cells.items()}
            keep(name, known | {"date": today, "commit": " ".join(dict.fromkeys([*others, here]))}, path)


def _cells(pool: WorkerPool, row: str, columns: list[str]) -> dict[str, Cell]:
    """Run a row in one process and then in columns."""
    chosen = row_named(row)
    want = _on_one(pool, one_process, chosen.name)
    if isinstance(want, Failure):
        return dict.fromkeys(columns, Cell(failure=f"one process: {want.message}"))
    cells = {}
    for column in columns:
        cell = attempt(compare, pool, chosen, column, want)
        cells[column] = Cell(failure=cell.trace) if isinstance(cell, Failure) else cell
        if cells[column].failure is not None:
            tqdm.write(f"FAILED {chosen.name} on {column}: {cells[column].failure[-1500:]}")
    return cells


def is_of_float32(cell: Cell) -> bool:
    """Return True for a failure that a class's own casts to float32 may be the reason of."""
    if (cell.failure or "").startswith(ONE):
        return True
    found = re.fullmatch(r"gradients differ by ([\d.e+-]+)", cell.failure or "")
    return found is not None and float(found[1]) <= FLOAT32_BOUND


def _on_one(pool: WorkerPool, function: Any, *args: Any) -> Any:
    """Return what a function returns in a process of its own, or a `Failure`, also if it died or did not answer."""
    try:
        (answer,) = pool.try_run(1, function, *args)
    except WorkerError as error:
        return Failure("WorkerError", str(error), traceback.format_exc())
    return answer


# ---------------------------------------------------------------------- the page

TITLE = "# Every model\n\n"
CAPTION = """\
`make table NAME=model` writes this page ([how](../fidelity.md#how-results-are-made)). A row is a tiny model of one
class of transformers; a cell compares one training step on a mesh (dp_shard x tp) with one process of plain PEFT.

A cell is **a number**, the largest relative error of the gradient of any adapter (bound 1e-12; 1e-5 in float32);
**refused**, with the number of the reason below; **FAILED**; or a dash: not run yet. "text alone": the class also
takes images or sound, which the row does not have. "mixed": the class casts to float32 in places, which the row
computes in float64.

"""


MISSED = """## Refused

| | reason | cells | such as |
|---|---|---|---|
"""


def family_of(name: str) -> str:
    """Return the family of a class: the folder of transformers that has its code."""
    return getattr(transformers, name).__module__.split(".")[2]


def inputs_of(name: str, inputs: str) -> str:
    """Return what a row's batch has beside text, or "text alone" if the class takes more."""
    known = inspect.signature(getattr(transformers, name).forward).parameters
    image = bool({"pixel_values", "flattened_patches"} & known.keys())
    sound = "input_features" in known or ("input_values" in known and "input_ids" not in known)
    if inputs == "full" and (image or sound):
        return "image" if image else "sound"
    # such as `image_pixel_values`, or `input_values` beside token ids, which the rows do not have
    takes_more = any(
        re.search("pixel|image|audio|speech|flattened_patches|input_(features|values)", key) for key in known
    )
    return "text alone" if takes_more else "text"


def kind_of(refusal: str) -> str:
    """Return the reason of a refusal, as one for all classes: without names of modules, and what is in brackets."""
    said = re.sub(r"\s*\([^()]*(\([^()]*\)[^()]*)*\)", "", reason(refusal.removeprefix("refused: ")))
    said = re.sub(r"`?\b[A-Za-z_]\w*(\.\w+)+\b`?", "a layer", said)
    return re.sub(r"\b(the tokens|asked|output) of (?!the model|a layer|that|its)\w+", r"\1 of the model", said)


def refused(refusals: dict[tuple[str, str], str], numbers: dict[str, int]) -> str:
    """Return the table of the reasons, those of most cells first, from the reason of each class and column."""
    text = MISSED
    for said, number in numbers.items():
        cells = [cell for cell, kind in refusals.items() if kind == said]
        columns = Counter(column for _, column in cells)
        counts = ", ".join(f"{COLUMNS[column]}: {count}" for column, count in columns.items())
        text += f"| {number} | {said.replace('|', '&#124;')} | {counts} | {cells[0][0]} |\n"
    return text + "\n"


def page(results: Results, names: list[str]) -> str:
    """Return the page: totals, a line for each class, sorted by family, and the reasons of refusals and failures."""
    listed = [name for name in names if name in results]
    trained = [name for name in listed if state_of(results[name].get(ONE)) == "right"]
    text = TITLE + f"{len(names)} classes are listed; {len(trained)} train in one process, "
    text += f"{len(listed) - len(trained)} do not, and {len(names) - len(listed)} were not run yet. "
    dates = sorted({known["date"] for known in results.values() if "date" in known})
    versions = sorted({results[name]["transformers"] for name in listed})
    text += f"{' to '.join(dict.fromkeys([*dates[:1], *dates[-1:]]))}, transformers {', '.join(versions)}.\n\n"
    text += "| | right | refused | FAILED | not run yet |\n|---|---|---|---|---|\n"
    for column, title in COLUMNS.items():
        states = [state_of(results[name].get(column)) for name in trained]
        counts = [states.count(state) for state in ("right", "refused", "failed", "missing")]
        text += f"| {title} | {' | '.join(map(str, counts))} |\n"
    text += f"\n{CAPTION}## Classes\n\n"
    text += f"| class | inputs | dtype | {' | '.join(COLUMNS.values())} |\n{'|---' * (3 + len(COLUMNS))}|\n"
    failures: list[str] = []
    in_order = sorted(trained, key=lambda each: (family_of(each), each))
    refusals = {
        (name, column): kind_of(value)
        for name, column in product(in_order, COLUMNS)
        if state_of(value := results[name].get(column)) == "refused"
    }
    numbers = {kind: number for number, (kind, _) in enumerate(Counter(refusals.values()).most_common(), 1)}
    for name in in_order:
        known = results[name]
        cells = []
        for column in COLUMNS:
            value = known.get(column)
            state = state_of(value)
            if state == "refused":
                cells.append(f"refused ({numbers[refusals[name, column]]})")
            elif state == "failed":
                cells.append("**FAILED**")
                failures.append(f"- {name}, {COLUMNS[column]}: {_line(value)}")
            else:
                cells.append("-" if value is None else f"{value:.0e}")
        text += f"| {name} | {inputs_of(name, known['inputs'])} | {known['dtype']} | {' | '.join(cells)} |\n"
    text += "\n"
    if refusals:
        text += refused(refusals, numbers)
    if failures:
        text += "## Failed\n\n" + "\n".join(failures) + "\n\n"
    if len(trained) < len(listed):
        text += "## Not trained in one process\n\nWhat plain PEFT, the class itself, or the table's own check of "
        text += "independent rows says to the rows that we make.\n\n"
        untrained = sorted(set(listed) - set(trained), key=lambda each: (family_of(each), each))
        text += "".join(f"- {name}: {_line(results[name][ONE])}\n" for name in untrained) + "\n"
    return text.rstrip("\n") + "\n"


def _line(value: str) -> str:
    """Return an error as one line of the page."""
    text = value.removeprefix("FAILED: ")
    return escaped(" ".join(text.split())[:LENGTH]).replace("`", "'").replace("_", r"\_").replace("[", r"\[")


def main() -> int:
    """Run what is missing, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", nargs="+", default=["*"], metavar="GLOB", help="classes by name")
    parser.add_argument("--columns", nargs="*", default=list(COLUMNS), choices=list(COLUMNS))
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="I/N", help="the I-th part of N of the classes")
    parser.add_argument("--again", default="", choices=["", "failed", "refused", "all"], help="cells to run anew")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = model_classes()
    part, parts = args.shard
    chosen = [name for name in names if any(fnmatch(name, glob) for glob in args.classes)][part - 1 :: parts]
    if not chosen:
        parser.error(f"no class is called {' or '.join(args.classes)}")
    if not args.page:
        run(chosen, args.columns, args.again)
    results = read_results()
    PAGE.write_text(page(results, names))
    failed = [name for name in chosen if any(state_of(results.get(name, {}).get(each)) == "failed" for each in COLUMNS)]
    print(f"{len(chosen)} classes, {len(failed)} with a failed cell; written to {PAGE}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
