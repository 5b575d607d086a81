"""Errors of others, as a part of a sentence."""

from __future__ import annotations

from textwrap import shorten

__all__ = ["brief"]

_LENGTH = 240


def brief(error: Exception) -> str:
    """The kind of the error and the first line of what it says, in whole words."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {shorten(text, _LENGTH, placeholder=' ...')}"
