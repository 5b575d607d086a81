"""What a process asks of files, holds in memory and hands to collectives."""

from __future__ import annotations

import gc
import json
import re
import tempfile
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
import torch
import transformers.modeling_utils
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

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


@contextmanager
def metered_reads() -> Iterator[ReadMeter]:
    """Within, all that opens safetensors files in this process is counted."""
    import lora_parallel.lazy.files  # here, so that the other meters need nothing that is internal to the package

    users: tuple[Any, ...] = (safetensors, safetensors.torch, transformers.modeling_utils, lora_parallel.lazy.files)
    meter = ReadMeter()
    counted = type("CountedFile", (_CountedFile,), {"meter": meter})
    for module in users:
        module.safe_open = counted
    try:
        yield meter
    finally:
        for module in users:
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


class Kernels(TorchDispatchMode):
    """Count operators that run a kernel, and the bytes of the tensors that they read and write.

    Views and allocations run none. What an operator calls inside is not seen: `native_dropout` is one kernel, as on a
    GPU. A tensor that an operator takes twice is read once, and one that it changes in place is read and written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        if not func.is_view and name not in KERNEL_FREE:
            inputs = args[1:] if name in OVERWRITING else args
            named = {key: value for key, value in (kwargs or {}).items() if key != "out"}  # which is written
            read = {id(tensor): tensor for tensor in _tensors((inputs, named))}
            self.count += 1
            self.bytes += sum(map(distinct_bytes, [*read.values(), *_tensors(result)]))
        return result


KERNEL_FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
OVERWRITING = {"bernoulli_", "copy_", "fill_", "normal_", "random_", "uniform_", "zero_"}
"""Operators that write their first argument without reading it."""


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def distinct_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's different elements: an expanded dim has one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size if stride or not size else 1 for size, stride in sizes) * tensor.element_size()


@dataclass(frozen=True)
class Collective:
    """One collective that this process issued."""

    kind: str
    """all_reduce, all_gather, "reduce_scatter", "broadcast", "alltoall", ..."""

    shape: tuple[int, ...]
    """Shape of the largest tensor that it was given: an all-gather's output, a reduce-scatter's input."""

    dtype: str

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def flat(self) -> bool:
        return len(self.shape) == 1


@dataclass
class StepMeter:
    """What the profiler saw: collectives, and the most memory that torch allocated above the start, in bytes."""

    calls: list[Collective] = field(default_factory=list)
    memory: int = 0


ELEMENT_BYTES = {
    **{"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2},
    **{"long": 8, "long int": 8, "int": 4, "unsigned char": 1, "signed char": 1, "bool": 1},
}


@contextmanager
def metered_collectives(memory: bool = False) -> Iterator[StepMeter]:
    """Within, the collectives of this process are noted, in eager and in compiled code alike.

    Both reach c10d's operators, which torch's profiler records. A mode of dispatch would see the first and hide it from
    the compiler. An operator that takes a list of tensors is recorded without their dtype; the process group's own
    record of the same collective has it. Where the two do not match one to one, such a list counts as float32.

    Args:
        memory: Note allocations too.
    """
    meter = StepMeter()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=memory) as profiler:
        yield meter
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = sorted((each for each in events if "ts" in each), key=lambda each: each["ts"])
    sent = [each for each in events if each["name"].startswith(("gloo:", "nccl:")) and "barrier" not in each["name"]]
    issued = [each for each in events if each["name"].startswith("c10d::") and "barrier" not in each["name"]]
    for index, event in enumerate(issued):
        shapes, dtypes = event["args"]["Input Dims"], event["args"]["Input type"]
        if "TensorList" in dtypes:
            dtype = sent[index]["args"]["Input type"][0] if len(sent) == len(issued) else "float"
        else:
            dtype = dtypes[0]
        tensors = [shape for each in shapes for shape in (each if each and isinstance(each[0], list) else [each])]
        meter.calls.append(Collective(_kind(event["name"]), tuple(max(tensors, key=prod)), dtype))
    allocated = 0
    for event in events:
        if event["name"] == "[memory]":
            allocated += event["args"]["Bytes"]
            meter.memory = max(meter.memory, allocated)


def _kind(operator: str) -> str:
    """The kind of an operator of c10d: `c10d::_allgather_base_` is an all_gather."""
    name = operator.removeprefix("c10d::").replace("allreduce", "all_reduce").replace("allgather", "all_gather")
    return re.sub("_(base|coalesced|into_tensor|tensor)(?=_|$)", "", name).strip("_")


@contextmanager
def metered_step(device: str) -> Iterator[StepMeter]:
    """Within, the collectives of this process and the most memory that torch allocated above the start are noted."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with metered_collectives(memory=device == "cpu") as meter:
        yield meter
    if device == "cuda":
        meter.memory = torch.cuda.max_memory_allocated() - before
