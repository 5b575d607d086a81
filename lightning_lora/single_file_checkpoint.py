"""Write and read a checkpoint as one file, which users can ask for instead of a folder.

The file holds the files of the folder, and a `state_dict` with full tensors for other programs.
"""

from __future__ import annotations

import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lora_parallel.integration import (
    Scratch,
    TrainState,
    agreed,
    check_free,
    may_be_replaced,
    open_checkpoint_folder,
    state_dict_of,
    sweep,
    write_checkpoint,
)

TRAINER = "Trainer"  # writer in meta.json of the checkpoints that Trainer's strategy writes and reads

PACKED = "lora_parallel_files"
"""Key in the file under which the folder's files are, by their path in the folder: each a tensor, uint8 [bytes]."""


def save_in_one_file(path: Path, state: TrainState, extra: Mapping[str, Any], entries: dict[str, Any]) -> None:
    """Write a checkpoint as one file, with Lightning's `entries` beside; rank 0 writes it. Collective."""
    scratch = Scratch(path)
    folder = scratch.path / path.name
    rank = dist.get_rank()
    try:
        with agreed():
            if not may_be_replaced(path) and not _is_packed(path):
                check_free(path)
            if rank == 0:
                sweep(path.parent)
                scratch.make()
        write_checkpoint(folder, state, extra, TRAINER)
        with agreed():
            if rank == 0:
                whole = state_dict_of(open_checkpoint_folder(folder, TRAINER, weights_only=False))
                files = {
                    str(file.relative_to(folder)): torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
                    for file in sorted(folder.rglob("*"))
                    if file.is_file()
                }
                packed = {**entries, "state_dict": whole, PACKED: files}
                torch.save(packed, scratch.path / "packed")
                scratch.place_file("packed")
    finally:
        if rank == 0:
            scratch.discard()


def _is_packed(path: Path) -> bool:
    """Return True if `path` is a file that `save_in_one_file` wrote, whatever its name. Nothing is unpickled."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as file:
        return any(name.endswith("/data.pkl") and PACKED.encode() in file.read(name) for name in file.namelist())


def unpacked(path: Path, weights_only: bool | None) -> tempfile.TemporaryDirectory[str] | None:
    """Unpack a file of `save_in_one_file` into a folder that lives as long as the result; None for another file."""
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
    """Write the files that a one-file checkpoint holds to a temporary folder; `path` is for errors."""
    for name in files:  # before anything is written
        parts = PurePath(name)
        if parts.is_absolute() or ".." in parts.parts:
            raise ValueError(f"{path} holds a file {name!r}, outside of its own folder: it is not to be trusted.")
    folder = tempfile.TemporaryDirectory(prefix="checkpoint")
    for name, data in files.items():
        file = Path(folder.name) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.cpu().numpy().tobytes())
    return folder
