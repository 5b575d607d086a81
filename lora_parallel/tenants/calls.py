"""Calls of a pool that every rank must make alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from lora_parallel.agreement import agreed, gather_numbers

__all__ = ["Calls", "number_of"]


class Calls:
    """What has been called so far, as a number that ranks share as long as they have made the same calls.

    Args:
        device: The type of device that messages go by.
        tenants: Gives the names of the tenants there are, for messages.
    """

    def __init__(self, device: str, tenants: Callable[[], Sequence[str]]) -> None:
        self._device, self._tenants = device, tenants
        self._before = 0
        self._alone: list[str] = []
        """The calls without a message since the last one with a message."""

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Run checks without collectives, and check that every rank makes the same call after the same calls.

        One message of two numbers, whatever the tenants.

        Raises:
            ValueError: One does not, on every rank that makes any.
            Exception: What a check raised on any rank.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        after = number_of(f"{self._before} {call}")
        numbers = gather_numbers([after, error is not None], self._device, f"TenantPool.{call.partition('(')[0]}")
        if len(numbers[:, 0].unique()) > 1:
            everyone = [""] * len(numbers)
            said = " and then ".join([*self._alone, call])
            dist.all_gather_object(everyone, f"{said}, with tenants {list(self._tenants())}")
            other = int((numbers[:, 0] != numbers[0, 0]).nonzero()[0])
            raise ValueError(
                f"ranks make different calls of the pool: rank 0 {everyone[0]}; rank {other} {everyone[other]}. Make "
                "the same calls in the same order on every rank."
            )
        if numbers[:, 1].any():
            with agreed():
                if error is not None:
                    raise error
        self._before, self._alone = after, []

    @contextmanager
    def apart(self, call: str) -> Iterator[None]:
        """The same without a message: a rank that calls something else is found out at the next `together`."""
        yield
        self._before = number_of(f"{self._before} {call}")
        self._alone.append(call)


def number_of(text: str) -> int:
    """A number that equal texts share in every process, and that others do not."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
