"""Give each tp rank the features that it computes, for a layer that is not cut into one chunk for each rank.

A fused projection holds several matrices, and each of them must be cut by itself. A key or value projection may have
fewer heads than there are tp ranks, and several ranks need the same head. In both cases a row partition says which rows
each rank computes. A frozen weight is stored as these rows, one rank's rows after another's; a parameter that trains is
stored whole, and each rank computes with its rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lora_parallel.distributed.collectives import chunk_bounds

__all__ = ["Range", "RowPartition", "partition_of", "set_partition"]

Range = tuple[int, int]
"""First index, and the index after the last one."""

_ATTRIBUTE = "_lora_parallel_row_partition"


@dataclass(frozen=True)
class RowPartition:
    """Hold the rows that each tp rank computes, as ranges (start, stop) in ascending order.

    Every rank has the same number of rows. Two ranks may have the same row.
    """

    ranks: tuple[tuple[Range, ...], ...]
    size: int
    """Number of rows of the whole tensor."""

    @classmethod
    def of(cls, rows: Iterable[Tensor | Sequence[int]], size: int) -> RowPartition:
        """Return the partition in which rank i computes the rows with the indices `rows[i]`."""
        return cls(tuple(tuple(_ranges(torch.as_tensor(indices))) for indices in rows), size)

    @classmethod
    def packed(cls, parts: Sequence[int], tp: int) -> RowPartition:
        """Return the partition of a tensor made of several matrices, in which each matrix is cut into one chunk a rank.

        Args:
            parts: Number of rows of each matrix, a multiple of tp, in the order of the tensor.
            tp: Size of the tp axis.
        """
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
        """Return True if each rank has one chunk, in the order of the ranks, as `colwise` cuts without a partition."""
        tp = len(self.ranks)
        return all(ranges == (chunk_bounds(self.size, tp, rank),) for rank, ranges in enumerate(self.ranks))

    @property
    def width(self) -> int:
        """Return the number of rows that each rank computes."""
        return sum(stop - start for start, stop in self.ranks[0])

    @cached_property
    def order(self) -> Tensor:
        """Return the indices of all ranks' rows, rank after rank, int64 [tp * width]."""
        return torch.cat([torch.arange(*each) for ranges in self.ranks for each in ranges])

    @cached_property
    def inverse(self) -> Tensor:
        """Return the first position of each row in `order`, int64 [size]."""
        last = len(self.order)
        places = torch.full((self.size,), last).scatter_reduce(0, self.order, torch.arange(last), "amin")
        return places.masked_fill(places == last, -1)

    def rows(self, rank: int) -> Tensor:
        """Return the indices of the rows that one rank computes, int64 [width]."""
        return torch.cat([torch.arange(*each) for each in self.ranks[rank]])

    def arranged(self, tensor: Tensor, dim: int) -> Tensor:
        """Return `tensor` with its rows along `dim` in the order of `order`: those of rank 0, then those of rank 1, ...

        The result is a concatenation of slices, so a lazy tensor stays one.
        """
        return torch.cat([tensor.narrow(dim, a, b - a) for ranges in self.ranks for a, b in ranges], dim)

    def restored(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor that `arranged` turned into `tensor`."""
        return torch.cat([tensor.narrow(dim, a, b - a) for a, b in _ranges(self.inverse)], dim)


def _ranges(indices: Tensor) -> Iterator[Range]:
    """Yield the runs of consecutive numbers in `indices`, int64 [rows], in order."""
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    for run in indices.tensor_split(breaks.tolist()):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1


def set_partition(module: nn.Module, key: str, partition: RowPartition, dim: int) -> None:
    """Note on `module` that its parameter `key` is stored as `partition.arranged(..., dim)`."""
    module.__dict__.setdefault(_ATTRIBUTE, {})[key] = partition, dim


def partition_of(module: nn.Module, key: str) -> tuple[RowPartition, int] | None:
    """Return the partition and the dim by which a parameter is stored rearranged, or None if it is stored as it is."""
    return module.__dict__.get(_ATTRIBUTE, {}).get(key)
