"""Plain values: what `torch.load(weights_only=True)` reads back."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

__all__ = ["check_plain", "plain"]


def plain(value: Any) -> Any:
    """The value with NumPy's numbers (a schedule's, perhaps), in it or in its containers, as Python's."""
    return tree_map_only(np.generic, lambda number: number.item(), value)


def check_plain(what: str, value: Any, remedy: str) -> None:
    """Check that weights_only=True reads a value back: better refused now than when a job resumes.

    Raises:
        ValueError: It does not.
    """
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{what} torch.load(weights_only=True) does not read back "
            f"({(str(error).splitlines() or [type(error).__name__])[0]}): {remedy}"
        ) from error
