"""Load an adapter from a PEFT folder into a sharded model. Each rank reads its own slices only."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lora_parallel.adapters.base_fingerprint import renew_fingerprints
from lora_parallel.adapters.config_check import check_config
from lora_parallel.adapters.inspection import (
    adapted_model,
    check_unmerged,
    first_names,
    peft_configs,
)
from lora_parallel.adapters.peft_format import (
    CONFIG,
    WEIGHTS,
    find_adapter,
    keys_on_disk,
    tensors_by_name,
)
from lora_parallel.distributed.gather import local, region_of, reshard
from lora_parallel.distributed.rank_checks import agreed, check_alike
from lora_parallel.distributed.rendezvous import collective_call

__all__ = ["ReadAdapter", "load_adapter", "read_adapter"]

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


_BLOCKS, _BLOCK_BYTES = 16, 4096


@collective_call("load_adapter")
@torch.inference_mode(False)  # a DTensor cannot be detached in inference mode
def load_adapter(model: nn.Module, directory: str | os.PathLike[str], adapter_name: str = "default") -> None:
    """Fill an adapter of the model from a PEFT folder, each rank with its own slices. Collective.

    The model must have the adapter already, with the same layers and r. Nothing is changed unless everything fits.
    Values are converted to the dtypes of the model's adapter. As in PEFT, embeddings in the folder replace the base's.

    Args:
        model: The model that `parallelize` returned, on any mesh, or an unsharded model with PEFT layers.
        directory: The folder that holds `adapter_model.safetensors`. As in PEFT, for an adapter that is not "default"
            the subfolder of its name comes first, if it holds that file.
        adapter_name: Name of the adapter of the model to fill.

    Raises:
        FileNotFoundError: The folder, or a file in it, does not exist.
        ValueError: The file cannot be read, is of another PEFT type, holds values that are not finite numbers, or its
            keys and shapes are not exactly the adapter's; or ranks name different adapters or read different folders.
            Every error is raised on every rank.
    """
    read_adapter(model, find_adapter(directory, adapter_name), adapter_name).put()


@dataclass(frozen=True)
class ReadAdapter:
    """Hold an adapter that was read from a folder, until `put` writes it into the model."""

    model: nn.Module
    values: list[tuple[Tensor, Tensor]]
    """Pairs of this rank's part of a parameter and the values to write into it, of the same shape."""

    base: list[str]
    """Names of the parameters in `values` that belong to the base: embeddings that PEFT saved with the adapter."""

    names: dict[str, str]
    """Name of the parameter in the model, for each key of the file that belongs to the adapter itself.

    It has those of all pipeline stages.
    """

    def put(self) -> None:
        """Write the adapter's values into the model. Collective."""
        with torch.no_grad():
            for target, value in self.values:
                target.copy_(value)
        if self.base:
            renew_fingerprints(self.model, self.base)


