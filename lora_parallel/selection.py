"""Which features each tp rank computes, where a layer is not cut into one chunk a rank.

A fused projection holds several matrices, each of which is to be cut by itself; a key or value projection with fewer
heads than tp is needed, in part, by several ranks. Both are a choice of rows for each rank. A frozen weight is stored
as those rows, one rank's after the other's; what trains is stored whole, and each rank computes with its rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lora_parallel.collectives import chunk_bounds

__all__ = ["Selection", "selection_of", "set_selection"]

Range = tuple[int, int]

_ATTRIBUTE = "_lora_parallel_selection"


@dataclass(frozen=True)
class Selection:
    """The rows of each tp rank, as ranges (start, stop) in ascending order; the same number for each."""

    ranks: tuple[tuple[Range, ...], ...]
    size: int
    """How many rows there are."""

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]], size: int) -> Selection:
        """From the indices of each rank."""
        return cls(tuple(tuple(_ranges(indices)) for indices in rows), size)

    @classmethod
    def packed(cls, parts: Sequence[int], tp: int) -> Selection:
        """Several matrices of `parts` rows (multiples of tp), one after the other, each cut into one chunk a rank."""
        ranks = []
        for rank in range(tp):
            start, chosen = 0, []
            for part in parts:
                low, high = chunk_bounds(part, tp, rank)
                chosen += list(range(start + low, start + high))
                start += part
            ranks.append(chosen)
        return cls.of(ranks, sum(parts))

    @property
    def is_chunked(self) -> bool:
        """Whether it is what `colwise` does anyway: chunk after chunk."""
        tp = len(self.ranks)
        return all(ranges == (chunk_bounds(self.size, tp, rank),) for rank, ranges in enumerate(self.ranks))

    @property
    def width(self) -> int:
        """How many rows a rank has."""
        return sum(stop - start for start, stop in self.ranks[0])

    @cached_property
    def order(self) -> Tensor:
        """The rows of all ranks, one rank's after the other's: int64 [tp * width]."""
        return torch.cat([torch.arange(*each) for ranges in self.ranks for each in ranges])

    @cached_property
    def inverse(self) -> Tensor:
        """Where in `order` each row is (first): int64 [size]."""
        places = torch.full((self.size,), -1)
        places[self.order.flip(0)] = torch.arange(len(self.order)).flip(0)
        return places

    def rows(self, rank: int) -> Tensor:
        """The rows of one rank: int64 [width]."""
        return torch.cat([torch.arange(*each) for each in self.ranks[rank]])

    def arranged(self, tensor: Tensor, dim: int) -> Tensor:
        """`tensor` with the rows of each rank one after the other along `dim`; a rearrangement, of slices."""
        return torch.cat([tensor.narrow(dim, a, b - a) for ranges in self.ranks for a, b in ranges], dim)

    def restored(self, tensor: Tensor, dim: int) -> Tensor:
        """The tensor that `arranged` made this of."""
        return torch.cat([tensor.narrow(dim, a, b - a) for a, b in _ranges(self.inverse.tolist())], dim)


def _ranges(indices: Iterable[int]) -> Iterator[Range]:
    start = stop = None
    for index in indices:
        if stop == index:
            stop += 1
            continue
        if start is not None and stop is not None:
            yield start, stop
        start, stop = index, index + 1
    if start is not None and stop is not None:
        yield start, stop


def set_selection(module: nn.Module, key: str, selection: Selection, dim: int) -> None:
    """Take note that the parameter `key` of `module` is stored as `selection.arranged(..., dim)`."""
    module.__dict__.setdefault(_ATTRIBUTE, {})[key] = selection, dim


def selection_of(module: nn.Module, key: str) -> tuple[Selection, int] | None:
    """The selection and the dim by which a parameter is stored, or None if it is stored as it is."""
    return module.__dict__.get(_ATTRIBUTE, {}).get(key)
