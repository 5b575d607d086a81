"""Check the arguments of a pool: names, seeds, configs and the layers that they adapt, rows and their lengths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lora_parallel.adapters.injection import has_adapters
from lora_parallel.adapters.peft_private import DRAWN
from lora_parallel.layers.module_names import clean_names
from lora_parallel.state import ParallelState, state_of
from lora_parallel.tenants.adapter_init import adapted_layers

__all__ = [
    "batch_norms",
    "check_base",
    "check_budget",
    "check_dtype",
    "check_layers",
    "check_lora_config",
    "check_name",
    "check_one_active",
    "check_rows_apart",
    "check_samples",
    "describe_config",
    "seed_of",
]


def describe_config(config: Any) -> str:
    """Describe a config by its values that are not the defaults, as text that is the same in every process.

    Sets are sorted, since their order differs between processes.
    """
    if not isinstance(config, LoraConfig):
        return repr(config)
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in _said(config).items()}
    return f"LoraConfig({', '.join(f'{key}={value!r}' for key, value in sorted(ordered.items()))})"


def check_name(name: Any, base: nn.Module) -> None:
    """Check that PEFT can use a tenant's name for its modules and in the names of parameters.

    Raises:
        ValueError: The name has other characters than letters, digits, "_" and "-", or is a name inside the model too.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name, re.ASCII):
        raise ValueError(f"a tenant's name is {name!r}: give letters, digits, underscores and hyphens.")
    inside = {part for each, _ in base.named_parameters() for part in each.split(".")}
    if name in inside or name.startswith("lora_") or hasattr(nn.ModuleDict(), name):
        raise ValueError(f"a tenant's name is {name!r}, which is a name inside of the model too: give another.")


_TAKEN = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out"),
    *(
        "task_type",
        "peft_type",
        "peft_version",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
}
"""Fields of a LoraConfig that tenants support; a config that sets any other field is refused."""

_FILLED_IN = {"target_parameters", "modules_to_save"}
"""Fields that PEFT fills with an empty value for some models, instead of None."""

_LINEAR = "tenants are plain LoRA on linear layers: name those in target_modules."


def check_lora_config(config: Any) -> None:
    """Check that a config asks for plain LoRA with random initial values.

    Raises:
        ValueError: The config sets a field that tenants do not support, or computes initial values from base weights.
    """
    if not isinstance(config, LoraConfig):
        raise ValueError(f"config is a {type(config).__name__}: give a peft.LoraConfig.")
    for key, asked in _said(config).items():
        if key not in _TAKEN and (asked or key not in _FILLED_IN):
            raise ValueError(f"LoraConfig({key}={asked!r}): {_LINEAR}")
    if config.init_lora_weights not in DRAWN:
        raise ValueError(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r}) is computed from the base weights, which are "
            "sharded: load a saved adapter instead."
        )


def _said(config: LoraConfig) -> dict[str, Any]:
    """Return the fields of a config whose values are not the defaults."""
    usual = LoraConfig().to_dict()
    return {key: value for key, value in config.to_dict().items() if value != usual.get(key)}


def check_dtype(dtype: Any) -> None:
    """Check that an adapter can be stored in a dtype.

    Raises:
        ValueError: The dtype is neither None nor a floating-point dtype of 16 bits or more.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"dtype={dtype!r}: give a floating-point torch.dtype of 16 bits or more, or None for PEFT's.")


def seed_of(init_seed: Any) -> int:
    """Return a seed as a Python int.

    Raises:
        ValueError: The seed is no whole number, or `torch.manual_seed` does not take it.
    """
    whole = hasattr(init_seed, "__index__") and not isinstance(init_seed, (bool, torch.Tensor))
    if not whole or not -(2**63) <= index(init_seed) < 2**64:  # what torch.manual_seed takes
        raise ValueError(f"init_seed={init_seed!r}: give a whole number of 64 bits.")
    return index(init_seed)


def _lengths_of(lengths: Sequence[Any]) -> list[int]:
    """Return numbers of tokens as Python ints.

    Raises:
        ValueError: A number is not whole, or negative.
    """
    try:
        found = [index(each) for each in lengths]
    except TypeError:
        found = [-1]
    if any(each < 0 for each in found):
        raise ValueError(f"route has the lengths {list(lengths)}: give the tokens of each sample, whole numbers.")
    return found


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return the batch norm layers of a model by name: in training they mix the rows of a batch."""
    return {where: layer for layer, where in clean_names(model).items() if isinstance(layer, _BatchNorm)}


def check_rows_apart(layers: Mapping[str, nn.Module]) -> None:
    """Check that none of these batch norm layers is in training, where it mixes rows and updates its statistics.

    Raises:
        ValueError: A layer is in training.
    """
    for where, layer in layers.items():
        if layer.training:
            raise ValueError(
                f"{where} is a {type(layer).__name__} in training: it mixes the rows of all tenants, and its "
                "statistics are the base's. Put it in evaluation (model.train() undoes that)."
            )


