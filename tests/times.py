"""A pytest plugin that says where the seconds of a run go, as a table by folder and by kind of work.

    make test-times

A thread of the pytest process and one of rank 0 of every group look at the stack of their main thread twenty times a
second, and name the kind of work by the files that are on it. A moment at which all cores are idle is a wait, whatever
the stack says. `--durations=0` has the seconds of each test; this has what they went into.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from bisect import bisect
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import TextIO

import pytest

PERIOD = 0.05  # seconds between two looks
BUSY = 0.1  # share of the cores' time up to which nobody computes
FOLDER = "TEST_TIMES"
"""Environment variable with the folder that ranks write to."""

RANKS = "in ranks"  # what the pytest process sees: the ranks know more
IDLE = "idle"  # a rank that waits for the next call
START, COMMANDS, IMPORTS = "start of ranks", "commands", "imports"
PLANNING, SET_UP, FILES, STEP, COMPILE = "planning", "set-up of models", "files", "steps", "compile"
PEERS, NO_RANKS, NOBODY, OTHER = "waits for peers", "without ranks", "nobody computes", "other"
KINDS = [START, IMPORTS, SET_UP, PLANNING, STEP, COMPILE, FILES, PEERS, OTHER, NO_RANKS, COMMANDS, NOBODY]

# (kind, part of a path, names of functions or all): the first that any frame of a stack matches.
PLACES: list[tuple[str, str, set[str] | None]] = [
    (IMPORTS, "<frozen importlib", None),
    (COMMANDS, "/subprocess.py", None),
    (START, "/tests/oracle/workers.py", {"_group", "_end"}),
    (RANKS, "/tests/oracle/workers.py", {"_answers"}),
    (IDLE, "/tests/oracle/workers.py", {"_received"}),
    (START, "/torch/distributed/distributed_c10d.py", {"init_process_group", "new_group", "split_group"}),
    (PEERS, "/torch/distributed/distributed_c10d.py", {"all_gather", "all_reduce", "broadcast", "barrier", "gather"}),
    (PEERS, "/torch/distributed/_functional_collectives.py", {"wait_tensor"}),
    (PEERS, "/lora_parallel/distributed/meetings.py", {"_wait"}),
    (PEERS, "/lora_parallel/fsdp/unit_order.py", {"wait"}),
    (COMPILE, "/torch/_inductor/", None),
    (COMPILE, "/torch/_dynamo/", {"compile", "_compile", "__call__", "transform"}),
    (PLANNING, "/lora_parallel/planning/", None),
    (PLANNING, "/lora_parallel/tracing/", None),
    (FILES, "/lora_parallel/checkpoint/", None),
    (FILES, "/lora_parallel/export/", None),
    (FILES, "/torch/distributed/checkpoint/", None),
    (FILES, "/safetensors/", None),
    (FILES, "/lora_parallel/adapters/adapter_folder.py", None),
    (SET_UP, "/lora_parallel/parallelize.py", None),
    (SET_UP, "/lora_parallel/fsdp/wrapping.py", None),
    (SET_UP, "/peft/mapping_func.py", None),
    (SET_UP, "/transformers/modeling_utils.py", {"__init__", "from_pretrained", "_from_config", "post_init"}),
    (SET_UP, "/transformers/", {"__init__"}),
    (SET_UP, "/copy.py", {"deepcopy"}),
    (STEP, "/torch/nn/modules/module.py", {"_call_impl", "_wrapped_call_impl"}),
    (STEP, "/torch/_tensor.py", {"backward"}),
    (STEP, "/torch/autograd/", None),
    (STEP, "/torch/optim/", None),
    (STEP, "/lora_parallel/distributed/gradients.py", None),
]


def kind_of(frame: FrameType | None) -> str:
    """Return the kind of work of a stack."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_code.co_name))
        frame = frame.f_back
    for kind, path, names in PLACES:
        if any(path in file and (names is None or name in names) for file, name in frames):
            return kind
    return OTHER


