"""Check that the config of an adapter folder makes the same function of its tensors as the model's own config does."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftType
from safetensors import SafetensorError, safe_open

from lora_parallel.adapters.peft_format import CONFIG, WEIGHTS
from lora_parallel.adapters.peft_private import get_pattern_key

__all__ = ["check_config", "with_sorted_patterns"]

_PICKLED = "adapter_model.bin"

_KEYS = "the keys of the file say which layers and tensors the adapter has"
_PLACE = "says where the adapter or its base comes from"
_HOW = "says how init_lora_weights computes the first values, and is compared with it where those change the base"
_SAME_FUNCTION = {
    "arrow_config": "routes tokens over several adapters by their tensors; a folder holds one",
    "auto_mapping": _PLACE,
    "base_model_name_or_path": _PLACE,
    "bias": _KEYS,
    "corda_config": _HOW,
    "ensure_weight_tying": _KEYS,
    "eva_config": _HOW,
    "exclude_modules": _KEYS,
    "fan_in_fan_out": "PEFT sets it to what the base layer needs",
    "inference_mode": "says whether the adapter trains",
    "layers_pattern": _KEYS,
    "layers_to_transform": _KEYS,
    "loftq_config": _HOW,
    "lora_bias": _KEYS,
    "lora_dropout": "is applied in training alone",
    "lora_ga_config": _HOW,
    "megatron_config": "says how Megatron shards the base",
    "megatron_core": "says how Megatron shards the base",
    "modules_to_save": _KEYS,
    "peft_type": "is compared before",
    "peft_version": _PLACE,
    "revision": _PLACE,
    "runtime_config": "says where PEFT computes, and is not saved",
    "target_modules": _KEYS,
    "target_parameters": _KEYS,
    "task_type": "names the class of the wrapper around the model",
    "use_dora": _KEYS,
    "velora_config": "says what the backward pass keeps of the activations",
}
"""Fields of a PEFT config that may differ between two configs of one function, each with its reason."""

_RANKS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
"""Fields that together say r and alpha of each layer."""

_FORMER = {"merge_weights": "says whether evaluation merges; PEFT dropped it in 0.3"}
"""Fields of former versions of PEFT that a folder may set, with the reason why its function stays the same."""

_LEAVES_BASE = (True, False, None, "gaussian", "eva", "mica", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they were: PiSSA and its kin subtract from them.

Source: the `*_init` methods of peft/tuners/lora/layer.py.
"""


def check_config(folder: Path, own: PeftConfig) -> None:
    """Check that an adapter folder holds weights whose config computes what the model's own config computes.

    A field that the folder's config lacks has PEFT's default, as PEFT reads it.

    Args:
        folder: The adapter folder.
        own: The config of the model's adapter.

    Raises:
        FileNotFoundError: The folder lacks the config or the weights.
        ValueError: The folder's config cannot be read, is of another PEFT type, sets a field that the installed PEFT
            does not know, or differs in a field on which the function depends.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            pickled = (folder / _PICKLED).is_file()
            raise FileNotFoundError(
                f"{folder} holds its adapter in {_PICKLED}, a pickle, which is not read: load it with "
                "PeftModel.from_pretrained, and write it anew with save_pretrained."
                if pickled and name == WEIGHTS
                else f"{folder} is no PEFT adapter folder: it has no {name}."
            )
    try:
        config = json.loads((folder / CONFIG).read_text())
        kind = config["peft_type"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG} is no PEFT config ({type(error).__name__}: {error}).") from error
    if kind != PeftType.LORA.value:
        raise ValueError(f"{folder} holds an adapter of PEFT type {kind!r}; only LORA is supported.")
    defaults = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in fields(own)
    }
    if unknown := {field: value for field, value in config.items() if field not in {**defaults, **_FORMER} and value}:
        raise ValueError(
            f"{folder} was trained with {', '.join(f'{field}={value!r}' for field, value in unknown.items())}, which "
            "the installed PEFT does not know: install the version of PEFT that wrote it, or a later one."
        )
    theirs, ours = {**defaults, **config}, own.to_dict()
    compared = _function(theirs), _function(ours)
    layers = _layers_of(folder / WEIGHTS)
    if layers is not None and not getattr(own, "target_parameters", None):  # of these the file does not name the layers
        with suppress(TypeError, AttributeError, ValueError, re.error):  # the fields are compared one by one then
            alike = _ranks(theirs, layers) == _ranks(ours, layers)
            for each in compared:
                each.update({field: None if alike else _ordered(each.get(field)) for field in _RANKS})
    for field in defaults:
        if compared[0].get(field) != compared[1].get(field):
            raise ValueError(
                f"{folder} was trained with {field}={theirs[field]!r}, the model's adapter has "
                f"{field}={ours.get(field)!r}: build the adapter with the folder's own config."
            )


def _function(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config on which the function of an adapter's tensors depends."""
    start = config.get("init_lora_weights", True)
    config = {**config, "init_lora_weights": start.lower() if isinstance(start, str) else start}  # as PEFT reads it
    changes_base = config["init_lora_weights"] not in _LEAVES_BASE
    found = {
        field: _plain(value)
        for field, value in config.items()
        if field not in _SAME_FUNCTION or (changes_base and _SAME_FUNCTION[field] is _HOW)
    }
    if not changes_base:
        found.pop("init_lora_weights", None)
    if not config.get("use_qalora"):
        found.pop("qalora_group_size", None)
    tokens = found.get("trainable_token_indices")
    if isinstance(tokens, dict):  # the keys of the file name the layers, and PEFT takes any ending of such a name
        short = {name.rpartition(".")[2]: indices for name, indices in tokens.items()}
        found["trainable_token_indices"] = short if len(short) == len(tokens) else tokens
        if len(tokens) == 1:
            (found["trainable_token_indices"],) = tokens.values()
    return found


