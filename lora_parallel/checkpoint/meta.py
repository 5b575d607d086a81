"""Write and read a checkpoint's meta.json, and hold its files to the sizes and checksums that it names."""

from __future__ import annotations

import json
import zlib
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from lora_parallel.checkpoint.layout import DIGEST_SINCE, META

__all__ = ["checksum", "find_alteration", "find_damage", "read_meta", "write_meta"]

_ENTRIES = {
    "format": int,
    "name": str,
    "number": int,
    "writer": str,
    "files": dict,
    "parameters": dict,
    "fingerprints": dict,
}


def read_meta(path: Path) -> dict[str, Any]:
    """Read a checkpoint's meta.json and check its entries.

    From format 2 on, every byte of the file must be as `write_meta` wrote it.

    Raises:
        ValueError: meta.json is damaged, or was not written by this library.
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
    """Write meta.json, with a digest of its other entries."""
    (path / META).write_text(_text(meta))


def _text(meta: dict[str, Any]) -> str:
    return json.dumps({**meta, "digest": zlib.crc32(json.dumps(meta).encode())}, indent=2) + "\n"


def find_damage(path: Path, meta: dict[str, Any]) -> str | None:
    """Describe the first file of a checkpoint that is missing or has another size; return None if there is none."""
    for name, size in meta["files"].items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes, and was written with {size}: it is truncated or changed"
    return None


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    total = 0
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            total = zlib.crc32(block, total)
    return total


_BLOCK_BYTES = 2**24


def find_alteration(path: Path, meta: Mapping[str, Any], names: Container[str] | None = None) -> str | None:
    """Describe the first file of a checkpoint whose bytes do not match its checksum; return None if there is none.

    Args:
        path: The checkpoint.
        meta: The contents of its meta.json. In formats before 2, the shards in state/ have no checksums.
        names: The files to check, of those that have a checksum; None: all of them.
    """
    for name, written in meta.get("checksums", {}).items():
        if (names is None or name in names) and checksum(path / name) != written:
            return f"{path / name} has other bytes than were written: the disk or a copy damaged it, or it was edited"
    return None
