"""Save and restore random states: one for each data-parallel rank, since tp peers share theirs."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from lora_parallel.distributed.mesh import dp_rank, dp_size, stage_mesh

__all__ = ["gather_random_states", "restore_random_state"]


def gather_random_states(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Gather Python's, NumPy's and torch's random states on rank 0. Collective.

    Returns:
        One dictionary for each data-parallel rank, in their order, on rank 0; an empty list on other ranks.
    """
    mine = _capture(mesh.device_type)
    states: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(mine, states if dist.get_rank() == 0 else None, dst=0)
    if dist.get_rank() != 0:
        return []
    batches = stage_mesh(mesh).mesh.reshape(dp_size(mesh), -1)  # pp peers of rank 0's stage have the same states
    return [states[ranks[0]] for ranks in batches.tolist()]


def restore_random_state(states: list[dict[str, Any]], mesh: DeviceMesh) -> None:
    """Set this process's random states to those that its data-parallel rank had when the checkpoint was written.

    A data-parallel rank that the saving mesh did not have gets a seed of its own, derived from the saved state of
    data-parallel rank 0 and its own number.
    """
    rank = dp_rank(mesh)
    if rank < len(states):
        _put(states[rank], mesh.device_type)
        return
    digest = hashlib.blake2b(states[0]["torch"].numpy().tobytes() + rank.to_bytes(4, "little"), digest_size=4)
    seed = int.from_bytes(digest.digest(), "little")
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _capture(device_type: str) -> dict[str, Any]:
    """Return this process's random states as plain values and tensors, which weights_only=True reads back."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if device_type != "cpu":
        state["device"] = torch.get_device_module(device_type).get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [str(kind), [int(key) for key in keys], *rest]
    return state


def _put(state: dict[str, Any], device_type: str) -> None:
    version, inner, gauss = state["python"]
    random.setstate((version, tuple(inner), gauss))
    torch.set_rng_state(state["torch"])
    if device_type != "cpu" and "device" in state:
        torch.get_device_module(device_type).set_rng_state(state["device"])
    if "numpy" in sys.modules and "numpy" in state:
        sys.modules["numpy"].random.set_state(tuple(state["numpy"]))
