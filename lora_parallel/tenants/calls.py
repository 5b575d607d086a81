"""Check that every rank makes the same calls of a pool, in the same order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from lora_parallel.distributed.rank_checks import agreed, gather_numbers

__all__ = ["Calls", "number_of"]


class Calls:
    """Keep a number of the calls made so far, which is equal on all ranks as long as they make the same calls.

    Args:
        device: Type of the device that messages between ranks go by.
        tenants: Returns the names of the pool's tenants, for error messages.
    """

    def __init__(self, device: str, tenants: Callable[[], Sequence[str]]) -> None:
        self._device, self._tenants = device, tenants
        self._before = 0
        self._alone: list[str] = []
        """Calls noted by `apart` since the last `together`."""

    @contextmanager
    def together(self, call: str) -> Iterator[None]:
        """Run checks without collectives, and check that every rank makes the same call after the same calls.

        Sends one message of two numbers, however many tenants there are.

        Args:
            call: The call with its arguments, as text.

        Raises:
            ValueError: A rank makes another call, or has made other calls before; on every rank that makes a call.
            Exception: A check in the block failed on some rank; on every rank.
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
        """Note a call without a message to the other ranks.

        The next `together` finds out if a rank has made another call.
        """
        yield
        self._before = number_of(f"{self._before} {call}")
        self._alone.append(call)


def number_of(text: str) -> int:
    """Return a 56-bit hash of a text, which is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")
