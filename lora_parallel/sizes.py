"""Compute the sizes of the mesh axes, check those of a pipeline, and print which rank is where.

Nothing but the standard library is imported, so that the console script can refuse impossible sizes before it imports
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""All mesh axes, the outermost first. Everything that depends on their order is derived from this."""

_ONLY_IF_USED = ("pp", "cp")  # axes that a mesh has only where they have more than one rank

_RANKS_IN_A_TABLE = 16  # largest number of ranks whose coordinates are printed one by one


def axis_sizes(asked: Mapping[str, Any], world_size: int, remedy: str = 'leave dp_shard="auto"') -> dict[str, int]:
    """Return the size of each axis of `AXES` for `world_size` ranks; that of dp_shard may be "auto".

    Raises ValueError, which ends with `remedy`, if the product of the sizes is not `world_size`, or does not divide it.
    """
    asked = {axis: asked[axis] for axis in AXES}
    fixed = {axis: size for axis, size in asked.items() if size != "auto" and (size > 1 or axis not in _ONLY_IF_USED)}
    product, text = prod(fixed.values()), " x ".join(f"{axis}={size}" for axis, size in fixed.items())
    if asked["dp_shard"] == "auto":
        if world_size % product:
            raise ValueError(
                f"{text} = {product} does not divide the world size {world_size}: start a multiple of {product} "
                f"processes, or choose sizes whose product divides {world_size}."
            )
        return asked | {"dp_shard": world_size // product}
    if product != world_size:
        raise ValueError(
            f"{text} = {product}, but the world size is {world_size}: start {product} processes, or {remedy}."
        )
    return asked


def check_schedule(pp: int, schedule: str, stages_per_rank: int) -> None:
    """Raise ValueError unless a pipeline's schedule exists, and is for this number of stages on each rank."""
    if schedule not in ("1f1b", "gpipe", "interleaved"):
        raise ValueError(f'pp_schedule={schedule!r}: give "1f1b", "gpipe" or "interleaved".')
    if pp > 1 and (schedule == "interleaved") != (stages_per_rank > 1):
        raise ValueError(
            f'pp_schedule="{schedule}" with pp_stages_per_rank={stages_per_rank}: "interleaved" is '
            "for 2 stages or more on each rank, the other schedules are for 1."
        )


def mesh_axes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the axes that a mesh of these sizes has, the outermost first."""
    return {axis: sizes[axis] for axis in AXES if sizes[axis] > 1 or axis not in _ONLY_IF_USED}


def axes_text(sizes: Mapping[str, int]) -> str:
    """Return the axes that have more than one rank as text: "dp_shard 2 x tp 2"."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1)


def mesh_text(sizes: Mapping[str, int]) -> str:
    """Return a mesh as text: "dp_shard 2 x tp 2, 4 ranks"."""
    used = axes_text(sizes)
    return f"{used}, {prod(sizes.values())} ranks" if used else "one rank"


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return the index of a rank along each axis of `AXES`."""
    indices = {}
    for axis in reversed(AXES):
        rank, indices[axis] = divmod(rank, sizes.get(axis, 1))
    return {axis: indices[axis] for axis in AXES}


def rank_lines(sizes: Mapping[str, int]) -> Iterator[str]:
    """Yield lines that say where each rank is: a column a rank for few ranks, a rule for many. One rank has no lines.

    Args:
        sizes: The size of each axis; axes that are left out have size 1.
    """
    ranks, used = prod(sizes.values()), [axis for axis in AXES if sizes.get(axis, 1) > 1]
    if ranks == 1:
        return
    same_batch = [axis for axis in used if axis in ("pp", "cp", "tp")]
    if ranks > _RANKS_IN_A_TABLE:
        strides, stride = {}, 1
        for axis in reversed(AXES):
            strides[axis], stride = stride, stride * sizes.get(axis, 1)
        terms = (axis if strides[axis] == 1 else f"{strides[axis]} x {axis}" for axis in used)
        yield f"rank = {' + '.join(terms)}, each counted from 0"
        if same_batch:
            yield f"ranks that differ in {' or '.join(same_batch)} alone share a batch"
        return
    indices = [coordinates(sizes, rank) for rank in range(ranks)]
    rows: dict[str, list[int]] = {"rank": [*range(ranks)], **{axis: [at[axis] for at in indices] for axis in used}}
    if same_batch:
        rows["batch"] = [at["dp_replicate"] * sizes.get("dp_shard", 1) + at["dp_shard"] for at in indices]
    for name, numbers in rows.items():
        yield f"{name:<13}" + " ".join(f"{number:>2}" for number in numbers)
