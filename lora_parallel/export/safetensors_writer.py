"""Write a safetensors file while its values are read, a few megabytes at a time.

The format (https://github.com/huggingface/safetensors#format): the header's length in 8 bytes, a JSON header with the
dtype, shape and place of each tensor, the values. The safetensors library itself can only write tensors that are all in
memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO

import torch

from lora_parallel.lazy.graph import Node, Region, read

__all__ = ["write_safetensors"]

_CHUNK_BYTES = 64 * 2**20
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(
    path: Path, tensors: Mapping[str, Node], writer: bool, progress: Callable[[int], object]
) -> Exception | None:
    """Write lazy tensors to a file. Collective if reading them is.

    Args:
        path: The file to write.
        tensors: The nodes of the lazy tensors, by the names to write them under.
        writer: True on the rank that writes; other ranks only take part in reading.
        progress: A function that is called with the number of bytes that each step has read.

    Returns:
        The error that ended writing, or None. After such an error reading goes on, because other ranks take part in it.
    """
    failure: Exception | None = None
    file: IO[bytes] | None = None
    try:
        if writer:
            file = open(path, "wb")  # noqa: SIM115 - closed below, whatever fails in between
            file.write(_header(tensors))
    except (OSError, KeyError) as error:
        failure = error
    for node in tensors.values():
        for region in _chunks(node):
            block = read(node, region)
            if file is not None and failure is None:
                try:
                    file.write(block.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                except OSError as error:
                    failure = error
            progress(block.numel() * block.element_size())
    if file is not None:
        try:
            file.close()
        except OSError as error:
            failure = failure or error
    return failure


def _header(tensors: Mapping[str, Node]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, node in tensors.items():
        start, end = end, end + prod(node.shape) * node.dtype.itemsize
        entries[name] = {"dtype": _NAMES[node.dtype], "shape": list(node.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values start at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def _chunks(node: Node) -> Iterator[Region]:
    """Divide a tensor into regions of whole rows, in the order of its memory.

    A region has `_CHUNK_BYTES` at most, unless a single row has more.
    """
    shape = node.shape
    if not prod(shape):
        return
    row = prod(shape[1:]) * node.dtype.itemsize
    rows = max(1, _CHUNK_BYTES // max(1, row))
    whole = tuple(slice(0, size) for size in shape)
    if not shape:
        yield whole
        return
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])), *whole[1:])
