"""Resume a learning-rate schedule with another number of processes, which counts its steps in another unit."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

__all__ = ["check_schedule", "resume_schedule"]

_COUNTS = ("last_epoch", "_step_count", "T_cur", "T_i")
_RATES = ("base_lrs", "_last_lr")


def check_schedule(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Check that a saved state comes from a scheduler of the same kind.

    Raises:
        ValueError: The saved state has other keys than that of `scheduler`.
    """
    differing = sorted(scheduler.state_dict().keys() ^ saved.keys())
    if differing:
        raise ValueError(
            f"the saved schedule is none of {type(scheduler).__name__} ({differing} are not in both): make the "
            "scheduler as it was made in the run that saved."
        )


def resume_schedule(scheduler: Any, saved: Mapping[str, Any], scale: Fraction) -> None:
    """Load the state of a scheduler, and convert its counts of steps to the unit of this run.

    Args:
        scheduler: A scheduler of torch, made as for this run from its start. Its lengths and factors are kept: they are
            in the unit of this run, and the saved ones may not be.
        saved: The `state_dict` of the scheduler that was saved.
        scale: The number of steps in this run that correspond to one step in the run that saved.
    """
    here = scheduler.state_dict()
    by_steps = "last_epoch" in saved and "num_bad_epochs" not in saved  # ReduceLROnPlateau does not count steps
    scheduler.load_state_dict(_scaled(here, saved, scale) if by_steps and scale != 1 else saved)


def _scaled(here: Mapping[str, Any], saved: Mapping[str, Any], scale: Fraction) -> dict[str, Any]:
    mixed = {**here, **{key: saved[key] for key in _RATES if key in saved}}
    for key in _COUNTS:
        if key in saved:
            start = int(key == "_step_count")  # _step_count counts the step in the constructor too
            mixed[key] = start + round((saved[key] - start) * scale)
    if "_schedulers" in saved:  # of SequentialLR and ChainedScheduler
        parts = zip(here["_schedulers"], saved["_schedulers"], strict=True)
        mixed["_schedulers"] = [_scaled(mine, theirs, scale) for mine, theirs in parts]
    return mixed
