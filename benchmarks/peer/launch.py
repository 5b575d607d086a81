"""Start the ranks of one cell as forks of a process that has imported what they need, and end them after a time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SECONDS = 60
"""After this time the ranks of a cell are killed."""

GRACE = 5
"""For so many seconds the other ranks are waited for after one has raised: they may hang in its collectives."""


@dataclass
class Failure:
    """What a rank raised."""

    kind: str
    message: str
    trace: str


def run_ranks(function: Callable[..., Any], args: tuple[Any, ...], ranks: int, folder: Path) -> list[Any] | Failure:
    """Run a function on forked ranks, whose process group is the function's own business.

    Returns:
        What each rank returned, or the first error.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    answers = [folder / f"answer_{rank}.pt" for rank in range(ranks)]
    for answer in answers:
        answer.unlink(missing_ok=True)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(function, args, rank, ranks, port, answers[rank])) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + SECONDS
    failures: list[Failure] = []
    try:
        while time.monotonic() < end and any(process.is_alive() for process in processes):
            time.sleep(0.1)
            if not failures:
                failures = _failures(processes, answers)
                end = min(end, time.monotonic() + GRACE) if failures else end
    finally:
        hang = any(process.is_alive() for process in processes)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    if hang and not failures:
        return Failure("no answer", f"in {SECONDS} s", "")
    failures = _failures(processes, answers)
    if failures:
        return failures[0]
    return [torch.load(answer, weights_only=False) for answer in answers]


def _failures(processes: list[Any], answers: list[Path]) -> list[Failure]:
    """Return what ranks have raised, or that they have died."""
    found = []
    for process, answer in zip(processes, answers, strict=True):
        if process.is_alive():
            continue
        if not answer.exists():
            found.append(Failure("died", f"exit code {process.exitcode}", ""))
            continue
        content = torch.load(answer, weights_only=False)
        if isinstance(content, Failure):
            found.append(content)
    # First what is no echo of another rank's end.
    return sorted(found, key=lambda failure: failure.kind == "died" or "Connection" in failure.message)


def _rank(function: Callable[..., Any], args: tuple[Any, ...], rank: int, ranks: int, port: int, answer: Path) -> None:
    """Run one rank, as torchrun would start it."""
    log = os.open(answer.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    torch.seed()  # a new process has a seed of its own, a fork that of its parent
    places = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "cell"}
    os.environ.update({key: str(value) for key, value in {**places, **store}.items()})
    os.chdir(answer.parent)
    try:
        content = function(*args)
    except BaseException as error:  # a refusal may be a SystemExit
        content = Failure(type(error).__name__, str(error), traceback.format_exc())
    torch.save(content, answer.with_suffix(".part"))
    answer.with_suffix(".part").rename(answer)
    # Without the end of the process group: a rank that leaves gloo's group may abort, or wait for one that has raised.
    os._exit(0)
