"""Whose sample is whose in a forward: the tokens of each tenant, its weight in the mean, its count of forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

__all__ = ["Route", "Tokens"]


@dataclass(frozen=True)
class Tokens:
    """The tokens of one tenant among those that a layer is fed, flattened."""

    place: Tensor
    """int64 [n]: where each is."""

    row: Tensor
    """int32 [n]: which of the tenant's samples it belongs to, over all data-parallel ranks."""

    token: Tensor
    """int32 [n]: which of its sample's tokens it is."""


@dataclass
class Route:
    """What is the same for all layers in the forwards and backwards of one context."""

    tenants: tuple[str, ...]
    """Those that have samples on some rank."""

    names: tuple[str, ...] | None
    """The tenant of each sample of this rank; None: one tenant has all of them, as many on every rank."""

    lengths: tuple[int, ...] | None
    """The tokens of each sample, where samples are segments of packed rows."""

    weights: dict[str, float]
    """What part of a tenant's mean over all ranks its mean on this rank is."""

    first: dict[str, int]
    """The number, over all ranks, of a tenant's first sample on this rank."""

    forwards: dict[int, dict[str, int]] = field(default_factory=dict)
    """By the number of the model's training forward: the number of each tenant's."""

    _spread: dict[tuple[int, ...], dict[str, Tokens]] = field(default_factory=dict)

    def tokens(self, shape: Sequence[int], device: torch.device) -> dict[str, Tokens]:
        """Whose the tokens are that a layer is fed.

        Args:
            shape: Of its input without the last dim: [rows, tokens, ...], or all tokens in one dim.
            device: Of its input.

        Raises:
            ValueError: There are not as many samples as were named.
        """
        assert self.names is not None
        key = tuple(shape)
        if key not in self._spread:
            self._spread[key] = self._place(key, device)
        return self._spread[key]

    def _place(self, shape: tuple[int, ...], device: torch.device) -> dict[str, Tokens]:
        assert self.names is not None
        total = prod(shape)
        lengths = self.lengths
        if lengths is None:
            samples = len(self.names)
            if total % samples or (len(shape) > 1 and shape[0] != samples):
                raise ValueError(f"route names {samples} samples, and a layer is fed {shape[0]} rows: name each row.")
            lengths = (total // samples,) * samples
        if sum(lengths) != total:
            raise ValueError(
                f"route: the lengths of the segments add up to {sum(lengths)} tokens, and a layer is fed {total}."
            )
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        found = {}
        for tenant in self.tenants:
            mine = [index for index, name in enumerate(self.names) if name == tenant]
            if mine:
                found[tenant] = Tokens(
                    torch.cat([torch.arange(starts[i], starts[i + 1]) for i in mine]).to(device),
                    torch.cat(
                        [
                            torch.full((lengths[i],), self.first[tenant] + number, dtype=torch.int32)
                            for number, i in enumerate(mine)
                        ]
                    ).to(device),
                    torch.cat([torch.arange(lengths[i], dtype=torch.int32) for i in mine]).to(device),
                )
        return found
