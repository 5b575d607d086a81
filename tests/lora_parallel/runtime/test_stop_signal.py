"""SIGTERM on one rank is seen by all after the same step."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch.distributed as dist

from lora_parallel import StopSignal
from lora_parallel.distributed.meetings import collective_call


def told() -> tuple[list[bool], bool]:
    """Return what four steps of a loop see, and whether the handler that was there before is back."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        seen = []
        for step in range(4):
            if step == dist.get_rank() == 2:  # rank 2 alone is told, in the third step
                os.kill(os.getpid(), signal.SIGTERM)
            seen.append(stop.requested())
    return seen, signal.getsignal(signal.SIGTERM) is before


def parted() -> Any:
    """The same without asking the other ranks: rank 2 saves, the others train on."""
    with StopSignal() as stop:
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        with collective_call("save_checkpoint" if stop._received else "the next step"):
            return "went on"


def test_all_ranks_see_it_after_the_same_step(pool):
    assert pool.run(4, told) == [([False, False, True, True], True)] * 4


def test_without_the_agreement_ranks_part(pool):
    for failure in pool.try_run(4, parted):
        assert failure.kind == "RuntimeError"
        assert "ranks make different calls" in failure.message


def test_one_process_needs_no_process_group():
    with StopSignal(signal.SIGUSR1) as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested()
