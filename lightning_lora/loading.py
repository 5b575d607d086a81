"""Find the models inside a LightningModule, and let `load_from_checkpoint` read what the strategy wrote.

Lightning reads a checkpoint with `torch.load` before it builds the module, and has no hook for another kind. So two
private functions of Lightning, `pl_load` and `_load_state`, are wrapped here and nowhere else. They treat other
checkpoints as before; `tests/lightning_lora/test_loading.py` checks that they do what is assumed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lora.namespace import installed_trainers, wrap
from lightning_lora.single_file_checkpoint import PACKED, TRAINER, unpack
from lora_parallel.integration import (
    Contents,
    base_fingerprints,
    check_base,
    check_config,
    has_adapters,
    is_checkpoint,
    open_checkpoint_folder,
    peft_configs,
    state_dict_of,
)

_TRAINED = "lora_parallel_trained"


@dataclass(frozen=True)
class _Trained:
    """Hold the part of a module's state that a checkpoint has."""

    path: Any  # as the user gave it
    contents: Contents
    values: dict[str, Any]
    """Entries of the module's state dict: full parameters and buffers, and other states."""
    unpacked: Any = None
    """Temporary folder with the files of a one-file checkpoint, which lives as long as this object; else None."""


def load_folders() -> None:
    """Let `load_from_checkpoint` read this library's checkpoints, in every installed namespace."""
    for package in installed_trainers():
        saving: Any = import_module(f"{package}.core.saving")
        wrap(saving, "pl_load", _load)
        wrap(saving, "_load_state", _load_state)


def _load(original: Any, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    if isinstance(path, (str, Path)) and is_checkpoint(Path(path)):
        contents = open_checkpoint_folder(Path(path), TRAINER, weights_only)
        trained = _Trained(path, contents, state_dict_of(contents))
        return {**contents.record["trainer"], "state_dict": {}, _TRAINED: trained}
    checkpoint = original(path, map_location=map_location, weights_only=weights_only)
    if not isinstance(checkpoint, dict) or PACKED not in checkpoint:
        return checkpoint
    folder = unpack(checkpoint.pop(PACKED), path)
    contents = open_checkpoint_folder(Path(folder.name), TRAINER, weights_only)
    return {**checkpoint, "state_dict": {}, _TRAINED: _Trained(path, contents, checkpoint["state_dict"], folder)}


def _load_state(
    original: Any, cls: Any, checkpoint: dict[str, Any], strict: bool | None = None, **kwargs: Any
) -> nn.Module:
    trained: _Trained | None = checkpoint.pop(_TRAINED, None)
    if trained is None:
        return original(cls, checkpoint, **({} if strict is None else {"strict": strict}), **kwargs)
    with warnings.catch_warnings():  # a warning of keys of the base, which the module has loaded itself
        warnings.filterwarnings("ignore", message="Found keys that are in the model state dict but not in")
        module: nn.Module = original(cls, checkpoint, strict=False, **kwargs)
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    others = {name: value for name, value in trained.values.items() if name not in tensors}
    unknown = module.load_state_dict(others, strict=False).unexpected_keys
    try:
        _check_tensors(trained, tensors, unknown, strict is not False)
        if strict is not False:
            _check_models(trained.contents, module)
    except ValueError as error:
        raise ValueError(f"{trained.path} does not fit {cls.__name__}: {error}") from error
    with torch.no_grad():
        for name, values in trained.values.items():
            if name in tensors:
                tensors[name].copy_(values)
    checkpoint["state_dict"] = trained.values  # Lightning looks at the device that they are on
    return module


def _check_tensors(trained: _Trained, tensors: dict[str, Tensor], unknown: list[str], strict: bool) -> None:
    untouched = [name for name, p in tensors.items() if p.requires_grad and name not in trained.values]
    if strict and (unknown or untouched):
        raise ValueError(
            f"{len(unknown)} of its parameters are not in the module (first: {unknown[:1]}), {len(untouched)} that "
            f"train are not in it (first: {untouched[:1]}). Where the strategy injected the adapter (lora_config), "
            "load the base and PeftModel.from_pretrained(base, checkpoint / 'adapter')."
        )
    for name, value in trained.values.items():  # copying would broadcast a tensor of another shape
        if name in tensors and tensors[name].shape != value.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} in it and {tuple(tensors[name].shape)} in the module: build "
                "the module as it was trained."
            )


def _check_models(contents: Contents, module: nn.Module) -> None:
    """Check, in this process alone, that the models' adapter configs and base are those of the checkpoint."""
    for name in contents.record["models"]:
        model, folder = module.get_submodule(name), contents.adapter_folder(name)
        configs = peft_configs(model)
        for adapter in contents.record["adapters"][name]:
            check_config(folder if adapter == "default" else folder / adapter, configs[adapter], model)
        _check_base(contents, name, model)


def _check_base(contents: Contents, name: str, model: nn.Module) -> None:
    saved, in_adapters = contents.meta["fingerprints"][name], contents.held_by(name)
    errors = []
    # Training may have cast the base to another dtype; this process holds it as it was loaded. None: it was not cast.
    for dtype in (None, torch.bfloat16, torch.float64):
        try:
            return check_base(saved, base_fingerprints(model, None, dtype), model, "it", in_adapters)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def find_roots(module: nn.Module, inject: bool, require_adapters: bool, trains: bool = True) -> dict[str, nn.Module]:
    """Return by name the models inside `module` to parallelize: those with adapters, or all that have parameters."""
    # `inject`: an adapter is to be injected into a model that has none. An evaluation (not `trains`) may lack a model.
    kind = type(module).__name__
    models = {name: child for name, child in _models(module) if any(True for _ in child.parameters())}
    if not models and trains and require_adapters:
        raise ValueError(
            f"{kind} holds no model with parameters: build it in __init__ or configure_model and keep it in an "
            "attribute, for example self.model."
        )
    adapted = {name: model for name, model in models.items() if has_adapters(model)}
    roots = adapted if adapted and require_adapters else models
    if require_adapters and not adapted and inject and len(models) > 1:
        raise ValueError(
            f"lora_config is given, but {kind} holds several models ({', '.join(models)}): call peft.get_peft_model on "
            "the one to adapt."
        )
    inside = {p for model in roots.values() for p in model.parameters()}
    outside = [name for name, p in module.named_parameters() if trains and p.requires_grad and p not in inside]
    if outside and require_adapters and (adapted or inject):
        raise ValueError(
            f"{outside[0]} of {kind} trains but belongs to no adapter. Freeze it, move its module into the adapted "
            "model and list it in LoraConfig(modules_to_save=[...]), or set require_adapters=False."
        )
    if outside and not require_adapters:
        raise ValueError(
            f"{outside[0]} trains and is {kind}'s own, not that of a module inside it, whose gradients are averaged "
            "over ranks: keep it in a child module that has a forward."
        )
    return roots


def _models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if type(child) in (nn.ModuleList, nn.ModuleDict):  # which have no forward of their own
            yield from _models(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
