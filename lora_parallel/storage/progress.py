"""Show a progress bar of bytes on one rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tqdm import tqdm

__all__ = ["bytes_bar", "saving_bar"]

_SHORT = 1.0
"""Seconds after which the bar of a save appears: an adapter and its states are usually written before that."""


def bytes_bar(doing: str, total: int, shown: bool, delay: float = 0.0) -> tqdm[Any]:
    """Return a progress bar that is updated with numbers of bytes.

    Args:
        doing: What is done to the bytes; it stands before the bar.
        total: Their number.
        shown: Whether this rank shows the bar.
        delay: Seconds after which the bar appears.
    """
    return tqdm(total=total, unit="B", unit_scale=True, desc=doing, delay=delay, disable=not shown)


def saving_bar(doing: str, total: int) -> tqdm[Any]:
    """Return the progress bar that rank 0 shows while `total` bytes are saved, if that takes longer than a second."""
    return bytes_bar(doing, total, dist.get_rank() == 0, _SHORT)
