"""The table of optimizers: adapters after some steps on 2x2, and after more on 1x2, against one process.

    python -m benchmarks.optimizers                  # two minutes on 2 cores; writes docs/results/optimizers.md
    python -m benchmarks.optimizers --rows 'Muon*'   # a look, without writing

The rows are data, in `tests/oracle/optimizer_rows.py`; the processes are those of the tests. A cell above its bound
says FAILED, and then so does the command.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

from tqdm import tqdm

from benchmarks.tables import RESULTS, run_table
from lora_parallel.optimizers import steps_on
from tests.oracle import ranks_of, relative_error
from tests.oracle.optimizer_rows import CASE, MAKES, MORE, STEPS, bound, on_ranks, one_process
from tests.oracle.workers import Failure, WorkerPool

PAGE = RESULTS / "optimizers.md"
MARK = "<!-- written by make table NAME=optimizer -->"
FIRST, SECOND = "2x2", "1x2"


def table(names: list[str]) -> tuple[str, bool]:
    """Return the table in Markdown, and whether all cells are within their bounds."""
    lines = [
        f"| | steps on | {STEPS} steps on {FIRST} | {MORE} more on {SECOND}, resumed | bound |",
        "|---|---|---|---|---|",
    ]
    good = True
    pool = WorkerPool()
    with tempfile.TemporaryDirectory() as folder:
        for name in tqdm(names):
            want = one_process(name)
            cells = []
            for part, mesh in enumerate((FIRST, SECOND)):
                steps = range(STEPS, STEPS + MORE) if part else range(STEPS)
                found = [
                    each[name]
                    for each in pool.run(ranks_of(mesh), on_ranks, [name], mesh, steps, Path(folder), part == 1)
                ]
                failures = [each for each in found if isinstance(each, Failure)]
                if failures:
                    tqdm.write(f"{name} on {mesh}: {failures[0].trace}")
                error = (
                    1.0 if failures else max(relative_error(each, want[part], rounding_counts=True) for each in found)
                )
                good = good and error <= bound(name)
                cells.append(f"{error:.0e}" if error <= bound(name) else "**FAILED**")
            kind = steps_on(MAKES[name](CASE.model())).value
            lines.append(f"| {name} | {kind} | {' | '.join(cells)} | {bound(name):.0e} |")
    pool.close()
    return "\n".join(lines), good


if __name__ == "__main__":
    sys.exit(run_table(__doc__, MAKES, table, PAGE, MARK))
