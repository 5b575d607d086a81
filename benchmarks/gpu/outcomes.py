"""Define the outcomes of a step, and the errors by which a step's function tells them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

Status = Literal["passed", "failed", "timed out", "out of memory", "not supported", "not installed", "not run"]
SETTLED: tuple[Status, ...] = ("passed", "not supported", "not installed")
"""Outcomes that a rerun does not try again."""

WRONG: tuple[Status, ...] = ("failed", "timed out", "out of memory")
"""Outcomes that make the command fail."""


class NotSupported(Exception):
    """The library refuses what the step asks for; the message is the refusal's."""


class NotInstalled(Exception):
    """A package that the step compares with, or builds on, cannot be imported here."""


def status_of(error: BaseException) -> Status:
    if isinstance(error, NotSupported):
        return "not supported"
    if isinstance(error, NotInstalled):
        return "not installed"
    # A collective that failed for it says so in its own error's cause.
    without_memory = type(error).__name__ == "OutOfMemoryError" or "CUDA out of memory" in str(error)
    return "out of memory" if without_memory else "failed"


def violations(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures that are above their bound or no number, of {"errors": {what: [error, bound]}}."""
    return [
        f"{what}: {error:.1e} is above the bound of {bound:.1e}"
        for what, (error, bound) in figures.get("errors", {}).items()
        if not (math.isfinite(error) and error <= bound)
    ]
