"""Bring together what the ranks of the pp axis hold, of which each has other parts of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import DeviceMesh

from lora_parallel.distributed.mesh import axis_size

__all__ = ["merged_over_stages", "over_stages"]

T = TypeVar("T")


def over_stages(mine: T, mesh: DeviceMesh | None) -> list[T]:
    """Return the object of each pp peer of this rank, in the order of pp ranks. Collective if there is a pp axis.

    Args:
        mine: This rank's object, which is pickled.
        mesh: The model's mesh; None for a model that is not sharded.
    """
    if mesh is None or axis_size(mesh, "pp") == 1:
        return [mine]
    everyone: list[Any] = [None] * axis_size(mesh, "pp")
    dist.all_gather_object(everyone, mine, group=mesh.get_group("pp"))
    return everyone


def merged_over_stages(mine: Mapping[str, T], mesh: DeviceMesh | None) -> dict[str, T]:
    """Return the entries of all pp peers of this rank; of those with equal keys the first. Collective as above."""
    merged: dict[str, T] = {}
    for theirs in over_stages(dict(mine), mesh):
        merged = {**merged, **{key: value for key, value in theirs.items() if key not in merged}}
    return merged
