"""Find the models inside a LightningModule, and let `load_from_checkpoint` read what the strategy wrote.

Lightning reads a checkpoint with `torch.load` before it builds the module, and has no hook for another kind. So two
private functions of Lightning, `pl_load` and `_load_state`, are wrapped here and nowhere else. They treat other
checkpoints as before; `tests/lightning_lora/test_loading.py` checks that they do what is assumed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_lora.namespace import installed_trainers
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

    path: Any
    """Path as the user gave it."""

    found: Contents
    values: dict[str, Any]
    """Entries of the module's state dict: full parameters and buffers, and other states."""

    unpacked: Any = None
    """Temporary folder with the files of a one-file checkpoint, which lives as long as this object; else None."""


def load_folders() -> None:
    """Let `load_from_checkpoint` read this library's checkpoints, in every installed namespace.

    A second call changes nothing.
    """
    for package in installed_trainers():
        saving: Any = import_module(f"{package}.core.saving")
        if not hasattr(saving.pl_load, "__wrapped__"):
            saving.pl_load, saving._load_state = _reading(saving.pl_load), _filling(saving._load_state)


def _reading(own: Any) -> Any:
    @wraps(own)
    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path, (str, Path)) and is_checkpoint(Path(path)):
            found = open_checkpoint_folder(Path(path), TRAINER, weights_only)
            checkpoint: dict[str, Any] = found.record["trainer"]
            return {**checkpoint, "state_dict": {}, _TRAINED: _Trained(path, found, state_dict_of(found))}
        read = own(path, map_location=map_location, weights_only=weights_only)
        if not isinstance(read, dict) or PACKED not in read:
            return read
        folder = unpack(read.pop(PACKED), path)
        found = open_checkpoint_folder(Path(folder.name), TRAINER, weights_only)
        return {**read, "state_dict": {}, _TRAINED: _Trained(path, found, read["state_dict"], folder)}

    return load


def _filling(own: Any) -> Any:
    @wraps(own)
    def load_state(cls: Any, checkpoint: dict[str, Any], strict: bool | None = None, **kwargs: Any) -> Any:
        trained: _Trained | None = checkpoint.pop(_TRAINED, None)
        if trained is None:
            return own(cls, checkpoint, **({} if strict is None else {"strict": strict}), **kwargs)
        with warnings.catch_warnings():  # a warning of keys of the base, which the module has loaded itself
            warnings.filterwarnings("ignore", message="Found keys that are in the model state dict but not in")
            module = own(cls, checkpoint, strict=False, **kwargs)
        tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        tensors |= dict(module.named_buffers(remove_duplicate=False))
        others = {name: value for name, value in trained.values.items() if name not in tensors}
        unknown = module.load_state_dict(others, strict=False).unexpected_keys
        try:
            if strict is not False:
                _check_names(trained, tensors, unknown)
            _check_shapes(trained, tensors)
            if strict is not False:
                _check_models(trained.found, module)
        except ValueError as error:
            raise ValueError(f"{trained.path} does not fit {cls.__name__}: {error}") from error
        with torch.no_grad():
            for name, values in trained.values.items():
                if name in tensors:
                    tensors[name].copy_(values)
        checkpoint["state_dict"] = trained.values  # Lightning looks at the device that they are on
        return module

    return load_state


def _check_names(trained: _Trained, tensors: dict[str, Tensor], unknown: list[str]) -> None:
    untouched = [name for name, p in tensors.items() if p.requires_grad and name not in trained.values]
    if unknown or untouched:
        raise ValueError(
            f"{len(unknown)} of its parameters are not in the module (first: {unknown[:1]}), {len(untouched)} that "
            f"train are not in it (first: {untouched[:1]}). Where the strategy injected the adapter (lora_config), "
            "load the base and PeftModel.from_pretrained(base, checkpoint / 'adapter')."
        )


def _check_shapes(trained: _Trained, tensors: dict[str, Tensor]) -> None:
    """Check that each tensor has the same shape in the checkpoint and in the module: copying would broadcast it."""
    for name, value in trained.values.items():
        if name in tensors and tensors[name].shape != value.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)} in it and {tuple(tensors[name].shape)} in the module: build "
                "the module as it was trained."
            )


def _check_models(found: Contents, module: nn.Module) -> None:
    """Check that the models' adapter configs and base are those of the checkpoint, in this process alone.

    A run that resumes makes the same checks, on all ranks.
    """
    for name in found.record["models"]:
        model, folder = module.get_submodule(name), found.adapter_folder(name)
        configs = peft_configs(model)
        for adapter in found.record["adapters"][name]:
            check_config(folder if adapter == "default" else folder / adapter, configs[adapter])
        _check_base(found, name, model)


def _check_base(found: Contents, name: str, model: nn.Module) -> None:
    stored, held = found.meta["fingerprints"][name], found.held_by(name)
    errors = []
    for dtype in _PRECISIONS:
        try:
            return check_base(stored, base_fingerprints(model, None, dtype), model, "it", held)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


_PRECISIONS = (None, torch.bfloat16, torch.float64)
"""Dtypes that training may have cast the base to, tried in turn, since this process holds the base as it was loaded.

None: the base was not cast.
"""


def find_roots(module: nn.Module, inject: bool, require_adapters: bool, trains: bool = True) -> dict[str, nn.Module]:
    """Find the models inside `module` that are to be parallelized, and return them by name.

    A model is a direct child of the LightningModule, or a child of its `nn.ModuleList` or `nn.ModuleDict`, which have
    no forward of their own. Models with adapters are parallelized; with `require_adapters=False`, all models that have
    parameters are.

    Args:
        module: The LightningModule.
        inject: True if an adapter is to be injected into a model that has none.
        require_adapters: As in `ParallelConfig`.
        trains: False for an evaluation: a module without a model, and one that would train outside of it, are accepted.

    Raises:
        ValueError: `module` is to train and holds no model with parameters, or several of which one must be chosen to
            get the adapter; or a parameter trains that is outside of the models to parallelize.
    """
    kind = type(module).__name__
    models = {name: child for name, child in _models(module) if any(True for _ in child.parameters())}
    if not models and trains and require_adapters:
        raise ValueError(
            f"{kind} holds no model with parameters: build it in __init__ or configure_model and keep it in an "
            "attribute, for example self.model."
        )
    adapted = {name: model for name, model in models.items() if has_adapters(model)}
    if not require_adapters:
        roots = models
    elif adapted:
        roots = adapted
    elif inject and len(models) > 1:
        raise ValueError(
            f"lora_config is given, but {kind} holds several models ({', '.join(models)}): call peft.get_peft_model on "
            "the one to adapt."
        )
    else:
        roots = models
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
        if type(child) in (nn.ModuleList, nn.ModuleDict):
            yield from _models(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child
