"""The table of predicted and measured memory: `plan_memory` from a config, against ranks that train.

    python -m benchmarks.memory                # ten minutes on 2 cores; writes the table into docs/results/memory.md
    python -m benchmarks.memory --kinds 'full' # a look, without writing

The rows are data, in `tests/oracle/cost_rows.py`; the processes are those of the tests. What is measured is what
torch's allocator of the CPU gave out in a step, by torch's profiler, and what parameters and the optimizer's states
take before it, on the rank where the sum is largest. A cell that is off by more than 5 % says
FAILED, and then so does the command; one of a mesh that is refused says so.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from benchmarks.tables import RESULTS, run_table
from tests.cores import share_cores
from tests.oracle.cost_rows import KINDS, MESHES, RANKS, measure
from tests.oracle.workers import Failure, WorkerPool

PAGE = RESULTS / "memory.md"
MARK = "<!-- written by make table NAME=memory -->"
BOUND = 0.05


def table(kinds: list[str]) -> tuple[str, bool]:
    """Return the table in Markdown, and whether all predictions are within the bound."""
    lines = [f"| MiB predicted, measured (error) | {' | '.join(MESHES)} |", "|---|" + "---|" * len(MESHES)]
    good = True
    pool = WorkerPool()
    for kind in tqdm(kinds):
        run = KINDS[kind]
        cells = []
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            dtype = getattr(torch, run.dtype)
            AutoModelForCausalLM.from_config(run.config, dtype=dtype).save_pretrained(folder)
            for mesh in MESHES.values():
                try:
                    predicted = run.predicted(mesh)
                except ValueError as error:
                    tqdm.write(str(error))
                    cells.append("refused")
                    continue
                found = pool.run(RANKS, measure, run, Path(folder), mesh)
                failures = [each.trace for each in found if isinstance(each, Failure)]
                if failures:
                    tqdm.write(failures[0])
                    cells, good = [*cells, "**FAILED**"], False
                    continue
                measured = max(each["held"] + each["step"] for each in found)
                error = predicted.total / measured - 1
                good = good and abs(error) <= BOUND
                text = f"{predicted.total / 2**20:.1f}, {measured / 2**20:.1f} ({100 * error:+.1f} %)"
                cells.append(text if abs(error) <= BOUND else f"**FAILED** {text}")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
        tqdm.write(lines[-1])
    pool.close()
    return "\n".join(lines), good


if __name__ == "__main__":
    share_cores()  # else a cell may be off by what a thread of gloo holds
    sys.exit(run_table(__doc__, KINDS, table, PAGE, MARK, "kinds"))
