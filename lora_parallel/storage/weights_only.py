"""Make and check plain values, which are the values that `torch.load(weights_only=True)` reads back."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

__all__ = ["check_loadable", "without_numpy"]


def without_numpy(value: Any) -> Any:
    """Return `value` with all NumPy numbers in it, also inside of containers, converted to Python numbers.

    A learning rate schedule may hold such numbers.
    """
    return tree_map_only(np.generic, lambda number: number.item(), value)


def check_loadable(what: str, value: Any, remedy: str) -> None:
    """Check that `torch.load(weights_only=True)` reads `value` back, so that the error comes now and not at a resume.

    Args:
        what: The beginning of the error message, which says where the value is.
        value: The value to check.
        remedy: The end of the error message, which says what to do.

    Raises:
        ValueError: `value` is not read back.
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
