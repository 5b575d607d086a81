"""Exposed communication: the time in which a GPU runs NCCL's kernels and no other, in a trace of torch's profiler."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

Interval = tuple[float, float]

KINDS: dict[str, tuple[str, ...]] = {
    "communication": ("nccl",),
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "products of matrices": ("gemm", "gemv", "cutlass", "nvjet", "cublas", "xmma"),
    "Triton": ("triton",),
    "optimizer, clipping": ("multi_tensor_apply", "adam", "foreach"),
    "copies, casts": ("copy",),
    "reductions": ("reduce", "softmax", "norm"),
    "elementwise": ("elementwise",),
}
"""Kinds of kernels, by what their names have in them, in lower case; a kernel is of the first kind that fits."""


def kernels_of(step: Callable[[], Any]) -> dict[str, Any] | None:
    """Run a step under the profiler; return what `exposed` and `by_kind` find; None without a GPU.

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
        events = json.loads(path.read_text())["traceEvents"]
    return {**exposed(events), "kinds": by_kind(events)}


def by_kind(events: Iterable[dict[str, Any]]) -> dict[str, list[float]]:
    """Return milliseconds and number of the kernels of each kind that is there.

    Args:
        events: Of a Chrome trace: "dur" is in microseconds.
    """
    found: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "kernel":
            name = event["name"].lower()
            kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
            each = found.setdefault(kind, [0.0, 0])
            each[0] += float(event["dur"]) / 1e3
            each[1] += 1
    return found


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
