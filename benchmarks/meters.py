"""What a process uses: bytes of safetensors files, bytes of collectives, and the memory that it takes at most."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import safetensors
import safetensors.torch
import transformers.modeling_utils
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self

import lora_parallel.lazy.files

SAMPLING_SECONDS = 0.002


@dataclass(frozen=True)
class FileRead:
    """One request for (a part of) a stored tensor. The headers of files are not counted, for anybody."""

    file: str
    key: str
    shape: tuple[int, ...]
    bytes: int


@dataclass
class ReadMeter:
    """Every read that goes through safetensors' `safe_open`; a list takes appends of several threads."""

    reads: list[FileRead] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(read.bytes for read in self.reads)

    @property
    def largest(self) -> int:
        return max((read.bytes for read in self.reads), default=0)

    def note(self, path: Any, key: str, tensor: Tensor) -> Tensor:
        shape = tuple(tensor.shape)
        self.reads.append(FileRead(str(Path(path)), key, shape, prod(shape) * tensor.element_size()))
        return tensor


class _CountedFile:
    """`safe_open`, with its reads noted."""

    meter: ReadMeter

    def __init__(self, filename: Any, *args: Any, **kwargs: Any) -> None:
        self._path = filename
        self._file: Any = _own_safe_open(filename, *args, **kwargs)

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, key: str) -> Tensor:
        return self.meter.note(self._path, key, self._file.get_tensor(key))

    def get_tensors(self, keys: list[str]) -> list[Tensor]:
        return [self.get_tensor(key) for key in keys]

    def get_slice(self, key: str) -> _CountedSlice:
        return _CountedSlice(self.meter, self._path, key, self._file.get_slice(key))


@dataclass
class _CountedSlice:
    meter: ReadMeter
    path: Any
    key: str
    view: Any

    def __getitem__(self, index: Any) -> Tensor:
        return self.meter.note(self.path, self.key, self.view[index])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.view, name)


_own_safe_open = safetensors.safe_open
_USERS: tuple[Any, ...] = (safetensors, safetensors.torch, transformers.modeling_utils, lora_parallel.lazy.files)


@contextmanager
def metered_reads() -> Iterator[ReadMeter]:
    """Within, all that opens safetensors files in this process is counted."""
    meter = ReadMeter()
    counted = type("CountedFile", (_CountedFile,), {"meter": meter})
    for module in _USERS:
        module.safe_open = counted
    try:
        yield meter
    finally:
        for module in _USERS:
            module.safe_open = _own_safe_open


@dataclass
class MemoryMeter:
    """The most that a process held at any sample, above what it held at the start, in bytes."""

    anonymous: int = 0
    file: int = 0


@contextmanager
def metered_memory() -> Iterator[MemoryMeter]:
    """Within, a thread samples this process's resident memory every two milliseconds."""
    gc.collect()
    meter, stop = MemoryMeter(), threading.Event()
    first_anonymous, first_file = _resident()

    def sample() -> None:
        anonymous, file = _resident()
        meter.anonymous = max(meter.anonymous, anonymous - first_anonymous)
        meter.file = max(meter.file, file - first_file)

    def keep_sampling() -> None:
        while not stop.wait(SAMPLING_SECONDS):
            sample()

    thread = threading.Thread(target=keep_sampling, daemon=True)
    thread.start()
    try:
        yield meter
    finally:
        stop.set()
        thread.join()
        sample()


def _resident() -> tuple[int, int]:
    """Anonymous memory, and pages of mapped files, in bytes."""
    found = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, file = (int(found[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return anonymous, file


class Received(TorchDispatchMode):
    """Counts the bytes that collectives write into this rank's tensors; what travels as Python objects is in it too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__
        if func.namespace == "_c10d_functional" and name.startswith(("all_gather", "broadcast", "all_reduce")):
            self.bytes += _size(result)
        elif func.namespace == "c10d" and name.startswith(("gather", "allgather", "_allgather", "broadcast", "recv")):
            self.bytes += _size(args[0])
        return result


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0
