"""The table of TRL's trainers: losses, logged values and adapters after some steps on a mesh, against one process.

    python -m benchmarks.trainers                  # two minutes on 2 cores; writes docs/results/trainers.md
    python -m benchmarks.trainers --rows 'GRPO*'   # a look, without writing

The rows are data, in `tests/oracle/trainer_rows.py`; the processes are those of the tests. A row above its bounds
says FAILED, and then so does the command.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

from tqdm import tqdm

from benchmarks.tables import RESULTS, run_table
from tests.oracle import ranks_of
from tests.oracle.trainer_rows import ROWS, STEPS, errors, tuned, write_base
from tests.oracle.workers import FRONT_ENDS, Failure, WorkerPool

PAGE = RESULTS / "trainers.md"
MARK = "<!-- written by make table NAME=trainer -->"


def table(names: list[str]) -> tuple[str, bool]:
    """Return the table in Markdown, and whether all rows are within their bounds."""
    lines = [
        f"| trainer | mesh | losses of {STEPS} steps | other logged values | adapter | |",
        "|---|---|---|---|---|---|",
    ]
    good = True
    pool = WorkerPool(modules=FRONT_ENDS)
    with tempfile.TemporaryDirectory() as folder:
        base = write_base(Path(folder) / "base")
        for name in tqdm(names):
            row = ROWS[name]
            [want] = tuned([name], base, Path(folder) / "one", "").values()
            found = [
                each[name]
                for each in pool.run(ranks_of(row.mesh), tuned, [name], base, Path(folder) / "mesh", row.mesh)
            ]
            failures = [each for each in (want, *found) if isinstance(each, Failure)]
            if failures:
                tqdm.write(f"{name}: {failures[0].trace}")
                cells, fine = ["**FAILED**"] * 3, False
            else:
                each_rank = [errors(name, got, want) for got in found]
                fine = all(each.good for each in each_rank)
                worst = [max(getattr(each, key) for each in each_rank) for key in ("losses", "logged", "adapters")]
                cells = [f"{value:.0e}" if fine else f"**FAILED** {value:.0e}" for value in worst]
            good = good and fine
            lines.append(f"| {name} | {row.mesh} | {' | '.join(cells)} | {row.about} |")
    pool.close()
    return "\n".join(lines), good


if __name__ == "__main__":
    sys.exit(run_table(__doc__, ROWS, table, PAGE, MARK))
