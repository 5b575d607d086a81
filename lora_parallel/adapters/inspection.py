"""Find the adapters of a model, name their tensors as PEFT's folders do, and compare their configs.

Source of the format: peft/utils/save_and_load.py and PeftModel.save_pretrained.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lora_parallel.adapters.peft_private import converted_config, get_pattern_key
from lora_parallel.distributed.dtensors import local, persistent_buffers
from lora_parallel.distributed.mesh import merged_over_stages, stage_group
from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.layers.layer_parameters import clean_parameter_name, embeddings_of, innermost
from lora_parallel.state import mesh_of, parallelized, state_of


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
    """Raise a ValueError if an adapter is merged into the base: it is not the one that the adapter was trained on."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and module.merged_adapters:
            raise ValueError(
                f"the adapter {module.merged_adapters[0]!r} is merged into the base of {name}: call unmerge_adapter() "
                "first."
            )


def check_finite(parameters: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if this rank's parts of parameters hold values that are not finite: they are not saved."""
    floats = {  # a buffer, which is no parameter, may hold a mask of -inf
        name: local(parameter)
        for name, parameter in parameters.items()
        if isinstance(parameter, nn.Parameter) and parameter.is_floating_point()
    }
    finite = [values.isfinite().all() for values in floats.values()]
    fine = torch.stack(finite).tolist() if finite else []
    if broken := [name for name, is_fine in zip(floats, fine, strict=True) if not is_fine]:
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
    names: set[str] = set()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            attributes = {*module.adapter_layer_names, "lora_magnitude_vector"}  # PEFT does not list it for embeddings
            for name, _ in cast(nn.Module, module).named_parameters(prefix, remove_duplicate=False):
                attribute, *owner = name.removeprefix(f"{prefix}.").split(".")[:2]
                if attribute in attributes and owner and adapter_name in (None, *owner):
                    names.add(name)
    for adapter, config in peft_configs(model).items():
        bias = getattr(config, "bias", "none")
        if adapter_name in (None, adapter) and bias in ("all", "lora_only"):
            biases = {name for name in parameters if name.endswith(".bias") or name == "bias"}
            names |= {name for name in biases if bias == "all" or ".base_layer." in name}
    return {name: parameter for name, parameter in parameters.items() if name in names}


def loose_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that belong to no adapter and train now, or trained when their model was parallelized."""
    models = parallelized(module).values()
    adapted = {parameter for model in models for parameter in adapter_parameters(model).values()}
    trained = {
        parameter
        for model in models
        if (state := state_of(model)) is not None
        for name, parameter in model.named_parameters()
        if name in state.trained
    }
    return {name: p for name, p in module.named_parameters() if (p.requires_grad or p in trained) and p not in adapted}


def adapter_tensors(model: nn.Module, adapter_name: str) -> dict[str, Tensor]:
    """Return an adapter's parameters and the persistent buffers of its `modules_to_save` copies, by name in `model`."""
    tensors: dict[str, Tensor] = dict(adapter_parameters(model, adapter_name))
    for prefix, module in model.named_modules():
        for attribute in module.adapter_layer_names if isinstance(module, AuxiliaryTrainingWrapper) else ():
            copies = getattr(module, attribute, None)
            if isinstance(copies, nn.ModuleDict) and adapter_name in copies:
                start = ".".join(filter(None, (prefix, attribute, adapter_name)))
                tensors |= {f"{start}.{name}": b for name, b in persistent_buffers(copies[adapter_name]).items()}
    return tensors


def first_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Map names of tensors of a model to the first name of each, under which every pipeline stage knows a tied weight.

    Without pipeline parallelism each name is mapped to itself. A first name is one without PEFT's additions.
    """
    state = state_of(model)
    if state is None or state.stage is None:
        return {name: name for name in names}
    tied = state.stage.tied
    return {name: tied.get(plain, plain) for name in names for plain in [clean_parameter_name(name)]}


WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "README.md"


def find_adapter(directory: str | os.PathLike[str], adapter_name: str) -> Path:
    """Return the folder in which PEFT looks for an adapter: a subfolder of its name that holds weights comes first."""
    inside = Path(directory) / adapter_name
    return inside if adapter_name != "default" and (inside / WEIGHTS).is_file() else Path(directory)


def keys_on_disk(
    model: nn.Module, holder: nn.Module, adapter_name: str, save_embedding_layers: Literal["auto"] | bool
) -> dict[str, str]:
    """Map each key that PEFT writes for an adapter to the name in `model` of its parameter or buffer. Collective.

    PEFT chooses the keys, on the first rank of each pipeline stage, since it may look at the base model's folder. The
    result has the keys of all stages, on every rank. Besides the adapter's own tensors PEFT writes the weights of input
    and output embeddings that are adapted or whose vocabulary has been resized.
    """
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is holder)
    mesh = mesh_of(model)
    group = None if mesh is None else stage_group(mesh)
    first = 0 if group is None else dist.get_global_rank(group, 0)
    names: dict[str, str] = {}
    with agreed():
        if not dist.is_initialized() or dist.get_rank() == first:
            parameters = tensors_by_name(model)
            adapter = adapter_tensors(model, adapter_name)
            embeddings = {n: parameters[n] for n in _embedding_weights(model, holder) if n in parameters}
            wanted = embeddings | adapter
            stand_ins = {name: torch.empty(tensor.shape, device="meta") for name, tensor in wanted.items()}
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
            if lost := sorted(name for name, tensor in adapter.items() if id(tensor) not in named):
                raise RuntimeError(f"PEFT does not name {len(lost)} tensors of {adapter_name!r} (first: {lost[0]}).")
    if dist.is_initialized() and dist.get_world_size() > 1:
        shared = [names]
        dist.broadcast_object_list(shared, src=first, group=group)
        names = shared[0]
    return merged_over_stages(names, mesh)


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Map names to the parameters and buffers of a model. A tied weight is under each of its names."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def _embedding_weights(model: nn.Module, holder: nn.Module) -> list[str]:
    """Return the names in `model` of the base weights of the input and output embeddings that `holder` declares."""
    base, inner = innermost(holder), set()
    for layer in (embeddings_of(base, "input"), embeddings_of(base, "output")):
        original = layer.original_module if isinstance(layer, AuxiliaryTrainingWrapper) else layer
        inner.add(getattr(original, "base_layer", original))
    return [f"{name}.weight" for name, module in model.named_modules() if module in inner]


_PICKLED = "adapter_model.bin"

_FIRST_VALUES = frozenset({"corda_config", "eva_config", "loftq_config", "lora_ga_config"})
"""Fields that say how init_lora_weights computes the first values; compared with it where those change the base."""

_SAME_FUNCTION = _FIRST_VALUES | {
    # where the adapter or its base comes from
    *("auto_mapping", "base_model_name_or_path", "peft_version", "revision"),
    # which layers and tensors the adapter has: the keys of the file say it
    *("bias", "ensure_weight_tying", "exclude_modules", "layers_pattern", "layers_to_transform", "lora_bias"),
    *("modules_to_save", "target_modules", "target_parameters", "use_dora"),
    "arrow_config",  # routes tokens over several adapters by their tensors; a folder holds one
    "fan_in_fan_out",  # PEFT sets it to what the base layer needs
    *("inference_mode", "lora_dropout", "velora_config"),  # of training alone
    *("megatron_config", "megatron_core", "runtime_config", "task_type"),  # of the base and the wrapper around it
    "peft_type",  # is compared before
}
"""Fields of a PEFT config that may differ between two configs of one function, with the reasons."""

_RANKS = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
"""Fields that together say r and alpha of each layer."""

_LEAVES_BASE = (True, False, None, "gaussian", "eva", "mica", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they were (peft/tuners/lora/layer.py, `*_init`): PiSSA
and its kin subtract from them.
"""


def check_config(folder: Path, own: PeftConfig, model: nn.Module) -> None:
    """Check that an adapter folder holds weights whose config computes what the model's own config computes.

    PEFT reads it: a field that the folder's config lacks has PEFT's default, of one that PEFT does not know it warns.

    Args:
        folder: The adapter folder.
        own: The config of the model's adapter.
        model: The model.

    Raises:
        FileNotFoundError: The folder lacks the config or the weights.
        ValueError: The folder's config cannot be read, is of another PEFT type, or differs in a field on which the
            function depends.
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
        option.name: option.default if option.default_factory is MISSING else option.default_factory()
        for option in fields(own)
    }
    if unknown := {field: value for field, value in config.items() if field not in defaults}:
        type(own).from_peft_type(peft_type=kind, **unknown)  # warns of them
    theirs, ours = converted_config({**defaults, **config}, own, adapted_model(model)), own.to_dict()
    compared = _function(theirs), _function(ours)
    layers = None
    with suppress(SafetensorError, OSError), safe_open(folder / WEIGHTS, "pt") as weights:
        layers = _layers(weights.keys())  # a file that cannot be read is refused where its tensors are read
    if layers is not None and not getattr(own, "target_parameters", None):  # of these the file does not name the layers
        with suppress(TypeError, AttributeError, ValueError, re.error):  # the fields are compared one by one then
            alike = _ranks(theirs, layers) == _ranks(ours, layers)
            for function in compared:
                function.update({field: None if alike else _ordered(function.get(field)) for field in _RANKS})
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
    function = {
        field: _plain(value)
        for field, value in config.items()
        if field not in _SAME_FUNCTION or (changes_base and field in _FIRST_VALUES)
    }
    if not changes_base:
        function.pop("init_lora_weights", None)
    if not config.get("use_qalora"):
        function.pop("qalora_group_size", None)
    tokens = function.get("trainable_token_indices")
    if isinstance(tokens, dict):  # the keys of the file name the layers, and PEFT takes any ending of such a name
        short = {name.rpartition(".")[2]: indices for name, indices in tokens.items()}
        function["trainable_token_indices"] = short if len(short) == len(tokens) else tokens
        if len(tokens) == 1:
            (function["trainable_token_indices"],) = tokens.values()
    return function


def with_sorted_patterns(config: PeftConfig, keys: Iterable[str]) -> PeftConfig:
    """Return a config that says the same r and alpha of each layer after PEFT has written it, with sorted patterns."""
    # PEFT takes the first key of a pattern that matches a layer. Where sorting gives a layer other values, the patterns
    # of the config that is returned have a key for each layer.
    if not isinstance(config, LoraConfig) or config.target_parameters:
        return config
    if not (config.rank_pattern or config.alpha_pattern):
        return config
    layers = _layers(keys)
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
    matches = [re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?A(?:\.weight)?", key) for key in keys]
    return [match[1] for match in matches if match is not None]


def _ordered(value: Any) -> Any:
    """Return a pattern as a list of its keys and values: PEFT takes the first key that matches."""
    return list(value.items()) if isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it. Everything false is None: PEFT writes None, {} or [] for a field not set."""
    plain = json.dumps(value, default=lambda other: sorted(other) if isinstance(other, set) else str(other))
    return json.loads(plain) or None
