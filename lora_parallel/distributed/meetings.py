"""Let ranks meet in a call that each of them must make, and name the ranks that are missing or make other calls.

Each rank announces its call in the store that the process group was made with, under the number of the call, and waits
until every rank has announced a call under the same number. A store, unlike a collective, can tell which ranks have
come: a rank that comes alone logs which ranks it waits for, long before a collective would time out. A meeting costs
each rank a few requests to the store, so it stands before saves, loads, set-up and the first forward; what comes with
every step waits in its collective, whose timeout names it (`distributed/collectives.py`).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from traceback import walk_stack
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from lora_parallel.distributed.torch_private import default_store, is_simulated

_log = logging.getLogger(__name__)

# seconds of waiting after which a rank logs which ranks it waits for; after the last, each time the wait doubles
TELL_SECONDS = (10.0, 30.0, 60.0, 300.0)

# Packages whose frames are not the user's program (contextlib and functools call functions of the others).
_LIBRARIES = frozenset(
    {
        *("lora_parallel", "lightning_lora", "accelerate_plugin", "torch", "transformers", "peft", "accelerate", "trl"),
        *("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities", "contextlib", "functools"),
    }
)

_REMEDY = "Make the same calls in the same order on every rank."

_NAMED = 16  # largest number of ranks that a message lists


@dataclass(frozen=True)
class _Announcement:
    """Hold the entry that a rank writes into the store: its call, and where the user's program makes it."""

    what: str
    caller: str  # file and line
    # seconds after which the rank stopped waiting for the others; None if it still waits or went on
    given_up_after: float | None = None

    def __str__(self) -> str:
        return f"{self.what} (called at {self.caller})"


@dataclass
class _Meetings:
    """Hold the announcements of some ranks: a meeting is one call that all of them announce."""

    rank: int
    ranks: tuple[int, ...]
    store: Any
    number: int = 0  # of meetings so far, which is also the number of the next one
    kept: int = 0  # number of the first meeting whose keys are still there

    def read(self, number: int) -> dict[int, _Announcement]:
        """Map each rank that has come to meeting `number` so far to its announcement."""
        keys = {rank: f"{number}/{rank}" for rank in self.ranks}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        texts = self.store.multi_get(list(keys.values())) if keys else []
        return {rank: _Announcement(**json.loads(text)) for rank, text in zip(keys, texts, strict=True)}

    def write(self, number: int, announcement: _Announcement) -> None:
        """Announce the call of this rank in meeting `number` to the other ranks."""
        self.store.set(f"{number}/{self.rank}", json.dumps(vars(announcement)))

    def forget_before(self, number: int) -> None:
        """Remove this rank's keys of meetings before `number`, to which every rank has come."""
        names = (self.rank, "call", "arrived", "open") if self.rank == self.ranks[0] else (self.rank,)
        for past, name in product(range(self.kept, number), names):
            self.store.delete_key(f"{past}/{name}")
        self.kept = number


# by the default process group that they belong to, and their ranks
_meetings: WeakKeyDictionary[Any, dict[tuple[int, ...], _Meetings]] = WeakKeyDictionary()
# seconds that ranks wait for each other at most, by the default process group
_limits: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

_inside: ContextVar[bool] = ContextVar("inside a collective call", default=False)
alone: ContextVar[bool] = ContextVar("rank 0 runs code that no other rank runs", default=False)


def _current(ranks: Iterable[int] | None = None) -> _Meetings | None:
    """Return the meetings of some ranks, of all if `ranks` is None; None if this rank has no other rank to meet."""
    # A fake group has one process, whatever its size.
    if not dist.is_initialized() or is_simulated():
        return None
    world = range(dist.get_world_size())
    which = tuple(world if ranks is None else ranks)
    known = _meetings.setdefault(dist.group.WORLD, {})
    if len(which) > 1 and which not in known:
        prefix = "lora_parallel" if len(which) == len(world) else f"lora_parallel/of {'_'.join(map(str, which))}"
        known[which] = _Meetings(dist.get_rank(), which, dist.PrefixStore(prefix, default_store()))
    return known.get(which)


def limit_waiting(seconds: float) -> None:
    """Limit the time that ranks wait for each other to `seconds`, and to the timeout of the process group."""
    _limits[dist.group.WORLD] = seconds


@contextmanager
def collective_call(what: str) -> Iterator[None]:
    """Run a call that every rank must make, once all ranks have come to it; around a block, or as a decorator.

    Calls inside of the call are not announced: every rank that makes the outer call makes them too. So the call counts
    as one on every rank, also if it fails.

    Args:
        what: The name of the call, as the user knows it.

    Raises:
        RuntimeError: Other ranks make another call, or have stopped waiting; raised on every rank.
        TimeoutError: Some ranks have not come in time.
    """
    if alone.get() and _current() is not None:
        refuse_alone(what)
    if _inside.get():
        yield
        return
    meet(what)
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def refuse_alone(what: str) -> NoReturn:
    """Refuse a call that every rank must make, in code that no other rank runs."""
    raise RuntimeError(
        f"{what} was called in a save that rank 0 runs alone, and every rank must call it: call it before the save."
    )


