"""Share a random state between the ranks of one batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from lora_parallel.distributed.mesh import same_batch_groups

__all__ = ["share_random_state"]


def share_random_state(mesh: DeviceMesh) -> None:
    """Give the ranks of one batch (pp, cp and tp peers) the random state of the first of them. Collective.

    Tp peers compute the same activations, so random numbers that the model draws outside of its adapters
    (for its own dropout) must be the same on all of them. In a seeded job the states are equal already, and nothing
    changes.
    """
    for group in same_batch_groups(mesh):
        source = dist.get_global_rank(group, 0)
        cpu = torch.get_rng_state().to(mesh.device_type)
        dist.broadcast(cpu, src=source, group=group)
        torch.set_rng_state(cpu.cpu())
        if mesh.device_type != "cpu":
            module = torch.get_device_module(mesh.device_type)
            device = module.get_rng_state().to(mesh.device_type)
            dist.broadcast(device, src=source, group=group)
            module.set_rng_state(device.cpu())
