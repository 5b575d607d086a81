"""Raise errors on every rank together, and name the ranks that are missing or make other calls.

A rank that comes alone logs which ranks it waits for, long before a collective would time out. Each rank announces its
call in the store that the process group was made with, under the number of the call, and waits until every rank has
announced a call under the same number. A store, unlike a collective, can tell which ranks have come. Calls that are too
frequent for this wait in their collective as usual, and use the store only after they have waited for long.

Private API of torch is used; `tests/lora_parallel/distributed/test_gloo.py`, and `test_rank_checks.py` for
`not_profiled`, test that it still means the same.
"""

from __future__ import annotations

import builtins
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import timedelta
from math import ceil
from traceback import walk_stack
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lora_parallel.distributed.torch_private import default_store, is_simulated, process_groups

T = TypeVar("T")
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

    group: Any  # the default process group that the meetings belong to
    ranks: tuple[int, ...]
    store: Any
    timeout: float
    number: int = 0  # of meetings so far, which is also the number of the next one
    # keys of earlier meetings, to be removed once every rank has left those
    past: list[str] = field(default_factory=list)

    def read(self, number: int) -> dict[int, _Announcement]:
        """Map each rank that has come to meeting `number` so far to its announcement."""
        keys = {rank: f"{number}/{rank}" for rank in self.ranks}
        if not self.store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self.store.check([key])}
        texts = self.store.multi_get(list(keys.values())) if keys else []
        return {rank: _Announcement(**json.loads(text)) for rank, text in zip(keys, texts, strict=True)}

    def write(self, number: int, announcement: _Announcement) -> None:
        """Announce the call of this rank in meeting `number` to the other ranks."""
        self.store.set(f"{number}/{self.group.rank()}", json.dumps(vars(announcement)))

    def leave(self, number: int, complete: bool) -> None:
        """Note this rank's keys of meeting `number`; remove earlier keys if it is `complete`: every rank has left."""
        if complete:
            for key in self.past:
                self.store.delete_key(key)
            self.past.clear()
        names = ["call", "arrived", "open"] if self.group.rank() == self.ranks[0] else []
        self.past += [f"{number}/{name}" for name in (self.group.rank(), *names)]


_meetings: dict[tuple[int, ...], _Meetings] = {}
# seconds that ranks wait for each other at most, by the default process group
_limits: WeakKeyDictionary[Any, float] = WeakKeyDictionary()

_inside: ContextVar[bool] = ContextVar("inside a collective call", default=False)


def _current(ranks: Iterable[int] | None = None) -> _Meetings | None:
    """Return the meetings of some ranks, of all if `ranks` is None; None if this rank has no other rank to meet."""
    # A fake group has one process, whatever its size.
    if not dist.is_initialized() or dist.get_world_size() == 1 or is_simulated():
        return None
    world = range(dist.get_world_size())
    which = tuple(world if ranks is None else ranks)
    if len(which) == 1:
        return None
    meetings = _meetings.get(which)
    if meetings is None or meetings.group is not dist.group.WORLD:
        store = default_store()
        prefix = "lora_parallel" if len(which) == len(world) else f"lora_parallel/of {'_'.join(map(str, which))}"
        limit = _limits.get(dist.group.WORLD, store.timeout.total_seconds())
        meetings = _meetings[which] = _Meetings(dist.group.WORLD, which, dist.PrefixStore(prefix, store), limit)
    return meetings


def limit_waiting(seconds: float) -> None:
    """Limit the time that ranks wait for each other to `seconds`, and to the timeout of the process group."""
    if (meetings := _current()) is not None:
        _limits[meetings.group] = limit = min(seconds, meetings.store.timeout.total_seconds())
        for known in _meetings.values():
            known.timeout = limit


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
    if _inside.get():
        yield
        return
    meet(what)
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def is_awaited_by(ranks: Iterable[int], among: Iterable[int] | None = None) -> bool:
    """Return True if one of `ranks` waits for this rank in a call that every rank, or every one `among`, must make."""
    meetings = _current(among)
    if meetings is None:
        return False
    mine = meetings.group.rank()
    return any(meetings.store.check([f"{meetings.number}/{rank}"]) for rank in ranks if rank != mine)


