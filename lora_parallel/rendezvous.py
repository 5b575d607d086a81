"""Calls that every rank must make: a rank that comes alone says whom it waits for, long before a collective times out.

Each rank announces its call in the store that the process group was made with, under the number of the call, and waits
there until every rank has announced the same number. A store, unlike a collective, can be asked who has come. Not for
forwards, backwards and steps, which are too many for it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch.distributed as dist

from lora_parallel.upstream import default_store

__all__ = ["collective_call", "limit_waiting", "meet", "others_wait", "place_of_call"]

_log = logging.getLogger(__name__)

TELL_SECONDS = (10.0, 30.0, 60.0, 300.0)
"""After how long a rank says whom it waits for; from then on whenever it has waited twice as long."""

_LIBRARIES = frozenset(
    {
        *("lora_parallel", "lightning_lora", "accelerate_plugin", "torch", "transformers", "peft", "accelerate", "trl"),
        *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "contextlib", "functools"),
    }
)
"""Packages whose frames are no place in the user's program; contextlib and functools call for them."""

_REMEDY = "Make the same calls in the same order on every rank."

_NAMED = 16
"""The most ranks that a message lists."""


@dataclass(frozen=True)
class _Announcement:
    """What a rank writes into the store."""

    what: str
    place: str
    detail: str
    given_up_after: float | None = None
    """The seconds after which the rank stopped waiting for the others; None: it waits, or went on."""

    def __str__(self) -> str:
        return f"{self.what} (called at {self.place})"


@dataclass
class _Meetings:
    """The meetings of one process group."""

    group: Any
    store: Any
    timeout: float
    number: int = 0
    """Of the next meeting."""

    past: list[str] = field(default_factory=list)
    """The keys of earlier meetings that this rank removes once every rank has left those."""

    def read(self, number: int) -> dict[int, _Announcement]:
        """Return the announcements so far, by rank."""
        keys = {rank: f"{number}/{rank}" for rank in range(self.group.size())}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        texts = self.store.multi_get(list(keys.values())) if keys else []
        return {rank: _Announcement(**json.loads(text)) for rank, text in zip(keys, texts, strict=True)}

    def write(self, number: int, announcement: _Announcement) -> None:
        """Announce a call to the other ranks."""
        self.store.set(f"{number}/{self.group.rank()}", json.dumps(vars(announcement)))

    def leave(self, number: int, complete: bool) -> None:
        """Keep in mind what is to be removed, and remove what was, if every rank has come to this meeting."""
        if complete:
            for key in self.past:
                self.store.delete_key(key)
            self.past.clear()
        names = ["call", "arrived", "open"] if self.group.rank() == 0 else []
        self.past += [f"{number}/{name}" for name in (self.group.rank(), *names)]


_meetings: _Meetings | None = None
_inside: ContextVar[bool] = ContextVar("inside a collective call", default=False)


def _current() -> _Meetings | None:
    """The meetings of the default process group; None where there is nobody to meet."""
    global _meetings
    # A fake group has one process, whatever its size.
    if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return None
    if _meetings is None or _meetings.group is not dist.group.WORLD:
        store = default_store()
        _meetings = _Meetings(dist.group.WORLD, dist.PrefixStore("lora_parallel", store), store.timeout.total_seconds())
    return _meetings


def limit_waiting(seconds: float) -> None:
    """Let ranks wait for each other no longer than `seconds` from now on, and no longer than the process group does."""
    meetings = _current()
    if meetings is not None:
        meetings.timeout = min(seconds, meetings.store.timeout.total_seconds())


@contextmanager
def collective_call(what: str) -> Iterator[None]:
    """Run a call that every rank must make, once they have all come; around a block, or as a decorator.

    Calls within are not announced: every rank makes them if it makes this one. So a call counts once on every rank,
    also if it fails.

    Args:
        what: The name of the call, as the user knows it.

    Raises:
        RuntimeError: Other ranks make another call, or have stopped waiting, on every rank.
        TimeoutError: Some ranks have not come in time.
    """
    if _inside.get():
        yield
        return
    meet(what)
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def others_wait() -> bool:
    """Return True if another rank waits for this one in a call that every rank must make."""
    meetings = _current()
    return meetings is not None and meetings.store.check([f"{meetings.number}/arrived"])


