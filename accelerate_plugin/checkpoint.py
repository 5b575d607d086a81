"""Implement `save_state` and `load_state` with the engine's checkpoint format.

A checkpoint of this format is never half-written under its name, and can be loaded on any mesh.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from accelerate_plugin.data import batch_size, check_sampler, restore_sampler, sampler_state
from accelerate_plugin.models import innermost
from lora_parallel.integration import (
    TrainState,
    agreed,
    check_loadable,
    load_models,
    load_optimizers,
    local_path,
    read_checkpoint,
    remove_folder,
    restore_random_state,
    resume_counting,
    without_numpy,
    write_checkpoint,
)

log = logging.getLogger(__name__)

_WRITER = "Accelerator"


def check_schedule(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Check that a saved state comes from a scheduler of the same kind."""
    differing = sorted(scheduler.state_dict().keys() ^ saved.keys())
    if differing:
        raise ValueError(
            f"the saved schedule is none of {type(scheduler).__name__} ({differing} are not in both): make the "
            "scheduler as it was made in the run that saved."
        )


def resume_schedule(scheduler: Any, saved: Mapping[str, Any], scale: Fraction) -> None:
    """Load the state of a scheduler of torch; `scale` steps of this run correspond to one that is saved."""
    here = scheduler.state_dict()
    by_steps = "last_epoch" in saved and "num_bad_epochs" not in saved  # ReduceLROnPlateau does not count steps
    # Lengths and factors are kept: they are in the unit of this run, and the saved ones may not be.
    scheduler.load_state_dict(_scaled(here, saved, scale) if by_steps and scale != 1 else saved)


def _scaled(here: Mapping[str, Any], saved: Mapping[str, Any], scale: Fraction) -> dict[str, Any]:
    mixed = {**here, **{key: saved[key] for key in ("base_lrs", "_last_lr") if key in saved}}
    for key in ("last_epoch", "_step_count", "T_cur", "T_i"):
        if key in saved:
            start = int(key == "_step_count")  # _step_count counts the step in the constructor too
            mixed[key] = start + round((saved[key] - start) * scale)
    if "_schedulers" in saved:  # of SequentialLR and ChainedScheduler
        parts = zip(here["_schedulers"], saved["_schedulers"], strict=True)
        mixed["_schedulers"] = [_scaled(mine, theirs, scale) for mine, theirs in parts]
    return mixed


def _train_state(accelerator: Accelerator) -> TrainState:
    """Return the models with trained parameters and the optimizers of an Accelerator, which its checkpoints hold."""
    models = [model for model in accelerator._models if any(p.requires_grad for p in model.parameters())]
    module = models[0] if len(models) == 1 else nn.ModuleList(models)
    optimizers = {str(index): innermost(each) for index, each in enumerate(accelerator._optimizers)}
    return TrainState(module, optimizers, accelerator.state.parallelism_config.mesh)


def save_state(accelerator: Accelerator, output_dir: Any = None, safe_serialization: bool = True, **others: Any) -> str:
    """Write all that a run needs to resume, as a folder that appears under its name once it is whole. Collective."""
    naming = accelerator.project_configuration.automatic_checkpoint_naming
    with agreed():
        if others or not safe_serialization:
            unsupported = ", ".join(others) or "safe_serialization=False"
            raise TypeError(f"save_state of a sharded model does not support {unsupported}: leave it out.")
        if naming:
            name = f"checkpoint_{accelerator.save_iteration}"
            output_dir = os.path.join(accelerator.project_dir, "checkpoints", name)
        if output_dir is None:
            raise ValueError("no output_dir is given and automatic checkpoint naming is disabled: give one.")
        path = local_path(output_dir)
        if naming and path.exists():
            raise ValueError(f"{path} exists already: set accelerator.project_configuration.iteration to go on.")
        state, stateful = _train_state(accelerator), accelerator.use_stateful_dataloader
        extra: dict[str, Any] = {
            "schedulers": [each.state_dict() for each in accelerator._schedulers],
            "processes": accelerator.num_processes,
            "loader": _trained_by(accelerator),
            "rows": _rows_of_an_update(accelerator, _trained_by(accelerator)),
            "samplers": [sampler_state(accelerator, each) for each in accelerator._dataloaders],
            "loaders": [each.state_dict() if stateful else None for each in accelerator._dataloaders],
            "custom": [each.state_dict() for each in accelerator._custom_objects],
            "step": accelerator.step,
        }
        for registered, values in zip(accelerator._custom_objects, extra["custom"], strict=True):
            kind = type(registered).__name__
            check_loadable(
                f"the state_dict of {kind}, registered for checkpointing, holds what",
                without_numpy(values),
                "use plain values.",
            )
    if not state.models and accelerator.is_main_process:
        log.warning("save_state: no model was prepared, so that %s holds no adapters and no optimizer.", path)
    write_checkpoint(path, state, {"accelerator": extra}, _WRITER, replace=not naming)
    with agreed():
        for hook in accelerator._save_model_state_pre_hook.values():  # only now: hooks write into the checkpoint
            hook(accelerator._models, [], str(path))
    if naming and accelerator.is_main_process and accelerator.project_configuration.total_limit is not None:
        for old in _numbered(path.parent)[: -accelerator.project_configuration.total_limit]:
            remove_folder(old)
    accelerator.project_configuration.iteration += 1
    return str(path)


