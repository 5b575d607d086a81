"""A pool of processes that tests run functions in, as the ranks of a process group.

Start-up costs more than the maths. A server imports what ranks need once, and forks them; ranks keep their process
group from test to test. Engine tests and front-end tests have a server each, the latter a fork of the former, and ranks
of the former cannot import the front ends, so that no engine test runs its ranks on an Accelerate that has been
patched. Every group has a short
timeout, so a hang is a failure in seconds. A group in which a rank fails or does not answer is killed and started anew,
unless its ranks all raised alike, as the test expected, and then meet in all of their process groups, with no message
between two of them that could be left over. Groups that grow too large, or are too many, are ended too: a fork takes a
tenth of a second, and memory that runs out takes the whole run. What a rank prints to standard error goes to a file,
which is part of the error if the rank crashes: where its threads were, in Python and below.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

FAKE = "fake"
"""Backend of a pool whose groups have rank 0 alone: its collectives send nothing. For refusals of arguments."""

COLLECTIVE_TIMEOUT = 180  # a rank waits for a peer that compiles, on a machine that is five times as slow
IMPATIENT = 5  # of a group in which a rank waits for a peer that does not come; on a busy machine peers are late, too
ANSWER_TIMEOUT = 600  # of ranks that compile, on a machine that is three times as slow; others end much earlier
SCRIPT_LIMIT = 600  # of a script that a test starts: with twenty processes at work imports alone take minutes
MEET_TIMEOUT = 2  # seconds in which ranks that raised alike must have met
MOST_RANKS = 16  # of one pytest process; those that were used last stay
MOST_BYTES = 3 * 2**29  # that a rank may hold after a call, to be called again
PRINTED = 30_000  # characters of what a rank that died has printed

ENGINE = ("torch.distributed.fsdp", "torch.distributed.tensor", "lora_parallel.integration", "tests.oracle.rows")
"""Modules that the server of the engine's tests imports."""

OURS = ("accelerate_plugin", "lightning_lora")
"""The front ends, which ranks of the engine's tests cannot import."""

OFTEN, SELDOM = gc.get_threshold(), (20_000, 20, 20)
"""Numbers of objects after which Python looks for garbage: its own, and those of the engine's ranks, which make many
tensors and modules; a twentieth of their time went into it. Processes that fork workers of data loaders keep Python's:
when pytest's own process looked seldom, a run once hung in such a worker.
"""

FRONT_ENDS = (
    *ENGINE,
    *OURS,
    "trl",
    "bitsandbytes",
    "tests.lightning_lora.harness",
    "tests.accelerate_plugin.harness",
    "tests.oracle.trainer_rows",
)
"""Modules that the server of the front ends' tests imports."""


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    kind: str
    message: str
    trace: str


class Death(Failure):
    """How a rank ended."""


class WorkerError(AssertionError):
    """A rank failed where none should."""


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns, or a `Failure` if it raises. On a rank: an error that is expected there."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:  # whatever a rank raises is an answer
        return Failure(type(error).__name__, str(error), traceback.format_exc())


# ---------------------------------------------------------------------- a rank