def meet(what: str, remedy: str = _REMEDY, ranks: Iterable[int] | None = None) -> None:
    """Wait until every rank (of `ranks`, if given) has come to the call `what`. Collective.

    Raises RuntimeError, ending with `remedy`, if ranks make other calls or gave up; TimeoutError if some are late.
    """
    meetings = _current(ranks)
    if meetings is None:
        return
    number = meetings.number
    meetings.number += 1
    mine = _Announcement(what, place_of_call())
    complete = False
    try:
        complete = _wait(meetings, number, mine)
        if not complete:
            _raise_unlike(meetings.read(number), meetings.group.rank(), remedy)
    except dist.DistError as error:
        raise RuntimeError(
            f"{mine} waits for the other ranks, and the store of the process group is gone, as when rank 0 has ended: "
            f"every rank must call {what}. Cause: {error}"
        ) from error
    finally:
        meetings.leave(number, complete)


def _wait(meetings: _Meetings, number: int, mine: _Announcement) -> bool:
    """Announce a call; return True once every rank has announced the same, False if one makes another call or gives up.

    All ranks poll the key "open", so that a rank's number of requests does not depend on the number of ranks. The rank
    that comes last or with another call sets it; the first to do so decides if the calls count as alike or unlike.
    """
    store, size, rank = meetings.store, len(meetings.ranks), meetings.group.rank()
    opened = f"{number}/open"
    meetings.write(number, mine)
    if store.compare_set(f"{number}/call", "", mine.what).decode() != mine.what:
        store.compare_set(opened, "", _UNLIKE)
    elif store.add(f"{number}/arrived", 1) == size:
        store.compare_set(opened, "", _ALIKE)
    start, reminders = time.monotonic(), _reminders()
    reminder = next(reminders)
    try:
        while not store.check([opened]):
            waited = time.monotonic() - start
            if waited >= meetings.timeout:
                raise TimeoutError(
                    f"rank {rank} waited {waited:.0f} s for {_missing(meetings, number)} in {mine}: every rank must "
                    "call it."
                )
            if waited >= reminder:
                _log.warning(_WAITING, _missing(meetings, number), mine)
                reminder = next(reminders)
            time.sleep(min(max(waited / 20, 0.0005), 0.5))
    except BaseException:
        # Without this a rank that comes later would read in the announcement that this rank still waits.
        meetings.write(number, replace(mine, given_up_after=time.monotonic() - start))
        store.compare_set(opened, "", _UNLIKE)
        raise
    return store.get(opened).decode() == _ALIKE


_ALIKE, _UNLIKE = "alike", "unlike"


def wait_for(work: dist.Work, what: str, device: str) -> None:
    """Wait for a collective of the default group, as `work.wait()` does, and log which ranks are missing."""
    start, reminders, meetings, waits = time.monotonic(), _reminders(), _current(), False
    while not is_done(work, device, start + next(reminders)):
        if meetings is not None:
            _tell_of_collective(meetings, _Announcement(what, place_of_call()))
            waits = True
    if meetings is not None and waits:
        meetings.store.delete_key(f"waits/{meetings.group.rank()}")


def is_done(work: dist.Work, device: str, until: float) -> bool:
    """Wait for a collective, at most until the monotonic time `until`; return True if the collective has finished."""
    start = time.monotonic()
    left = max(until - start, 0.001)
    if device == "cpu":
        try:
            work.wait(timedelta(milliseconds=ceil(1000 * left)))  # torch cuts off parts of milliseconds
        except RuntimeError:
            # What fails before the time is over has failed, also where gloo never calls it complete: a reduce-scatter.
            if work.is_completed() or time.monotonic() - start < left:
                raise
            return False  # a wait for gloo's work may be repeated after a timeout
        return True
    while not work.is_completed():  # a wait with a timeout would abort NCCL's work
        waited = time.monotonic() - start
        if waited >= left:
            return False
        time.sleep(0 if waited < 0.001 else min(waited / 20, 0.5))
    work.wait()
    return True


