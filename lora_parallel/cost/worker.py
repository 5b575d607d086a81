"""Run the simulated steps of a plan in processes of their own, as a simulated rank needs a process group of its own.

    python -m lora_parallel.cost.worker 5 6

imports what they need once, and starts a process for each socket whose file descriptor is given. It reads a job a line
from the socket, in JSON, and writes a result a line to it.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch

from lora_parallel.config import ParallelConfig
from lora_parallel.cost.described_model import DescribedModel
from lora_parallel.cost.simulated_step import cost_of_a_step


def main(connections: list[int]) -> None:
    """Start a process for each socket, and return when all of them have ended."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sockets = [socket.socket(fileno=number) for number in connections]
    for index, connection in enumerate(sockets):
        if not os.fork():
            for later in sockets[index + 1 :]:
                later.close()
            # Only now: torch's pool of threads does not survive a fork, and threads of autograd that both look for it
            # end the process ("Invalid thread pool!").
            torch.set_num_threads(1)
            with connection.makefile("rw") as jobs:
                for answer in answers_to(jobs):
                    print(json.dumps(answer), file=jobs, flush=True)
            return
        connection.close()  # so that it ends when its process does
    for _ in sockets:
        os.wait()


def answers_to(jobs: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the answer to each job; a model is built once for all jobs about it."""

    @cache
    def described(model: str) -> DescribedModel:
        return DescribedModel(**json.loads(model))

    for line in jobs:
        job = json.loads(line)
        try:
            model = described(json.dumps(job["model"]))
            if job["kind"] == "stack":
                yield model.describe()
                continue
            options = {
                name: getattr(torch, value) if name.endswith("_dtype") and value else value
                for name, value in job["config"].items()
            }
            config = ParallelConfig(**options)
            cost = cost_of_a_step(model, config, job["ranks"], job["rows"], job["tokens"], job["optimizer"])
            yield {"around": cost.around, "blocks": cost.blocks}
        except Exception as error:  # whatever a model's code raises is the answer to this job alone
            text = f"{error}"
            is_written = isinstance(error, (ValueError, RuntimeError, OSError)) and text
            yield {"refused": text if is_written else f"{type(error).__name__}: {text}"}


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])])
