"""Stop training after the same step on every rank when SLURM, Kubernetes or torchrun tells a process to end.

`StopSignal` is for loops of your own. Lightning and Trainer have theirs, in the front ends' callbacks.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from lora_parallel.distributed.rank_checks import gather_numbers


class StopSignal:
    """Record a signal that asks this process to end, in place of ending it, and tell all ranks of it after a step.

        with StopSignal() as stop:
            for step, batch in enumerate(loader):
                ...
                optimizer.step()
                if stop.requested():  # on every rank, or on none
                    save_checkpoint(model, optimizer, f"checkpoints/step-{step}", extra)
                    break

    A checkpoint is saved by all ranks together, and the signal reaches them at different times, or one of them only. So
    the handler records the signal, and `requested` asks all ranks.

    Args:
        signals: The signals that are recorded.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals or (signal.SIGTERM,)
        self._before: dict[signal.Signals, Any] = {}
        self._received = False

    def __enter__(self) -> StopSignal:
        """Record the signals from here on. Call it in the main thread: Python runs signal handlers nowhere else."""
        self._before = {number: signal.signal(number, self._record) for number in self._signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Put the handlers back that were there before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def requested(self) -> bool:
        """Return True on every rank if any rank has received a signal. Collective.

        Every rank calls it after the same steps. It is one message of eight bytes.
        """
        return bool(gather_numbers([self._received], "StopSignal.requested").any())

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = True
