"""End a script where its first model has been parallelized: `accelerate-lora check` runs scripts up to there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["SetUpIsPossible", "end_after_set_up", "end_if_checked", "is_checked"]

_checked = False


class SetUpIsPossible(SystemExit):
    """End a script whose set-up is checked, as `parallelize` would have returned the model.

    No `except Exception` of a script or a trainer stops it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(0)
        self.model = model


@contextmanager
def end_after_set_up() -> Iterator[None]:
    """Within the context, let `parallelize` read no weights, and raise `SetUpIsPossible` in place of returning."""
    global _checked
    _checked = True
    try:
        yield
    finally:
        _checked = False


def is_checked() -> bool:
    """Return True within `end_after_set_up`: nothing is trained, so no weights are read and nothing is written."""
    return _checked


def end_if_checked(model: nn.Module) -> None:
    """End the script within `end_after_set_up`; do nothing outside of it.

    Raises:
        SetUpIsPossible: The set-up is checked.
    """
    if _checked:
        raise SetUpIsPossible(model)