def is_awaited_by(ranks: Iterable[int], among: Iterable[int] | None = None) -> bool:
    """Return True if one of `ranks` waits for this rank in a call that every rank, or every one `among`, must make."""
    if (meetings := _current(among)) is None:
        return False
    others = (rank for rank in ranks if rank != meetings.rank)
    return any(meetings.store.check([f"{meetings.number}/{rank}"]) for rank in others)


def meet(what: str, remedy: str = _REMEDY, ranks: Iterable[int] | None = None) -> None:
    """Wait until every rank (of `ranks`, if given) has come to the call `what`. Collective.

    Raises RuntimeError, ending with `remedy`, if ranks make other calls or gave up; TimeoutError if some are late.
    """
    if (meetings := _current(ranks)) is None:
        return
    number, mine = meetings.number, _Announcement(what, place_of_call())
    meetings.number += 1
    try:
        if not _wait(meetings, number, mine, remedy):
            _raise_unlike(meetings.read(number), meetings.rank, remedy)
        meetings.forget_before(number)
    except dist.DistError as error:
        raise RuntimeError(
            f"{mine} waits for the other ranks, and the store of the process group is gone, as when rank 0 has ended: "
            f"every rank must call {what}. Cause: {error}"
        ) from error


def _wait(meetings: _Meetings, number: int, mine: _Announcement, remedy: str) -> bool:
    """Announce a call; return True once every rank has announced the same, False if one makes another call or gives up.

    All ranks poll the key "open", so that a rank's number of requests does not depend on the number of ranks. The rank
    that comes last or with another call sets it; the first to do so decides if the calls count as alike or unlike.
    """
    store, opened = meetings.store, f"{number}/open"
    limit = min(_limits.get(dist.group.WORLD, inf), store.timeout.total_seconds())
    meetings.write(number, mine)
    if store.compare_set(f"{number}/call", "", mine.what).decode() != mine.what:
        store.compare_set(opened, "", _UNLIKE)
    elif store.add(f"{number}/arrived", 1) == len(meetings.ranks):
        store.compare_set(opened, "", _ALIKE)
    start, reminder = time.monotonic(), TELL_SECONDS[0]
    more = "" if remedy == _REMEDY else f" {remedy}"  # which says no more than that every rank must call it
    try:
        while not store.check([opened]):
            waited = time.monotonic() - start
            if waited >= limit:
                raise TimeoutError(
                    f"rank {meetings.rank} waited {waited:.0f} s for {_missing(meetings, number)} in {mine}: every "
                    f"rank must call it.{more}"
                )
            if waited >= reminder:
                late = _missing(meetings, number)
                _log.warning("waiting for %s in %s: every rank must call it%s", late, mine, more and f".{more}")
                reminder = next((seconds for seconds in TELL_SECONDS if seconds > waited), 2 * reminder)
            time.sleep(min(max(waited / 20, 0.0005), 0.5))
    except BaseException:
        # Without this a rank that comes later would read in the announcement that this rank still waits.
        meetings.write(number, replace(mine, given_up_after=time.monotonic() - start))
        store.compare_set(opened, "", _UNLIKE)
        raise
    return store.get(opened).decode() == _ALIKE


_ALIKE, _UNLIKE = "alike", "unlike"


def _missing(meetings: _Meetings, number: int) -> str:
    """Return a text that names the ranks that have not come to meeting `number`."""
    there = meetings.read(number)
    ranks = [rank for rank in meetings.ranks if rank not in there]
    if len(ranks) <= _NAMED:
        return f"ranks {ranks}"
    return f"{len(ranks)} ranks, of which the first are {ranks[:_NAMED]}"


def _raise_unlike(everyone: dict[int, _Announcement], rank: int, remedy: str) -> NoReturn:
    """Raise an error that says which ranks are in different calls, or which rank has stopped waiting."""
    for other, call in everyone.items():
        if call.given_up_after is not None:
            raise RuntimeError(
                f"rank {other} waited {call.given_up_after:.0f} s in {call} and stopped; rank {rank} came later, "
                f"with {everyone[rank]}: every rank must call it."
            )
    first = min(everyone)
    other = next(rank for rank in everyone if everyone[rank].what != everyone[first].what)
    raise RuntimeError(
        f"ranks make different calls: rank {first} {everyone[first]}, rank {other} {everyone[other]}. {remedy}"
    )


def place_of_call() -> str:
    """Return the file and line of the innermost frame of the user's program: of no package in `_LIBRARIES`."""
    ours = sys._getframe(1)
    named = ((frame.f_globals.get("__name__", "").partition(".")[0], frame) for frame, _ in walk_stack(ours))
    users = (f for package, f in named if package not in _LIBRARIES and not f.f_code.co_filename.startswith("<frozen"))
    caller = next(users, ours)
    file, here = caller.f_code.co_filename, os.path.join(os.getcwd(), "")
    return f"{file.removeprefix(here)}:{caller.f_lineno}"
