"""Find the complete checkpoints in a folder and the newest of them, and remove old ones."""

from __future__ import annotations

import os
from pathlib import Path

from lora_parallel.checkpoint.meta import find_damage, read_meta
from lora_parallel.storage.atomic import remove_folder

__all__ = ["complete_checkpoints", "latest_checkpoint", "prune"]


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None if it holds none or does not exist.

    The newest checkpoint is the one that was saved last, by a number that every save in a folder counts up, not by
    clocks. A checkpoint is complete if all of its files are there in their full length. The call is not collective;
    each rank that makes it must see the folder.
    """
    found = complete_checkpoints(Path(directory))
    return found[-1] if found else None


def complete_checkpoints(directory: Path) -> list[Path]:
    """List the complete checkpoints in a folder, oldest first."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        if path.name.startswith(".") or path.is_symlink():
            continue
        try:
            meta = read_meta(path)
            if find_damage(path, meta) is None:
                found.append((meta["number"], path.name, path))
        except (OSError, ValueError):  # no checkpoint of this library, or not readable by this user
            continue
    return [path for *_, path in sorted(found)]


def prune(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints in a folder but the newest `keep`; leave everything else in it."""
    for path in complete_checkpoints(directory)[:-keep]:
        remove_folder(path)
