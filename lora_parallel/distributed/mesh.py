"""Build the device mesh, which always has the three axes `dp_replicate`, `dp_shard` and `tp`."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lora_parallel.config import ParallelConfig
from lora_parallel.distributed.rendezvous import collective_call, limit_waiting
from lora_parallel.distributed.torch_private import one_gloo_thread, set_timeout

__all__ = ["AXES", "build_mesh", "dp_mesh", "dp_rank", "dp_size", "mesh_sizes"]

AXES = ("dp_replicate", "dp_shard", "tp")


def mesh_sizes(config: ParallelConfig, world_size: int) -> tuple[int, int, int]:
    """Return the sizes of (dp_replicate, dp_shard, tp) for `world_size` ranks.

    Raises:
        ValueError: The product of the sizes is not `world_size`; or, with `dp_shard="auto"`, the product of the other
            two does not divide it.
    """
    fixed = config.dp_replicate * config.tp
    if config.dp_shard == "auto":
        if world_size % fixed:
            raise ValueError(
                f"tp={config.tp} x dp_replicate={config.dp_replicate} = {fixed} does not divide the world size "
                f"{world_size}: start a multiple of {fixed} processes, or choose sizes whose product divides "
                f"{world_size}."
            )
        return config.dp_replicate, world_size // fixed, config.tp
    product = fixed * config.dp_shard
    if product != world_size:
        raise ValueError(
            f"dp_replicate={config.dp_replicate} x dp_shard={config.dp_shard} x tp={config.tp} = {product}, but the "
            f'world size is {world_size}: start {product} processes, or leave dp_shard="auto".'
        )
    return config.dp_replicate, config.dp_shard, config.tp


def build_mesh(config: ParallelConfig, device_type: str | None = None) -> DeviceMesh:
    """Build the mesh of this job, with `tp` as the innermost axis, so that tp peers are neighbours (one node, NVLink).

    A default process group that exists already is used. Otherwise one is made from torchrun's environment, or, in a
    process that no launcher started, for this process alone.

    Args:
        config: The sizes of the axes; `dp_shard="auto"` takes the ranks that the other two axes leave.
        device_type: "cuda", "cpu", ...; None selects the accelerator if there is one, else "cpu".

    Raises:
        ValueError: The sizes do not fit the world size; raised on every rank, before any process group is made.
    """
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device_type = accelerator.type if accelerator is not None else "cpu"
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    sizes = mesh_sizes(config, world_size)
    with one_gloo_thread():
        if not dist.is_initialized():
            timeout = timedelta(seconds=config.timeout_seconds)
            if device_type != "cpu":
                torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
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
            own: Any = dict.fromkeys(AXES, "gloo") if gloo else None
            mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXES, backend_override=own)
    for axis in AXES:
        set_timeout(mesh.get_group(axis), config.timeout_seconds)
    return mesh


def dp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of `mesh` that FSDP2 works on.

    It has no dp_replicate axis if that axis has size 1, where it would cost an all-reduce per FSDP unit.
    """
    return mesh["dp_replicate", "dp_shard"] if mesh["dp_replicate"].size() > 1 else mesh["dp_shard"]


def dp_size(mesh: DeviceMesh) -> int:
    """Return the number of different batches that a step processes, one per data-parallel rank."""
    return mesh["dp_replicate"].size() * mesh["dp_shard"].size()


def dp_rank(mesh: DeviceMesh) -> int:
    """Return the index of the batch, of the `dp_size` batches, that this rank processes; its tp peers have the same."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
