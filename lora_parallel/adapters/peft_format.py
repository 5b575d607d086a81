"""Describe adapter folders in PEFT's own format: their files, and the key of each tensor.

Source of the format: peft/utils/save_and_load.py and PeftModel.save_pretrained.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from lora_parallel.adapters.inspection import (
    adapter_tensors,
)
from lora_parallel.distributed.mesh import stage_group
from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.distributed.stages import merged_over_stages
from lora_parallel.layers.module_names import embeddings_of, innermost
from lora_parallel.state import mesh_of

__all__ = ["CARD", "CONFIG", "WEIGHTS", "find_adapter", "keys_on_disk", "tensors_by_name"]

WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "README.md"


def find_adapter(directory: str | os.PathLike[str], adapter_name: str) -> Path:
    """Return the folder in which PEFT looks for an adapter.

    This is the subfolder of the adapter's name if the adapter is not "default" and the subfolder holds weights, else
    the directory itself.
    """
    inside = Path(directory) / adapter_name
    return inside if adapter_name != "default" and (inside / WEIGHTS).is_file() else Path(directory)


def keys_on_disk(
    model: nn.Module, holder: nn.Module, adapter_name: str, save_embedding_layers: Literal["auto"] | bool
) -> dict[str, str]:
    """Map each key that PEFT writes for an adapter to the name in `model` of its parameter or buffer. Collective.

    PEFT chooses the keys, on the first rank of each pipeline stage, since it may look at the base model's folder. The
    result has the keys of all stages, on every rank. Besides the adapter's own tensors PEFT writes the weights of input
    and output embeddings that are adapted or whose vocabulary has been resized.

    Args:
        model: The model.
        holder: The module in it that holds PEFT's configs.
        adapter_name: The adapter's name.
        save_embedding_layers: As in `PeftModel.save_pretrained`.

    Raises:
        RuntimeError: PEFT gives no key to a tensor of the adapter.
    """
    prefix, mesh = _name_of(model, holder), mesh_of(model)
    group = None if mesh is None else stage_group(mesh)
    first = 0 if group is None else dist.get_global_rank(group, 0)
    names: dict[str, str] = {}
    with agreed():
        if not dist.is_initialized() or dist.get_rank() == first:
            parameters = tensors_by_name(model)
            own = adapter_tensors(model, adapter_name)
            embeddings = [name for name in _embedding_weights(model, holder) if name in parameters]
            wanted = {**{name: parameters[name] for name in embeddings}, **own}
            stand_ins: dict[str, Tensor] = {
                name: torch.empty(parameter.shape, device="meta") for name, parameter in wanted.items()
            }
            state = get_peft_model_state_dict(
                holder,
                state_dict={name.removeprefix(prefix): tensor for name, tensor in stand_ins.items()},
                adapter_name=adapter_name,
                save_embedding_layers=save_embedding_layers,
            )
            by_tensor = {id(tensor): name for name, tensor in stand_ins.items()}
            added = "" if isinstance(holder, PeftModel) else "base_model.model."
            names = {f"{added}{key}": by_tensor[id(tensor)] for key, tensor in state.items()}
            named = {id(parameters[name]) for name in names.values()}  # a tensor that tied layers share is written once
            if lost := sorted(name for name, tensor in own.items() if id(tensor) not in named):
                raise RuntimeError(f"PEFT does not name {len(lost)} tensors of {adapter_name!r} (first: {lost[0]}).")
    if dist.is_initialized() and dist.get_world_size() > 1:
        shared = [names]
        dist.broadcast_object_list(shared, src=first, group=group)
        names = shared[0]
    return merged_over_stages(names, mesh)


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Map names to the parameters and buffers of a model. A tied weight is under each of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def _embedding_weights(model: nn.Module, holder: nn.Module) -> list[str]:
    """Return the names in `model` of the base weights of the input and output embeddings that `holder` declares."""
    base, inner = innermost(holder), set()
    for layer in (embeddings_of(base, "input"), embeddings_of(base, "output")):
        held = layer.original_module if isinstance(layer, AuxiliaryTrainingWrapper) else layer
        inner.add(getattr(held, "base_layer", held))
    return [f"{name}.weight" for name, module in model.named_modules() if module in inner]


def _name_of(model: nn.Module, inner: nn.Module) -> str:
    name = next(name for name, module in model.named_modules() if module is inner)
    return f"{name}." if name else ""
