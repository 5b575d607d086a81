"""Hold what the parts of one model share under pipeline parallelism: which stage computes, and where its input is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lora_parallel.pp.other_stages import StageEnd

__all__ = ["Entry", "StageContext"]


class Entry(Protocol):
    """Cut hidden states where they enter blocks, as the model's first block does, and clean up behind the last."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Return this rank's part of hidden states [rows, tokens, features]."""

    def leave(self, device: torch.device) -> None:
        """Note that the blocks have been computed."""


class StageContext:
    """Say which stage of this rank computes, and hand its input to it.

    Args:
        entries: What cuts hidden states of all tokens, in order: context parallelism, sequence parallelism.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.running = False
        self._entries = entries
        self._first, self._last = 0, 0
        self._receive: Callable[[Tensor], Tensor] | None = None

    def begin(self, bounds: tuple[int, int], receive: Callable[[Tensor], Tensor] | None) -> None:
        """Begin a stage.

        Args:
            bounds: Its first and last + 1 block.
            receive: Returns the input of the stage, from a tensor of its shape; None for the first stage.
        """
        self.running = True
        (self._first, self._last), self._receive = bounds, receive

    def end(self, hidden: Tensor | None) -> None:
        """End a stage, which hands on `hidden`; None if it is the last, or has failed."""
        self.running, self._receive = False, None
        if hidden is not None:
            for entry in reversed(self._entries):
                entry.leave(hidden.device)

    def pass_block(self, index: int, hidden: Tensor) -> Tensor:
        """Return the output of block `index`, which is on another stage (see `StageRun`)."""
        if index >= self._last:
            raise StageEnd(hidden)
        if index < self._first - 1:
            return hidden
        assert self._receive is not None
        for entry in self._entries:
            hidden = entry.enter(hidden)
        return self._receive(hidden)
