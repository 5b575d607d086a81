"""Say why a model cannot be run without its weights, with the errors of other code cut to fit into a sentence."""

from __future__ import annotations

from textwrap import shorten

__all__ = ["FailedError", "TraceError", "brief"]

_LENGTH = 240


class TraceError(Exception):
    """Report that a model cannot be run without its weights, and why."""


class FailedError(TraceError):
    """Report that the model's own code raised an error."""


def brief(error: Exception) -> str:
    """Return the error's class name and the first line of its message, cut after a whole word at 240 characters."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {shorten(text, _LENGTH, placeholder=' ...')}"