def check_layers(adapted: Any, name: str, config: LoraConfig) -> None:
    """Check that PEFT has put an adapter on linear layers only, and on each that the config targets.

    The config alone does not tell: the layers that it selects depend on the model.

    Args:
        adapted: The copy of the base on meta with the adapter, from `adapter_init.shaped`.
        name: The name of the adapter.
        config: The config as the user gave it.

    Raises:
        ValueError: A target is missing from the base or excluded; a field that PEFT has filled in is not supported; or
            the adapter is on a layer that is not linear, or that the model has under several names.
    """
    layers = adapted_layers(adapted)
    if isinstance(config.target_modules, (list, set, tuple)):
        lacking = [t for t in config.target_modules if not any(f".{where}".endswith(f".{t}") for where in layers)]
        if lacking:
            raise ValueError(
                f"LoraConfig(target_modules=...): the base lacks {sorted(lacking)}, or the config excludes them: the "
                f"adapter would be on {sorted({where.rpartition('.')[2] for where in layers})} alone. Correct them, or "
                "leave them out."
            )
    check_lora_config(adapted.peft_config[name])  # PEFT fills in what it knows of the model
    places = Counter(child for parent in adapted.modules() for child in parent._modules.values() if child is not None)
    for where, layer in layers.items():
        plain = name in layer.lora_A and isinstance(layer.lora_A[name], nn.Linear)
        if isinstance(layer, ParamWrapper) or not plain:
            kind = type(layer.get_base_layer()).__name__
            raise ValueError(f"the adapter {name!r} would be on {where}, which is a {kind}: {_LINEAR}")
        if places[layer.get_base_layer()] > 1:  # PEFT adapts the layer under one of its names only
            raise ValueError(
                f"the adapter {name!r} would be on {where}, which the model has under another name too: leave it out "
                "of target_modules."
            )


def check_base(model: nn.Module) -> tuple[ParallelState, nn.Module]:
    """Check that a model can be the base of a pool; return the model's state, and its copy without values.

    Raises:
        ValueError: The model was not parallelized, has adapters or a pool, cannot be copied, or uses sequence or
            context parallelism.
    """
    state = state_of(model)
    if state is None:
        raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
    if state.stage is not None:
        raise ValueError("a TenantPool needs the whole base on each rank of a mesh without a pp axis: use pp=1.")
    if state.bare is None:
        raise ValueError(
            "the model has adapters of its own, or was told to need some: parallelize the bare base with "
            "ParallelConfig(require_adapters=False)."
        )
    if state.pool is not None or has_adapters(model):
        raise ValueError("the model has a TenantPool, or adapters of its own, already: a base has one pool.")
    if isinstance(state.bare, Exception):
        raise ValueError(
            f"the base cannot be copied ({type(state.bare).__name__}: {state.bare}), and adapters are drawn on a "
            "copy without values: let its modules be copied by copy.deepcopy."
        )
    if state.config.sequence_parallel:
        raise ValueError("tenants need all tokens of a sample on one rank: leave sequence_parallel=False.")
    if state.config.cp > 1:
        raise ValueError(f"tenants need all tokens of a sample on one rank: leave cp=1 (it is cp={state.config.cp}).")
    return state, state.bare


def check_budget(budget: Any) -> None:
    """Check that a budget is a positive number of bytes, or None.

    Raises:
        ValueError: The budget is anything else.
    """
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0):
        raise ValueError(f"budget={budget!r}: give a positive number of bytes, or None for no limit.")


def check_samples(names: Sequence[str], lengths: Sequence[int] | None) -> list[int] | None:
    """Check the arguments of `TenantPool.route`; return the lengths as Python ints, or None.

    Raises:
        ValueError: There are no names, not as many lengths as names, or lengths that are no numbers of tokens.
    """
    if isinstance(names, str) or not len(names):
        raise ValueError(f"route({names!r}) names no samples: give a list with the tenant of each row.")
    if lengths is None:
        return None
    counted = _lengths_of(lengths)
    if len(counted) != len(names):
        raise ValueError(f"route names {len(names)} samples, and gives {len(counted)} lengths: one for each.")
    return counted


def check_one_active(model: nn.Module) -> None:
    """Check that exactly one of the tenants on a base is active.

    Raises:
        ValueError: No tenant is active, or several are, whose sum would be merged.
    """
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    tenants = sorted({name for layer in layers for name in layer.lora_A})
    active = sorted({name for layer in layers for name in layer.active_adapters} & {*tenants})
    if layers and len(active) != 1:
        raise ValueError(
            f"export_merged: the tenants {active} are active, of {tenants}: call it inside of pool.train(name), which "
            "makes one of them active."
        )
