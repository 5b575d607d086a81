"""A pool of processes that tests run functions in, as the ranks of a gloo process group.

Start-up costs more than the maths: the processes are forked once a session from a server that has imported everything,
and join a process group of another size only when a test asks for one. Every group has a short timeout, so a hang is a
failure in seconds; a pool that does not answer is killed and started anew.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

COLLECTIVE_TIMEOUT = 60
ANSWER_TIMEOUT = 300
_PRELOAD = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers", "peft", "tests.oracle"]


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    kind: str
    message: str
    trace: str


class WorkerError(AssertionError):
    """A rank failed where none should."""


def _serve(rank: int, pipe: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    size = 0
    while True:
        try:
            function, args, wanted, store = pipe.recv()
        except EOFError:
            return
        try:
            if wanted != size:
                if dist.is_initialized():
                    dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=wanted,
                    timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
                )
                size = wanted
            answer = function(*args)
        except BaseException as error:  # whatever a rank raises is an answer
            answer = Failure(type(error).__name__, str(error), traceback.format_exc())
        pipe.send(answer)


class WorkerPool:
    """Runs `function(*args)` on ranks 0 .. world_size - 1."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._workers: list[tuple[Any, Connection]] = []
        self._size = 0
        self._stores = tempfile.mkdtemp(prefix="stores")
        self._groups = 0

    def _ensure(self, count: int) -> None:
        for rank in range(len(self._workers), count):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def try_run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's return value, or a `Failure` where it raised."""
        self._ensure(world_size)
        if world_size != self._size:
            # Ranks outside of the new group leave theirs when they are asked for again.
            self._groups += 1
            self._size = world_size
        store = os.path.join(self._stores, str(self._groups))
        ranks = self._workers[:world_size]
        for _, pipe in ranks:
            pipe.send((function, args, world_size, store))
        answers: list[Any] = []
        for rank, (_, pipe) in enumerate(ranks):
            if not pipe.poll(ANSWER_TIMEOUT):
                self.close()
                raise WorkerError(f"rank {rank} gave no answer in {ANSWER_TIMEOUT} s")
            answers.append(pipe.recv())
        if any(isinstance(answer, Failure) for answer in answers):
            self.close()  # a group in which a rank failed may be out of step
        return answers

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's return value; fails if any rank raised."""
        answers = self.try_run(world_size, function, *args)
        failures = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, Failure)]
        if failures:
            rank, failure = failures[0]
            raise WorkerError(f"{len(failures)} of {world_size} ranks failed; rank {rank}:\n{failure.trace}")
        return answers

    def close(self) -> None:
        """End all processes."""
        for process, pipe in self._workers:
            process.kill()
            pipe.close()
        wait([process.sentinel for process, _ in self._workers], timeout=10)
        self._workers = []
        self._size = 0
