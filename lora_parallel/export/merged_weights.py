"""List the tensors of a base with its adapters merged in, and the adapters that are to be merged into each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lora_parallel.distributed.gather import class_of, local
from lora_parallel.layers.module_names import clean_parameter_name
from lora_parallel.layers.quantised_layer import QuantisedLayer
from lora_parallel.layers.row_partition import RowPartition, partition_of

__all__ = ["MergedWeight", "WeightForm", "active_adapters", "merged_weights", "refuse_one_of_two"]


@dataclass(frozen=True)
class WeightForm:
    """Describe one tensor of the merged model to ranks that do not hold it."""

    name: str
    """Name in the merged model."""

    first_name: str
    """First name of a tied weight in the sharded model, the same on all pipeline stages that hold it."""

    shape: tuple[int, ...]
    """Shape of the tensor that adapters are merged into; [out, in] if it is quantised."""

    dtype: torch.dtype
    """Dtype in the merged model."""

    device: str
    """Type of the device that the tensor is sent from."""

    selected: tuple[RowPartition, int] | None
    """Row partition by which the tensor is stored, and the dim of its rows; None if it is stored as it is."""

    transposed: bool
    """True if the weight is [in, out] in the merged model and [out, in] here.

    That is so for a quantised `Conv1D`, whose weight bitsandbytes transposes.
    """

    is_merged: bool
    """True if adapters are to be merged into the tensor."""

    is_quantised: bool


@dataclass(frozen=True)
class MergedWeight:
    """Describe one tensor of the merged model."""

    tensor: Tensor
    place: str
    """Name of the tensor in the sharded model."""

    layer: LoraLayer | None = None
    """LoRA layer whose adapters are to be merged into the tensor; None if there are none to merge."""

    selected: tuple[RowPartition, int] | None = None
    """Row partition by which the tensor is stored, and the dim of its rows; None if it is stored as it is."""

    quantised: QuantisedLayer | None = None
    """Layer whose weight `tensor` is, as bytes; None if the tensor is not quantised."""

    dense_dtype: torch.dtype | None = None
    """Dtype that a quantised weight is written in; None if the tensor is not quantised."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the tensor has in the merged model."""
        return self.dense_dtype or self.tensor.dtype

    def form(self, name: str, first_name: str) -> WeightForm:
        """Return the description for other ranks.

        Args:
            name: The name of the tensor in the merged model.
            first_name: The first of the names of the tensor in the sharded model.
        """
        layer = self.quantised
        return WeightForm(
            name,
            first_name,
            shape=tuple(self.tensor.shape) if layer is None else (layer.out_features, layer.in_features),
            dtype=self.dtype,
            device=local(self.tensor).device.type,
            selected=self.selected,
            transposed=issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D),
            is_merged=self.layer is not None,
            is_quantised=layer is not None,
        )


