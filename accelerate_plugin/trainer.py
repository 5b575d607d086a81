"""Replace methods of transformers' Trainer and of its callbacks where it trains with `lora_parallel`.

`patches.py` replaces each method by the function of its name here, whose argument `original` is the replaced method.
Trainer supports FSDP and tensor parallelism, but not both together. When it saves and loads a sharded model it follows
the state-dict type: it gathers the base, or writes nothing at all.

The signal sets a flag in a process some seconds later, by a timer, and Trainer's callback looks at the flag at four
places of a step. The flags of two processes may be set at different places, and a signal may reach one of them only. So
all processes ask each other as a step ends, and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from accelerate_plugin.accelerator import Original
from accelerate_plugin.models import innermost
from accelerate_plugin.parallelism import collective_method, parallelism_of, parallelism_within_batch
from lora_parallel.integration import (
    Contents,
    MeshMeter,
    Scratch,
    TrainState,
    adapter_parameters,
    agreed,
    is_checkpoint,
    largest_numbers,
    load_models,
    load_optimizers,
    local_path,
    of_another,
    over_stages,
    parallelized,
    read_checkpoint,
    read_meta,
    restore_random_state,
    resume_counting,
    state_of,
    sweep,
    write_checkpoint,
    write_pretrained,
)

_WRITER = "Trainer of transformers"
TRAIN_STATE = "train_state"
"""Name of the folder, inside a checkpoint of Trainer, that the engine writes."""


def get_tp_size(original: Original, self: Any) -> int:
    """Return 1 as the tensor-parallel size.

    Trainer divides numbers of processes by it to get those of data-parallel processes. The Accelerator counts, gathers
    and averages over data-parallel processes already.
    """
    return original(self) if parallelism_of(self.accelerator) is None else 1


def get_cp_size(original: Original, self: Any) -> int:
    """Return 1 as the context-parallel size, for the reason of `get_tp_size`."""
    return original(self) if parallelism_of(self.accelerator) is None else 1


def train(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Train, after two corrections.

    TRL's trainers keep the tensor-parallel size in `_tp_size` and divide counts of tokens by it: it is set to 1. The
    checkpoint to resume from is checked here, before Trainer fails because a file of its own is missing.

    Raises:
        ValueError: The checkpoint cannot be resumed from, or a loss of sentence-transformers would gather the rows of a
            batch from peers that all have the same.
    """
    if parallelism_of(self.accelerator) is not None:
        _refuse_gathering_losses(getattr(self, "loss", None))
        if hasattr(self, "_tp_size"):
            self._tp_size = 1
        resume = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        if isinstance(resume, str):
            with agreed():
                _check_readable(local_path(resume))
    return original(self, *args, **kwargs)


def _refuse_gathering_losses(held: Any) -> None:
    losses = held.values() if isinstance(held, dict) else [held]
    modules = [module for loss in losses if isinstance(loss, nn.Module) for module in loss.modules()]
    gathering = [module for module in modules if getattr(module, "gather_across_devices", False)]
    if gathering and parallelism_within_batch() is not None:
        raise ValueError(
            f"{type(gathering[0]).__name__}(gather_across_devices=True) takes the rows of all processes for different "
            "ones, and tensor, context and pipeline parallel peers have the same: leave it False, or use sizes of 1."
        )


def has_mixed_mesh_grads(original: Original, self: Any, model: nn.Module) -> bool:
    """Return False, so that Trainer lets the Accelerator clip, which can clip gradients on several meshes."""
    return parallelism_of(self.accelerator) is None and original(self, model)


def store_flos(original: Original, self: Any) -> None:
    """Add up the floating-point operations that the data-parallel processes have counted, each for its own batches.

    Tensor-parallel peers see the same batches, and count once. A pipeline rank has counted those of its own blocks.
    """
    parallelism = parallelism_of(self.accelerator)
    if parallelism is None:
        original(self)
        return
    own = sum(over_stages(float(self.current_flos), parallelism.mesh))
    counted = torch.tensor(own, dtype=torch.float64, device=self.args.device)
    self.state.total_flos += self.accelerator.reduce(counted, "sum").item()
    self.current_flos = 0


# ---------------------------------------------------------------------- saving


