"""Save and load a tenant: a folder in PEFT's format, and beside the adapter the state that training resumes from.

The state can be loaded on another mesh than the one that saved it.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.optim import Optimizer

from lora_parallel.adapters.adapter_folder import gather_adapter, read_adapter
from lora_parallel.adapters.base_fingerprint import check_base
from lora_parallel.adapters.inspection import WEIGHTS, peft_configs
from lora_parallel.checkpoint.states import check_optimizer, group_names, optimizer_state, restored, restored_bytes
from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.distributed.dtensors import gather_on_rank_zero, local
from lora_parallel.distributed.rank_checks import agreed, is_rank_zero
from lora_parallel.distributed.torch_private import strided_shard

STATE = "tenant_state-{}.pt"  # file name of the training state, with a digest of the adapter file that it belongs to

_FORMAT = 1


def save_tenant(
    model: nn.Module, name: str, folder: Path, optimizer: Optimizer, record: Mapping[str, Any], base: Mapping[str, str]
) -> None:
    """Write an adapter as PEFT does, and beside it `record` (counters, seed) and the optimizer's state. Collective."""
    gathered = replace(gather_adapter(model, name, save_embedding_layers=False), name="default")
    names = _names(model, gathered.names)
    with agreed():
        state = optimizer_state(optimizer, names)
    config = peft_configs(model)[name]
    states = state.tensors.items()
    tensors = gather_on_rank_zero({f"{param}\0{key}": tensor for param, of in states for key, tensor in of.items()})
    with agreed():
        if is_rank_zero():
            written = ""

            def beside(path: Path) -> None:
                nonlocal written
                file = _state_of(path)
                kept = {"format": _FORMAT, "dropout": _dropout(config), "base": dict(base), **record}
                torch.save({**kept, "optimizer": state.record, "tensors": tensors}, file)
                written = file.name

            # The new state stands beside the old one until the adapter has been replaced, so that the adapter in the
            # folder has its state even if the save is interrupted.
            gathered.write(folder, beside)
            for old in folder.glob(STATE.format("*")):
                if old.name != written:
                    old.unlink()


def load_tenant(
    model: nn.Module, name: str, folder: Path, optimizer: Optimizer, base: Mapping[str, str], most: int | None
) -> dict[str, Any] | None:
    """Fill an adapter and its optimizer from a folder; return the state saved beside it, if any. Collective."""
    # Nothing is changed unless all fits; errors are raised on every rank. Without a state the optimizer's is cleared.
    with agreed() as alike:
        path = _state_of(folder) if (folder / WEIGHTS).is_file() else None
        trained = path is not None and path.is_file()
        # each rank may read another disk
        alike["the training state in the folder"] = _digest_of(path) if path is not None and trained else None
    adapter = read_adapter(model, folder, name, same_dtypes=trained)
    with agreed():
        names, put, kept = _names(model, adapter.names), optimizer.state.clear, None
        if path is not None and trained:
            kept = _read(path)
            check_base(kept["base"], base, model, str(folder), ())
            if kept["dropout"] != _dropout(peft_configs(model)[name]):
                raise ValueError(
                    f"{folder} was trained with lora_dropout={kept['dropout']}, the tenant {name!r} has another: add "
                    f"it with the folder's config, or remove {path.name} to start from the adapter alone."
                )
            check_optimizer(optimizer, names, group_names(optimizer, names, None), kept["optimizer"])
            takes = restored_bytes(names, kept["optimizer"])
            if most is not None and takes > most:
                raise ValueError(
                    f"{folder}: the optimizer's state takes {takes:,} bytes on a rank, and {name!r} was counted "
                    f"for {most:,} of the budget: add it with the saved optimizer's settings (amsgrad, momentum)."
                )
            tensors: Mapping[str, Tensor] = kept["tensors"]

            def read(parameter: str, key: str, region: tuple[slice, ...]) -> Tensor:
                return tensors[f"{parameter}\0{key}"][region]

            with _damaged(path):
                put = restored(optimizer, names, kept["optimizer"], read)
        elif others := sorted(file.name for file in folder.glob(STATE.format("*"))):
            raise ValueError(
                f"{folder}: {others[0]} was written with another {WEIGHTS}: the files are of different saves. Take the "
                f"folder from one save, or remove {others[0]} to start from the adapter alone."
            )
    adapter.put()
    put()
    return kept


def _read(path: Path) -> dict[str, Any]:
    with _damaged(path):
        with zipfile.ZipFile(path) as records:  # torch.load does not check the checksums of the zip records
            if (changed := records.testzip()) is not None:
                raise ValueError(f"{changed} in it has other bytes than were written")
        kept = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if kept["format"] != _FORMAT:
            raise ValueError(
                f"{path} has format {kept['format']!r}; this release reads {_FORMAT}: load it with one that wrote it."
            )
        for key in ("base", "dropout", "optimizer", "tensors", "steps", "forwards", "seed"):
            kept[key]
    return kept


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Turn errors in a block that reads `path` into a ValueError that calls the file damaged."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}): take the folder from a save that is whole, or "
            "remove the file to start from the adapter alone."
        ) from error


def _dropout(config: Any) -> float:
    return float(config.lora_dropout)


def _state_of(folder: Path) -> Path:
    return folder / STATE.format(_digest_of(folder / WEIGHTS))


def _digest_of(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


def _names(model: nn.Module, keys: Mapping[str, str]) -> dict[nn.Parameter, str]:
    """Map each parameter of an adapter to its name in the adapter file, which is the same for every tenant."""
    return {model.get_parameter(inside): key for key, inside in keys.items()}


@dataclass(frozen=True)
class Cut:
    """Describe how the part of a parameter that one tp rank has is cut into chunks over dp_shard."""

    shape: tuple[int, ...]  # shape of the part that a tp rank has
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
    """Return a parameter with this rank's dp_shard chunk of the part that this tp rank has, and the chunks' layout."""
    part = local(parameter)
    dim = max(range(part.dim()), key=lambda axis: parameter.shape[axis])  # the longest; the same on all tp ranks
    chunks = Cut(tuple(part.shape), dim, mesh["dp_shard"].size())
    mine = chunks.of(part, mesh.get_local_rank("dp_shard")).clone(memory_format=torch.contiguous_format)
    placements: list[Placement] = [Shard(dim)]  # as FSDP2 places it on top of tensor parallelism
    axes = mesh["dp_shard"]
    if isinstance(parameter, DTensor):
        (over_tp,) = parameter.placements
        axes = mesh["dp_shard", "tp"]
        both = isinstance(over_tp, Shard) and over_tp.dim == dim
        placements = [strided_shard(dim, mesh["tp"].size()) if both else Shard(dim), over_tp]
    sharded = DTensor.from_local(
        mine, axes, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded), chunks