def merged_weights(base: nn.Module) -> dict[str, MergedWeight]:
    """List the parameters and persistent buffers of the merged model that this rank holds, by their names in it.

    A tied tensor is listed once, under the first of the names that it has on this rank.

    Raises:
        ValueError: An adapter cannot be merged part by part, or is on only one of two layers with a tied weight.
    """
    found: dict[str, MergedWeight] = {}
    seen: dict[int, tuple[str, bool]] = {}
    for prefix, module in base.named_modules():
        if _is_left_out(base, prefix):
            continue
        quantised = module if isinstance(module, QuantisedLayer) else None
        persistent = {key: b for key, b in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is None or (quantised is not None and key in quantised.scales):
                continue
            place = f"{prefix}.{key}" if prefix else key
            name = _merged_name(place)
            layer = _adapted_by(base, prefix, key)
            merged = layer is not None and bool(active_adapters(layer))
            if id(tensor) in seen:
                first, first_merged = seen[id(tensor)]
                if merged or first_merged:
                    refuse_one_of_two(name, first)
                continue
            seen[id(tensor)] = name, merged
            if merged:
                assert layer is not None
                _check_kind(name, layer)
            weight = MergedWeight(tensor, place, layer if merged else None, partition_of(module, key))
            if quantised is not None and key == "weight":
                weight = replace(weight, quantised=quantised, dense_dtype=_dense_dtype(base))
            found[name] = weight
    _check_all_merged(base, found)
    return found


def refuse_one_of_two(name: str, first: str) -> NoReturn:
    """Raise a ValueError that says that an adapter is on one of two layers with a tied weight."""
    raise ValueError(
        f"{name} and {first} are one weight, and an adapter is on one of them only: merging it would change both. Save "
        "the adapter (save_adapter) and merge it where it is used."
    )


def _check_all_merged(base: nn.Module, weights: Mapping[str, MergedWeight]) -> None:
    """Check that each active adapter is on a tensor of the merged model, since any other would be left out.

    Raises:
        ValueError: An adapter is on something else.
    """
    merged = {weight.layer for weight in weights.values()}
    for prefix, module in base.named_modules():
        if not isinstance(module, LoraLayer) or module in merged or _is_left_out(base, prefix):
            continue
        if active_adapters(module):
            _refuse(_merged_name(prefix), f"a {class_of(base.get_submodule(prefix)).__name__} layer")


def _is_left_out(base: nn.Module, prefix: str) -> bool:
    """Return True if the merged model does not have a module.

    Such a module is part of an adapter, or belongs to a layer that PEFT copies for `modules_to_save`: it is the layer's
    original where an active adapter has a copy of it, or the copy of an adapter that is not active.
    """
    parts = prefix.split(".") if prefix else []
    for depth in range(len(parts)):
        owner = base.get_submodule(".".join(parts[:depth]))
        part = parts[depth]
        if isinstance(owner, ModulesToSaveWrapper):
            copies = [name for name in owner.active_adapters if name in owner.modules_to_save]
            if part == "original_module":
                if copies:
                    return True
            elif part != "modules_to_save" or depth + 1 == len(parts) or parts[depth + 1] not in copies:
                return True
        elif isinstance(owner, BaseTunerLayer) and part != "base_layer":
            return True
    return False


def _merged_name(name: str) -> str:
    """Return the name in the merged model of a parameter or module, which may be in a copy of `modules_to_save`."""
    return re.sub(r"\bmodules_to_save\.[^.]+\.?", "", clean_parameter_name(name)).removesuffix(".")


def _adapted_by(base: nn.Module, prefix: str, key: str) -> LoraLayer | None:
    """Return the LoRA layer whose adapters change a parameter, or None.

    With PEFT's `target_parameters` several LoRA layers may be nested around one module; each changes one parameter.

    Args:
        base: The base model.
        prefix: The name of the module that holds the parameter.
        key: The name of the parameter in that module.
    """
    while prefix.endswith(".base_layer"):
        prefix = prefix.removesuffix(".base_layer")
        owner = base.get_submodule(prefix)
        if isinstance(owner, LoraLayer) and key == getattr(owner, "parameter_name", "weight"):
            return owner
    return None


def _dense_dtype(base: nn.Module) -> torch.dtype:
    """Return the dtype that transformers' own `dequantize` gives to quantised weights."""
    dtype = getattr(getattr(base, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def active_adapters(layer: LoraLayer) -> list[str]:
    """List the adapters of a layer that `merge_and_unload` would merge."""
    held = {*layer.lora_A, *layer.lora_embedding_A}
    return [name for name in layer.active_adapters if name in held]


def _check_kind(name: str, layer: LoraLayer) -> None:
    problem = None
    kind: Any = class_of(layer)  # type: ignore[arg-type]
    if kind not in (Linear, Embedding, ParamWrapper) and not isinstance(layer.get_base_layer(), QuantisedLayer):
        problem = f"a {kind.__name__} layer"
    for adapter in active_adapters(layer):
        if adapter in layer.lora_variant:
            problem = type(layer.lora_variant[adapter]).__name__
        elif layer.lora_bias.get(adapter):
            problem = "lora_bias=True"
    if problem is not None:
        _refuse(name, problem)


def _refuse(name: str, problem: str) -> NoReturn:
    raise ValueError(
        f"export_merged: the adapter of {name} ({problem}) cannot be merged part by part. Save the adapter "
        "(save_adapter) and merge it in one process with PEFT's merge_and_unload."
    )
