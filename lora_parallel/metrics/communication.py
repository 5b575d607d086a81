"""Measure the share of a step in which collectives run, with torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

__all__ = ["ProfiledStep", "covered"]


class ProfiledStep:
    """Profile one step, from `__init__` to `share`.

    A collective counts from its beginning to its end on the device (kernels of NCCL and RCCL) or, for gloo, in the
    process group's thread: with the time that it waits for other ranks, and that in which other work overlaps it.
    Intervals that overlap each other count once.

    Args:
        device_type: The type of device that the step computes on.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device_type == "cuda" else [])
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._start = time.perf_counter()

    def share(self) -> float:
        """End the step and return the share of its time in which a collective ran."""
        if self._device_type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start
        self._profiler.stop()
        return min(1.0, covered(self._profiler.events() or ()) / 1e6 / seconds)


def covered(events: Iterable[FunctionEvent]) -> float:
    """Return the microseconds in which at least one of the collectives among some events ran."""
    intervals = sorted((each.time_range.start, each.time_range.end) for each in events if _is_collective(each))
    total = last = 0.0
    for start, end in intervals:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def _is_collective(event: FunctionEvent) -> bool:
    if event.device_type == torch.autograd.DeviceType.CPU:
        return event.name.startswith("gloo:")
    return event.name.startswith("nccl")