def meet(what: str, detail: str = "", timeout: float | None = None, remedy: str = _REMEDY) -> list[str]:
    """Wait until every rank has come to the same call. Collective.

    Args:
        what: The name of the call, which must be the same on every rank.
        detail: What to tell the other ranks.
        timeout: The most seconds to wait; None: those of `limit_waiting`, or the process group's.
        remedy: What to do if other ranks make another call.

    Returns:
        Every rank's `detail`, by rank.

    Raises:
        RuntimeError: Other ranks make another call, or have stopped waiting, on every rank.
        TimeoutError: Some ranks have not come in time.
    """
    meetings = _current()
    if meetings is None:
        return [detail]
    number, meetings.number = meetings.number, meetings.number + 1
    mine = _Announcement(what, place_of_call(), detail)
    complete = False
    try:
        everyone = _wait(meetings, number, mine, meetings.timeout if timeout is None else timeout)
        _check_same(everyone, meetings.group.rank(), remedy)
        complete = True
    except dist.DistError as error:
        raise RuntimeError(
            f"{mine} waits for the other ranks, and the store of the process group is gone, as when rank 0 has ended: "
            f"every rank must call {what}. Cause: {error}"
        ) from error
    finally:
        meetings.leave(number, complete)
    return [everyone[rank].detail for rank in sorted(everyone)]


def _wait(meetings: _Meetings, number: int, mine: _Announcement, timeout: float) -> dict[int, _Announcement]:
    """Announce a call, and wait until every rank has, or one has announced another call or has stopped waiting."""
    store, size, rank = meetings.store, meetings.group.size(), meetings.group.rank()
    meetings.write(number, mine)
    first = store.compare_set(f"{number}/call", "", mine.what).decode()
    if store.add(f"{number}/arrived", 1) == size or first != mine.what:
        store.set(f"{number}/open", "")
    start, reminders = time.monotonic(), _reminders()
    reminder = next(reminders)
    try:
        while not store.check([f"{number}/open"]):
            waited = time.monotonic() - start
            if waited >= timeout:
                raise TimeoutError(
                    f"rank {rank} waited {waited:.0f} s for {_missing(meetings, number)} in {mine}: every rank must "
                    "call it."
                )
            if waited >= reminder:
                _log.warning("waiting for %s in %s: every rank must call it", _missing(meetings, number), mine)
                reminder = next(reminders)
            time.sleep(min(max(waited / 20, 0.0005), 0.5))
    except BaseException:
        # A rank that comes later would take the announcement for a rank that waits.
        meetings.write(number, replace(mine, given_up_after=time.monotonic() - start))
        store.set(f"{number}/open", "")
        raise
    return meetings.read(number)


def _reminders() -> Iterator[float]:
    """After how many seconds to remind."""
    yield from TELL_SECONDS
    yield from (TELL_SECONDS[-1] * 2**times for times in itertools.count(1))


def _missing(meetings: _Meetings, number: int) -> str:
    """Name the ranks that have not come to a meeting."""
    there = meetings.read(number)
    missing = [rank for rank in range(meetings.group.size()) if rank not in there]
    if len(missing) <= _NAMED:
        return f"ranks {missing}"
    return f"{len(missing)} ranks, of which the first are {missing[:_NAMED]}"


def _check_same(everyone: dict[int, _Announcement], rank: int, remedy: str) -> None:
    """Check that all ranks are in the same call, and none has stopped waiting."""
    first = min(everyone)
    for other, theirs in everyone.items():
        if theirs.given_up_after is not None:
            raise RuntimeError(
                f"rank {other} waited {theirs.given_up_after:.0f} s in {theirs} and stopped; rank {rank} came later, "
                f"with {everyone[rank]}: every rank must call it."
            )
        if theirs.what != everyone[first].what:
            raise RuntimeError(
                f"ranks make different calls: rank {first} {everyone[first]}, rank {other} {theirs}. {remedy}"
            )


def place_of_call() -> str:
    """Return the file and line of the innermost frame that is the user's: of no package that our calls go through."""
    frame: FrameType | None = sys._getframe(1)
    ours = frame
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in _LIBRARIES and not frame.f_code.co_filename.startswith("<frozen"):
            break
        frame = frame.f_back
    found = frame or ours
    assert found is not None
    file, here = found.f_code.co_filename, os.path.join(os.getcwd(), "")
    return f"{file.removeprefix(here)}:{found.f_lineno}"
