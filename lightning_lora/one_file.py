"""A checkpoint in one file, for those who ask for it: the folder's files in it, and a `state_dict` that others read."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lora_parallel.agreement import agreed
from lora_parallel.atomic import Scratch, check_free, sweep
from lora_parallel.checkpoint_reader import open_checkpoint_folder, state_dict_of
from lora_parallel.checkpoint_writer import may_be_replaced, write_checkpoint
from lora_parallel.train_state import TrainState

__all__ = ["PACKED", "TRAINER", "save_in_one_file", "unpack", "unpacked"]

TRAINER = "Trainer"
"""Who wrote a checkpoint that Trainer's strategy reads."""

PACKED = "lora_parallel_files"
"""Where in the file the folder's files are: a tensor of bytes each, by their path in the folder."""


def save_in_one_file(path: Path, state: TrainState, extra: Mapping[str, Any], entries: dict[str, Any]) -> None:
    """Write a checkpoint as the file `path`. Collective; rank 0 writes the file.

    Args:
        path: The file; a checkpoint that stands there is replaced.
        state: What to save.
        extra: As in `write_checkpoint`.
        entries: What Lightning puts into a file; its `state_dict` is added: the trained parameters in full, the
            buffers and other states.

    Raises:
        FileExistsError: Something else stands at `path`.
        OSError: It cannot be written; what stood at `path` is still there. All on every rank.
    """
    scratch = Scratch(path)
    folder = scratch.path / path.name
    rank = dist.get_rank()
    try:
        with agreed():
            if not may_be_replaced(path):
                check_free(path)
            if rank == 0:
                sweep(path.parent)
                scratch.make()
        write_checkpoint(folder, state, extra, TRAINER)
        with agreed():
            if rank == 0:
                whole = state_dict_of(open_checkpoint_folder(folder, TRAINER, weights_only=False))
                packed = {**entries, "state_dict": whole, PACKED: _files(folder)}
                torch.save(packed, scratch.path / _FILE)
                scratch.place_file(_FILE)
    finally:
        if rank == 0:
            scratch.discard()


_FILE = "packed"


def _files(folder: Path) -> dict[str, Tensor]:
    return {
        str(file.relative_to(folder)): torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def unpacked(path: Path, weights_only: bool | None) -> tempfile.TemporaryDirectory[str] | None:
    """What `save_in_one_file` wrote, as a folder, for as long as what is returned lives; None for any other file.

    Args:
        path: The file.
        weights_only: As in `torch.load`; None means True.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds Python objects (hyperparameters, perhaps) that weights_only=True does not read. If you "
            f"trust the file, load with weights_only=False. Cause: {error}"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as a checkpoint ({error}): it is damaged.") from error
    if not isinstance(state, dict) or PACKED not in state:
        return None
    return unpack(state[PACKED], path)


def unpack(files: Mapping[str, Tensor], path: object) -> tempfile.TemporaryDirectory[str]:
    """A folder of the files that a one-file checkpoint holds, for as long as what is returned lives.

    Args:
        files: What the checkpoint has under `PACKED`.
        path: The checkpoint, for the error.

    Raises:
        ValueError: The name of a file leads out of the folder. Nothing is written then.
    """
    for name in files:
        parts = PurePath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"{path} holds a file {name!r}, outside of its own folder: it is not to be trusted.")
    folder = tempfile.TemporaryDirectory(prefix="checkpoint")
    for name, data in files.items():
        file = Path(folder.name) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.cpu().numpy().tobytes())
    return folder
