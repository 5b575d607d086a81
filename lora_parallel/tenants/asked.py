"""What may be asked of a pool: names, seeds, configs and the layers that these come to; rows and their lengths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lora_parallel.names import clean_names
from lora_parallel.peft_hooks import DRAWN
from lora_parallel.tenants.drawing import adapted_layers

__all__ = [
    "batch_norms",
    "check_dtype",
    "check_layers",
    "check_name",
    "check_plain",
    "check_rows_apart",
    "described",
    "lengths_of",
    "seed_of",
]


def described(config: Any) -> str:
    """A config by what it says otherwise than by default, the same in every process: sets have an order of their own in
    each.
    """
    if not isinstance(config, LoraConfig):
        return repr(config)
    ordered = {key: sorted(value) if isinstance(value, set) else value for key, value in _said(config).items()}
    return f"LoraConfig({', '.join(f'{key}={value!r}' for key, value in sorted(ordered.items()))})"


def check_name(name: Any, base: nn.Module) -> None:
    """Check that PEFT's modules, and its keys of parameters, can have a name.

    Raises:
        ValueError: They cannot.
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
"""The fields of a config that a tenant follows. Whatever else one asks for would not be done."""

_FILLED_IN = {"target_parameters", "modules_to_save"}
"""Which PEFT leaves empty for some models instead of None."""

_LINEAR = "tenants are plain LoRA on linear layers: name those in target_modules."


def check_plain(config: Any) -> None:
    """Check that a config asks for plain LoRA that is drawn at random.

    Raises:
        ValueError: It does not.
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
    """What a config says otherwise than by default."""
    usual = LoraConfig().to_dict()
    return {key: value for key, value in config.to_dict().items() if value != usual.get(key)}


def check_dtype(dtype: Any) -> None:
    """Check that an adapter can be stored in a dtype.

    Raises:
        ValueError: It cannot.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"dtype={dtype!r}: give a floating-point torch.dtype of 16 bits or more, or None for PEFT's.")


def seed_of(init_seed: Any) -> int:
    """A seed as a plain number.

    Raises:
        ValueError: It is no whole number, or one that torch cannot be seeded with.
    """
    whole = hasattr(init_seed, "__index__") and not isinstance(init_seed, (bool, torch.Tensor))
    if not whole or not -(2**63) <= index(init_seed) < 2**64:  # what torch.manual_seed takes
        raise ValueError(f"init_seed={init_seed!r}: give a whole number of 64 bits.")
    return index(init_seed)


def lengths_of(lengths: Sequence[Any]) -> list[int]:
    """Numbers of tokens as plain numbers.

    Raises:
        ValueError: They are no whole numbers, or negative.
    """
    try:
        found = [index(each) for each in lengths]
    except TypeError:
        found = [-1]
    if any(each < 0 for each in found):
        raise ValueError(f"route has the lengths {list(lengths)}: give the tokens of each sample, whole numbers.")
    return found


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that mix the rows of a batch in training, by name."""
    return {where: layer for layer, where in clean_names(model).items() if isinstance(layer, _BatchNorm)}


def check_rows_apart(layers: Mapping[str, nn.Module]) -> None:
    """Check that none of these layers mixes the rows of a batch, or takes its statistics from them.

    Raises:
        ValueError: One does.
    """
    for where, layer in layers.items():
        if layer.training:
            raise ValueError(
                f"{where} is a {type(layer).__name__} in training: it mixes the rows of all tenants, and its "
                "statistics are the base's. Put it in evaluation (model.train() undoes that)."
            )


def check_layers(adapted: Any, name: str, config: LoraConfig) -> None:
    """Check that PEFT has put an adapter on linear layers alone, and on each that is asked for. What a config says may
    come to something else.

    Args:
        adapted: What PEFT made of the base.
        name: The adapter's.
        config: As it was asked for.

    Raises:
        ValueError: It has not.
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
    check_plain(adapted.peft_config[name])  # PEFT fills in what it knows of the model
    places = Counter(child for parent in adapted.modules() for child in parent._modules.values() if child is not None)
    for where, layer in layers.items():
        plain = name in layer.lora_A and isinstance(layer.lora_A[name], nn.Linear)
        if isinstance(layer, ParamWrapper) or not plain:
            kind = type(layer.get_base_layer()).__name__
            raise ValueError(f"the adapter {name!r} would be on {where}, which is a {kind}: {_LINEAR}")
        if places[layer.get_base_layer()] > 1:  # PEFT adapts one of them
            raise ValueError(
                f"the adapter {name!r} would be on {where}, which the model has under another name too: leave it out "
                "of target_modules."
            )
