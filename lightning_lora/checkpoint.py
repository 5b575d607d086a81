"""A Lightning checkpoint as a directory: adapters in PEFT's format, and the rest of the train state.

    <path>/adapter/     PEFT's folders; other adapters in subfolders of their names
    <path>/state/       torch DCP: optimizer states and trained parameters that no adapter holds, by parameter name
    <path>/trainer.pt   Trainer's own: loops, callbacks, schedulers, hyperparameters
    <path>/fabric.pt    instead of trainer.pt: what else the user of Fabric saves
    <path>/meta.json    format version, mesh, library versions; written last

Only what trains is gathered or written; the base never is. Written beside the target and renamed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lora_parallel import load_adapter, save_adapter
from lora_parallel.adapters import adapter_parameters, peft_configs
from lora_parallel.agreement import agreed
from lora_parallel.state import ParallelState, state_of

__all__ = [
    "FABRIC",
    "TRAINER",
    "forward_counts",
    "is_checkpoint",
    "load_models",
    "load_optimizers",
    "optimizer_settings",
    "read_rest",
    "restore_forward_counts",
    "save",
]

FORMAT = 1
TRAINER, FABRIC = "trainer.pt", "fabric.pt"
"""The file that holds what is no tensor of a model or optimizer, by who writes it."""

_META = "meta.json"
_WRITERS = {TRAINER: "Trainer", FABRIC: "Fabric"}
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def is_checkpoint(path: Path) -> bool:
    """Whether a complete checkpoint of ours stands at `path`."""
    return (path / _META).is_file()


def save(
    path: Path,
    roots: Mapping[str, nn.Module],
    module: nn.Module,
    optimizers: Mapping[str, Optimizer],
    rest: dict[str, Any],
    file: str,
) -> None:
    """Write a checkpoint. Collective.

    Args:
        path: The directory to make; a checkpoint or file that stands there is replaced once the new one is complete.
        roots: The parallelized models by their names in `module`.
        module: What holds them: the LightningModule.
        optimizers: By the names to store them under.
        rest: All that is no tensor of models or optimizers.
        file: The name of the file for it: `TRAINER` or `FABRIC`.

    Raises:
        OSError: It cannot be written, on every rank. What stood at `path` is still there.
    """
    scratch, old = path.with_name(f".{path.name}.writing"), path.with_name(f".{path.name}.replaced")
    writer = dist.get_rank() == 0
    with agreed():
        if writer:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(parents=True)
    for name, model in roots.items():
        for adapter in peft_configs(model):
            save_adapter(model, _adapter_folder(scratch, name, roots), adapter)
    state: dict[str, Any] = {"model": _loose_parameters(module, roots)}
    for name, optimizer in optimizers.items():
        if optimizer.state:  # torch would step one without state, to make some
            state[_key(name)] = _optimizer_state(module, optimizer)["state"]
    if any(state.values()):
        try:
            dcp.save(state, checkpoint_id=scratch / "state")
        except dcp.CheckpointException as error:  # raised on every rank
            raise OSError(f"the train state cannot be written to {scratch}: {error}") from error
    with agreed():
        if writer:
            torch.save(rest, scratch / file)
            (scratch / _META).write_text(json.dumps(_meta(roots), indent=2) + "\n")
            if path.exists() or path.is_symlink():
                _remove(old)
                os.replace(path, old)
            os.replace(scratch, path)
            _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _key(optimizer: str) -> str:
    return f"optimizer_{optimizer}"


def _adapter_folder(path: Path, name: str, names: Iterable[str]) -> Path:
    """One folder where a checkpoint holds one model, one for each where it holds several."""
    return path / "adapter" if len(list(names)) == 1 else path / "adapter" / name


def _loose_parameters(module: nn.Module, roots: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    held = {parameter for model in roots.values() for parameter in adapter_parameters(model).values()}
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad and p not in held}


def _meta(roots: Mapping[str, nn.Module]) -> dict[str, Any]:
    state = _state(next(iter(roots.values())))
    return {
        "format": FORMAT,
        "mesh": dict(zip(state.mesh.mesh_dim_names or (), state.mesh.shape, strict=True)),
        "versions": {name: version(name) for name in ("torch", "peft", "lightning-lora") if _installed(name)},
    }


def _installed(name: str) -> bool:
    try:
        version(name)
    except Exception:
        return False
    return True


def read_rest(path: Path, file: str, weights_only: bool | None) -> dict[str, Any]:
    """What a checkpoint holds besides the tensors of models and optimizers.

    Args:
        path: The checkpoint.
        file: `TRAINER` or `FABRIC`: who reads.
        weights_only: As in `torch.load`; None means True.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        ValueError: What stands there is not a complete checkpoint of this format, or not of this writer. On every rank.
    """
    with agreed():
        if not path.exists():
            raise FileNotFoundError(f"there is no checkpoint at {path}.")
        if not is_checkpoint(path):
            raise ValueError(
                f"{path} is not a checkpoint that LoRAParallelStrategy wrote (a directory with {_META}). Load a file "
                "that another strategy wrote into the model before training."
            )
        found = json.loads((path / _META).read_text()).get("format")
        if found != FORMAT:
            raise ValueError(f"{path} has checkpoint format {found!r}; this version reads format {FORMAT}.")
        for other, writer in _WRITERS.items():
            if other != file and (path / other).is_file():
                raise ValueError(
                    f"{path} was written by {writer}, whose loops and schedulers {_WRITERS[file]} does not know. Load "
                    "its adapter alone: lora_parallel.load_adapter(model, path / 'adapter')."
                )
        try:
            return torch.load(path / file, map_location="cpu", weights_only=weights_only is not False)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path / file} holds Python objects (hyperparameters, perhaps) that weights_only=True does not load. "
                f"If you trust the file, load with weights_only=False. Cause: {error}"
            ) from error


def load_models(path: Path, roots: Mapping[str, nn.Module], module: nn.Module, written: Iterable[str]) -> None:
    """Fill adapters and other trained parameters from a checkpoint. Collective.

    Args:
        path: The checkpoint.
        roots: The models to fill, by the names that they were saved under.
        module: What holds them.
        written: The names of all models that are in the checkpoint.
    """
    for name, model in roots.items():
        for adapter in peft_configs(model):
            load_adapter(model, _adapter_folder(path, name, written), adapter)
    loose = _loose_parameters(module, roots)
    if loose:
        dcp.load({"model": loose}, checkpoint_id=path / "state")


def load_optimizers(
    path: Path, module: nn.Module, optimizers: Mapping[str, Optimizer], written: Mapping[str, dict[str, Any]]
) -> None:
    """Fill optimizers' states from a checkpoint. Collective.

    Args:
        path: The checkpoint.
        module: What holds the models whose parameters they hold.
        optimizers: By the names that they were saved under.
        written: The `optimizer_settings` in the checkpoint, by name.

    Raises:
        ValueError: One has not as many parameter groups as the one that was saved.
    """
    with agreed():
        for name, optimizer in optimizers.items():
            groups = written[name]["settings"]
            if len(groups) != len(optimizer.param_groups):
                raise ValueError(
                    f"the optimizer in {path} has {len(groups)} parameter groups, this {type(optimizer).__name__} has "
                    f"{len(optimizer.param_groups)}: make it with the same groups."
                )
    for name, optimizer in optimizers.items():
        saved = written[name]
        if saved["stepped"]:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # torch makes no state to load into where there are gradients
            target = _optimizer_state(module, optimizer)
            dcp.load({_key(name): target["state"]}, checkpoint_id=path / "state")
            set_optimizer_state_dict(module, optimizer, target, options=_OPTIONS)
        else:
            optimizer.state.clear()
        for group, settings in zip(optimizer.param_groups, saved["settings"], strict=True):
            group.update(settings)


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """What of an optimizer is no tensor: learning rates and the like of each group, and whether it has stepped."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"stepped": bool(optimizer.state), "settings": settings}


def forward_counts(roots: Mapping[str, nn.Module]) -> dict[str, int]:
    """How often each model has run forward in training, by name: what its dropout masks depend on."""
    return {name: _state(model).forward_count.done for name, model in roots.items()}


def restore_forward_counts(roots: Mapping[str, nn.Module], counts: Mapping[str, int]) -> None:
    """Go on counting where a checkpoint was written."""
    for name, model in roots.items():
        _state(model).forward_count.done = counts[name]


def _state(model: nn.Module) -> ParallelState:
    state = state_of(model)
    assert state is not None
    return state


def _optimizer_state(module: nn.Module, optimizer: Optimizer) -> Any:
    return get_optimizer_state_dict(module, optimizer, options=_OPTIONS)
