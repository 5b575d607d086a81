"""Let all ranks draw the same random numbers in an optimizer's step, such as those of stochastic rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["SharedDraws"]


class SharedDraws:
    """Give this rank the random state of rank 0 until `end`. Collective over all ranks.

    Ranks that compute the same step on full tensors would part if they drew other numbers: their copies of what is
    replicated, and their slices of what is not. A rank whose state is that of rank 0 keeps what it draws, so that ranks
    with one seed go on together.

    Args:
        device: The device that the numbers are drawn on.
    """

    def __init__(self, device: torch.device) -> None:
        self._random: Any = torch if device.type == "cpu" else torch.get_device_module(device)
        own = self._random.get_rng_state()
        shared = own.clone() if device.type == "cpu" else own.to(device)
        dist.broadcast(shared, 0)
        self._own = None if torch.equal(shared.cpu(), own) else own
        if self._own is not None:
            self._random.set_rng_state(shared.cpu())

    def end(self) -> None:
        """Give the rank its own random state back."""
        if self._own is not None:
            self._random.set_rng_state(self._own)
