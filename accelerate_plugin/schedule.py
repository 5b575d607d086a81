"""A learning-rate schedule that goes on where another number of processes counts its steps."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

__all__ = ["check_schedule", "resume_schedule"]

_COUNTS = ("last_epoch", "_step_count", "T_cur", "T_i")
_RATES = ("base_lrs", "_last_lr")


def check_schedule(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Check that a saved state is of the same kind of schedule.

    Raises:
        ValueError: It is not.
    """
    differing = sorted(scheduler.state_dict().keys() ^ saved.keys())
    if differing:
        raise ValueError(
            f"the saved schedule is none of {type(scheduler).__name__} ({differing} are not in both): make the "
            "scheduler as it was made in the run that saved."
        )


def resume_schedule(scheduler: Any, saved: Mapping[str, Any], scale: Fraction) -> None:
    """Load a scheduler's state, its steps counted in another unit.

    Args:
        scheduler: Of torch, made as for a run from the start here: its lengths and factors are in the unit that is
            counted here, the saved ones may not be.
        saved: Its `state_dict` when it was saved.
        scale: Steps here for one then.
    """
    here = scheduler.state_dict()
    by_steps = "last_epoch" in saved and "num_bad_epochs" not in saved  # not so ReduceLROnPlateau
    scheduler.load_state_dict(_scaled(here, saved, scale) if by_steps and scale != 1 else saved)


def _scaled(here: Mapping[str, Any], saved: Mapping[str, Any], scale: Fraction) -> dict[str, Any]:
    mixed = {**here, **{key: saved[key] for key in _RATES if key in saved}}
    for key in _COUNTS:
        if key in saved:
            start = int(key == "_step_count")  # which counts the one of its construction too
            mixed[key] = start + round((saved[key] - start) * scale)
    if "_schedulers" in saved:  # of SequentialLR and ChainedScheduler
        parts = zip(here["_schedulers"], saved["_schedulers"], strict=True)
        mixed["_schedulers"] = [_scaled(mine, theirs, scale) for mine, theirs in parts]
    return mixed
