"""A model that is already in memory on every rank: rank 0's values win, as under DDP."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel.agreement import agreed, fingerprint, gather_numbers

__all__ = ["adopt_rank_zero"]

log = logging.getLogger(__name__)


def adopt_rank_zero(model: nn.Module, mesh: DeviceMesh) -> int:
    """Give every rank the parameters and buffers of rank 0; return how many tensors had to be sent.

    Fingerprints decide: copies that are equal (same seed, same file) cost one small collective and no traffic. Unequal
    tensors are broadcast one by one.

    Raises:
        ValueError: The ranks hold models of different structure (names, shapes or dtypes), on every rank.
    """
    if dist.get_world_size() == 1:
        return 0
    tensors = _tensors(model)
    names = list(tensors)
    structure = fingerprint(
        torch.tensor(
            bytearray("\n".join(f"{n} {tuple(t.shape)} {t.dtype} {t.requires_grad}" for n, t in tensors.items()), "utf8"),
            dtype=torch.uint8,
        )
    )
    structures = gather_numbers([structure, len(names)], mesh.device_type)
    with agreed():
        if (structures != structures[0]).any():
            others = [rank for rank in range(len(structures)) if (structures[rank] != structures[0]).any()]
            raise ValueError(
                f"ranks {others} built a model that differs from rank 0's in names, shapes, dtypes or requires_grad "
                f"({int(structures[0, 1])} tensors on rank 0): build the same model on every rank."
            )
    prints = gather_numbers([fingerprint(tensor) for tensor in tensors.values()], mesh.device_type)
    unequal = [name for index, name in enumerate(names) if (prints[:, index] != prints[0, index]).any()]
    if unequal and dist.get_rank() == 0:
        log.warning(
            "%d of %d tensors differ between ranks (first: %s): every rank takes rank 0's, as under DDP. Seed the "
            "model's construction to make this unnecessary.",
            len(unequal),
            len(names),
            unequal[0],
        )
    for name in unequal:
        tensor = tensors[name].detach()
        staged = tensor.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)
        dist.broadcast(staged, src=0)
        tensor.copy_(staged)
    return len(unequal)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