def _tell_of_collective(meetings: _Meetings, mine: _Announcement) -> None:
    """Log which ranks do not wait in a collective, and the call that each of them waits in instead if it is known."""
    meetings.store.set(f"waits/{meetings.group.rank()}", "")
    time.sleep(0.5)  # other ranks that wait began at about the same time: let them say so first
    missing = [rank for rank in meetings.ranks if not meetings.store.check([f"waits/{rank}"])]
    calls = meetings.read(meetings.number).items()
    if missing:
        elsewhere = "".join(f"; rank {rank} waits in {call}" for rank, call in calls if rank in missing)
        _log.warning(_WAITING + elsewhere.replace("%", "%%"), _named(missing), mine)


_WAITING = "waiting for %s in %s: every rank must call it"


def _reminders() -> Iterator[float]:
    """Yield the seconds of waiting after which to log the next reminder."""
    yield from TELL_SECONDS
    yield from (TELL_SECONDS[-1] * 2**times for times in itertools.count(1))


def _missing(meetings: _Meetings, number: int) -> str:
    """Return a text that names the ranks that have not come to meeting `number`."""
    there = meetings.read(number)
    return _named([rank for rank in meetings.ranks if rank not in there])


def _named(ranks: list[int]) -> str:
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


_NOTHING = torch.empty(0)


@contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Give each gloo group that is made within the context one worker thread: two can corrupt the heap."""
    # They write a long name of the collective that has finished into one string (docs/upstream/gloo_threads.md).
    # torch ignores the options that it is given for gloo, so the class is replaced.
    if not dist.is_gloo_available():
        yield
        return
    c10d: Any = dist.distributed_c10d
    gloo: Any = c10d.ProcessGroupGloo

    class OneThread(gloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            usual = gloo(dist.HashStore(), 0, 1, timeout).options  # for its devices, which the environment selects
            options = gloo._Options()
            options._threads, options._timeout, options._devices = 1, timeout, usual._devices
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OneThread
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = gloo


@contextmanager
def not_profiled() -> Iterator[None]:
    """Hide the operations of the calling thread from torch's profilers within the context. It does not nest."""
    # A collective on gloo that a profiler has seen begin, and that ends when the profiler has stopped, writes into
    # memory that the profiler has freed (docs/upstream/gloo_profiler.md).
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def finish_gloo() -> None:
    """Wait, at exit, until gloo's threads have let go of all tensors; not at all if an error has ended the process."""
    # A thread of gloo that frees a tensor while Python ends aborts the process (docs/upstream/gloo_exit.md). An all-
    # reduce of no elements waits for no peer, but comes after messages whose peers an error may keep away.
    if getattr(sys, "last_value", None) is not None or not dist.is_initialized():
        return
    until = time.monotonic() + 5
    for group in process_groups():
        if "cpu:gloo" in dist.get_backend_config(group):
            is_done(dist.all_reduce(_NOTHING, group=group, async_op=True), "cpu", until)


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
    failures = gather_objects(None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise _error(failure[0], f"on rank {rank}: {failure[1]}")


def gather_objects(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the object of each rank of `group`, of all ranks if it is None; `mine` is pickled. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _error(name: str, text: str) -> Exception:
    """Return an exception of the builtin class `name`, or a RuntimeError, with the message `text`."""
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
    everyone = gather_objects({name: repr(value) for name, value in arguments.items()})
    for rank, values in enumerate(everyone):
        for name, value in values.items():
            if value != everyone[0][name]:
                raise ValueError(
                    f"{name} is {everyone[0][name]} on rank 0 and {value} on rank {rank}: call it with the same on "
                    "every rank."
                )


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit number that is equal for equal tensors and differs if the bytes or their order differ."""
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
        body = raw[:whole].clone() if raw.storage_offset() % 8 else raw[:whole]
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
    """Begin `gather_numbers`, and return a function that waits for its result. Collective."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return lambda: mine.unsqueeze(0).cpu()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    with not_profiled():  # a profiler may stop before the result is read
        work = dist.all_gather(everyone, mine, group=group, async_op=what is not None)

    def result() -> Tensor:
        if what is not None:
            wait_for(work, what, device)  # logs which ranks are missing, after long
        return torch.stack(everyone).cpu()

    return result


def gather_numbers(
    numbers: list[int], device: str, what: str | None = None, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the `numbers` of every rank, int64 [ranks, len(numbers)] on the CPU. Collective."""
    return begin_gather(numbers, device, what, group)()