def load_state(accelerator: Accelerator, input_dir: Any = None) -> None:
    """Load a checkpoint, on the mesh that wrote it or on any other; nothing is changed unless it fits. Collective."""
    with agreed():
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            there = _numbered(Path(accelerator.project_dir) / "checkpoints")
            if not there:
                raise FileNotFoundError(f"there is no checkpoint in {accelerator.project_dir}/checkpoints.")
            input_dir = there[-1]
        if input_dir is None:
            raise ValueError("no input_dir is given and automatic checkpoint naming is disabled: give one.")
        path = local_path(os.path.expanduser(input_dir))
    found = read_checkpoint(path, _WRITER)
    extra = found.record["accelerator"]
    with agreed():
        state = _train_state(accelerator)
        if found.record["models"] and not state.models:
            raise ValueError(
                f"{path} holds a model, and none was prepared: call accelerator.prepare(model, optimizer, ...) first."
            )
        for key, name, mine in (
            ("schedulers", "schedulers", accelerator._schedulers),
            ("samplers", "dataloaders", accelerator._dataloaders),
            ("custom", "objects registered for checkpointing", accelerator._custom_objects),
        ):
            if len(extra[key]) != len(mine):
                raise ValueError(f"{path} holds {len(extra[key])} {name}, this Accelerator has {len(mine)}.")
        for scheduler, saved in zip(accelerator._schedulers, extra["schedulers"], strict=True):
            check_schedule(scheduler.scheduler, saved)
        for loader, saved in zip(accelerator._dataloaders, extra["samplers"], strict=True):
            check_sampler(loader, saved)
        if found.optimizers.keys() != state.optimizers.keys():
            raise ValueError(
                f"{path} holds the state of {len(found.optimizers)} optimizers, this Accelerator has "
                f"{len(state.optimizers)}."
            )
    commits = [*load_models(found, state), *load_optimizers(found, state)]
    with agreed():
        for hook in accelerator._load_model_state_pre_hook.values():
            hook([], str(path))
    for commit in commits:
        commit()
    resume_counting(found, state)
    with agreed():
        for scheduler, saved in zip(accelerator._schedulers, extra["schedulers"], strict=True):
            resume_schedule(scheduler.scheduler, saved, _scale(accelerator, extra))
        for loader, sampler, saved in zip(accelerator._dataloaders, extra["samplers"], extra["loaders"], strict=True):
            restore_sampler(loader, sampler)
            if saved is not None and accelerator.use_stateful_dataloader:
                loader.load_state_dict(saved)
        for each, saved in zip(accelerator._custom_objects, extra["custom"], strict=True):
            each.load_state_dict(saved)
    accelerator.step = extra["step"]
    restore_random_state(found.record["random"], state.mesh)


def _trained_by(accelerator: Accelerator) -> int:
    """Return the index of the dataloader that the run trains on: the one that is being read, or else the first."""
    active = accelerator.gradient_state.active_dataloader
    return next((index for index, each in enumerate(accelerator._dataloaders) if each is active), 0)


def _rows_of_an_update(accelerator: Accelerator, loader: int) -> int | None:
    """Return the number of rows that one process contributes to an optimizer step; None if it is not known."""
    size = batch_size(accelerator._dataloaders[loader]) if loader < len(accelerator._dataloaders) else None
    return size * accelerator.gradient_accumulation_steps if size is not None else None


def _scale(accelerator: Accelerator, saved: Mapping[str, Any]) -> Fraction:
    """Return the factor that converts the saved step count of a prepared scheduler to a step count of this run."""
    # The scheduler counts one step per process and update, and a process may contribute another number of rows in this
    # run: half as many processes need twice the rows each for the same global batch.
    if accelerator.split_batches or not accelerator.step_scheduler_with_optimizer:
        return Fraction(1)
    here = _rows_of_an_update(accelerator, saved["loader"])
    if saved["rows"] and here:
        return Fraction(saved["rows"], here)
    return Fraction(accelerator.num_processes, saved["processes"])


def _numbered(folder: Path) -> list[Path]:
    """List the checkpoints that automatic naming made, oldest first."""
    found = [*folder.iterdir()] if folder.is_dir() else []
    return sorted(
        (path for path in found if re.fullmatch(r"checkpoint_\d+", path.name)), key=lambda path: int(path.name[11:])
    )
