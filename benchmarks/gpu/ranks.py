"""Run one step in processes of its own, as the ranks of a group, and say what it came to, whatever happens to them.

- A rank imports torch, and whatever else, after its output goes to the step's log.
- On GPUs each process is a fresh one: no CUDA context, memory or library state of an earlier step, and nothing that
  fork does not survive (torchao and bitsandbytes begin to use the GPU when they are imported). On a CPU they are forked
  from a server that has imported the libraries, which costs more than the tiny steps there.
- Of more ranks than GPUs, several share one, which NCCL does not do: they talk over `tests/oracle/late_group.py`.
- A step that exceeds its time has its stacks printed and is killed with all that it started.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Thread
from typing import Any, Literal

from benchmarks.gpu.outcomes import SETTLED, Status, status_of, violations
from benchmarks.gpu.records import ROOT, Record
from benchmarks.gpu.steps import Step

PRELOAD = [
    *("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "lora_parallel"),
    *("transformers.models.llama.modeling_llama", "tests.oracle", "benchmarks.peers"),
]
START_METHODS = {"cuda": "spawn", "cpu": "forkserver"}
GRACE_SECONDS = 20.0
"""How long the others may go on when one rank has failed: they may be about to say why. And how long ranks may take to
end when all have given their results."""

Ended = Literal["ended", "failed", "lingered", "timed out"]

TOLD_LINES = 60


def run_step(step: Step, device: str, options: dict[str, Any], seconds: float) -> Record:
    """Run a step once, for at most so many seconds."""
    start = time.monotonic()
    context: Any = multiprocessing.get_context(START_METHODS[device])
    if START_METHODS[device] == "forkserver":
        context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="gpu-step-") as scratch:
        port = _free_port()
        ranks = [
            context.Process(target=_serve, args=(step.function, options, device, rank, step.world_size, port, scratch))
            for rank in range(step.world_size)
        ]
        try:
            for rank in ranks:
                rank.start()
            ended = _wait(ranks, Path(scratch), start + seconds)
            if ended in ("timed out", "lingered"):
                _print_stacks(ranks)
        finally:
            _end(ranks)
        status, figures, detail, trace = _came_to(ranks, Path(scratch), ended, seconds)
        output = "" if status in SETTLED else trace or _last_lines(Path(scratch, "log"))
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M")
    return Record(step.name, status, figures, detail, output, round(time.monotonic() - start, 1), options, date)


# ---------------------------------------------------------------------- in a rank


def _serve(
    function: str, options: dict[str, Any], device: str, rank: int, world_size: int, port: int, scratch: str
) -> None:
    """Call the step's function on this rank and write what it returned or raised."""
    os.setsid()  # to be killed together with what it starts
    Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    log = os.open(Path(scratch, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _set_environment(device, rank, world_size, port, scratch)
    answer: dict[str, Any] = {"status": "passed", "figures": {}, "detail": ""}
    try:
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        _choose_device(device, rank, world_size)
        module, _, name = function.partition(":")
        answer["figures"] = getattr(importlib.import_module(module), name)(device=device, **options) or {}
        if wrong := violations(answer["figures"]):
            answer |= {"status": "failed", "detail": "; ".join(wrong)}
    except BaseException as error:  # whatever a rank raises is what the step came to
        answer |= {"status": status_of(error), "detail": f"{type(error).__name__}: {error}"}
        answer["trace"] = traceback.format_exc()
        print(answer["trace"])
        if answer["status"].startswith("not "):
            answer["detail"] = str(error)
    written = Path(scratch, f"{rank}.tmp")
    written.write_text(json.dumps(answer))
    written.rename(Path(scratch, f"{rank}.json"))
    if answer["status"] == "passed":
        _leave_together()


def _end_with(parent: int) -> None:
    """Kill this rank, and what it has started, when its parent is gone: none may go on holding a GPU."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def _set_environment(device: str, rank: int, world_size: int, port: int, scratch: str) -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), f"gpu-inductor-{os.getuid()}")))
    tempfile.tempdir = os.environ["TMPDIR"] = scratch  # what a killed step leaves behind goes with it
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        os.environ.pop(name, None)
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": "1",  # ranks share the CPU
        "PYTHONPATH": str(ROOT),  # of what a step starts itself
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    if world_size > 1:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _choose_device(device: str, rank: int, world_size: int) -> None:
    """Before anything is put on a device: what is made on "cuda" afterwards is on this rank's."""
    import torch
    import torch.distributed as dist

    if device == "cpu":
        torch.set_num_threads(1)
    else:
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        if world_size > gpus:
            from tests.oracle import late_group

            torch.cuda.init()  # or the first mesh would choose a device of its own
            late_group.register("lazy")
            dist.init_process_group("late", timeout=timedelta(seconds=60))
    torch.set_float32_matmul_precision("highest")  # an error is to be ours, not TF32's


def _leave_together() -> None:
    """A rank that ends early can take gloo's threads of the others down with it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


# ---------------------------------------------------------------------- around the ranks


_given: set[int] = set()
"""Ports of this command's steps, some of which may not have bound theirs yet."""


def _free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def _wait(ranks: list[BaseProcess], scratch: Path, deadline: float) -> Ended:
    """Wait until all have ended, or have been waited for as long as there is reason to."""
    running = {rank.sentinel: number for number, rank in enumerate(ranks)}
    limit, reason = deadline, "timed out"
    while running:
        left = limit - time.monotonic()
        if left <= 0:
            return reason
        for sentinel in wait(list(running), timeout=min(left, 1.0)):
            ranks[running.pop(sentinel)].join()  # type: ignore[call-overload]
        answers = [_answer(scratch, number) for number in range(len(ranks))]
        ended = [answers[number] for number in range(len(ranks)) if number not in running.values()]
        if reason == "timed out" and (None in ended or any(each and each["status"] != "passed" for each in answers)):
            limit, reason = min(deadline, time.monotonic() + GRACE_SECONDS), "failed"
        elif reason == "timed out" and None not in answers:
            limit, reason = min(deadline, time.monotonic() + GRACE_SECONDS), "lingered"
    return "ended"


def _answer(scratch: Path, rank: int) -> dict[str, Any] | None:
    path = scratch / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _came_to(
    ranks: list[BaseProcess], scratch: Path, ended: Ended, seconds: float
) -> tuple[Status, dict[str, Any], str, str]:
    """The step's status, figures, one line about it, and the stack of what was raised."""
    answers = [_answer(scratch, number) for number in range(len(ranks))]
    figures = (answers[0] or {}).get("figures", {})
    if ended == "timed out":
        return "timed out", figures, f"not finished after {seconds:.0f} s", ""
    found = [(number, answer) for number, answer in enumerate(answers) if answer and answer["status"] != "passed"]
    # The first that failed: the others may only have waited for it. Out of memory is what a smaller model mends.
    found.sort(key=lambda each: (each[1]["status"] != "out of memory", (scratch / f"{each[0]}.json").stat().st_mtime))
    dead = [number for number, answer in enumerate(answers) if answer is None]
    if found:
        number, answer = found[0]
        where = f"rank {number}: " if len(ranks) > 1 and answer["status"] in ("failed", "out of memory") else ""
        return answer["status"], figures, where + answer["detail"], answer.get("trace", "")
    if dead:
        return "failed", figures, f"rank {dead[0]} ended by {_ending(ranks[dead[0]].exitcode)}", ""
    return "passed", figures, "its processes did not end by themselves" if ended == "lingered" else "", ""


def _ending(exitcode: int | None) -> str:
    return signal.Signals(-exitcode).name if exitcode is not None and exitcode < 0 else f"exit code {exitcode}"


def _print_stacks(ranks: list[BaseProcess]) -> None:
    for rank in ranks:
        if rank.is_alive() and rank.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)
    time.sleep(1)


def _end(ranks: list[BaseProcess]) -> None:
    """Kill what is left of the ranks and of what they started."""
    for rank in ranks:
        if rank.pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
            if rank.is_alive():
                rank.kill()
    for rank in ranks:
        if rank.pid is not None:
            rank.join(timeout=10)


def _last_lines(log: Path) -> str:
    if not log.exists():
        return ""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", log.read_text(errors="replace"))
    lines = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    return "\n".join([line for line in lines if line][-TOLD_LINES:])
