"""Make all ranks start from the same weights.

For models in memory every rank takes the values of rank 0, as under DDP. For models on meta the ranks' files must be
copies of the same files.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel.distributed.rank_checks import agreed, fingerprint, gather_numbers
from lora_parallel.lazy.files import fingerprint_of
from lora_parallel.lazy.tracking import sources_of

__all__ = ["adopt_rank_zero", "check_same_files", "tensors_of"]

log = logging.getLogger(__name__)


def adopt_rank_zero(tensors: Mapping[str, Tensor], mesh: DeviceMesh) -> int:
    """Give every rank the parameters and buffers of rank 0, by name; return how many tensors had to be sent.

    Tensors on meta have no values yet; only their names, shapes and dtypes are compared.

    Fingerprints of the tensors are compared first: copies that are equal (same seed, same file) cost small collectives
    and no traffic. Unequal tensors are broadcast one by one.

    Raises:
        ValueError: The ranks hold models of different structure (names, shapes, dtypes or requires_grad); every rank
            raises it.
    """
    if dist.get_world_size() == 1:
        return 0
    names = list(tensors)
    lines = [f"{name} {tuple(t.shape)} {t.dtype} {t.requires_grad} {t.is_meta}" for name, t in tensors.items()]
    structure = fingerprint(torch.tensor(bytearray("\n".join(lines), "utf8"), dtype=torch.uint8))
    structures = gather_numbers([structure, len(names)], mesh.device_type)
    if (structures != structures[0]).any():  # every rank sees it, and raises
        others = [rank for rank in range(len(structures)) if (structures[rank] != structures[0]).any()]
        raise ValueError(
            f"ranks {others} built a model that differs from rank 0's in names, shapes, dtypes or requires_grad "
            f"({int(structures[0, 1])} tensors on rank 0): build the same model on every rank."
        )
    names = [name for name in names if not tensors[name].is_meta]
    prints = gather_numbers([fingerprint(tensors[name]) for name in names], mesh.device_type)
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


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of `model` by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_same_files(model: nn.Module, mesh: DeviceMesh) -> None:
    """Check that all ranks fill a model on meta from copies of the same files. Collective.

    Raises:
        ValueError: The files of two ranks differ, so shards of different checkpoints would be mixed; every rank raises
            it.
    """
    with agreed():
        prints = {source.path.name: fingerprint_of(source) for source in sources_of(model)}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, prints)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            names = sorted(
                name for name in theirs.keys() | everyone[0].keys() if theirs.get(name) != everyone[0].get(name)
            )
            raise ValueError(
                f"rank {rank} would read other files than rank 0 ({len(names)} differ, first: {names[0]}): their "
                "shards would be of different checkpoints. Give every rank the same one."
            )
