"""Run each step until it has come to something, several checks at a time on a GPU, and keep every record at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from typing import Any

from tqdm import tqdm

from benchmarks.gpu.outcomes import SETTLED
from benchmarks.gpu.ranks import run_step
from benchmarks.gpu.records import Record, Records
from benchmarks.gpu.steps import Step

AT_A_TIME = max(1, (os.cpu_count() or 1) // 3)
"""Checks that run beside each other on a GPU: most of their time is Python's imports, on a CPU."""

LEAST_SECONDS = 15.0
"""With less time left no step is begun."""


def run_all(
    steps: list[Step], records: Records, device: str, seconds: float, told: Callable[[str], None] = tqdm.write
) -> Iterator[Record]:
    """Run what has no settled record yet, for at most so many seconds in all; yield the record of every step.

    Args:
        steps: In the order in which they are run.
        records: Where records are found and kept. A step that went wrong before is run again.
        device: "cuda" or "cpu".
        seconds: Steps that this leaves no time for are "not run", and run next time.
        told: Gets a line for every step.
    """
    deadline = time.monotonic() + seconds
    with tqdm(total=len(steps), unit="step", dynamic_ncols=True, disable=None) as progress:
        for alone, batch in groupby(steps, lambda step: step.alone or device == "cpu"):
            with ThreadPoolExecutor(1 if alone else AT_A_TIME) as threads:
                for record, kept in threads.map(partial(_settled, records, device, deadline), batch):
                    progress.update()
                    told(_line(record, kept))
                    yield record


def _settled(records: Records, device: str, deadline: float, step: Step) -> tuple[Record, bool]:
    """Return the record of a step, and True if it is an earlier one."""
    record = records.find(step)
    if record is not None and record.status in SETTLED:
        return record, True
    if deadline - time.monotonic() < LEAST_SECONDS:
        return record or Record(step.name, "not run", detail="no time was left"), False
    record = _run(step, device, deadline)
    if record.status != "not run":
        records.keep(step, record)
    return record, False


def _run(step: Step, device: str, deadline: float) -> Record:
    tried: list[str] = []
    for change in ({}, *step.fallbacks):
        options: dict[str, Any] = {**step.options, **change}
        left = max(1.0, deadline - time.monotonic())
        record = run_step(step, device, options, min(step.seconds, left))
        if record.status == "timed out" and left < step.seconds:  # it may well have finished
            return Record(
                step.name, "not run", detail=f"the time of the run ended {record.seconds:.0f} s after its start"
            )
        if record.status != "out of memory" or deadline - time.monotonic() < LEAST_SECONDS:
            break
        tried.append(", ".join(f"{name} {options[name]}" for name in change) or "as it was asked")
    if tried and record.status != "out of memory":
        record.detail = f"{record.detail} (out of memory with: {'; '.join(tried)})".strip()
    return record


def _line(record: Record, kept: bool) -> str:
    worst = max(
        record.figures.get("errors", {}).values(), key=lambda each: each[0] / each[1] if each[1] else 0.0, default=None
    )
    error = f"  error {worst[0]:.1e} of {worst[1]:.1e}" if worst else ""
    detail = f"  {record.detail.splitlines()[0][:110]}" if record.detail else ""
    how = "kept" if kept else f"{record.seconds:.0f} s"
    return f"{record.status:14} {record.step} ({how}){error}{detail}"
