"""Layers between which each tp rank computes a slice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lora_parallel.selection import Selection

__all__ = ["Flow", "pattern_of"]


@dataclass(eq=False)
class Flow:
    """Layers that compute slices, from the whole tensors that the sources are fed to the sums that the sinks give."""

    sinks: dict[str, None]
    """Rowwise layers, by name."""

    sources: dict[str, Selection]
    """The layers before them, and the output features that each rank computes."""

    between: dict[tuple[nn.Module, str], tuple[int, Selection] | None] = field(default_factory=dict)
    """Parameters that act on slices (a norm of each head): by module and name there; the dim that is cut, if one is."""

    attributes: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    """What modules say of their own sizes, on a rank; an `Overlay` for what their config says."""

    @property
    def units(self) -> Iterator[str]:
        """All layers."""
        yield from self.sources
        yield from self.sinks


def pattern_of(name: str) -> str:
    """A layer's name without the numbers of its blocks."""
    return re.sub(r"\d+", "*", name)
