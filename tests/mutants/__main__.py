"""Break the product in one place after the other, and say which breakages no test sees; the list of all is a page.

Tests run on copies of the working tree, in forks of this process, which has imported what others wrote. First all of
them must pass on what is not broken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from tests.conftest import _shard
from tests.mutants import KINDS, PACKAGES, ROOT, Mutant, mutants, place_of, product_files

PAGE = ROOT / "docs" / "development" / "mutants.md"
CAPTION = """\
Each line is a breakage of the product, and the test of `make test` that must fail then. `make mutants` applies them
and writes this page; they are data, in `tests/mutants/`.
"""

IMPORTS = (
    *("torch.distributed.fsdp", "torch.distributed.tensor", "peft", "transformers.trainer", "accelerate", "lightning"),
    *("trl", "bitsandbytes"),
)
LIMIT = 300  # seconds that a test of a broken product may take, until it fails for that
WORKERS = 2
PASSED, FAILED = 0, 1  # exit codes of pytest


@dataclass
class Copy:
    """A copy of the working tree, whose files are written with times that no two of them share.

    Python takes a compiled file for that of a source of the same time, in seconds, and size.
    """

    root: Path
    times: Iterator[int]
    restore: Callable[[], None] = lambda: None

    @classmethod
    def make(cls, root: Path) -> Copy:
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        return cls(root, count(2_000_000_000))

    def write(self, path: Path, text: str) -> None:
        place, now = self.root / path.relative_to(ROOT), next(self.times)
        place.write_text(text)
        os.utime(place, (now, now))

    @property
    def log(self) -> Path:
        return self.root / "printed.log"

    def test(self, test: str) -> None:
        """Run a test on this copy, and end this process, which leads a group of its own, with pytest's exit code."""
        os.setsid()
        os.chdir(self.root)
        printed = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        temporary = self.root / "temporary"
        temporary.mkdir(exist_ok=True)
        os.environ.update({"PYTHONPATH": str(self.root), "TMPDIR": str(temporary)})
        tempfile.tempdir = None
        for name in list(sys.modules):
            if name.partition(".")[0] in ("tests", *PACKAGES):
                del sys.modules[name]
        sys.path[:] = [str(self.root), *(each for each in sys.path if each not in ("", str(ROOT)))]
        code = pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", f"--timeout={LIMIT}", test])
        sys.stdout.flush()
        os._exit(code)


def _outcomes(
    cases: Iterable[Any], prepare: Callable[[Copy, Any], str], copies: list[Copy]
) -> dict[Any, tuple[int, str]]:
    """Run a test of each case, as many at once as there are copies; return pytest's exit codes and what it printed.

    Args:
        cases: What is asked.
        prepare: Changes a copy as a case wants it, and returns the test.
        copies: Copies of the working tree.
    """
    waiting, free, running, outcomes = list(cases), list(copies), {}, {}
    tqdm.monitor_interval = 0  # no thread while this process forks
    with tqdm(total=len(waiting), dynamic_ncols=True) as bar:
        while waiting or running:
            while waiting and free:
                case, copy = waiting.pop(0), free.pop()
                test = prepare(copy, case)
                if not (pid := os.fork()):
                    copy.test(test)
                running[pid] = copy, case
            pid, status = os.wait()
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # ranks that the test has left
            copy, case = running.pop(pid)
            outcomes[case] = os.waitstatus_to_exitcode(status), copy.log.read_text(errors="replace")
            copy.restore()
            free.append(copy)
            bar.update()
    return outcomes


def _page(breakages: Iterable[Mutant]) -> str:
    held = list(breakages)
    text = f"# Mutants\n\n{len(held)} breakages. {date.today().isoformat()}.\n\n{CAPTION}"
    for kind, title in KINDS.items():
        rows = [f"| {each.harm} | `{each.test.removeprefix('tests/')}` |" for each in held if each.kind == kind]
        text += "\n".join([f"\n## {title}\n", "| what a user would get | test |", "|---|---|", *rows, ""])
    return text


def main() -> None:
    """Run the shard that is asked for; the exit code is 1 if a breakage is not seen or does not fit."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("-k", default="", metavar="TEXT", help="those whose test, harm, kind or old text has the text")
    parser.add_argument("--shard", type=_shard, default=(1, 1), metavar="2/4", help="the second quarter")
    arguments = parser.parse_args()
    number, shards = arguments.shard
    texts = {path: path.read_text() for path in product_files()}
    chosen: dict[Mutant, Path] = {
        each: place_of(each, texts)
        for each in mutants()
        if zlib.crc32(each.old.encode()) % shards == number - 1
        and arguments.k in "\n".join((each.test, each.harm, each.kind, each.old))
    }
    if not chosen:
        sys.exit("no breakage is chosen.")
    PAGE.write_text(_page(mutants()))
    for name in IMPORTS:
        with suppress(ImportError):
            import_module(name)

    def broken(copy: Copy, mutant: Mutant) -> str:
        path = chosen[mutant]
        copy.write(path, texts[path].replace(mutant.old, mutant.new))
        copy.restore = lambda: copy.write(path, texts[path])
        return mutant.test

    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        copies = [Copy.make(Path(folder, str(index))) for index in range(WORKERS)]
        whole = _outcomes(dict.fromkeys(each.test for each in chosen), lambda _, test: test, copies)
        for test, (code, printed) in whole.items():
            if code != PASSED:
                sys.exit(f"{test} must pass before anything is broken:\n{printed[-5000:]}")
        outcomes = _outcomes(chosen, broken, copies)
    missed = 0
    for mutant, (code, printed) in outcomes.items():
        if code != FAILED:
            missed += 1
            print(f"\n{chosen[mutant].relative_to(ROOT)}, {mutant.kind}: {mutant.harm}\n{mutant.old}\n->\n{mutant.new}")
            print(f"{mutant.test} {'passed' if code == PASSED else f'could not be run ({code}):{printed[-3000:]}'}")
    print(f"{len(chosen) - missed} of {len(chosen)} breakages were seen by their test.")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
