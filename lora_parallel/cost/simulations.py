"""Run simulated steps in processes of their own, several at a time, and each of them once."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

_WORKERS = 4  # most processes that simulate steps at the same time


class Simulations:
    """Hold processes that answer jobs (see `lora_parallel.cost.worker`), and the answers."""

    def __init__(self, progress: bool = False) -> None:
        self._progress = progress
        self._answers: dict[str, dict[str, Any]] = {}
        self._folder = tempfile.TemporaryDirectory()
        pairs = [socket.socketpair() for _ in range(min(_WORKERS, os.cpu_count() or 1))]
        self._group, self._wait = self._start(pairs)
        self._workers = [ours.makefile("rw") for ours, _ in pairs]
        for end in itertools.chain(*pairs):  # what was made of it, and the process that has it, keep a socket open
            end.close()
        self._locks = [Lock() for _ in pairs]

    def __enter__(self) -> Simulations:
        return self

    def __exit__(self, *error: object) -> None:
        if any(error):
            self._kill()
        for worker in self._workers:
            with suppress(OSError):  # of what could not be sent
                worker.close()
        self._wait()
        self._folder.cleanup()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)

    def answers(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answer to each job. Equal jobs, of earlier calls too, are answered once."""
        keys = [json.dumps(job) for job in jobs]
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self._answers}
        with ThreadPoolExecutor(max(1, len(missing))) as threads:  # a thread waits until its job's process is free
            replies = threads.map(self.ask, missing.values())
            bar = tqdm(replies, "Planning", len(missing), unit="run", disable=not self._progress)
            try:
                self._answers.update(zip(missing, bar, strict=True))
            except BaseException:  # as an interrupt, after which the threads would wait for their answers
                self._kill()
                raise
        return [self._answers[key] for key in keys]

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a job, or raise ChildProcessError if its process ends. Several threads may ask."""
        # What is proven of a model for one size of tp takes longest, and serves all jobs of that size in one process.
        number = (job.get("config", {}).get("tp", 1).bit_length() - 1) % len(self._workers)
        worker = self._workers[number]
        try:
            with self._locks[number]:
                worker.write(json.dumps(job) + "\n")
                worker.flush()
                answer = worker.readline()
        except OSError:
            answer = ""
        if not answer:
            errors = Path(self._folder.name, "stderr").read_text(errors="replace").strip().split("\n")
            last = errors[-1] or "it printed no error, as when the system is out of memory"
            why = next((line.strip() for line in errors if "what():" in line), last)  # a list of C++ frames follows it
            raise ChildProcessError(f"a process that simulates a step has ended: {why}")
        return dict(json.loads(answer))

    def _start(self, pairs: list[tuple[socket.socket, socket.socket]]) -> tuple[int, Callable[[], object]]:
        """Start a process for each pair of sockets; return the number of their group, and what waits for their end."""
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in launcher}
        # the folder for temporary files, which a process cannot remove when it is killed
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": self._folder.name}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with Path(self._folder.name, "stderr").open("w") as errors:
            connections = [theirs.fileno() for _, theirs in pairs]
            process = subprocess.Popen(
                [sys.executable, "-m", "lora_parallel.cost.worker", *map(str, connections)],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=environment,
                pass_fds=connections,
                start_new_session=True,  # so that all of its processes are killed together
            )
        return process.pid, process.wait
