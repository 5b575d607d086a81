"""Implement `save_state` and `load_state` with the engine's checkpoint format.

A checkpoint of this format is never half-written under its name, and can be loaded on any mesh.
"""

from __future__ import annotations

import logging
import os
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
    collective_call,
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
    optimizers = {str(index): innermost(wrapper) for index, wrapper in enumerate(accelerator._optimizers)}
    return TrainState(module, optimizers, accelerator.state.parallelism_config.device_mesh)


@collective_call("accelerator.save_state")
def save_state(
    self: Accelerator, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
) -> str:
    """Write all that a run needs to resume, as a folder that has its name once it is whole; return it. Collective."""
    naming = self.project_configuration.automatic_checkpoint_naming
    with agreed():
        if save_model_func_kwargs or not safe_serialization:
            unsupported = ", ".join(save_model_func_kwargs) or "safe_serialization=False"
            raise TypeError(f"save_state of a sharded model does not support {unsupported}: leave it out.")
        if naming:
            name = f"checkpoint_{self.save_iteration}"
            output_dir = os.path.join(self.project_dir, "checkpoints", name)
        if output_dir is None:
            raise ValueError("no output_dir is given and automatic checkpoint naming is disabled: give one.")
        path = local_path(output_dir)
        if naming and path.exists():
            raise ValueError(f"{path} exists already: set accelerator.project_configuration.iteration to go on.")
        state, stateful = _train_state(self), self.use_stateful_dataloader
        extra: dict[str, Any] = {
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "processes": self.num_processes,
            "loader": _trained_by(self),
            "rows": _rows_of_an_update(self, _trained_by(self)),
            "samplers": [sampler_state(self, loader) for loader in self._dataloaders],
            "loaders": [loader.state_dict() if stateful else None for loader in self._dataloaders],
            "custom": [registered.state_dict() for registered in self._custom_objects],
            "step": self.step,
        }
        for registered, values in zip(self._custom_objects, extra["custom"], strict=True):
            kind = type(registered).__name__
            check_loadable(
                f"the state_dict of {kind}, registered for checkpointing, holds what",
                without_numpy(values),
                "use plain values.",
            )
    if not state.models and self.is_main_process:
        log.warning("save_state: no model was prepared, so that %s holds no adapters and no optimizer.", path)
    write_checkpoint(path, state, {"accelerator": extra}, _WRITER, replace=not naming)
    with agreed():
        for hook in self._save_model_state_pre_hook.values():  # only now: hooks write into the checkpoint
            hook(self._models, [], str(path))
    if naming and self.is_main_process and self.project_configuration.total_limit is not None:
        for old in _numbered(path.parent)[: -self.project_configuration.total_limit]:
            remove_folder(old)
    self.project_configuration.iteration += 1
    return str(path)


@collective_call("accelerator.load_state")
def load_state(
    self: Accelerator, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
) -> None:
    """Load a checkpoint, on the mesh that wrote it or on any other; nothing is changed unless it fits. Collective."""
    with agreed():
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            there = _numbered(Path(self.project_dir) / "checkpoints")
            if not there:
                raise FileNotFoundError(f"there is no checkpoint in {self.project_dir}/checkpoints.")
            input_dir = there[-1]
        if input_dir is None:
            raise ValueError("no input_dir is given and automatic checkpoint naming is disabled: give one.")
        path = local_path(os.path.expanduser(input_dir))
    contents = read_checkpoint(path, _WRITER)
    extra = contents.record["accelerator"]
    with agreed():
        state = _train_state(self)
        if contents.record["models"] and not state.models:
            raise ValueError(
                f"{path} holds a model, and none was prepared: call accelerator.prepare(model, optimizer, ...) first."
            )
        for key, name, mine in (
            ("schedulers", "schedulers", self._schedulers),
            ("samplers", "dataloaders", self._dataloaders),
            ("custom", "objects registered for checkpointing", self._custom_objects),
        ):
            if len(extra[key]) != len(mine):
                raise ValueError(f"{path} holds {len(extra[key])} {name}, this Accelerator has {len(mine)}.")
        for scheduler, saved in zip(self._schedulers, extra["schedulers"], strict=True):
            check_schedule(scheduler.scheduler, saved)
        for loader, saved in zip(self._dataloaders, extra["samplers"], strict=True):
            check_sampler(loader, saved)
        if contents.optimizers.keys() != state.optimizers.keys():
            raise ValueError(
                f"{path} holds the state of {len(contents.optimizers)} optimizers, this Accelerator has "
                f"{len(state.optimizers)}."
            )
    commits = [*load_models(contents, state), *load_optimizers(contents, state)]
    with agreed():
        for hook in self._load_model_state_pre_hook.values():
            hook([], str(path))
    for commit in commits:
        commit()
    resume_counting(contents, state)
    with agreed():
        for scheduler, saved in zip(self._schedulers, extra["schedulers"], strict=True):
            resume_schedule(scheduler.scheduler, saved, _scale(self, extra))
        for loader, sampler, saved in zip(self._dataloaders, extra["samplers"], extra["loaders"], strict=True):
            restore_sampler(loader, sampler)
            if saved is not None and self.use_stateful_dataloader:
                loader.load_state_dict(saved)
        for registered, saved in zip(self._custom_objects, extra["custom"], strict=True):
            registered.load_state_dict(saved)
    self.step = extra["step"]
    restore_random_state(contents.record["random"], state.mesh)


def _trained_by(accelerator: Accelerator) -> int:
    """Return the index of the dataloader that the run trains on: the one that is being read, or else the first."""
    active = accelerator.gradient_state.active_dataloader
    return next((index for index, loader in enumerate(accelerator._dataloaders) if loader is active), 0)


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
    numbers = {path: path.name.removeprefix("checkpoint_") for path in folder.glob("checkpoint_*")}
    return sorted((path for path in numbers if numbers[path].isdecimal()), key=lambda path: int(numbers[path]))
