"""Compare what ranks hold that should be equal: the same shard of a parameter."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel.distributed.dtensors import fingerprint, local
from lora_parallel.distributed.mesh import sharded_axes, stage_group, stage_mesh
from lora_parallel.distributed.rank_checks import gather_objects

log = logging.getLogger(__name__)

_PIECE = 2**20  # Elements that are compared at a time


def unequal_replicas(parameters: Mapping[str, Tensor], mesh: DeviceMesh) -> dict[str, list[int]]:
    """Return the names of parameters of which ranks hold the same shard with other values, and these ranks, for each.

    It is the same on all ranks of a pipeline stage. Collective.
    """
    stage = stage_mesh(mesh)
    names = stage.mesh_dim_names or ()
    numbers = [fingerprint(local(parameter)) for parameter in parameters.values()]
    everyone = gather_objects(numbers, stage_group(mesh))  # in the order of the stage's ranks
    prints = torch.tensor(everyone, dtype=torch.int64)
    alike: dict[frozenset[str], list[int]] = {}
    for index, parameter in enumerate(parameters.values()):
        alike.setdefault(sharded_axes(parameter), []).append(index)
    found: dict[str, list[int]] = {}
    for axes, indices in alike.items():
        # ranks that hold the same shard of these parameters: [shards, ranks of each shard]
        order = sorted(names, key=lambda name: name not in axes)
        permuted = stage.mesh.permute([names.index(name) for name in order])
        peers = permuted.reshape(prod(stage[name].size() for name in axes), -1)
        same = prints[peers - _first_rank(mesh)][:, :, indices]  # [shards, ranks that hold one, parameters]
        for shard, at in (same != same[:, :1]).any(dim=1).nonzero().tolist():
            found.setdefault(list(parameters)[indices[at]], peers[shard].tolist())
    return found


def warn_of_unequal_replicas(tensors: Mapping[str, Tensor], mesh: DeviceMesh | None) -> None:
    """Warn of parameters that are about to be saved, and differ between ranks that should hold the same. Collective.

    Nothing is lost for that: what one of these ranks holds is saved. The first rank of each stage warns.
    """
    parameters = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}
    if mesh is None or mesh.size() == 1 or not (found := unequal_replicas(parameters, mesh)):
        return
    name, ranks = next(iter(found.items()))
    first, apart, largest = _first_rank(mesh), 0.0, 0.0
    mine = local(parameters[name]).reshape(-1)
    # In pieces: a whole vocabulary of every rank takes much memory. Their number is that of the rank with most.
    for start in range(0, parameters[name].numel(), _PIECE):
        values = gather_objects(mine[start : start + _PIECE].double().cpu(), stage_group(mesh))
        held = [values[rank - first] for rank in ranks]
        if not held[0].numel():
            continue
        apart = max(apart, *((value - held[0]).abs().max().item() for value in held))
        largest = max(largest, held[0].abs().max().item())
    if dist.get_rank() == first:
        log.warning(
            "%s%s should be equal on ranks %s, and differs by %.1e, where its largest value is %.1e: an adapter "
            "folder gets the values of rank %d. If it is more than rounding, something changed it on some ranks only.",
            *(name, f" (and {len(found) - 1} more parameters)" if len(found) > 1 else "", ranks, apart),
            *(largest, ranks[0]),
        )


def _first_rank(mesh: DeviceMesh) -> int:
    return int(stage_mesh(mesh).mesh.min())
