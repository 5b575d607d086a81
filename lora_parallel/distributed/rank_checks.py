"""Raise errors on every rank together, and compare what ranks hold."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lora_parallel.distributed.collectives import named
from lora_parallel.distributed.torch_private import not_profiled

T = TypeVar("T")


def is_rank_zero() -> bool:
    """Return True on rank 0, and in a process without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def agreed(remedy: str = "call it with the same on every rank.") -> Iterator[dict[str, object]]:
    """Run a block that contains no collectives; if it fails on any rank, raise an error on every rank. Collective.

    The failing rank raises its own error. The other ranks raise an error of the same type, or a RuntimeError, that
    gives the number of the failing rank and its message. So no rank waits in a later collective for a rank that has
    left.

    Yields:
        A dict for values that must be the same on every rank, by what to call them. If values differ, or some ranks
        lack one and the block has failed on none, every rank raises a ValueError, which ends with `remedy`.
    """
    error: Exception | None = None
    alike: dict[str, object] = {}
    try:
        yield alike
    except Exception as caught:
        error = caught
    failure = None if error is None else (type(error).__name__, str(error))
    everyone = gather_objects((failure, {name: repr(value) for name, value in alike.items()}))
    failures = [(rank, failure) for rank, (failure, _) in enumerate(everyone) if failure is not None]
    first = everyone[0][1]
    for rank, (_, values) in enumerate(everyone):
        # What differs may be why a rank has failed, which may lack other values for that.
        for name in [name for name in first if name in values] if failures else {**first, **values}:
            if values.get(name) != first.get(name):
                texts = f"{first.get(name)} on rank 0 and {values.get(name)} on rank {rank}"
                raise ValueError(f"{name} is {texts}: {remedy}") from error
    if error is not None:
        raise error
    for rank, (kind, text) in failures:
        raise _error(kind, f"on rank {rank}: {text}")


def _error(name: str, text: str) -> Exception:
    """Return an exception of the builtin class `name`, or a RuntimeError, with the message `text`."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            return kind(text)
    return RuntimeError(text)


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the object of each rank of `group`, of all ranks if it is None; `mine` is pickled. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def begin_gather(numbers: list[int], what: str) -> Callable[[], Tensor]:
    """Begin `gather_numbers`, and return a function that waits for its result. Collective.

    A caller that reads the result after the next step does not wait for what its device computes in that step, where
    all messages of the process group go through the device, as under Lightning on GPUs.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: torch.tensor([numbers], dtype=torch.int64)
    device = _device_of_messages()
    on_cpu = torch.tensor([numbers], dtype=torch.int64, pin_memory=device != "cpu")
    mine = on_cpu.to(device, non_blocking=True)
    everybody: Any = dist.group.WORLD
    everyone = [torch.empty_like(mine) for _ in range(everybody.size())]
    with not_profiled():  # a profiler may stop before the result is read
        work = dist.all_gather(everyone, mine, async_op=True)
    if device == "cpu":

        def result() -> Tensor:
            with named("numbers", what, everybody):
                work.wait()
            return torch.cat(everyone)

        return result
    # In the caller's stream the copy would come after all that is queued there until the result is read.
    module = torch.get_device_module(device)
    stream = module.Stream()
    copied = torch.empty(len(everyone), len(numbers), dtype=torch.int64, pin_memory=True)
    with module.stream(stream):
        work.wait()
        copied.copy_(torch.cat(everyone), non_blocking=True)
        event = stream.record_event()

    def copied_result() -> Tensor:
        event.synchronize()
        del everyone[:]  # until here: memory that is free may be used again before the copy has run
        return copied

    return copied_result


def _device_of_messages() -> str:
    """Return the type of device that messages of the default process group are sent from: the CPU where it can be."""
    if not dist.is_initialized() or "cpu:" in dist.get_backend_config():
        return "cpu"
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def gather_numbers(numbers: list[int], what: str) -> Tensor:
    """Return the `numbers` of every rank, int64 [ranks, len(numbers)] on the CPU. Collective.

    It is one message, for what comes with every step. If a rank does not come, the error after the timeout names the
    call `what`.
    """
    return begin_gather(numbers, what)()
