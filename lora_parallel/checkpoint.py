"""Checkpoints of a loop of one's own: adapters and the rest of the train state, from any mesh into any.

Only what trains is gathered or written; the base never is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lora_parallel.agreement import agreed, check_alike
from lora_parallel.atomic import local_path
from lora_parallel.checkpoint_reader import load_models, load_optimizers, read_checkpoint, resume_counting
from lora_parallel.checkpoint_writer import write_checkpoint
from lora_parallel.plain import check_plain, plain
from lora_parallel.random_state import restore_random_state
from lora_parallel.rendezvous import collective_call
from lora_parallel.train_state import TrainState

__all__ = ["load_checkpoint", "save_checkpoint"]

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

    Of the model its adapters and whatever else trains; of the base nothing. Optimizer states, random states and the
    count that dropout depends on are in it; a scheduler, a step or the position in the data belong in `extra`. A
    process that is killed at any instant leaves the checkpoints before this one as they were.

    Args:
        model: What `parallelize` returned, or a module that holds such models.
        optimizer: Its optimizer or optimizers; None to save none.
        directory: The checkpoint to write, for example "checkpoints/step-100". It must not exist, or be empty.
        extra: Plain values, containers and tensors, such as {"scheduler": scheduler.state_dict(), "step": step}; rank
            0's is saved.
        keep_last: Afterwards keep only so many of the newest complete checkpoints beside it; None: all.
        async_save: Return once the state is copied to the CPU, and write while training goes on. One save at most is in
            flight: the next one waits for it, and so do `load_checkpoint`, `wait_for_save` and the end of the process.
            Its errors are raised there.

    Returns:
        The path of the checkpoint, which with `async_save` is complete after `wait_for_save`.

    Raises:
        FileExistsError: `directory` exists and is not empty.
        ValueError: `extra` is not plain, an optimizer is not the model's, `keep_last` is not positive, or nothing of
            the model was parallelized.
        OSError: It cannot be written. All on every rank.
    """
    with agreed():
        path = local_path(directory)
        if path.name.startswith("."):
            raise ValueError(f"{path}: a name that starts with a dot is for what is half written; choose another.")
        state = TrainState(model, _numbered(optimizer))
        if extra is not None and not isinstance(extra, Mapping):
            raise TypeError(f"extra is a {type(extra).__name__}: give a dict.")
        if keep_last is not None and (isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last < 1):
            raise ValueError(f"keep_last={keep_last!r}: give a positive int, or None to keep all.")
        if not state.models:
            raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
        values = plain(dict(extra or {}))
        for key, value in values.items():
            check_plain(f"extra[{key!r}] holds what", value, "save plain values and tensors, such as a state_dict().")
    return write_checkpoint(path, state, {"extra": values}, _WRITER, keep_last=keep_last, async_save=async_save)


@collective_call("load_checkpoint")
@torch.inference_mode(False)  # what is made inside of it could not be trained with
def load_checkpoint(
    model: nn.Module, optimizer: Optimizer | list[Optimizer] | None, directory: str | os.PathLike[str]
) -> dict[str, Any]:
    """Resume from a checkpoint, on the mesh that wrote it or any other. Collective.

    Each rank reads its own slices. Nothing is changed unless everything fits.

    Args:
        model: Built and parallelized as the one that was saved.
        optimizer: Built as those that were saved, of the same classes and groups; None to leave them out.
        directory: The checkpoint; `latest_checkpoint` finds the newest.

    Returns:
        What was saved as `extra`.

    Raises:
        FileNotFoundError: There is nothing at `directory`, or it is None: `latest_checkpoint` found none.
        ValueError: It is no complete checkpoint of this format; or of another base model, adapter or optimizer. All on
            every rank.
    """
    with agreed():
        if directory is None:
            raise FileNotFoundError("directory is None: there is no checkpoint to load (latest_checkpoint found none).")
        path = local_path(directory)
    found = read_checkpoint(path, _WRITER)
    with agreed():
        state = TrainState(model, _numbered(optimizer))
        if not state.models:
            raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
        if state.optimizers and len(found.optimizers) != len(state.optimizers):
            raise ValueError(
                f"{path} holds the state of {len(found.optimizers)} optimizers, and {len(state.optimizers)} are given."
            )
    check_alike(optimizers=list(state.optimizers))
    commits = [*load_models(found, state), *load_optimizers(found, state)]
    for commit in commits:
        commit()
    resume_counting(found, state)
    restore_random_state(found.record["random"], state.parallel.mesh)
    return found.record["extra"]


def _numbered(optimizer: Optimizer | list[Optimizer] | None) -> dict[str, Optimizer]:
    given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in given:
        if not isinstance(each, Optimizer):
            raise TypeError(f"optimizer is a {type(each).__name__}: give a torch.optim.Optimizer, a list, or None.")
    return {str(index): each for index, each in enumerate(given)}
