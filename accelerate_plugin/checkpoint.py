"""`save_state` and `load_state`: one checkpoint of the engine's, which is complete or not there, and fits any mesh."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from accelerate_plugin.accelerator import Own, innermost
from accelerate_plugin.data import batch_size, check_sampler, restore_sampler, sampler_state
from accelerate_plugin.parallelism import collective_method, parallelism_of
from accelerate_plugin.schedule import check_schedule, resume_schedule
from lora_parallel.agreement import agreed
from lora_parallel.atomic import local_path, remove_folder
from lora_parallel.checkpoint_reader import load_models, load_optimizers, read_checkpoint, resume_counting
from lora_parallel.checkpoint_writer import write_checkpoint
from lora_parallel.plain import check_plain, plain
from lora_parallel.random_state import restore_random_state
from lora_parallel.state import parallelized
from lora_parallel.train_state import TrainState

__all__ = ["load_state", "save_state"]

_WRITER = "Accelerator"


def _train_state(accelerator: Accelerator) -> TrainState:
    """What a checkpoint of an Accelerator is of: its models that train, and its optimizers."""
    models = [model for model in accelerator._models if any(p.requires_grad for p in model.parameters())]
    if not any(parallelized(model) for model in models):
        raise ValueError("no model was prepared: call accelerator.prepare(model, optimizer, ...) first.")
    module = models[0] if len(models) == 1 else nn.ModuleList(models)
    return TrainState(module, {str(index): innermost(each) for index, each in enumerate(accelerator._optimizers)})


@collective_method("accelerator.save_state")
def save_state(
    own: Own, self: Accelerator, output_dir: Any = None, safe_serialization: bool = True, **others: Any
) -> str:
    """Write a checkpoint: adapters in PEFT's format and everything a run goes on with. Collective.

    A checkpoint that stands at `output_dir` is replaced once the new one is complete.

    Raises:
        TypeError: An argument that is not supported.
        ValueError: The state of a registered object is not plain, or no model was prepared.
        FileExistsError: Something else stands at `output_dir`.
        OSError: It cannot be written. All on every rank.
    """
    if parallelism_of(self) is None:
        return own(self, output_dir, safe_serialization, **others)
    naming = self.project_configuration.automatic_checkpoint_naming
    with agreed():
        if others or not safe_serialization:
            unsupported = ", ".join(others) or "safe_serialization=False"
            raise TypeError(f"save_state of a sharded model does not support {unsupported}: leave it out.")
        if naming:
            output_dir = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{self.save_iteration}")
        if output_dir is None:
            raise ValueError("no output_dir is given and automatic checkpoint naming is disabled: give one.")
        path = local_path(output_dir)
        if naming and path.exists():
            raise ValueError(f"{path} exists already: set accelerator.project_configuration.iteration to go on.")
        state = _train_state(self)
        extra: dict[str, Any] = {
            "schedulers": [each.state_dict() for each in self._schedulers],
            "processes": self.num_processes,
            "loader": _trained_by(self),
            "rows": _rows_of_an_update(self, _trained_by(self)),
            "samplers": [sampler_state(self, each) for each in self._dataloaders],
            "loaders": [each.state_dict() if self.use_stateful_dataloader else None for each in self._dataloaders],
            "custom": [each.state_dict() for each in self._custom_objects],
            "step": self.step,
        }
        for index, each in enumerate(extra["custom"]):
            kind = type(self._custom_objects[index]).__name__
            check_plain(
                f"the state_dict of {kind}, registered for checkpointing, holds what", plain(each), "use plain values."
            )
    write_checkpoint(path, state, {"accelerator": extra}, _WRITER, replace=not naming)
    with agreed():
        for hook in self._save_model_state_pre_hook.values():  # afterwards: they write files of their own in there
            hook(self._models, [], str(path))
    if naming and self.is_main_process and self.project_configuration.total_limit is not None:
        for old in _numbered(path.parent)[: -self.project_configuration.total_limit]:
            remove_folder(old)
    self.project_configuration.iteration += 1
    return str(path)


@collective_method("accelerator.load_state")
def load_state(
    own: Own, self: Accelerator, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **others: Any
) -> None:
    """Go on from a checkpoint, on the mesh that wrote it or any other. Collective.

    Nothing is changed unless everything fits.

    Raises:
        FileNotFoundError: There is nothing at `input_dir`.
        ValueError: What is there is no complete checkpoint of this format, or of another base, adapter, optimizer or
            set of registered objects. All on every rank.
    """
    if parallelism_of(self) is None:
        own(self, input_dir, load_kwargs, **others)
        return
    with agreed():
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            there = _numbered(Path(self.project_dir) / "checkpoints")
            if not there:
                raise FileNotFoundError(f"there is no checkpoint in {self.project_dir}/checkpoints.")
            input_dir = there[-1]
        if input_dir is None:
            raise ValueError("no input_dir is given and automatic checkpoint naming is disabled: give one.")
        path = local_path(os.path.expanduser(input_dir))
    found = read_checkpoint(path, _WRITER)
    extra = found.record["accelerator"]
    with agreed():
        state = _train_state(self)
        for what, mine in (
            ("schedulers", self._schedulers),
            ("samplers", self._dataloaders),
            ("custom", self._custom_objects),
        ):
            if len(extra[what]) != len(mine):
                name = {"samplers": "dataloaders", "custom": "objects registered for checkpointing"}.get(what, what)
                raise ValueError(f"{path} holds {len(extra[what])} {name}, this Accelerator has {len(mine)}.")
        for scheduler, saved in zip(self._schedulers, extra["schedulers"], strict=True):
            check_schedule(scheduler.scheduler, saved)
        for loader, saved in zip(self._dataloaders, extra["samplers"], strict=True):
            check_sampler(loader, saved)
        if found.optimizers.keys() != state.optimizers.keys():
            raise ValueError(
                f"{path} holds the state of {len(found.optimizers)} optimizers, this Accelerator has "
                f"{len(state.optimizers)}."
            )
    commits = [*load_models(found, state), *load_optimizers(found, state)]
    with agreed():
        for hook in self._load_model_state_pre_hook.values():
            hook([], str(path))
    for commit in commits:
        commit()
    resume_counting(found, state)
    with agreed():
        for scheduler, saved in zip(self._schedulers, extra["schedulers"], strict=True):
            resume_schedule(scheduler.scheduler, saved, _scale(self, extra))
        for loader, sampler, saved in zip(self._dataloaders, extra["samplers"], extra["loaders"], strict=True):
            restore_sampler(loader, sampler)
            if saved is not None and self.use_stateful_dataloader:
                loader.load_state_dict(saved)
        for each, saved in zip(self._custom_objects, extra["custom"], strict=True):
            each.load_state_dict(saved)
    self.step = extra["step"]
    restore_random_state(found.record["random"], state.parallel.mesh)


def _trained_by(accelerator: Accelerator) -> int:
    """Which dataloader a run trains on: the one that is being read, or else the first."""
    active = accelerator.gradient_state.active_dataloader
    return next((index for index, each in enumerate(accelerator._dataloaders) if each is active), 0)


def _rows_of_an_update(accelerator: Accelerator, loader: int) -> int | None:
    """How many rows one process contributes to an update of the parameters, if that can be known."""
    size = batch_size(accelerator._dataloaders[loader]) if loader < len(accelerator._dataloaders) else None
    return size * accelerator.gradient_accumulation_steps if size is not None else None


def _scale(accelerator: Accelerator, saved: Mapping[str, Any]) -> Fraction:
    """By what to multiply the steps that a prepared scheduler has counted.

    It counts one for each process and update, and an update may take other numbers of rows here: on half the processes,
    for example, twice the rows make the same global batch.
    """
    if accelerator.split_batches or not accelerator.step_scheduler_with_optimizer:
        return Fraction(1)
    here = _rows_of_an_update(accelerator, saved["loader"])
    if saved["rows"] and here:
        return Fraction(saved["rows"], here)
    return Fraction(accelerator.num_processes, saved["processes"])


def _numbered(folder: Path) -> list[Path]:
    """Checkpoints that automatic naming made, oldest first."""
    named = (
        [(re.fullmatch(r"checkpoint_(\d+)", each.name), each) for each in folder.iterdir()] if folder.is_dir() else []
    )
    return [each for _, each in sorted((int(match[1]), each) for match, each in named if match)]