@collective_method("trainer.save_model")
def save_model(original: Original, self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
    """Write the adapters, with any state-dict type, and the files that Trainer writes beside a model. Collective."""
    if parallelism_of(self.accelerator) is None:
        original(self, output_dir, _internal_call)
        return
    directory = output_dir if output_dir is not None else self.args.output_dir
    if state_of(self.model) is None:
        # The model is not sharded yet (before training): adapters are whole, and in memory but for copies of the base.
        with agreed():
            written = adapter_parameters(self.model) or dict(self.model.named_parameters())
            if any(parameter.is_meta for parameter in written.values()):
                raise RuntimeError(
                    "the model's weights are still on disk, from where each process will read its part: train or "
                    "evaluate before trainer.save_model, or load the model with LORA_PARALLEL_DEFER=0 set."
                )
            if self.args.should_save:
                self._save(directory)
    else:
        write_pretrained(self.model, directory)
        with agreed():
            if self.args.should_save:
                _save_beside(self, directory)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def _save_beside(self: Any, directory: str) -> None:
    """Write what Trainer's `_save` writes beside a model, which is there already: the tokenizer, the arguments."""
    model = self.model
    kept = vars(model).get("save_pretrained")
    if kept is None:  # a module of the user's, whose state dict Trainer would write itself
        self.model = object.__new__(_SavedAlready)
    else:
        vars(model)["save_pretrained"] = _SavedAlready.save_pretrained
    try:
        self._save(directory, state_dict={})
    finally:
        self.model = model
        if kept is not None:
            vars(model)["save_pretrained"] = kept


class _SavedAlready(PreTrainedModel):
    """Stand in for a model that is saved already, under a class whose `save_pretrained` Trainer calls."""

    def save_pretrained(*args: Any, **kwargs: Any) -> None:
        """Write nothing."""


@collective_method("Trainer's saving of a checkpoint")
def save_checkpoint(original: Original, self: Any, model: nn.Module, trial: Any) -> None:
    """Save a checkpoint by Trainer's own steps, in a folder beside its place that is renamed at the end. Collective.

    Trainer itself writes in place; since scripts resume from the newest folder, they could find an incomplete one.
    """
    if parallelism_of(self.accelerator) is None:
        original(self, model, trial)
        return
    if self.hp_search_backend is None and trial is None:
        self.store_flos()
    run = local_path(self._get_output_dir(trial=trial))
    target = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
    scratch = Scratch(target)
    writer = self.is_world_process_zero()
    try:
        with agreed():
            if writer:
                sweep(run)
                scratch.make()
        self.save_model(str(scratch.path), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(scratch.path))
        best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        with agreed():
            if self.state.best_global_step and (best == target or best.is_dir()):
                self.state.best_model_checkpoint = str(best)
            if writer:
                _note_callbacks(self)
                self.state.save_to_json(str(scratch.path / TRAINER_STATE_NAME))
                scratch.place(replace=True)
    finally:
        scratch.discard()
    if self.args.push_to_hub:
        self._push_from_checkpoint(str(target))
    if writer:
        rotate_checkpoints(
            output_dir=str(run),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )


def _note_callbacks(self: Any) -> None:
    """Put the states that callbacks export into the state that Trainer saves."""
    for each in [*self.callback_handler.callbacks, self.control]:
        if isinstance(each, ExportableState):
            kept = self.state.stateful_callbacks
            name = type(each).__name__
            if isinstance(kept[name], list):
                kept[name].append(each.state())
            else:
                kept[name] = each.state()


@collective_method("Trainer's saving of the optimizer")
def save_optimizer_and_scheduler(original: Original, self: Any, output_dir: str) -> None:
    """Write everything that a run needs to resume, on any mesh, in the engine's format. Collective."""
    if parallelism_of(self.accelerator) is None:
        original(self, output_dir)
        return
    extra = {"scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler is not None else None}
    path = local_path(Path(output_dir) / TRAIN_STATE)
    write_checkpoint(path, _train_state(self), {"trainer": extra}, _WRITER, replace=True)


def _train_state(self: Any) -> TrainState:
    return TrainState(self.model, {"0": innermost(self.optimizer)})


# ---------------------------------------------------------------------- loading


@collective_method("Trainer's loading of a checkpoint")
def load_from_checkpoint(
    original: Original, self: Any, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    """Load the adapters, each process its own slices, and the count of forwards. Collective."""
    if parallelism_of(self.accelerator) is None:
        original(self, resume_from_checkpoint, model)
        return
    found = _read(resume_from_checkpoint)
    state = _train_state(self)
    for commit in load_models(found, state):
        commit()
    resume_counting(found, state)


@collective_method("Trainer's loading of the optimizer")
def load_optimizer_and_scheduler(original: Original, self: Any, checkpoint: str | None) -> None:
    """Load the states of the optimizer and of the scheduler. Collective."""
    if parallelism_of(self.accelerator) is None or checkpoint is None:
        original(self, checkpoint)
        return
    found = _read(checkpoint)
    for commit in load_optimizers(found, _train_state(self)):
        commit()
    saved = found.record["trainer"]["scheduler"]
    if saved is not None and self.lr_scheduler is not None:
        self.lr_scheduler.load_state_dict(saved)


@collective_method("Trainer's loading of random states")
def load_rng_state(original: Original, self: Any, checkpoint: str | None) -> None:
    """Load the random state of this process's data-parallel rank from a checkpoint. Collective.

    A rank that the checkpoint lacks gets a state that is derived from the first rank's.
    """
    parallelism = parallelism_of(self.accelerator)
    if parallelism is None or checkpoint is None:
        original(self, checkpoint)
        return
    restore_random_state(_read(checkpoint).record["random"], parallelism.mesh)


@collective_method("Trainer's loading of the best model")
def load_best_model(original: Original, self: Any) -> None:
    """Load everything that trains from the best checkpoint. Collective."""
    if parallelism_of(self.accelerator) is None:
        original(self)
        return
    best = str(self.state.best_model_checkpoint)
    for commit in load_models(_read(best), _train_state(self)):
        commit()


def _read(checkpoint: str) -> Contents:
    with agreed():
        path = local_path(checkpoint)
        _check_readable(path)
    return read_checkpoint(path / TRAIN_STATE, _WRITER)


def _check_readable(path: Path) -> None:
    if not path.is_dir() or is_checkpoint(path / TRAIN_STATE):
        return
    if is_checkpoint(path):
        raise ValueError(of_another(path, read_meta(path)["writer"], _WRITER))
    raise ValueError(
        f"{path} has no {TRAIN_STATE}/: it is no checkpoint that a run of this library can go on from (another "
        "library's, or one of save_only_model). Load its adapter, or its whole model, before training."
    )


class MeshCallback(TrainerCallback):
    """Log tokens a second, MFU, memory and the share of communication, as docs/metrics.md defines them.

        trainer = Trainer(..., callbacks=[MeshCallback()])

    The numbers are in `state.log_history` and go wherever `report_to` says, every `logging_steps` steps, under names
    that begin with "mesh/". Time of evaluation and of saving is left out.

    Args:
        peak_flops: Operations a second that one device could do at best; None to look the device up.
        profile_every: One step of so many is profiled, for the share of communication; None for no step.
    """

    def __init__(self, peak_flops: float | None = None, profile_every: int | None = None) -> None:
        self._peak_flops, self._profile_every = peak_flops, profile_every
        self._meter: MeshMeter | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._close()  # of a run that has failed
        models = list(parallelized(model).values()) or [model]
        self._meter = MeshMeter(models, self._peak_flops, self._profile_every)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._meter is not None:
            self._meter.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._meter is not None:
            self._meter.end_step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._close()

    def read(self) -> dict[str, float]:
        """Return the numbers of the steps since the last call. Collective."""
        return {} if self._meter is None else self._meter.read()

    def _pause(self) -> None:
        if self._meter is not None:
            self._meter.pause()

    def _close(self) -> None:
        if self._meter is not None:
            self._meter.close()
        self._meter = None


def log(original: Original, self: Any, logs: dict[str, float], start_time: float | None = None) -> None:
    """Log, and add the numbers of each `MeshCallback` to the entry of a training step.

    Callbacks get an entry after those of `report_to` have sent theirs, too late to add to it.
    """
    if "loss" in logs:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, MeshCallback):
                logs.update(callback.read())
    original(self, logs, start_time)


def on_step_end(original: Original, self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Save and stop if any process has received SIGTERM. Collective."""
    if _works_alone(self):
        original(self, args, state, control, **kwargs)
        return
    manager = self.jit_manager
    asked = [manager.is_checkpoint_requested]
    manager.is_checkpoint_requested = bool(largest_numbers(asked, "Trainer's step with enable_jit_checkpoint")[0])
    original(self, args, state, control, **kwargs)


def at_other_places(original: Original, self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Do nothing in training on a mesh: another process may be at another place."""
    if _works_alone(self):
        original(self, args, state, control, **kwargs)


def _works_alone(callback: Any) -> bool:
    return callback.jit_manager is None or parallelism_of(callback.trainer.accelerator) is None