def with_sorted_patterns(config: PeftConfig, keys: Iterable[str]) -> PeftConfig:
    """Return a config that says the same r and alpha of each layer after PEFT has written and read it.

    PEFT takes the first key of a pattern that matches a layer, and writes the keys sorted. Where that gives a layer
    other values, the patterns of the config that is returned have a key for each layer.

    Args:
        config: The config of the model's adapter.
        keys: The keys of the adapter's tensors in the file.

    Raises:
        ValueError: The layers' names do not tell them apart either.
    """
    layers = _layers(keys)
    if (
        not isinstance(config, LoraConfig)
        or config.target_parameters
        or not (config.rank_pattern or config.alpha_pattern)
    ):
        return config
    wanted = _ranks(vars(config), layers)
    written = copy.copy(config)
    for pattern in ("rank_pattern", "alpha_pattern"):
        setattr(written, pattern, dict(sorted((getattr(config, pattern) or {}).items())))
    if _ranks(vars(written), layers) == wanted:
        return config
    written.rank_pattern = {layer: r for layer, (r, _) in sorted(wanted.items()) if r != config.r}
    written.alpha_pattern = {layer: alpha for layer, (_, alpha) in sorted(wanted.items()) if alpha != config.lora_alpha}
    if _ranks(vars(written), layers) != wanted:
        raise ValueError(
            f"rank_pattern={config.rank_pattern} and alpha_pattern={config.alpha_pattern} cannot be written: PEFT "
            "sorts their keys, and takes the first that matches a layer. Give keys of which one matches each layer."
        )
    return written


def _ranks(config: Mapping[str, Any], layers: Iterable[str]) -> dict[str, tuple[Any, Any]]:
    """Return r and alpha of each layer, as PEFT finds them: {layer: (r, alpha)}."""
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    return {
        layer: (
            ranks.get(get_pattern_key(list(ranks), layer), config["r"]),
            alphas.get(get_pattern_key(list(alphas), layer), config["lora_alpha"]),
        )
        for layer in layers
    }


def _layers(keys: Iterable[str]) -> list[str]:
    """Return the names of the layers whose `lora_A` is among the keys of an adapter file."""
    found = [re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?A(?:\.weight)?", key) for key in keys]
    return [match[1] for match in found if match is not None]


def _layers_of(file: Path) -> list[str] | None:
    """Return the names of the layers in an adapter file; None if it cannot be read, which who reads it says."""
    try:
        with safe_open(file, "pt") as opened:
            return _layers(opened.keys())
    except (SafetensorError, OSError):
        return None


def _ordered(value: Any) -> Any:
    """Return a pattern as a list of its keys and values: PEFT takes the first key that matches."""
    return list(value.items()) if isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it. Everything false is None: PEFT writes None, {} or [] for a field not set."""
    plain = json.dumps(value, default=lambda each: sorted(each) if isinstance(each, set) else str(each))
    return json.loads(plain) or None
