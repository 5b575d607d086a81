"""Shard adapters over dp_shard at rest, and gather those of all tenants of a step in one message for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.distributed.gather import local
from lora_parallel.distributed.torch_private import strided_shard

__all__ = ["Cut", "cut", "gather"]


@dataclass(frozen=True)
class Cut:
    """Describe how the part of a parameter that one tp rank has is cut into chunks over dp_shard.

    Chunks are cut along the dim that is the longest in the whole parameter.
    """

    shape: tuple[int, ...]
    """Shape of the part that a tp rank has."""

    dim: int
    ranks: int

    def part(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the chunk of a rank of dp_shard."""
        start, end = chunk_bounds(self.shape[self.dim], self.ranks, rank)
        return (*self.shape[: self.dim], end - start, *self.shape[self.dim + 1 :])

    def of(self, whole: Tensor, rank: int) -> Tensor:
        """Return the chunk of a rank of dp_shard, from the part `whole` that its tp rank has."""
        start, end = chunk_bounds(self.shape[self.dim], self.ranks, rank)
        return whole.narrow(self.dim, start, end - start)


def cut(parameter: nn.Parameter, mesh: DeviceMesh) -> tuple[nn.Parameter, Cut]:
    """Cut the part of a parameter that this tp rank has into chunks over dp_shard.

    Returns:
        A parameter that holds this rank's chunk, a DTensor placed as FSDP2 places it on top of tensor parallelism; and
        the description of the chunks.
    """
    held, ranks = local(parameter), mesh["dp_shard"].size()
    dim = max(range(held.dim()), key=lambda each: parameter.shape[each])  # the same on all tp ranks
    how = Cut(tuple(held.shape), dim, ranks)
    mine = how.of(held, mesh.get_local_rank("dp_shard")).clone(memory_format=torch.contiguous_format)
    placements: list[Placement] = [Shard(dim)]
    axes = mesh["dp_shard"]
    if isinstance(parameter, DTensor):
        (over_tp,) = parameter.placements
        axes = mesh["dp_shard", "tp"]
        both = isinstance(over_tp, Shard) and over_tp.dim == dim
        placements = [strided_shard(dim, mesh["tp"].size()) if both else Shard(dim), over_tp]
    sharded = DTensor.from_local(
        mine, axes, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded), how


@torch.no_grad()
def gather(parameters: Sequence[nn.Parameter], cuts: Sequence[Cut], mesh: DeviceMesh) -> list[Tensor]:
    """Gather the chunks of parameters from all ranks of dp_shard, in one message for each dtype. Collective.

    Returns:
        The part of each parameter that this tp rank has.
    """
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        some = [index for index, parameter in enumerate(parameters) if parameter.dtype == dtype]
        ranks = mesh["dp_shard"].size()
        sizes = [[torch.Size(cuts[index].part(rank)).numel() for index in some] for rank in range(ranks)]
        longest = max(sum(each) for each in sizes)
        mine = torch.cat([local(parameters[index]).reshape(-1) for index in some])
        padded = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        everyone = padded.new_empty(ranks * longest)
        dist.all_gather(list(everyone.split(longest)), padded, group=mesh.get_group("dp_shard"))
        chunks = [everyone[rank * longest :][: sum(of_rank)].split(of_rank) for rank, of_rank in enumerate(sizes)]
        for place, index in enumerate(some):
            parts = [chunks[rank][place].view(cuts[index].part(rank)) for rank in range(ranks)]
            found[index] = torch.cat(parts, cuts[index].dim)
    return [found[index] for index in range(len(parameters))]
