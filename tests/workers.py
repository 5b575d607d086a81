"""A pool of processes that tests run functions in, as the ranks of a gloo process group.

Start-up costs more than the maths: the processes are forked from a server that has imported everything, once a session
for each world size, and keep their process group. Every group has a short timeout, so a hang is a failure in seconds; a
group in which a rank fails, or does not answer, is killed and started anew. What a rank prints to standard error goes
to a file, which is told if it crashes: where its threads were, in Python and below.
"""

from __future__ import annotations

import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

COLLECTIVE_TIMEOUT = 60
ANSWER_TIMEOUT = 300
TOLD = 30_000  # characters of what a rank that died has printed
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "peft", "tests.oracle"]


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


def _send(pipe: Connection, value: Any) -> None:
    """As bytes: `pipe.send` would move tensors to shared memory, in place, while other threads of a rank may still hold
    them, and a file descriptor of each would go with it.
    """
    written = io.BytesIO()
    torch.save(value, written, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    pipe.send_bytes(written.getbuffer())


def _received(pipe: Connection) -> Any:
    return torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)


def _serve(rank: int, world_size: int, store: str, log: Path, pipe: Connection, timeout: int) -> None:
    global COLLECTIVE_TIMEOUT
    COLLECTIVE_TIMEOUT = timeout
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    import torch.distributed as dist

    from lora_parallel.distributed.torch_private import one_gloo_thread

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with (
        one_gloo_thread()
    ):  # with two a rank's heap is corrupted in one full run of fifteen: docs/upstream/gloo_threads.md
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
    while True:
        try:
            function, args = _received(pipe)
        except EOFError:
            return
        except Exception as error:  # a function that cannot be imported here
            _send(pipe, Failure(type(error).__name__, str(error), traceback.format_exc()))
            continue
        _send(pipe, attempt(function, *args))


def _ending(exitcode: int | None) -> str:
    return f"exit code {exitcode}" if exitcode is None or exitcode >= 0 else signal.Signals(-exitcode).name


@dataclass
class Rank:
    """A process, the pipe to it and the file of what it prints."""

    process: Any
    pipe: Connection
    log: Path


class WorkerPool:
    """Runs `function(*args)` on ranks 0 .. world_size - 1, whose collectives wait `timeout` seconds for each other."""

    def __init__(self, timeout: int = COLLECTIVE_TIMEOUT) -> None:
        self._timeout = timeout
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._ranks: dict[int, list[Rank]] = {}
        self._stores = tempfile.TemporaryDirectory(prefix="stores")
        self._started = 0

    def _group(self, world_size: int) -> list[Rank]:
        if world_size not in self._ranks:
            self._started += 1
            store = os.path.join(self._stores.name, str(self._started))
            self._ranks[world_size] = []
            for rank in range(world_size):
                ours, theirs = self._context.Pipe()
                log = Path(f"{store}.{rank}.log")
                log.touch()
                process = self._context.Process(
                    target=_serve, args=(rank, world_size, store, log, theirs, self._timeout), daemon=True
                )
                process.start()
                theirs.close()
                self._ranks[world_size].append(Rank(process, ours, log))
        return self._ranks[world_size]

    def try_run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's return value, or a `Failure` where it raised."""
        try:
            return self._answers(world_size, function, *args)
        except BaseException:  # pytest's timeout too: the next caller would get the late answers as its own
            self._end(world_size)
            raise

    def _answers(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        ranks = self._group(world_size)
        printed = [rank.log.stat().st_size for rank in ranks]
        for rank in ranks:
            _send(rank.pipe, (function, args))
        answers: list[Any] = []
        for index, rank in enumerate(ranks):
            if not rank.pipe.poll(ANSWER_TIMEOUT):
                raise WorkerError(f"rank {index} of {world_size} gave no answer in {ANSWER_TIMEOUT} s")
            try:
                answers.append(_received(rank.pipe))
            except EOFError:
                rank.process.join(timeout=10)
                ending = f"rank {index} of {world_size} died ({_ending(rank.process.exitcode)})"
                told = rank.log.read_bytes()[printed[index] :].decode(errors="replace")[:TOLD]
                answers.append(Death("EOFError", ending, f"{ending}, having printed:\n{told}"))
        if any(isinstance(answer, Failure) for answer in answers):
            self._end(world_size)  # a group in which a rank failed may be out of step
        return answers

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's return value; fails if any rank raised."""
        answers = self.try_run(world_size, function, *args)
        failures = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, Failure)]
        if failures:
            # The first of them may only have waited for the one that went wrong, as all do for one that died.
            failures.sort(key=lambda failure: not isinstance(failure[1], Death))
            told = "\n".join(f"rank {rank}: {failure.trace or failure.message}" for rank, failure in failures)
            raise WorkerError(f"{len(failures)} of {world_size} ranks failed.\n{told}")
        return answers

    def _end(self, world_size: int) -> None:
        ranks = self._ranks.pop(world_size, [])
        for rank in ranks:
            rank.process.kill()
            rank.pipe.close()
        wait([rank.process.sentinel for rank in ranks], timeout=10)

    def close(self) -> None:
        """End all processes."""
        for world_size in list(self._ranks):
            self._end(world_size)
        self._stores.cleanup()
