"""`export_merged`: a base with its adapter merged in, from shards to a folder that plain `from_pretrained` loads."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from peft import PeftModel
from safetensors import safe_open
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from lora_parallel.adapters import check_unmerged
from lora_parallel.agreement import agreed, check_alike
from lora_parallel.atomic import Scratch, check_free, local_path
from lora_parallel.gather import class_of, reshard
from lora_parallel.merged_model import MergedModel
from lora_parallel.merged_weights import MergedWeight, check_one_active, merged_weights
from lora_parallel.nodes import Leaf
from lora_parallel.quantised import Quantised
from lora_parallel.rendezvous import collective_call
from lora_parallel.safetensors_writer import write_safetensors
from lora_parallel.sources import INDEX
from lora_parallel.state import state_of
from lora_parallel.stored import StoredTensor
from lora_parallel.transformers_quantisers import reverted

__all__ = ["export_merged"]

_SIZE = re.compile(r"\s*(?=.*[1-9])\d+(\.\d+)?\s*[KMGT]B\s*", re.IGNORECASE)
"""What huggingface_hub takes, and is not zero."""


@collective_call("export_merged")
@torch.inference_mode(False)  # inside of which a DTensor cannot be detached
def export_merged(model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> Path:
    """Write the model with its active adapters merged into the base, as `merge_and_unload` and `save_pretrained` would
    in one process. Collective.

    Each rank merges the part of a weight that it holds; rank 0 receives and writes a few megabytes at a time, so no
    rank ever holds a full tensor beside its shard. The model itself stays as it is. A model without adapters is written
    as it is.

    Args:
        model: What `parallelize` returned.
        directory: The folder to write. It must not exist, or be empty.
        max_shard_size: Of a safetensors file, as in transformers' `save_pretrained`.

    Returns:
        The folder.

    Raises:
        FileExistsError: `directory` exists and is not empty.
        ValueError: The model was not parallelized, or has adapter layers that cannot be merged part by part or are
            merged already; it has tenants, and not one of them is active; `max_shard_size` is no positive size; or
            ranks call with different arguments.
        OSError: It cannot be written. All on every rank.
    """
    with agreed():
        target = local_path(directory)
        _check_size(max_shard_size)
    check_alike(directory=str(target), max_shard_size=max_shard_size)
    scratch, writer = Scratch(target), not dist.is_initialized() or dist.get_rank() == 0
    reshard(model)
    try:
        with agreed():
            state = state_of(model)
            if state is None:
                raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
            check_unmerged(model)
            if state.pooled:
                check_one_active(model)
            base = model.get_base_model() if isinstance(model, PeftModel) else model
            weights = merged_weights(base)
            if writer:
                check_free(target)
                scratch.make()
        source = MergedModel(Path(class_of(base).__name__), weights)
        leaves = source.list()
        with agreed():
            stored = _as_saved(base, leaves, weights)
            files = split_state_dict_into_shards_factory(
                stored,
                get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        total = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc="Merging", disable=not writer) as progress:
            for name, keys in files.filename_to_tensors.items():
                failure = write_safetensors(
                    scratch.path / name, {key: stored[key].node for key in keys}, writer, progress.update
                )
                with agreed():
                    if failure is not None:
                        raise failure
        with agreed():
            if writer:
                if files.is_sharded:
                    index = {"metadata": {"total_size": total}, "weight_map": files.tensor_to_filename}
                    (scratch.path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
                _write_configs(base, scratch.path)
                _check(scratch.path, stored, files.tensor_to_filename)
                scratch.place()
    except BaseException:
        scratch.discard()
        raise
    return target


def _check_size(size: Any) -> None:
    if isinstance(size, str):
        positive = _SIZE.fullmatch(size) is not None
    else:
        positive = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not positive:
        raise ValueError(f"max_shard_size={size!r}: give a positive number of bytes, or a text such as '5GB'.")


def _as_saved(
    base: nn.Module, merged: Mapping[str, Leaf], weights: Mapping[str, MergedWeight]
) -> dict[str, StoredTensor]:
    """By the names, and in the shapes, that the model's checkpoints have on disk."""
    stored = {name: StoredTensor(leaf) for name, leaf in merged.items()}
    for name, weight in weights.items():
        if weight.selected is not None:
            selection, dim = weight.selected
            stored[name] = selection.restored(stored[name], dim)  # type: ignore[assignment]
        if weight.transposed:
            stored[name] = stored[name].T  # type: ignore[assignment]
    return dict(reverted(base, stored)) if isinstance(base, PreTrainedModel) else stored  # type: ignore[arg-type]


def _write_configs(base: nn.Module, folder: Path) -> None:
    config = copy.deepcopy(getattr(base, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [class_of(base).__name__]  # type: ignore[union-attr]
        config.dtype = str(base.dtype).removeprefix("torch.")  # type: ignore[union-attr]
        if any(isinstance(module, Quantised) for module in base.modules()):
            del config.quantization_config  # type: ignore[union-attr]
        config.save_pretrained(folder)  # type: ignore[union-attr]
    generation = getattr(base, "generation_config", None)
    if hasattr(generation, "save_pretrained") and base.can_generate():  # type: ignore[operator]
        generation.save_pretrained(folder)  # type: ignore[union-attr]


def _check(folder: Path, stored: Mapping[str, StoredTensor], files: Mapping[str, str]) -> None:
    for key, tensor in stored.items():
        with safe_open(folder / files[key], framework="pt") as file:
            if key not in file.keys() or tuple(file.get_slice(key).get_shape()) != tuple(tensor.shape):  # noqa: SIM118
                raise RuntimeError(f"{folder / files[key]} does not hold {key}: nothing was put in place.")
