"""Which checkpoints in a folder are complete, which is the newest, and which to keep."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from lora_parallel.atomic import remove_folder
from lora_parallel.checkpoint_layout import DIGEST_SINCE, META

__all__ = [
    "alteration",
    "checksum",
    "complete_checkpoints",
    "damage",
    "latest_checkpoint",
    "prune",
    "read_meta",
    "write_meta",
]


_ENTRIES = {
    "format": int,
    "name": str,
    "number": int,
    "writer": str,
    "files": dict,
    "parameters": dict,
    "fingerprints": dict,
}


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None where there is none (or no such folder).

    Newest is the one that was saved last, by a number that every save in a folder counts up; not by clocks. Complete is
    one whose files are all there in their full length. Not collective; where each rank asks, each must see the folder.
    """
    found = complete_checkpoints(Path(directory))
    return found[-1] if found else None


def complete_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
    if not directory.is_dir():
        return []
    found = []
    for path in directory.iterdir():
        if path.name.startswith(".") or path.is_symlink():
            continue
        try:
            meta = read_meta(path)
            if damage(path, meta) is None:
                found.append((meta["number"], path.name, path))
        except (OSError, ValueError):  # nothing of ours, or nothing that this user may read
            continue
    return [path for *_, path in sorted(found)]


def read_meta(path: Path) -> dict[str, Any]:
    """What meta.json says.

    From format 2 on, every byte of it must be as `write_meta` wrote it.

    Raises:
        ValueError: It is damaged, or not one of ours.
    """
    try:
        text = (path / META).read_text()
        meta = json.loads(text)
        for key, kind in _ENTRIES.items():
            if not isinstance(meta[key], kind):
                raise TypeError(f"{key} is a {type(meta[key]).__name__}")
        if not isinstance(meta.get("checksums", {}), dict):
            raise TypeError("checksums is no dict")
        if meta["format"] >= DIGEST_SINCE and text != _text({key: meta[key] for key in meta if key != "digest"}):
            raise ValueError("it is not what was written")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path / META} is damaged ({type(error).__name__}: {error}).") from error
    return meta


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, with a digest of itself."""
    (path / META).write_text(_text(meta))


def _text(meta: dict[str, Any]) -> str:
    return json.dumps({**meta, "digest": zlib.crc32(json.dumps(meta).encode())}, indent=2) + "\n"


def damage(path: Path, meta: dict[str, Any]) -> str | None:
    """What is wrong with the files that a checkpoint consists of; None if nothing is."""
    for name, size in meta["files"].items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes, and was written with {size}: it is truncated or changed"
    return None


def checksum(file: Path) -> int:
    """Of a file's bytes."""
    total = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            total = zlib.crc32(block, total)
    return total


_BLOCK_BYTES = 2**24


def alteration(path: Path, meta: Mapping[str, Any], names: Container[str] | None = None) -> str | None:
    """Which file has other bytes than were written, of those that have a checksum; None if none has.

    Args:
        path: The checkpoint.
        meta: What its meta.json says. Until format 2 the shards in state/ had no checksums.
        names: Which files to look at; None: all.
    """
    for name, written in meta.get("checksums", {}).items():
        if (names is None or name in names) and checksum(path / name) != written:
            return f"{path / name} has other bytes than were written: the disk or a copy damaged it, or it was edited"
    return None


def prune(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep`. What is not a complete checkpoint of ours stays."""
    for path in complete_checkpoints(directory)[:-keep]:
        remove_folder(path)
