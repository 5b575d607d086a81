"""Raise errors on every rank together, and compare values that must be equal on all ranks."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from lora_parallel.distributed.gloo import not_profiled
from lora_parallel.distributed.rendezvous import wait_for

__all__ = [
    "agreed",
    "begin_gather",
    "check_alike",
    "fingerprint",
    "fingerprint_on_device",
    "gather_numbers",
    "is_rank_zero",
]

_COLUMNS = 4096


def is_rank_zero() -> bool:
    """Return True on rank 0, and in a process without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def agreed() -> Iterator[None]:
    """Run a block that contains no collectives; if it fails on any rank, raise an error on every rank. Collective.

    The failing rank raises its own error. The other ranks raise an error of the same type, or a RuntimeError, that
    gives the number of the failing rank and its message. So no rank waits in a later collective for a rank that has
    left.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    mine = None if error is None else (type(error).__name__, str(error))
    everyone: list[tuple[str, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if error is not None:
        raise error
    for rank, failure in enumerate(everyone):
        if failure is not None:
            raise _error(failure[0], f"on rank {rank}: {failure[1]}")


def _error(name: str, text: str) -> Exception:
    """Return an exception of the builtin class `name` with the message `text`.

    The exception is a RuntimeError if `name` is no builtin exception, or one that needs more arguments than a text.
    """
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            return kind(text)
    return RuntimeError(text)


def check_alike(**arguments: object) -> None:
    """Check that every rank passes the same `arguments`. Collective.

    Raises:
        ValueError: An argument differs between ranks; raised on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {name: repr(value) for name, value in arguments.items()})
    for rank, theirs in enumerate(everyone):
        for name, value in theirs.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"{name} is {everyone[0][name]} on rank 0 and {value} on rank {rank}: call it with the same on "
                    "every rank."
                )


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit number that is equal for equal tensors and differs if the bytes or their order differ.

    The tensor's bytes are read as a table of int64 [rows, 4096]. The number adds up the sums of the columns and of the
    rows, each multiplied by a weight of its own, and the remaining bytes likewise. It is not cryptographic.
    """
    return int(fingerprint_on_device(tensor))


def fingerprint_on_device(tensor: Tensor) -> Tensor:
    """Return `fingerprint` as an int64 tensor without dims, without waiting for the tensor's device."""
    data = tensor.detach().contiguous().view(-1)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    if data.numel() == 0:
        return total
    raw = data.view(torch.uint8)
    whole = raw.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
    weights = torch.arange(1, _COLUMNS + 1, dtype=torch.int64, device=data.device) * -7046029254386353131 + 1
    total += raw.numel()
    if whole:
        body = raw[:whole]
        if body.storage_offset() % 8:
            body = body.clone()
        table = body.view(torch.int64).view(-1, _COLUMNS)
        rows = torch.arange(1, len(table) + 1, dtype=torch.int64, device=data.device) * -2401053089206453571 + 1
        total += (table.sum(0) * weights).sum() + (table.sum(1) * rows).sum()
    tail = raw[whole:].to(torch.int64)
    if tail.numel():
        places = torch.arange(1, tail.numel() + 1, dtype=torch.int64, device=data.device) * -4658895280553007687 + 1
        total += (tail * places).sum()
    return total


def begin_gather(
    numbers: list[int], device: str, what: str | None = None, group: dist.ProcessGroup | None = None
) -> Callable[[], Tensor]:
    """Begin `gather_numbers`, and return a function that waits for its result. Collective; the arguments are the same.

    Without `what` the message has been sent and received when this function returns.
    """
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: mine.unsqueeze(0).cpu()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with not_profiled():  # a profiler may stop before the result is read
        work = dist.all_gather(everyone, mine, group=group, async_op=what is not None)

    def result() -> Tensor:
        if what is not None:
            wait_for(work, what, device)
        return torch.stack(everyone).cpu()

    return result


def gather_numbers(
    numbers: list[int], device: str, what: str | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the `numbers` of every rank, int64 [ranks, len(numbers)] on the CPU. Collective.

    Args:
        numbers: The numbers of this rank, as many as on every other rank.
        device: The type of device that the message is sent from.
        what: The name of the call that every rank must make. A rank that waits for long then logs it, and which ranks
            are missing. None: a rank waits without a message.
        group: The process group of the ranks; None for all ranks.
    """
    return begin_gather(numbers, device, what, group)()
