"""Save and load checkpoints in a training loop of the user's own: adapters and the rest of the train state.

A checkpoint can be loaded on another mesh than the one that wrote it. The frozen base is never gathered or written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lora_parallel.checkpoint.reader import load_models, load_optimizers, read_checkpoint, resume_counting
from lora_parallel.checkpoint.states import TrainState, restore_random_state
from lora_parallel.checkpoint.writer import write_checkpoint
from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.storage import check_loadable, local_path, without_numpy

_WRITER = "lora_parallel"


@collective_call("save_checkpoint")
def save_checkpoint(
    model: nn.Module,
    optimizer: Optimizer | list[Optimizer] | None,
    directory: str | os.PathLike[str],
    extra: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    async_save: bool = False,
) -> Path:
    """Write a checkpoint that `load_checkpoint` resumes from, on any mesh. Collective.

    The checkpoint holds the model's adapters and all other parameters that train, but not the frozen base. It also
    holds persistent buffers, optimizer states, random states and the count of forwards that dropout depends on. A
    scheduler, a step count or the position in the data belong in `extra`. If the process is killed at any moment,
    earlier checkpoints stay as they were.

    Args:
        model: The model that `parallelize` returned, or a module that holds such models.
        optimizer: The model's optimizer, or a list of its optimizers; None to save none.
        directory: The checkpoint to write, for example "checkpoints/step-100". It must be empty or not exist.
        extra: Plain values, containers and tensors, such as {"scheduler": scheduler.state_dict(), "step": step}. Those
            of rank 0 are saved.
        keep_last: The number of the newest complete checkpoints to keep in the folder that `directory` is in, the new
            one included; older ones are removed. None: keep all.
        async_save: Return once the state is copied to the CPU, and write while training goes on. At most one save is in
            flight: the next save waits for it, and so do `load_checkpoint`, `wait_for_save` and the end of the process.
            The call that waits raises the errors of the save; the end of the process only logs them.

    Returns:
        The path of the checkpoint. With `async_save`, the checkpoint is complete after `wait_for_save`.

    Raises:
        FileExistsError: `directory` exists and is not empty.
        TypeError: `extra` is not a dict, or `optimizer` is not an optimizer or a list of them.
        ValueError: `extra` holds values that are not plain, an optimizer is not the model's, `keep_last` is not
            positive, or no part of the model was parallelized.
        OSError: The checkpoint cannot be written. All on every rank.
    """
    with agreed():
        path = local_path(directory)
        if path.name.startswith("."):
            raise ValueError(f"{path}: a name that starts with a dot is for what is half written; choose another.")
        state = _train_state(model, optimizer)
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"extra is a {type(extra).__name__}: give a dict.")
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"keep_last={keep_last!r}: give a positive int, or None to keep all.")
        values = without_numpy(dict(extra or {}))
        for key, value in values.items():
            check_loadable(
                f"extra[{key!r}] holds what", value, "save plain values and tensors, such as a state_dict()."
            )
    return write_checkpoint(path, state, {"extra": values}, _WRITER, keep_last=keep_last, async_save=async_save)


@collective_call("load_checkpoint")
@torch.inference_mode(False)  # tensors made in inference mode cannot be trained with
def load_checkpoint(
    model: nn.Module, optimizer: Optimizer | list[Optimizer] | None, directory: str | os.PathLike[str]
) -> dict[str, Any]:
    """Resume from a checkpoint, on the mesh that wrote it or any other. Collective.

    Each rank reads its own slices. The model and the optimizers are changed only if everything fits.

    Args:
        model: A model that was built and parallelized as the saved one was; the mesh may differ.
        optimizer: An optimizer or a list of optimizers, of the same classes and groups as the saved ones; None to load
            none.
        directory: The checkpoint; `latest_checkpoint` finds the newest.

    Returns:
        The dictionary that was saved as `extra`.

    Raises:
        FileNotFoundError: There is nothing at `directory`, or `directory` is None (`latest_checkpoint` found none).
        ValueError: There is no complete checkpoint of this format at `directory`, or it belongs to another base model,
            adapter or optimizer. All on every rank.
    """
    with agreed():
        if directory is None:
            raise FileNotFoundError("directory is None: there is no checkpoint to load (latest_checkpoint found none).")
        path = local_path(directory)
    found = read_checkpoint(path, _WRITER)
    with agreed() as alike:
        state = _train_state(model, optimizer)
        alike["optimizers"] = list(state.optimizers)
        if state.optimizers and len(found.optimizers) != len(state.optimizers):
            raise ValueError(
                f"{path} holds the state of {len(found.optimizers)} optimizers, and {len(state.optimizers)} are given."
            )
    commits = [*load_models(found, state), *load_optimizers(found, state)]
    for commit in commits:
        commit()
    resume_counting(found, state)
    restore_random_state(found.record["random"], state.mesh)
    return found.record["extra"]


def _train_state(model: nn.Module, optimizer: Optimizer | list[Optimizer] | None) -> TrainState:
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer is a {type(one).__name__}: give a torch.optim.Optimizer, a list, or None.")
    state = TrainState(model, {str(index): one for index, one in enumerate(optimizers)})
    if not state.models:
        raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
    return state
