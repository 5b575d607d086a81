"""Steps of the GPU script that end in each way; called in its processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.outcomes import NotInstalled, NotSupported


def counted(device: str, file: str, error: float = 0.0, bound: float = 0.0) -> dict[str, Any]:
    with Path(file).open("a") as lines:
        lines.write("called\n")
    return {"errors": {"something": [error, bound]}}


def fails(device: str, rank: str = "0") -> dict[str, Any]:
    """On one rank, while the others wait for it."""
    if os.environ["LOCAL_RANK"] != rank:
        time.sleep(60)
    print("the last words")
    raise ValueError("it broke")


def hangs(device: str) -> None:
    print("until here")
    waits_for_nothing()


def tells_and_hangs(device: str, file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    waits_for_nothing()


def waits_for_nothing() -> None:
    time.sleep(60)


def dies(device: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refused(device: str) -> None:
    raise NotSupported("the library says no")


def lacks(device: str) -> None:
    raise NotInstalled("no such package")


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def large(device: str, layers: int) -> dict[str, Any]:
    if layers > 4:
        raise OutOfMemoryError(f"{layers} layers")
    return {"layers": layers}


def lingers(device: str) -> dict[str, Any]:
    """The process stays when the result is there."""
    import threading

    threading.Thread(target=time.sleep, args=(60,)).start()
    return {"errors": {}}
