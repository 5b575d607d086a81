"""A Lightning checkpoint as a directory: adapters in PEFT's format, and the rest of the train state.

    <path>/adapter/     PEFT's folders; other adapters in subfolders of their names
    <path>/state/       torch DCP: optimizer states and trained parameters that no adapter holds, by parameter name
    <path>/trainer.pt   Lightning's own: loops, callbacks, schedulers, hyperparameters
    <path>/meta.json    format version, mesh, library versions; written last

Only what trains is gathered or written; the base never is. Written beside the target and renamed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Mapping
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
from lora_parallel.state import state_of

__all__ = ["is_checkpoint", "load_model", "load_optimizers", "optimizer_settings", "read_trainer_state", "save"]

FORMAT = 1
_META, _TRAINER = "meta.json", "trainer.pt"
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


def is_checkpoint(path: Path) -> bool:
    """Whether a complete checkpoint of ours stands at `path`."""
    return (path / _META).is_file()


def save(
    path: Path,
    roots: Mapping[str, nn.Module],
    module: nn.Module,
    optimizers: list[Optimizer] | None,
    trainer_state: dict[str, Any],
) -> None:
    """Write a checkpoint. Collective.

    Args:
        path: The directory to make; a checkpoint or file that stands there is replaced once the new one is complete.
        roots: The parallelized models by their names in `module`.
        module: The LightningModule.
        optimizers: None to save weights only.
        trainer_state: Lightning's dictionary without model and optimizer states.

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
    for index, optimizer in enumerate(optimizers or []):
        if optimizer.state:  # torch would step one without state, to make some
            state[f"optimizer_{index}"] = _optimizer_state(module, optimizer)["state"]
    if any(state.values()):
        try:
            dcp.save(state, checkpoint_id=scratch / "state")
        except dcp.CheckpointException as error:  # raised on every rank
            raise OSError(f"the train state cannot be written to {scratch}: {error}") from error
    with agreed():
        if writer:
            torch.save(trainer_state, scratch / _TRAINER)
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


def _adapter_folder(path: Path, name: str, roots: Mapping[str, nn.Module]) -> Path:
    """One folder where the module holds one model, one for each where it holds several."""
    return path / "adapter" if len(roots) == 1 else path / "adapter" / name


def _loose_parameters(module: nn.Module, roots: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    held = {parameter for model in roots.values() for parameter in adapter_parameters(model).values()}
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad and p not in held}


def _meta(roots: Mapping[str, nn.Module]) -> dict[str, Any]:
    state = state_of(next(iter(roots.values())))
    assert state is not None
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


def read_trainer_state(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Lightning's dictionary of a checkpoint.

    Args:
        path: The checkpoint.
        weights_only: As in `torch.load`; None means True.

    Raises:
        FileNotFoundError: There is no checkpoint at `path`.
        ValueError: What stands there is not a complete checkpoint of this format. On every rank.
    """
    with agreed():
        if not path.exists():
            raise FileNotFoundError(f"there is no checkpoint at {path}.")
        if not is_checkpoint(path):
            raise ValueError(
                f"{path} is not a checkpoint that LoRAParallelStrategy wrote (a directory with {_META}). Load a file "
                "that another strategy wrote into the LightningModule before training."
            )
        found = json.loads((path / _META).read_text()).get("format")
        if found != FORMAT:
            raise ValueError(f"{path} has checkpoint format {found!r}; this version reads format {FORMAT}.")
        try:
            return torch.load(path / _TRAINER, map_location="cpu", weights_only=weights_only is not False)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path / _TRAINER} holds Python objects (hyperparameters, perhaps) that weights_only=True does not "
                f"load. If you trust the file, pass weights_only=False to the Trainer's method. Cause: {error}"
            ) from error


def load_model(path: Path, roots: Mapping[str, nn.Module], module: nn.Module) -> None:
    """Fill adapters and other trained parameters from a checkpoint. Collective."""
    for name, model in roots.items():
        for adapter in peft_configs(model):
            load_adapter(model, _adapter_folder(path, name, roots), adapter)
    loose = _loose_parameters(module, roots)
    if loose:
        dcp.load({"model": loose}, checkpoint_id=path / "state")


def load_optimizers(path: Path, module: nn.Module, optimizers: list[Optimizer], written: list[dict[str, Any]]) -> None:
    """Fill the optimizers' states from a checkpoint, of which `written` are the `optimizer_settings`. Collective."""
    for index, (optimizer, groups) in enumerate(zip(optimizers, written, strict=True)):
        if groups["stepped"]:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # torch makes no state to load into where there are gradients
            target = _optimizer_state(module, optimizer)
            dcp.load({f"optimizer_{index}": target["state"]}, checkpoint_id=path / "state")
            set_optimizer_state_dict(module, optimizer, target, options=_OPTIONS)
        for group, settings in zip(optimizer.param_groups, groups["settings"], strict=True):
            group.update(settings)


def optimizer_settings(optimizer: Optimizer) -> dict[str, Any]:
    """What of an optimizer is no tensor: learning rates and the like of each group, and whether it has stepped."""
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"stepped": bool(optimizer.state), "settings": settings}


def _optimizer_state(module: nn.Module, optimizer: Optimizer) -> Any:
    return get_optimizer_state_dict(module, optimizer, options=_OPTIONS)
