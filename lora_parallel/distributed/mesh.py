"""Build the device mesh: axes `dp_replicate`, `dp_shard` and `tp`, and `pp` and `cp` where they have several ranks."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Mapping
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from lora_parallel.config import ParallelConfig
from lora_parallel.distributed.meetings import collective_call, limit_waiting
from lora_parallel.distributed.rank_checks import T, gather_objects
from lora_parallel.distributed.torch_private import (
    finish_groups,
    flatten_axes,
    one_gloo_thread,
    set_timeout,
    sub_mesh,
)
from lora_parallel.sizes import AXES, axis_sizes, mesh_axes

log = logging.getLogger(__name__)

_STAGE = "stage"

_RESTART_REMEDY = (
    "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment and with --rdzv-backend c10d"
)

# axes that are made by flattening others, as far as a mesh has these
_JOINED = {
    "dp_shard_cp": ("dp_shard", "cp"),
    "cp_tp": ("cp", "tp"),
    _STAGE: tuple(axis for axis in AXES if axis != "pp"),
}


def mesh_sizes(config: ParallelConfig, world_size: int) -> dict[str, int]:
    """Return the size of each axis of `AXES` for `world_size` ranks.

    Raises ValueError if the product of the sizes is not `world_size`, or does not divide it with `dp_shard="auto"`.
    """
    return axis_sizes({axis: getattr(config, axis) for axis in AXES}, world_size)


def build_mesh(config: ParallelConfig, device_type: str | None = None) -> DeviceMesh:
    """Build the mesh of this job, with `tp` as the innermost axis, so that tp peers are neighbours (one node, NVLink).

    A default process group that exists already is used. Otherwise one is made from torchrun's environment, or, in a
    process that no launcher started, for this process alone.

    Args:
        config: The sizes of the axes; `dp_shard="auto"` takes the ranks that the other axes leave.
        device_type: "cuda", "cpu", ...; None selects the accelerator if there is one, else "cpu".

    Raises:
        ValueError: The sizes do not fit the world size; raised on every rank, before any process group is made.
        RuntimeError: torchrun has restarted the job in a way in which ranks may not find each other.
    """
    check_restarts()
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = accelerator.type if accelerator is not None else "cpu"
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    axes = mesh_axes(mesh_sizes(config, world_size))
    with one_gloo_thread():
        if not dist.is_initialized():
            timeout = timedelta(seconds=config.timeout_seconds)
            if device_type != "cpu":
                # A launcher may show each process its own device only, whose index is then 0.
                is_alone = torch.accelerator.device_count() == 1
                torch.accelerator.set_device_index(0 if is_alone else int(os.environ.get("LOCAL_RANK", "0")))
            if "RANK" in os.environ:
                dist.init_process_group(timeout=timeout)
            else:
                backend = dist.get_default_backend_for_device(device_type)
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        limit_waiting(config.timeout_seconds)
        with collective_call("build_mesh"):
            # A named backend gives an axis of all ranks a process group of its own, in place of the default group,
            # which other code may have made (without `one_gloo_thread`).
            gloo = device_type == "cpu" and "cpu:gloo" in dist.get_backend_config()
            backends: Any = dict.fromkeys(axes, "gloo") if gloo else None
            sizes, names = tuple(axes.values()), tuple(axes)
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names, backend_override=backends)
            joined = _joined_axes(axes)
            for name, parts in joined.items():
                flatten_axes(mesh, parts, name, "gloo" if gloo else None)
    for axis in (*axes, *joined):
        set_timeout(sub_mesh(mesh, (axis,)).get_group(), config.timeout_seconds)
    atexit.unregister(finish_groups)
    atexit.register(finish_groups)
    return mesh


def _joined_axes(axes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """Return the axes of a mesh that are made by flattening others, with those others."""
    names = [name for name in _JOINED if ("pp" if name == _STAGE else "cp") in axes]
    return {name: tuple(axis for axis in _JOINED[name] if axis in axes) for name in names}


def communicators(sizes: Mapping[str, int]) -> int:
    """Return how many process groups of several ranks a rank of a mesh of these sizes is in.

    NCCL has a communicator with buffers of its own for each. (A pipeline's messages take one more for each neighbour.)
    """
    axes, world = mesh_axes(sizes), prod(sizes.values())
    ranks = [*axes.values(), *(prod(axes[part] for part in parts) for parts in _joined_axes(axes).values())]
    return (world > 1) + sum(1 < count < world for count in ranks)  # DeviceMesh takes the default group for all ranks


def check_restarts(environment: Mapping[str, str] = os.environ) -> None:
    """Warn on rank 0 if torchrun could not restart this job; raise RuntimeError in a job that it has restarted so.

    torchrun's agent keeps one store for all starts of a job, so that ranks of the next start may read addresses of the
    last, and fail or wait (https://github.com/pytorch/pytorch/issues/135712, seen with torch 2.13).
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    if int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0:
        raise RuntimeError(
            "torchrun has restarted this job with the store of the last start, in which ranks find the addresses of "
            f"processes that are gone: {_RESTART_REMEDY}."
        )
    if int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0 and environment.get("RANK") == "0":
        log.warning("torchrun's --max-restarts would fail, as its restarts share one store: %s.", _RESTART_REMEDY)


def possible_axes() -> list[tuple[str, ...]]:
    """Return the names of the axes that a mesh of `build_mesh` may have: with and without those that are not used."""
    choices = product((1, 2), repeat=len(AXES))
    return list(dict.fromkeys(tuple(mesh_axes(dict(zip(AXES, sizes, strict=True)))) for sizes in choices))


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    """Return the number of ranks along an axis, 1 if the mesh does not have it."""
    return mesh[axis].size() if axis in (mesh.mesh_dim_names or ()) else 1


def axis_rank(mesh: DeviceMesh, axis: str) -> int:
    """Return this rank's index along an axis, 0 if the mesh does not have it."""
    return mesh.get_local_rank(axis) if axis in (mesh.mesh_dim_names or ()) else 0


def dp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of `mesh` that FSDP2 works on, which shards over dp_shard and cp."""
    shard = "dp_shard_cp" if axis_size(mesh, "cp") > 1 else "dp_shard"
    # A dp_replicate axis of size 1 would cost an all-reduce per FSDP unit.
    return sub_mesh(mesh, ("dp_replicate", shard) if mesh["dp_replicate"].size() > 1 else (shard,))


def shard_size(mesh: DeviceMesh) -> int:
    """Return the number of ranks that FSDP2 shards a parameter over."""
    return mesh["dp_shard"].size() * axis_size(mesh, "cp")


def same_batch_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of `mesh` whose ranks process one batch together, in one stage: cp and tp peers."""
    return sub_mesh(mesh, ("cp_tp",) if axis_size(mesh, "cp") > 1 else ("tp",))


def same_batch_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups (cp and tp peers, then pp peers) that connect the ranks of one batch; none for a rank alone.

    What all ranks of the one have, and then all of the other, all ranks of the batch have.
    """
    groups = [same_batch_mesh(mesh).get_group()] if same_batch_mesh(mesh).size() > 1 else []
    return groups + ([mesh.get_group("pp")] if axis_size(mesh, "pp") > 1 else [])


def groups_of_axes(mesh: DeviceMesh) -> dict[str, str]:
    """Map names of process groups to the axis of each: "dp_shard" also where FSDP2 shards over dp_shard and cp."""
    axes: dict[str, str] = {mesh.get_group(name).group_name: name for name in mesh.mesh_dim_names or ()}
    if axis_size(mesh, "cp") > 1:
        axes[dp_mesh(mesh).get_group(-1 if dp_mesh(mesh).ndim > 1 else None).group_name] = "dp_shard"
    return axes


def stage_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of `mesh` whose ranks hold the same stage of the model: the mesh itself without a pp axis."""
    names = mesh.mesh_dim_names or ()
    return sub_mesh(mesh, tuple(axis for axis in names if axis != "pp")) if "pp" in names else mesh


def stage_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the process group of the ranks of `stage_mesh`; None if these are all ranks."""
    return sub_mesh(mesh, (_STAGE,)).get_group() if "pp" in (mesh.mesh_dim_names or ()) else None


def sharded_axes(tensor: Tensor) -> frozenset[str]:
    """Return the axes of `AXES` that a tensor is sharded over."""
    if not isinstance(tensor, DTensor):
        return frozenset()
    names = tensor.device_mesh.mesh_dim_names or ()
    sharded = [name for name, placed in zip(names, tensor.placements, strict=True) if not placed.is_replicate()]
    return frozenset(axis for name in sharded for axis in _JOINED.get(name, (name,)))


def dp_size(mesh: DeviceMesh) -> int:
    """Return the number of different batches that a step processes, one per data-parallel rank."""
    return mesh["dp_replicate"].size() * mesh["dp_shard"].size()


def dp_rank(mesh: DeviceMesh) -> int:
    """Return the index of the batch, of the `dp_size` batches, that this rank processes, as its cp and tp peers do."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")


def over_stages(mine: T, mesh: DeviceMesh | None) -> list[T]:
    """Return the object of each pp peer of this rank, in the order of pp ranks. Collective if there is a pp axis.

    `mine` is pickled; `mesh` is None for a model that is not sharded.
    """
    return [mine] if mesh is None or axis_size(mesh, "pp") == 1 else gather_objects(mine, mesh.get_group("pp"))


def merged_over_stages(mine: Mapping[str, T], mesh: DeviceMesh | None) -> dict[str, T]:
    """Return the entries of all pp peers of this rank; of those with equal keys the first. Collective as above."""
    merged: dict[str, T] = {}
    for entries in over_stages(dict(mine), mesh):
        merged |= {key: value for key, value in entries.items() if key not in merged}
    return merged


def share_random_state(mesh: DeviceMesh) -> None:
    """Give the ranks of one batch (pp, cp and tp peers) the random state of the first of them. Collective."""
    # Tp peers compute the same activations, so random numbers that the model draws outside of its adapters (for its own
    # dropout) must be the same on all of them.
    generators = [torch] if mesh.device_type == "cpu" else [torch, torch.get_device_module(mesh.device_type)]
    for group in same_batch_groups(mesh):
        for generator in generators:
            state = generator.get_rng_state().to(mesh.device_type)
            dist.broadcast(state, src=dist.get_global_rank(group, 0), group=group)
            generator.set_rng_state(state.cpu())
