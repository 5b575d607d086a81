"""Work around errors of gloo, the backend of CPUs, whose threads write into what other threads use or have freed.

Private API of torch is used; `tests/lora_parallel/distributed/test_gloo.py`, and `test_rank_checks.py` for
`not_profiled`, test that it still means the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lora_parallel.distributed.rendezvous import is_done
from lora_parallel.distributed.torch_private import process_groups

__all__ = ["finish_gloo", "not_profiled", "one_gloo_thread"]

_NOTHING = torch.empty(0)
_SECONDS_AT_EXIT = 5


@contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Give each gloo group that is made within the context one worker thread, not two.

    Two threads write the name of the collective that has finished into one string, without a lock. If the name is
    longer than 15 characters, as that of a functional all-gather is, the threads can corrupt the heap
    (docs/upstream/gloo_threads.md). torch ignores the options that it is given for gloo, so the class of which it makes
    a group is replaced.
    """
    if not dist.is_gloo_available():
        yield
        return
    c10d: Any = dist.distributed_c10d
    gloo: Any = c10d.ProcessGroupGloo

    class OneThread(gloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            usual = gloo(dist.HashStore(), 0, 1, timeout).options  # for its devices, which the environment selects
            options = gloo._Options()
            options._threads, options._timeout, options._devices = 1, timeout, usual._devices
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OneThread
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = gloo


@contextmanager
def not_profiled() -> Iterator[None]:
    """Hide the operations of the calling thread from torch's profilers within the context. It does not nest.

    A collective on gloo that a profiler has seen begin, and that ends when the profiler has stopped, writes into memory
    that the profiler has freed (docs/upstream/gloo_profiler.md). A public profiler records all operations or none.
    """
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def finish_gloo() -> None:
    """Wait until gloo's threads have let go of all tensors, as the process ends; not at all if an error has ended it.

    It is called at exit. A thread of gloo that frees a tensor while Python ends aborts the process
    (docs/upstream/gloo_exit.md). An all-reduce of no elements waits for no peer, but comes after the messages before
    it. After an error, a peer that one of these waits for may never come.
    """
    if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
        return
    until = time.monotonic() + _SECONDS_AT_EXIT
    for group in process_groups():
        if "cpu:gloo" in dist.get_backend_config(group):
            is_done(dist.all_reduce(_NOTHING, group=group, async_op=True), "cpu", until)
