"""Exposed communication: the time in which a GPU runs NCCL's kernels and no other, in a trace of torch's profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Interval = tuple[float, float]


def kernels_of(step: Callable[[], Any]) -> dict[str, float] | None:
    """Run a step under the profiler; return milliseconds of kernels, of NCCL's and of NCCL's alone; None without a GPU.

    The trace is read as it is exported: its category "kernel" has no annotations in it, which cover other kernels.
    """
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return exposed(json.loads(path.read_text())["traceEvents"])


def exposed(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of all kernels, of communication, and of communication that no other kernel overlaps.

    Args:
        events: Of a Chrome trace: "ts" and "dur" are in microseconds.
    """
    communication: list[Interval] = []
    compute: list[Interval] = []
    for event in events:
        if event.get("cat") == "kernel":
            start = float(event["ts"])
            (communication if "nccl" in event["name"].lower() else compute).append((start, start + float(event["dur"])))
    either = length(communication + compute)
    return {
        "kernels": either / 1e3,
        "communication": length(communication) / 1e3,
        "exposed": (either - length(compute)) / 1e3,
    }


def length(intervals: Iterable[Interval]) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
