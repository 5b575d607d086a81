"""The tensors of a base with its adapters merged in: which there are, and what is to be merged into each."""

from __future__ import annotations

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

from lora_parallel.gather import class_of
from lora_parallel.quantised import Quantised
from lora_parallel.selection import Selection, selection_of

__all__ = ["MergedWeight", "active_adapters", "check_one_active", "merged_weights"]


@dataclass(frozen=True)
class MergedWeight:
    """One tensor of the merged model."""

    tensor: Tensor
    layer: LoraLayer | None = None
    """Whose adapters are to be merged into it."""

    selected: tuple[Selection, int] | None = None
    """How its rows are stored, and along which dim, if not as they are."""

    quantised: Quantised | None = None
    """The layer whose bytes `tensor` is some of."""

    dense_dtype: torch.dtype | None = None
    """Of a quantised weight: what it is written in."""

    @property
    def transposed(self) -> bool:
        """Whether it is [in, out] in the merged model, as `Conv1D` has it, which bitsandbytes turns round."""
        return issubclass(getattr(self.quantised, "source_cls", nn.Linear), Conv1D)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that is merged."""
        layer = self.quantised
        return tuple(self.tensor.shape) if layer is None else (layer.out_features, layer.in_features)

    @property
    def dtype(self) -> torch.dtype:
        """In the merged model."""
        return self.dense_dtype or self.tensor.dtype


def merged_weights(base: nn.Module) -> dict[str, MergedWeight]:
    """The parameters and persistent buffers of the merged model, by their names in it; a tied one under the first."""
    found: dict[str, MergedWeight] = {}
    seen: dict[int, tuple[str, bool]] = {}
    for prefix, module in base.named_modules():
        if _is_left_out(base, prefix):
            continue
        quantised = module if isinstance(module, Quantised) else None
        persistent = {key: b for key, b in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is None or (quantised is not None and key in quantised.scales):
                continue
            name = _plain(f"{prefix}.{key}" if prefix else key)
            layer = _adapted_by(base, prefix, key)
            merged = layer is not None and bool(active_adapters(layer))
            if id(tensor) in seen:
                first, first_merged = seen[id(tensor)]
                if merged or first_merged:
                    raise ValueError(
                        f"{name} and {first} are one weight, and an adapter is on one of them only: merging it would "
                        "change both. Save the adapter (save_adapter) and merge it where it is used."
                    )
                continue
            seen[id(tensor)] = name, merged
            if merged:
                assert layer is not None
                _check_kind(name, layer)
            weight = MergedWeight(tensor, layer if merged else None, selection_of(module, key))
            if quantised is not None and key == "weight":
                weight = replace(weight, quantised=quantised, dense_dtype=_dense_dtype(base))
            found[name] = weight
    _check_all_merged(base, found)
    return found


def _check_all_merged(base: nn.Module, weights: Mapping[str, MergedWeight]) -> None:
    """An adapter of something that is no tensor of the model would be left out."""
    merged = {weight.layer for weight in weights.values()}
    for prefix, module in base.named_modules():
        if not isinstance(module, LoraLayer) or module in merged or _is_left_out(base, prefix):
            continue
        if active_adapters(module):
            _refuse(_plain(prefix), f"a {class_of(base.get_submodule(prefix)).__name__} layer")


def _is_left_out(base: nn.Module, prefix: str) -> bool:
    """Whether a module is an adapter's, or one that an adapter's copy (`modules_to_save`) stands in for."""
    parts = prefix.split(".") if prefix else []
    for depth in range(len(parts)):
        owner = base.get_submodule(".".join(parts[:depth]))
        part = parts[depth]
        if isinstance(owner, ModulesToSaveWrapper):
            if part != "modules_to_save":
                return True
            if depth + 1 == len(parts) or parts[depth + 1] not in owner.active_adapters:
                return True
        elif isinstance(owner, BaseTunerLayer) and part != "base_layer":
            return True
    return False


def _plain(name: str) -> str:
    """Without what PEFT puts between: `base_layer`, `modules_to_save.<adapter>`."""
    parts = name.split(".")
    plain: list[str] = []
    skip = 0
    for part in parts:
        if skip:
            skip -= 1
        elif part == "modules_to_save":
            skip = 1
        elif part != "base_layer":
            plain.append(part)
    return ".".join(plain)


def _adapted_by(base: nn.Module, prefix: str, key: str) -> LoraLayer | None:
    """The layer whose adapters are on a parameter: of several that are one around the other (PEFT's
    `target_parameters`), each is on one.
    """
    while prefix.endswith(".base_layer"):
        prefix = prefix.removesuffix(".base_layer")
        owner = base.get_submodule(prefix)
        if isinstance(owner, LoraLayer) and key == getattr(owner, "parameter_name", "weight"):
            return owner
    return None


def _dense_dtype(base: nn.Module) -> torch.dtype:
    """As transformers' own `dequantize` writes them."""
    dtype = getattr(getattr(base, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def active_adapters(layer: LoraLayer) -> list[str]:
    """The adapters of the layer that `merge_and_unload` would merge."""
    held = {*layer.lora_A, *layer.lora_embedding_A}
    return [name for name in layer.active_adapters if name in held]


def check_one_active(model: nn.Module) -> None:
    """Check that of the tenants on a base one alone is active.

    Raises:
        ValueError: None is, or several, whose sum would be merged.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    active = sorted({name for layer in layers for name in active_adapters(layer)})
    if layers and len(active) != 1:
        tenants = sorted({name for layer in layers for name in layer.lora_A})
        raise ValueError(
            f"export_merged: the tenants {active} are active, of {tenants}: call it inside of pool.train(name), which "
            "makes one of them active."
        )


def _check_kind(name: str, layer: LoraLayer) -> None:
    problem = None
    kind: Any = class_of(layer)  # type: ignore[arg-type]
    if kind not in (Linear, Embedding, ParamWrapper) and not isinstance(layer.get_base_layer(), Quantised):
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
