"""Errors that every rank raises, and what ranks must hold alike."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from lora_parallel.rendezvous import wait_for

__all__ = ["agreed", "check_alike", "fingerprint", "gather_numbers"]

_COLUMNS = 4096


@contextmanager
def agreed() -> Iterator[None]:
    """Run a block without collectives; if it fails on any rank, raise on every rank.

    The failing rank raises its own error; the others raise one of the same type, or a RuntimeError, that names the rank
    and its message. So no rank is left waiting in a later collective for one that has gone.
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
    """One of the builtin class of this name; another class, or one that wants more than a text, stays unknown here."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(TypeError):
            return kind(text)
    return RuntimeError(text)


def check_alike(**arguments: object) -> None:
    """Check that every rank calls with the same arguments. Collective.

    Raises:
        ValueError: Some do not, on every rank.
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
    """A 64-bit number that equal tensors share, and that differs for tensors whose bytes or order of bytes differ.

    Sums of the columns and of the rows of the tensor's bytes, each with a weight of its own. Not cryptographic.
    """
    data = tensor.detach().contiguous().view(-1)
    if data.numel() == 0:
        return 0
    raw = data.view(torch.uint8)
    whole = raw.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
    weights = torch.arange(1, _COLUMNS + 1, dtype=torch.int64, device=data.device) * -7046029254386353131 + 1
    total = raw.numel()
    if whole:
        body = raw[:whole]
        if body.storage_offset() % 8:
            body = body.clone()
        table = body.view(torch.int64).view(-1, _COLUMNS)
        rows = torch.arange(1, len(table) + 1, dtype=torch.int64, device=data.device) * -2401053089206453571 + 1
        total += int((table.sum(0) * weights).sum()) + int((table.sum(1) * rows).sum())
    tail = raw[whole:].to(torch.int64)
    if tail.numel():
        places = torch.arange(1, tail.numel() + 1, dtype=torch.int64, device=data.device) * -4658895280553007687 + 1
        total += int((tail * places).sum())
    return (total + 2**63) % 2**64 - 2**63


def gather_numbers(numbers: list[int], device: str, what: str | None = None) -> Tensor:
    """Every rank's `numbers`, as int64 of shape [world size, len(numbers)] on the CPU. Collective.

    Args:
        numbers: This rank's.
        device: The type of device that the message goes by.
        what: The call that every rank must make, for a rank that waits for others to say so.
    """
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine.unsqueeze(0).cpu()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    work = dist.all_gather(everyone, mine, async_op=what is not None)
    if what is not None:
        wait_for(work, what, device)
    return torch.stack(everyone).cpu()
