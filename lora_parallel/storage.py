"""Write folders that are complete or not there, and only values that `torch.load(weights_only=True)` reads back.

In: paths and values, numbers of bytes. Out: folders on disk, a progress bar on rank 0. Knows nothing of models.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

_WRITING, _REPLACED, _REMOVING, _LOCK = ".writing", ".replaced", ".removing", ".lock"


class Scratch:
    """Manage a folder beside `target` to write into, until it is complete and takes the place of `target`.

    Only one process uses the folder. A lock on a file in the folder tells other processes that it is still being
    written. The system drops the lock when the process ends; forked children of the process do not keep it.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = _beside(target, _WRITING)
        self.lock = self.path / _LOCK  # a file in the folder, and not part of its content
        self._lock: int | None = None

    def make(self) -> None:
        """Make the folder, empty, in place of one that a killed process left; BlockingIOError if another writes it."""
        if self.path.exists() and _in_use(self.path):
            raise BlockingIOError(f"another process is writing {self.target} ({self.path} is locked).")
        _remove(self.path)
        self.path.mkdir(parents=True)
        self._lock = os.open(self.lock, os.O_CREAT | os.O_RDWR)
        _made.add(self)
        _locked(self._lock)  # on a file system without locks, other writers get no error

    def place(self, replace: bool = False) -> None:
        """Sync the folder to the disk and rename it to the target; with `replace` remove what stood there, afterwards.

        Raises:
            OSError: Syncing or renaming fails; what stood at the target is still there. A FileExistsError if something
                stands at the target and `replace` is False.
        """
        _sync(self.path)
        if not replace:
            check_free(self.target)
        replace_by(self.path, self.target)
        (self.target / _LOCK).unlink()  # only now: without the lock file another process may sweep the folder away
        self._release()

    def place_files(self, last: str) -> None:
        """Move the files of the folder, one by one, into the target: a folder that exists and keeps its other files.

        If the file `last` is in the target, so are the others.
        """
        _sync(self.path)
        for file in self.path.iterdir():
            if file != self.lock and file.name != last:
                os.replace(file, self.target / file.name)
        _sync_entry(self.target)
        os.replace(self.path / last, self.target / last)
        _sync_entry(self.target)
        self.discard()

    def place_file(self, name: str) -> None:
        """Sync one file of the folder to the disk and move it to the target, in place of a file or folder."""
        _sync_entry(self.path / name)
        replace_by(self.path / name, self.target)
        self.discard()

    def discard(self) -> None:
        """Remove the folder if it was made and not placed: a save that failed for want of space then leaves nothing."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


_made: WeakSet[Scratch] = WeakSet()


def _forget_in_child() -> None:
    """Close the lock files in a forked child: a dataloader's worker may outlive the writer and would keep the lock."""
    for scratch in list(_made):
        scratch._release()


os.register_at_fork(after_in_child=_forget_in_child)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` as an absolute path: the working directory may change before a background save uses the path.

    Raises:
        ValueError: `path` is a URL, which as a path would be a folder of that name.
    """
    if "://" in str(path):
        raise ValueError(f"{path} is a URL: only local paths are supported. Mount it, or copy the folder afterwards.")
    return Path(os.path.abspath(path))


def is_taken(path: Path) -> bool:
    """Return True if `path` is a file, a link or a folder with content, which a new folder would replace."""
    return path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir()))


def check_free(path: Path) -> None:
    """Check that no file, link or folder with content stands at `path`.

    Raises:
        FileExistsError: A file, a link or a folder with content stands at `path`.
    """
    if is_taken(path):
        raise FileExistsError(f"{path} exists and is not empty, and is not overwritten: choose another place.")


def replace_by(path: Path, target: Path) -> None:
    """Rename `path` to `target`, then remove what stood there; if renaming fails, that is still there."""
    old = target.with_name(f".{target.name}{_REPLACED}")
    there = os.path.lexists(target)
    if there and _exchanged(path, target):
        old = path
    else:
        _remove(old)
        if there:
            os.replace(target, old)
        try:
            os.replace(path, target)
        except OSError:
            if there:
                os.replace(old, target)
            raise
    _sync_entry(target.parent)
    _remove(old)


def restore_replaced(path: Path) -> None:
    """Put back what stood at `path`, if a process was killed between the two renames of a replacement."""
    old = path.with_name(f".{path.name}{_REPLACED}")
    if os.path.lexists(old) and not os.path.lexists(path):
        os.replace(old, path)


def remove_folder(path: Path) -> None:
    """Remove a folder such that nobody ever sees half of it under its name."""
    going = _beside(path, _REMOVING)
    _remove(going)
    os.replace(path, going)
    _remove(going)


def _beside(target: Path, ending: str) -> Path:
    """Return the path beside `target` with a hidden name that ends in `ending`."""
    # Lightning takes every name with "hpc_ckpt_" for a checkpoint of a requeued job.
    return target.with_name(f".{target.name.replace('hpc_ckpt_', 'hpc-ckpt-')}{ending}")


def sweep(parent: Path) -> None:
    """Clean up in `parent` after killed processes: remove half of a folder, undo half of a replacement."""
    for path in list(parent.glob(".*")):
        if path.name.endswith(_REPLACED):
            restore_replaced(path.with_name(path.name[1 : -len(_REPLACED)]))
            _remove(path)
        elif path.name.endswith(_REMOVING) or (path.name.endswith(_WRITING) and not _in_use(path)):
            with suppress(OSError):
                _remove(path)


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange the names of two files or folders in one step; return False if the system cannot."""
    # Python has no function for renameat2(2) of Linux. Without it, nothing stands under the name for an instant between
    # two renames; `sweep` repairs what a process killed in that instant leaves.
    at_fdcwd, rename_exchange = -100, 2
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return rename is not None and rename(at_fdcwd, names[0], at_fdcwd, names[1], rename_exchange) == 0


def _in_use(scratch: Path) -> bool:
    try:
        lock = os.open(scratch / _LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _locked(lock)
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock, which some disks lack."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Sync everything in a folder to the disk, so that the content is there before the folder gets its final name."""
    for path in (*folder.rglob("*"), folder):
        _sync_entry(path)


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_SHORT = 1.0  # seconds after which the bar of a save appears: an adapter and its states usually take less


def bytes_bar(doing: str, total: int, shown: bool, delay: float = 0.0) -> tqdm[Any]:
    """Return a progress bar that is updated with numbers of bytes, and appears after `delay` seconds."""
    return tqdm(total=total, unit="B", unit_scale=True, desc=doing, delay=delay, disable=not shown)


def saving_bar(doing: str, total: int) -> tqdm[Any]:
    """Return the progress bar that rank 0 shows while `total` bytes are saved, if that takes longer than a second."""
    return bytes_bar(doing, total, dist.get_rank() == 0, _SHORT)


def without_numpy(value: Any) -> Any:
    """Return `value` with all NumPy numbers in it, also inside of containers, converted to Python numbers.

    A learning rate schedule may hold such numbers.
    """
    return tree_map_only(np.generic, lambda number: number.item(), value)


def check_loadable(what: str, value: Any, remedy: str) -> None:
    """Check that `torch.load(weights_only=True)` reads `value` back, so that the error comes now and not at a resume.

    Args:
        what: The beginning of the error message, which says where the value is.
        value: The value to check.
        remedy: The end of the error message, which says what to do.

    Raises:
        ValueError: `value` is not read back.
    """
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{what} torch.load(weights_only=True) does not read back "
            f"({(str(error).splitlines() or [type(error).__name__])[0]}): {remedy}"
        ) from error