def read_adapter(
    model: nn.Module, directory: str | os.PathLike[str], adapter_name: str = "default", same_dtypes: bool = False
) -> ReadAdapter:
    """Read an adapter from a folder, each rank its own slices, and check that it fits. Collective.

    Args:
        model: As in `load_adapter`.
        directory: The folder that holds the files; no subfolder is looked at.
        adapter_name: As in `load_adapter`.
        same_dtypes: Refuse values whose dtype is not that of the model's adapter, as optimizer states belong to them.

    Raises:
        FileNotFoundError: A file of the folder does not exist.
        ValueError: As in `load_adapter`, or a dtype differs and `same_dtypes` is True.
    """
    check_alike(adapter_name=adapter_name)
    reshard(model)
    with agreed():
        check_unmerged(model)
        holder = adapted_model(model)
        configs = peft_configs(model)
        if holder is None or adapter_name not in configs:
            raise ValueError(f"no adapter {adapter_name!r} in the model; it has: {', '.join(configs) or 'none'}.")
        folder = Path(directory)
        check_config(folder, configs[adapter_name])
        digest = _digest(folder)
    check_alike(directory=f"a folder with digest {digest}")
    own = keys_on_disk(model, holder, adapter_name, save_embedding_layers=False)
    # The folder may or may not hold embeddings: its writer chose.
    with_embeddings = hasattr(holder, "get_input_embeddings")
    more = keys_on_disk(model, holder, adapter_name, save_embedding_layers=True) if with_embeddings else {}
    with agreed():
        keys = {**own, **{key: more[key] for key in _keys(folder / WEIGHTS) if key in more}}
        targets = _targets(model, keys)
        values = _read_slices(folder / WEIGHTS, targets, keys)
        for key, parameter in targets.items():
            if same_dtypes and values[key].dtype != parameter.dtype:
                raise ValueError(
                    f"{folder / WEIGHTS}: {key} has dtype {values[key].dtype}, the model's has {parameter.dtype}: "
                    "build the adapter with the dtype that it was trained with (autocast_adapter_dtype, perhaps), or "
                    "fill it with load_adapter and start anew."
                )
    base = sorted(set(keys.values()) - set(own.values()))
    return ReadAdapter(model, [(local(parameter), values[key]) for key, parameter in targets.items()], base, own)


def _targets(model: nn.Module, keys: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of this rank that keys of a file belong to, by key.

    A tied weight may be on two pipeline stages, under another name on each.

    Args:
        model: The model.
        keys: The name in the model for each key of the file, of all pipeline stages.
    """
    held = tensors_by_name(model)
    first = first_names(model, {*held, *keys.values()})
    by_first_name = {first[name]: tensor for name, tensor in held.items()}
    return {key: by_first_name[first[name]] for key, name in keys.items() if first[name] in by_first_name}


def _digest(folder: Path) -> str:
    """Return a hash of an adapter folder's content, which is the same wherever the folder is mounted.

    It covers the config file and, of the weights file, the size, the header and 16 blocks.
    """
    found = hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=6)
    with open(folder / WEIGHTS, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = int.from_bytes(file.read(8), "little")
        found.update(str(size).encode() + file.read(min(header, size)))
        for index in range(_BLOCKS):
            file.seek(max(size - _BLOCK_BYTES, 0) * index // (_BLOCKS - 1))
            found.update(file.read(_BLOCK_BYTES))
    return found.hexdigest()


def _keys(file: Path) -> list[str]:
    with _opened(file) as stored:
        return list(stored.keys())


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}).") from error


def _read_slices(file: Path, targets: Mapping[str, Tensor], expected: Collection[str]) -> dict[str, Tensor]:
    """Read this rank's slices of the tensors in a file.

    Args:
        file: The file.
        targets: The tensors to read slices for, by key.
        expected: All keys that the file must have.
    """
    with _opened(file) as stored:
        keys = set(stored.keys())
        missing, unexpected = sorted(set(expected) - keys), sorted(keys - set(expected))
        if missing or unexpected:
            raise ValueError(
                f"{file} does not fit the model's adapter: {len(missing)} keys are missing (first: {missing[:2]}), "
                f"{len(unexpected)} are unexpected (first: {unexpected[:2]})."
            )
        values = {}
        for key, parameter in targets.items():
            view = stored.get_slice(key)
            if parameter.is_floating_point() and view.get_dtype() not in _FLOATS:
                raise ValueError(f"{file}: {key} has dtype {view.get_dtype()}, which no adapter has.")
            shape = tuple(view.get_shape())
            if shape != tuple(parameter.shape):
                raise ValueError(f"{file}: {key} has shape {shape}, the model's has {tuple(parameter.shape)}.")
            if not local(parameter).numel():
                values[key] = torch.empty_like(local(parameter))
            else:
                values[key] = view[region_of(parameter)] if shape else stored.get_tensor(key)
            if isinstance(parameter, nn.Parameter) and not torch.isfinite(values[key]).all():
                raise ValueError(f"{file}: {key} holds values that are not finite: the adapter is broken.")
        return values
