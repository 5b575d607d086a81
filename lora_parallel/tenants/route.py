"""Whose sample is whose in a forward: the tokens of each tenant, its weight in the mean, its count of forwards.

A route belongs to the forwards that are computed in its context, also when they are recomputed in a backward that comes
after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from lora_parallel.agreement import agreed, gather_numbers
from lora_parallel.tenants.factor import Factor
from lora_parallel.upstream import in_backward

__all__ = ["Forward", "Route", "Tokens"]


@dataclass(frozen=True)
class Tokens:
    """The tokens of one tenant among those that a layer is fed, flattened."""

    place: Tensor
    """int64 [n]: where each is."""

    row: Tensor
    """int32 [n]: which of the tenant's samples it belongs to, over all data-parallel ranks."""

    token: Tensor
    """int32 [n]: which of its sample's tokens it is. Where a model flattens rows, each token is a row."""


@dataclass
class Route:
    """What is the same for all layers in the forwards of one context."""

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

    gone: Callable[[], list[str]]
    """Gives those of the tenants that have been removed since."""

    lent: dict[Factor, Tensor] = field(default_factory=dict)
    """Of adapters that are shared out over dp: what this tp rank has of each factor."""

    _spread: dict[tuple[int, ...], dict[str, Tokens]] = field(default_factory=dict)

    def tokens(self, shape: Sequence[int], device: torch.device, layer: str, widths: set[int]) -> dict[str, Tokens]:
        """Whose the tokens are that a layer is fed.

        Args:
            shape: Of its input without the last dim: [rows, tokens, ...], or all tokens in one dim.
            device: Of its input.
            layer: Its name.
            widths: How many tokens the rows of this forward are known to have.

        Raises:
            ValueError: There are not as many samples as were named.
        """
        assert self.names is not None
        key = tuple(shape)
        if key not in self._spread:
            if self.lengths is None and len(key) == 1 and widths and key[0] not in self._flat(widths):
                raise ValueError(
                    f"route: {layer} is fed {key[0]} tokens in one dim, which are not those of {len(self.names)} rows "
                    f"of {' or '.join(map(str, sorted(widths)))}: nobody knows whose they are. Leave it out of "
                    "target_modules."
                )
            self._spread[key] = self._place(key, device, layer)
        return self._spread[key]

    def _flat(self, widths: set[int]) -> set[int]:
        """How many tokens there are where all rows, or one vector of each (a pooled one), are fed in one dim."""
        assert self.names is not None
        return {len(self.names) * width for width in (1, *widths)}

    @torch.inference_mode(False)  # or a training forward in the same context could not use it
    def _place(self, shape: tuple[int, ...], device: torch.device, layer: str) -> dict[str, Tokens]:
        assert self.names is not None
        total = prod(shape)
        lengths = self.lengths
        if lengths is None:
            samples = len(self.names)
            if total % samples or (len(shape) > 1 and shape[0] != samples):
                raise ValueError(f"route names {samples} samples, and {layer} is fed {shape[0]} rows: name each row.")
            lengths = (total // samples,) * samples
        if sum(lengths) != total:
            raise ValueError(
                f"route: the lengths of the segments add up to {sum(lengths)} tokens, and {layer} is fed {total}."
            )
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        flattened = self.lengths is None and len(shape) == 1
        found = {}
        for tenant in self.tenants:
            mine = [index for index, name in enumerate(self.names) if name == tenant]
            if not mine:
                continue
            row = [torch.full((lengths[i],), self.first[tenant] + n, dtype=torch.int32) for n, i in enumerate(mine)]
            token = [torch.arange(lengths[i], dtype=torch.int32) for i in mine]
            if flattened:
                row = [sample * lengths[0] + place for sample, place in zip(row, token, strict=True)]
                token = [torch.zeros_like(each) for each in token]
            place = [torch.arange(starts[i], starts[i + 1]) for i in mine]
            found[tenant] = Tokens(*(torch.cat(each).to(device) for each in (place, row, token)))
        return found


@dataclass
class Forward:
    """One forward in a route."""

    route: Route
    counts: dict[str, int]
    """The number that it has among each tenant's training forwards; empty in evaluation."""

    trains: bool = False
    """Whether the model's forward began with gradients enabled."""

    widths: set[int] = field(default_factory=set)
    """How many tokens rows are known to have: those of the model's inputs, and of layers that are not fed them flat."""

    agrees: bool = False
    """Whether it is the model's own and still computed, so that all ranks come to its `end`."""

    training: dict[str, bool] = field(default_factory=dict)
    """Of each layer that took part, whether it was in training."""

    _problem: Exception | None = None

    def tokens(self, shape: Sequence[int], device: torch.device, layer: str) -> dict[str, Tokens] | None:
        """As `Route.tokens`; None where a layer is left out, since `end` will raise."""
        if len(shape) > 1:
            self.widths.add(prod(shape[1:]))
        try:
            return self.route.tokens(shape, device, layer, self.widths)
        except ValueError as error:
            self.refuse(error)
            return None

    def refuse(self, error: Exception) -> None:
        """Raise an error: at the `end`, where every rank does, since others are on their way to the next collective."""
        if not self.agrees or in_backward():
            raise error
        self._problem = self._problem or error

    def end(self, device: str) -> None:
        """Raise on every rank what was refused on any. Collective.

        Args:
            device: The type of device that messages go by.
        """
        if not self.agrees:
            return
        self.agrees = False
        if gather_numbers([self._problem is not None], device).any():
            with agreed():
                if self._problem is not None:
                    raise self._problem
