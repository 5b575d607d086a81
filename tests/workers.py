"""A pool of processes that tests run functions in, as the ranks of a gloo process group.

Start-up costs more than the maths: the processes are forked from a server that has imported everything, once a session
for each world size, and keep their process group. Every group has a short timeout, so a hang is a failure in seconds; a
group in which a rank fails, or does not answer, is killed and started anew.
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


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the function returns, or a `Failure` if it raises. On a rank: an error that is expected there."""
    try:
        return function(*args, **kwargs)
    except BaseException as error:  # whatever a rank raises is an answer
        return Failure(type(error).__name__, str(error), traceback.format_exc())


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        except Exception as error:  # a function that cannot be imported here
            pipe.send(Failure(type(error).__name__, str(error), traceback.format_exc()))
            continue
        pipe.send(attempt(function, *args))


class WorkerPool:
    """Runs `function(*args)` on ranks 0 .. world_size - 1."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._ranks: dict[int, list[tuple[Any, Connection]]] = {}
        self._stores = tempfile.TemporaryDirectory(prefix="stores")
        self._started = 0

    def _group(self, world_size: int) -> list[tuple[Any, Connection]]:
        if world_size not in self._ranks:
            self._started += 1
            store = os.path.join(self._stores.name, str(self._started))
            self._ranks[world_size] = []
            for rank in range(world_size):
                ours, theirs = self._context.Pipe()
                process = self._context.Process(target=_serve, args=(rank, world_size, store, theirs), daemon=True)
                process.start()
                theirs.close()
                self._ranks[world_size].append((process, ours))
        return self._ranks[world_size]

    def try_run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's return value, or a `Failure` where it raised."""
        ranks = self._group(world_size)
        for _, pipe in ranks:
            pipe.send((function, args))
        answers: list[Any] = []
        for rank, (_, pipe) in enumerate(ranks):
            if not pipe.poll(ANSWER_TIMEOUT):
                self._end(world_size)
                raise WorkerError(f"rank {rank} of {world_size} gave no answer in {ANSWER_TIMEOUT} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append(Failure("EOFError", f"rank {rank} of {world_size} died", ""))
        if any(isinstance(answer, Failure) for answer in answers):
            self._end(world_size)  # a group in which a rank failed may be out of step
        return answers

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Each rank's return value; fails if any rank raised."""
        answers = self.try_run(world_size, function, *args)
        failures = [(rank, answer) for rank, answer in enumerate(answers) if isinstance(answer, Failure)]
        if failures:
            rank, failure = failures[0]
            raise WorkerError(f"{len(failures)} of {world_size} ranks failed; rank {rank}:\n{failure.trace}")
        return answers

    def _end(self, world_size: int) -> None:
        ranks = self._ranks.pop(world_size)
        for process, pipe in ranks:
            process.kill()
            pipe.close()
        wait([process.sentinel for process, _ in ranks], timeout=10)

    def close(self) -> None:
        """End all processes."""
        for world_size in list(self._ranks):
            self._end(world_size)
        self._stores.cleanup()
