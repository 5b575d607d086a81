"""A tenant on disk: an ordinary PEFT folder, and beside the adapter what its training goes on from, on any mesh."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lora_parallel.adapter_folder import WEIGHTS, gather_adapter, read_adapter
from lora_parallel.agreement import agreed
from lora_parallel.gather import gather_on_rank_zero
from lora_parallel.identity import check_base
from lora_parallel.optimizer_state import check_optimizer, optimizer_state, restored

__all__ = ["STATE", "load_tenant", "save_tenant"]

STATE = "tenant_state.pt"


def save_tenant(
    model: nn.Module, name: str, folder: Path, optimizer: Optimizer, record: Mapping[str, Any], base: Mapping[str, str]
) -> None:
    """Write an adapter as PEFT does, and beside it `record` and the optimizer's state. Collective.

    Args:
        model: The pool's.
        name: The tenant.
        folder: An adapter folder, new or written before.
        optimizer: The tenant's.
        record: What else is to be found again.
        base: Fingerprints of the base.
    """
    gathered = replace(gather_adapter(model, name, save_embedding_layers=False), name="default")
    names = _names(model, gathered.names)
    with agreed():
        state = optimizer_state(optimizer, names)
    flat = {f"{parameter}\0{key}": each for parameter, of in state.tensors.items() for key, each in of.items()}
    tensors = gather_on_rank_zero(flat)
    with agreed():
        if not dist.is_initialized() or dist.get_rank() == 0:

            def beside(path: Path) -> None:
                kept = {"format": 1, "adapter": _digest(path), "base": dict(base), **record}
                torch.save({**kept, "optimizer": state.record, "tensors": tensors}, path / STATE)

            gathered.write(folder, beside)


def load_tenant(
    model: nn.Module, name: str, folder: Path, optimizer: Optimizer, base: Mapping[str, str]
) -> dict[str, Any] | None:
    """Fill an adapter and its optimizer from a folder; nothing is changed unless everything fits. Collective.

    Returns:
        The record that was written with it; None of an adapter without one, which starts with a new optimizer state.

    Raises:
        FileNotFoundError, ValueError: It is no folder of an adapter like this one, or of another base; its files are of
            different saves. On every rank.
    """
    adapter = read_adapter(model, folder, name)
    with agreed():
        names, put, kept = _names(model, adapter.names), optimizer.state.clear, None
        if (folder / STATE).is_file():
            kept = torch.load(folder / STATE, map_location="cpu", weights_only=True, mmap=True)
            if kept["adapter"] != _digest(folder):
                raise ValueError(
                    f"{folder}: {STATE} was written with another {WEIGHTS}: the files are of different saves. Take the "
                    f"folder from one save, or remove {STATE} to start from the adapter alone."
                )
            check_base(kept["base"], base, model, str(folder), ())
            check_optimizer(optimizer, names, kept["optimizer"])
            tensors: Mapping[str, Tensor] = kept["tensors"]
            put = restored(
                optimizer,
                names,
                kept["optimizer"],
                lambda parameter, key, region: tensors[f"{parameter}\0{key}"][region],
            )
    adapter.put()
    put()
    return kept


def _names(model: nn.Module, keys: Mapping[str, str]) -> dict[nn.Parameter, str]:
    """Of an adapter's parameters, as its file names them: the same for every tenant."""
    return {model.get_parameter(inside): key for key, inside in keys.items()}


def _digest(folder: Path) -> str:
    return hashlib.blake2b((folder / WEIGHTS).read_bytes(), digest_size=16).hexdigest()
