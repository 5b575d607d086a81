"""How processes share the cores of a machine that has fewer of them than ranks."""

from __future__ import annotations

import os


def share_cores() -> None:
    """Let a thread that wakes take no core from one that runs, in this process and those it starts; Linux only."""
    # Else gloo's thread that polls takes the core from the one that holds its lock, and polls in vain
    # (docs/upstream/gloo_polling.md); and one that waits to run holds what its rank has sent.
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
