"""Find the adapters of a model, and the parameters and buffers that belong to each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from lora_parallel.distributed.gather import local, persistent_buffers
from lora_parallel.layers.module_names import clean_parameter_name
from lora_parallel.state import parallelized, state_of

__all__ = [
    "adapted_model",
    "adapter_parameters",
    "adapter_tensors",
    "check_finite",
    "check_unmerged",
    "first_names",
    "loose_parameters",
    "peft_configs",
]

_MAGNITUDES = {"lora_magnitude_vector": None}


def peft_configs(model: nn.Module) -> dict[str, PeftConfig]:
    """Return the PEFT config of each adapter of the model, by adapter name."""
    holder = adapted_model(model)
    return {} if holder is None else dict(holder.peft_config)  # type: ignore[arg-type]


def adapted_model(model: nn.Module) -> nn.Module | None:
    """Return the outermost module in `model` that holds PEFT's configs, or None if there is none."""
    for module in model.modules():
        if isinstance(module, PeftModel) or isinstance(module.__dict__.get("peft_config"), dict):
            return module
    return None


def check_unmerged(model: nn.Module) -> None:
    """Check that no adapter is merged into the base: a merged base is not the one that the adapter was trained on.

    Raises:
        ValueError: An adapter is merged.
    """
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged_adapters:
            raise ValueError(
                f"the adapter {module.merged_adapters[0]!r} is merged into the base of {name}: call unmerge_adapter() "
                "first."
            )


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Check that this rank's parts of parameters hold finite values: others are not saved.

    Args:
        parameters: The parameters, by name. What is no parameter is not looked at: a buffer may hold a mask of -inf.

    Raises:
        ValueError: A parameter holds others.
    """
    held = {
        name: local(each)
        for name, each in parameters.items()
        if isinstance(each, nn.Parameter) and each.is_floating_point()
    }
    finite = [value.isfinite().all() for value in held.values()]
    broken = [name for name, each in zip(held, torch.stack(finite).tolist() if finite else [], strict=True) if not each]
    if broken:
        more = f", and so do {len(broken) - 1} more parameters" if len(broken) > 1 else ""
        raise ValueError(
            f"{broken[0]} holds values that are not finite{more}: the model is broken, and is not saved. "
            "torch.autograd.detect_anomaly (in Lightning detect_anomaly=True) finds the operation; go on from the last "
            "checkpoint."
        )


def adapter_parameters(model: nn.Module, adapter_name: str | None = None) -> dict[str, nn.Parameter]:
    """Return the parameters that belong to an adapter, by their name in `model`.

    These are LoRA factors, the parameters that LoRA variants add, `modules_to_save` copies, and the biases that the
    adapter's config trains.

    Args:
        model: A model, with or without PEFT layers.
        adapter_name: The adapter's name; None for all adapters.
    """
    found: dict[str, nn.Parameter] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            continue
        held = dict(cast(nn.Module, module).named_parameters(prefix, remove_duplicate=False))
        # PEFT does not list the magnitudes of embeddings.
        for attribute in {**dict.fromkeys(module.adapter_layer_names), **_MAGNITUDES}:
            start = f"{prefix}.{attribute}." if prefix else f"{attribute}."
            for name, parameter in held.items():
                if not name.startswith(start):
                    continue
                owner = name[len(start) :].split(".")[0]
                if adapter_name is None or owner == adapter_name:
                    found[name] = parameter
    for adapter, config in peft_configs(model).items():
        if adapter_name not in (None, adapter):
            continue
        bias = getattr(config, "bias", "none")
        for name, parameter in parameters.items():
            is_bias = name.endswith(".bias") or name == "bias"
            if is_bias and (bias == "all" or (bias == "lora_only" and ".base_layer." in name)):
                found[name] = parameter
    return {name: parameters[name] for name in parameters if name in found}


def loose_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters of a module that belong to no adapter, by name.

    A parameter counts as trained if it trains now, or trained when its model was parallelized and was frozen since.

    Args:
        module: A parallelized model, or a module that holds several.
    """
    models = parallelized(module).values()
    held = {parameter for model in models for parameter in adapter_parameters(model).values()}
    trained = {
        parameter
        for model in models
        if (state := state_of(model)) is not None
        for name, parameter in model.named_parameters()
        if name in state.trained
    }
    return {name: p for name, p in module.named_parameters() if (p.requires_grad or p in trained) and p not in held}


def adapter_tensors(model: nn.Module, adapter_name: str) -> dict[str, Tensor]:
    """Return an adapter's parameters and the persistent buffers of its `modules_to_save` copies, by name in `model`."""
    found: dict[str, Tensor] = dict(adapter_parameters(model, adapter_name))
    for prefix, module in model.named_modules():
        if not isinstance(module, AuxiliaryTrainingWrapper):
            continue
        for attribute in module.adapter_layer_names:
            copies = getattr(module, attribute, None)
            if not isinstance(copies, nn.ModuleDict) or adapter_name not in copies:
                continue
            for name, buffer in persistent_buffers(copies[adapter_name]).items():
                found[".".join(filter(None, (prefix, attribute, adapter_name, name)))] = buffer
    return found


def first_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map names of tensors of a model to the first name of each, under which every pipeline stage knows a tied weight.

    Args:
        model: A model. Without pipeline parallelism each name is mapped to itself.
        names: The names; a first name is one without PEFT's additions.
    """
    state = state_of(model)
    stage = state.stage if state is not None else None
    if stage is None:
        return {name: name for name in names}
    plain = {name: clean_parameter_name(name) for name in names}
    return {name: stage.tied.get(each, each) for name, each in plain.items()}
