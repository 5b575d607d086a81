"""Run simulated steps in processes of their own, several at a time, and each of them once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tqdm import tqdm

_WORKERS = 4  # most processes that simulate steps at the same time; each takes about 1 GB


class Simulations:
    """Hold processes that answer jobs (see `lora_parallel.cost.worker`), and the answers."""

    def __init__(self, progress: bool = False) -> None:
        self._progress = progress
        self._free: SimpleQueue[subprocess.Popen[str] | None] = SimpleQueue()
        # the folder of each process for temporary files, which it cannot remove when it is killed
        self._started: dict[subprocess.Popen[str], Path] = {}
        self._answers: dict[str, dict[str, Any]] = {}
        self._folder = tempfile.TemporaryDirectory()
        for _ in range(min(_WORKERS, os.cpu_count() or 1)):
            self._free.put(None)

    def __enter__(self) -> Simulations:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def answers(self, jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the answer to each job. Equal jobs, of earlier calls too, are answered once."""
        keys = [json.dumps(job) for job in jobs]
        missing = {key: job for key, job in zip(keys, jobs, strict=True) if key not in self._answers}
        with ThreadPoolExecutor(_WORKERS) as threads:
            replies = threads.map(self.ask, missing.values())
            bar = tqdm(replies, "Planning", len(missing), unit="run", disable=not self._progress)
            self._answers.update(zip(missing, bar, strict=True))
        return [self._answers[key] for key in keys]

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a job, or raise ChildProcessError if its process ends. Several threads may ask."""
        process = self._free.get() or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = process.wait()
            errors = Path(self._started[process], "stderr").read_text(errors="replace").strip().split("\n")
            last = errors[-1] or "it printed no error"
            raise ChildProcessError(f"the process that simulates a step ended with exit code {code}: {last}")
        self._free.put(process)
        return dict(json.loads(answer))

    def _start(self) -> subprocess.Popen[str]:
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in launcher}
        folder = Path(tempfile.mkdtemp(dir=self._folder.name))
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with (folder / "stderr").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "lora_parallel.cost.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self._started[process] = folder
        return process
