"""A checkpoint in one file, for those who ask for it: the folder's files in it, and a `state_dict` that others read."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lora_parallel.agreement import agreed
from lora_parallel.atomic import remove_folder, replace_by
from lora_parallel.checkpoint_reader import open_checkpoint_folder, state_dict_of

__all__ = ["PACKED", "pack", "unpacked"]

PACKED = "lora_parallel_files"
"""Where in the file the folder's files are: a tensor of bytes each, by their path in the folder."""


def pack(folder: Path, path: Path, state: dict[str, Any], writer: str) -> None:
    """Put the checkpoint in `folder` into the file `path`, and remove the folder. Collective; rank 0 writes.

    What stands at `path` is replaced.

    Args:
        folder: A checkpoint.
        path: The file.
        state: What Lightning puts into a file; the trained parameters, buffers and other states are added in full, as
            its `state_dict`.
        writer: Who wrote the folder.

    Raises:
        OSError: It cannot be written, on every rank. What stood at `path` is still there.
    """
    with agreed():
        if dist.get_rank() == 0:
            try:
                found = open_checkpoint_folder(folder, writer, weights_only=False)
                _write({**state, "state_dict": state_dict_of(found), PACKED: _files(folder)}, path)
            finally:
                remove_folder(folder)


def _files(folder: Path) -> dict[str, Tensor]:
    return {
        str(file.relative_to(folder)): torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _write(state: dict[str, Any], path: Path) -> None:
    scratch = path.with_name(f".{path.name}.writing")
    try:
        with open(scratch, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        replace_by(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def unpacked(path: Path, weights_only: bool | None) -> tempfile.TemporaryDirectory[str] | None:
    """The folder in a file that `pack` wrote, for as long as what is returned lives; None for any other file.

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
    folder = tempfile.TemporaryDirectory(prefix="checkpoint")
    for name, data in state[PACKED].items():
        file = Path(folder.name) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.numpy().tobytes())
    return folder
