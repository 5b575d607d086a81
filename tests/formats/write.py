"""Write the files that later versions have to read, with the code that is there.

    OMP_NUM_THREADS=1 python -m tests.formats.write tests/formats

makes `tests/formats/<version>`, which must not exist. Two kinds of files are left out, which no load reads and which
hold paths of the machine: PEFT's model cards (README.md) and Trainer's `training_args.bin`. The files are written in a
folder of the system's temporary directory, whose path torch DCP notes in `.metadata`, and copied; that none of them
names a folder of the user, this repository or the machine is checked.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
from pathlib import Path

from lora_parallel import __version__
from tests.formats import bases
from tests.formats.jobs import FOLDER, JOBS, record, write_job
from tests.oracle import ranks_of
from tests.oracle.workers import FRONT_ENDS, WorkerPool

LEFT_OUT = ("README.md", "training_args.bin")


def write(folder: Path, pool: WorkerPool) -> Path:
    """Write the files of all jobs into a folder of this version in `folder`, and return that."""
    target = folder / __version__
    if target.exists():
        raise FileExistsError(f"{target} is there: what a version wrote stays as it is.")
    with tempfile.TemporaryDirectory(prefix="formats") as path:
        scratch = Path(path)
        bases.write(scratch / "bases")
        for name, kept in JOBS.items():
            (scratch / "files" / name).mkdir(parents=True)
            outcome = pool.run(ranks_of(kept.job.mesh), write_job, name, scratch / "bases", scratch / "files" / name)[0]
            record(outcome, scratch / "files" / name)
        _check_private(scratch / "files")
        shutil.copytree(scratch / "files", target, ignore=shutil.ignore_patterns(*LEFT_OUT))
    return target


def _check_private(folder: Path) -> None:
    """Raise ValueError if a file that is kept names a folder of the user or the repository, or the machine."""
    private = [str(FOLDER.parents[1]), str(Path.home()), socket.gethostname()]
    for file in folder.rglob("*"):
        if file.is_file() and file.name not in LEFT_OUT:
            data = file.read_bytes()
            if found := [text for text in private if len(text) > 3 and text.encode() in data]:
                raise ValueError(f"{file} holds {found[0]!r}.")


if __name__ == "__main__":
    workers = WorkerPool(modules=FRONT_ENDS)
    try:
        print(write(Path(sys.argv[1]), workers))
    finally:
        workers.close()