def watch_rank(rank: int, world_size: int) -> None:
    """On rank 0 of a group, if this run is watched: write the kind of work at each moment to a file."""
    folder = os.environ.get(FOLDER)
    if not folder or rank:
        return
    file = open(Path(folder, f"{time.monotonic_ns()}.{world_size}.{os.getpid()}"), "w")  # noqa: SIM115 - the thread's
    threading.Thread(target=_watch, args=(threading.main_thread().ident, file), daemon=True).start()


def _watch(thread: int, file: TextIO) -> None:
    while True:
        time.sleep(PERIOD)
        if (kind := kind_of(sys._current_frames().get(thread))) != IDLE:
            print(time.monotonic(), kind, file=file, flush=True)


class Watch:
    """Looks at the pytest process, and puts the ranks' files beside it when the run is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.test = ""
        self.looks: list[tuple[float, str, str]] = []  # when, test, kind
        self._main = threading.main_thread().ident
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        busy, total = _processor_times()
        looked = time.monotonic()
        pending: list[tuple[float, str, str]] = []
        while True:
            time.sleep(PERIOD)
            kind = kind_of(sys._current_frames().get(self._main))
            if kind not in (RANKS, START, COMMANDS, IMPORTS):
                kind = NO_RANKS  # an oracle, or a test that needs none
            pending.append((time.monotonic(), self.test, kind))
            if time.monotonic() - looked < 0.25:  # the kernel counts in hundredths of a second
                continue
            looked = time.monotonic()
            before = busy, total
            busy, total = _processor_times()
            if busy - before[0] < BUSY * (total - before[1]):
                pending = [(when, test, NOBODY) for when, test, _ in pending]
            self.looks += pending
            pending = []

    def table(self) -> dict[str, Counter[str]]:
        """{folder: {kind: seconds}}."""
        ranks: list[tuple[float, str]] = []
        for file in self.folder.iterdir():
            for line in file.read_text().splitlines():
                when, _, kind = line.partition(" ")
                if kind:
                    ranks.append((float(when), kind))
        ranks.sort()
        times = [when for when, _ in ranks]
        seconds: dict[str, Counter[str]] = defaultdict(Counter)
        for (when, test, kind), after in zip(self.looks, self.looks[1:], strict=False):
            found = kind
            if kind == RANKS:
                index = bisect(times, when)
                near = min(ranks[max(index - 1, 0) : index + 1], key=lambda look: abs(look[0] - when), default=None)
                found = START if near is None or abs(near[0] - when) > 1 else near[1]
            seconds[_folder_of(test)][found] += after[0] - when
        return seconds

    def groups(self) -> list[int]:
        """Return the number of ranks of each group that was started."""
        return [int(file.name.split(".")[1]) for file in self.folder.iterdir()]


def _processor_times() -> tuple[float, float]:
    """(busy, all) time of all cores since the machine started."""
    values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(values) - values[3] - values[4], sum(values)


def _folder_of(test: str) -> str:
    path = Path(test.partition("::")[0]).parts
    if len(path) < 3:
        return path[0] if path else "collection"
    return "/".join(path[1:-1])


_watching: list[Watch] = []


def pytest_configure(config: pytest.Config) -> None:
    """Start to watch, before the server of ranks is started."""
    os.environ[FOLDER] = tempfile.mkdtemp()
    _watching.append(Watch(Path(os.environ[FOLDER])))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> object:
    """Note which test runs."""
    _watching[0].test = item.nodeid
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    watch = _watching[0]
    seconds = watch.table()
    groups = watch.groups()
    rows = sorted(seconds.items(), key=lambda row: -row[1].total())
    total: Counter[str] = sum((counts for _, counts in rows), Counter())
    lines = ["| tests | seconds | " + " | ".join(KINDS) + " |", "|---|" + "---|" * (len(KINDS) + 1)]
    for name, counts in [*rows, ("all", total)]:
        cells = [f"{counts[kind]:.0f}" for kind in KINDS]
        lines.append(f"| {name} | {counts.total():.0f} | " + " | ".join(cells) + " |")
    terminalreporter.write_line(f"\n{len(groups)} groups of ranks, {sum(groups)} forks")
    for line in lines:
        terminalreporter.write_line(line)