def _send(pipe: Connection, value: Any) -> None:
    """As bytes: `pipe.send` would move tensors to shared memory, in place, while other threads of a rank may still hold
    them, and a file descriptor of each would go with it.
    """
    written = io.BytesIO()
    torch.save(value, written, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    pipe.send_bytes(written.getbuffer())


def _received(pipe: Connection) -> Any:
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


@dataclass(frozen=True)
class Group:
    """A process group that ranks are started in."""

    world_size: int
    store: str
    timeout: int
    backend: str
    prepare: Callable[[], None] | None

    def log(self, rank: int) -> Path:
        """File of what a rank prints to standard error."""
        return Path(f"{self.store}.{rank}.log")


def _serve(group: Group, rank: int, pipe: Connection) -> None:
    global COLLECTIVE_TIMEOUT
    COLLECTIVE_TIMEOUT = group.timeout
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.dup2(os.open(group.log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    from lora_parallel.distributed.torch_private import one_gloo_thread
    from tests.oracle.caches import keep_plans
    from tests.times import watch_rank

    watch_rank(rank, group.world_size)
    _note_messages()
    keep_plans()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)  # glibc's; it keeps what was freed, otherwise
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if group.prepare is not None:
        group.prepare()
    if group.backend == FAKE:
        place: dict[str, Any] = {"store": FakeStore()}
    else:
        place = {"init_method": f"file://{group.store}"}
    # With two threads a rank's heap is corrupted in one full run of fifteen: docs/upstream/gloo_threads.md
    with one_gloo_thread():
        dist.init_process_group(
            group.backend,
            **place,
            rank=rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=group.timeout),
        )
    while True:
        try:
            function, args = _received(pipe)
        except EOFError:
            return
        except Exception as error:  # a function that cannot be imported here
            _send(pipe, Failure(type(error).__name__, str(error), traceback.format_exc()))
            continue
        if function is not _meet:
            _messages.clear()
        _send(pipe, attempt(function, *args))
        del function, args
        trim(0)


_messages: list[str] = []
"""Names of the functions by which this rank has sent to or received from one peer, in the last call but `_meet`."""


def _note_messages() -> None:
    """Note messages between two ranks: one that nobody has received would be taken for the next test's."""

    def noting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            _messages.append(name)
            return own(*args, **kwargs)

        return call

    for name in ("send", "recv", "isend", "irecv"):
        setattr(dist, name, noting(name, getattr(dist, name)))


def _meet() -> None:
    """Wait for the peers in every process group of this rank: none is broken, none has a collective left over.

    Raises:
        RuntimeError: The call before this one sent messages between two ranks, of which some may be left over.
    """
    from lora_parallel.distributed.torch_private import process_groups

    if _messages:
        raise RuntimeError(f"{_messages[0]} was called: a message may be left over.")
    gc.collect()  # models that the error's frames held
    for group in process_groups():
        dist.barrier(group)


# ---------------------------------------------------------------------- the server


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _import(modules: tuple[str, ...]) -> None:
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:  # of a package that is not installed; a test that needs it says so
            if (error.name or "tests").split(".")[0] in ("lora_parallel", *OURS, "tests"):
                raise


def _fork_ranks(modules: tuple[str, ...], requests: Connection, other_end: Connection | None = None) -> None:
    if other_end is not None:
        other_end.close()  # a fork has it too, and would wait for requests of its own
    gc.disable()  # what is imported is kept
    for name in OURS:
        if sys.modules.get(name, ...) is None:  # in the server that this one is a fork of
            del sys.modules[name]
    _import(modules)
    gc.set_threshold(*OFTEN)
    if not set(OURS) & sys.modules.keys():
        sys.modules.update(dict.fromkeys(OURS))  # type: ignore[arg-type]  # importing one is an error from now on
        gc.set_threshold(*SELDOM)
    gc.freeze()  # pages that no rank's collector writes to stay shared
    gc.enable()
    context = multiprocessing.get_context("fork")
    started: dict[int, Any] = {}
    while True:
        try:
            request = requests.recv()
        except EOFError:
            for pid, process in started.items():
                if process.daemon:  # a rank: one that is stopped would not end by itself
                    _signal(pid, signal.SIGKILL)
            return
        if isinstance(request, int):
            process = started.pop(request)
            process.join(timeout=10)
            requests.send(process.exitcode)
            continue
        target, *arguments = request
        process = context.Process(target=target, args=arguments, daemon=target is _serve)
        process.start()
        arguments[-1].close()
        started[process.pid] = process
        requests.send(process.pid)


class Server:
    """A process that has imported `modules`, and forks ranks of itself: a fork of another server or of this process, or
    a new process.
    """

    def __init__(self, modules: tuple[str, ...], parent: Server | None = None, method: str = "spawn") -> None:
        context: Any = multiprocessing.get_context(method)
        self._requests, theirs = context.Pipe()
        if parent is None:
            self._process = context.Process(target=_fork_ranks, args=(modules, theirs, self._requests))
            self._process.start()
        else:
            parent._ask((_fork_ranks, modules, theirs))
        theirs.close()
        atexit.register(self._requests.close)  # the end of its requests ends it, and all of its ranks

    def _ask(self, request: Any) -> Any:
        self._requests.send(request)
        return self._requests.recv()

    def fork(self, group: Group, rank: int) -> Rank:
        ours, theirs = multiprocessing.Pipe()
        pid = self._ask((_serve, group, rank, theirs))
        theirs.close()
        return Rank(pid, ours, group.log(rank), self)

    def exit_code(self, pid: int) -> int | None:
        """Exit code of a rank that has died or been killed; None if it has not ended within ten seconds."""
        return self._ask(pid)


_servers: dict[tuple[str, ...], Server] = {}


def fork_server() -> None:
    """Fork the server of the engine's tests from this process, which has imported nothing that a rank must not have."""
    _import(ENGINE)
    _servers[ENGINE] = Server(ENGINE, method="fork")


def server(modules: tuple[str, ...]) -> Server:
    """The one server of these modules."""
    if modules not in _servers:
        _servers[modules] = Server(modules) if modules == ENGINE else Server(modules, server(ENGINE))
    return _servers[modules]


@dataclass
class Rank:
    """A process, the pipe to it and the file of what it prints."""

    pid: int
    pipe: Connection
    log: Path
    server: Server

    @property
    def size(self) -> int:
        """Return the bytes that the process holds in memory; 0 if it has ended."""
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0

    def end(self, kill: bool = True) -> str:
        """End the process, or wait for the end of one that has died; return how it ended."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)  # a rank that has ended is there until its server has waited for it
        code = self.server.exit_code(self.pid)
        self.pipe.close()
        return f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name


# ---------------------------------------------------------------------- the pool


class WorkerPool:
    """Runs `function(*args)` on ranks 0 .. world_size - 1, whose collectives wait `timeout` seconds for each other.

    `prepare` is called on each rank before it joins the process group of the given backend.
    """

    _in_use: ClassVar[dict[tuple[WorkerPool, int], None]] = {}
    """The groups of all pools: pool and world size, those that were used last at the end."""

    def __init__(
        self,
        timeout: int = COLLECTIVE_TIMEOUT,
        modules: tuple[str, ...] = ENGINE,
        backend: str = "gloo",
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self._settings = (timeout, backend, prepare)
        self._modules = modules
        self._ranks: dict[int, list[Rank]] = {}
        self._stores = tempfile.TemporaryDirectory(prefix="stores")
        self._started = 0

    def _group(self, world_size: int) -> list[Rank]:
        self._in_use.pop((self, world_size), None)
        self._pause()
        self._in_use[self, world_size] = None
        for rank in self._ranks.get(world_size, []):
            _signal(rank.pid, signal.SIGCONT)
        if world_size not in self._ranks:
            while len(self._in_use) > 1 and sum(size for _, size in self._in_use) > MOST_RANKS:
                pool, size = next(iter(self._in_use))
                pool._end(size)
            self._started += 1
            group = Group(world_size, os.path.join(self._stores.name, str(self._started)), *self._settings)
            self._ranks[world_size] = []
            for rank in range(1 if group.backend == FAKE else world_size):
                group.log(rank).touch()
                self._ranks[world_size].append(server(self._modules).fork(group, rank))
        return self._ranks[world_size]

    @classmethod
    def _pause(cls) -> None:
        """Stop the ranks of all groups: each of gloo's threads wakes a hundred times a second, and a rank has forty."""
        for pool, size in cls._in_use:
            for rank in pool._ranks[size]:
                if not rank.pipe.closed:
                    _signal(rank.pid, signal.SIGSTOP)

    def try_run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's return value, or a `Failure` where it raised."""
        try:
            answers = self._answers(world_size, function, *args)
            failed = any(isinstance(answer, Failure) for answer in answers)
            large = any(rank.size > MOST_BYTES for rank in self._ranks[world_size])
            if large or (failed and not self._in_step(world_size, answers)):
                self._end(world_size)
        except BaseException:  # pytest's timeout too: the next caller would get the late answers as its own
            self._end(world_size)
            raise
        return answers

    def _answers(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        ranks = self._group(world_size)
        printed = [rank.log.stat().st_size for rank in ranks]
        for rank in ranks:
            with suppress(BrokenPipeError):  # it died since its last answer, as the end of its pipe says below
                _send(rank.pipe, (function, args))
        answers: list[Any] = []
        for index, rank in enumerate(ranks):
            if not rank.pipe.poll(ANSWER_TIMEOUT):
                raise WorkerError(f"rank {index} of {world_size} gave no answer in {ANSWER_TIMEOUT} s")
            try:
                answers.append(_received(rank.pipe))
            except (EOFError, ConnectionResetError):  # the latter if it died before it read what it was sent
                ending = f"rank {index} of {world_size} died ({rank.end(kill=False)})"
                text = rank.log.read_bytes()[printed[index] :].decode(errors="replace")[:PRINTED]
                answers.append(Death("EOFError", ending, f"{ending}, having printed:\n{text}"))
        return answers

    def _in_step(self, world_size: int, answers: list[Any]) -> bool:
        """Return True if the ranks raised the same kind of error, and meet afterwards."""
        if len({getattr(answer, "kind", None) for answer in answers}) > 1:
            return False
        if any(isinstance(answer, Death) for answer in answers):
            return False
        ranks = self._ranks[world_size]
        for rank in ranks:
            _send(rank.pipe, (_meet, ()))
        return all(rank.pipe.poll(MEET_TIMEOUT) and _received(rank.pipe) is None for rank in ranks)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's return value; fails if any rank raised."""
        answers = self.try_run(world_size, function, *args)
        failures = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, Failure)]
        if failures:
            self._end(world_size)
            # The first of them may only have waited for the one that went wrong, as all do for one that died.
            failures.sort(key=lambda failure: not isinstance(failure[1], Death))
            told = "\n".join(f"rank {rank}: {failure.trace or failure.message}" for rank, failure in failures)
            raise WorkerError(f"{len(failures)} of {world_size} ranks failed.\n{told}")
        return answers

    def _end(self, world_size: int) -> None:
        self._in_use.pop((self, world_size), None)
        for rank in self._ranks.pop(world_size, []):
            if not rank.pipe.closed:
                rank.end()

    def close(self) -> None:
        """End all processes."""
        for world_size in list(self._ranks):
            self._end(world_size)
        self._stores.cleanup()
