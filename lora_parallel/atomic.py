"""Folders that are complete or not there: written beside their place, synced to the disk, and renamed."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

__all__ = [
    "Scratch",
    "check_free",
    "is_taken",
    "local_path",
    "remove_folder",
    "replace_by",
    "restore_replaced",
    "sweep",
]

_WRITING, _REPLACED, _REMOVING, _LOCK = ".writing", ".replaced", ".removing", ".lock"


class Scratch:
    """A folder beside `target` to write into. One process uses it.

    A lock on a file in it, which the system drops with the process, tells others that it is still being written; the
    process's forked children do not keep it.

    Args:
        target: Where the folder is to stand.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = _beside(target, _WRITING)
        self._lock: int | None = None

    @property
    def lock(self) -> Path:
        """A file in it that is no part of it."""
        return self.path / _LOCK

    def make(self) -> None:
        """Make the folder, empty; what a killed process left in its place is removed.

        Raises:
            OSError: It cannot be made; BlockingIOError: another process is writing it.
        """
        if self.path.exists() and _in_use(self.path):
            raise BlockingIOError(f"another process is writing {self.target} ({self.path} is locked).")
        _remove(self.path)
        self.path.mkdir(parents=True)
        self._lock = os.open(self.lock, os.O_CREAT | os.O_RDWR)
        _made.add(self)
        _locked(self._lock)  # where a file system has no locks, there is one writer less to warn

    def place(self, replace: bool = False) -> None:
        """Sync and rename.

        Args:
            replace: A file or folder that stands in the target's place is removed once the new one is there.

        Raises:
            OSError: That fails; what stood in the place of the target is still there. FileExistsError: something does,
                and `replace` is False.
        """
        _sync(self.path)
        if not replace:
            check_free(self.target)
        replace_by(self.path, self.target)
        (self.target / _LOCK).unlink()  # not before: without it others may sweep the folder away
        self._release()

    def place_files(self, last: str) -> None:
        """Put its files, one by one, into the target, a folder that exists and whose other files stay.

        Args:
            last: The file that the others belong to: once it is there, they are.
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
        """Sync, and put one of its files in the target's place, where a file or folder may stand.

        Raises:
            OSError: That fails; what stood in the place of the target is still there.
        """
        _sync_entry(self.path / name)
        replace_by(self.path / name, self.target)
        self.discard()

    def discard(self) -> None:
        """Remove it if it was made here and not placed: a save that failed for want of space leaves none behind."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


_made: WeakSet[Scratch] = WeakSet()


def _forget_in_child() -> None:
    """A child (a dataloader's worker) may outlive the writer, and would hold the lock for it."""
    for scratch in list(_made):
        scratch._release()


os.register_at_fork(after_in_child=_forget_in_child)


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path, absolute: the working directory may change before a save in the background gets to it.

    Raises:
        ValueError: It is a URL; as a path it would be a folder of that name.
    """
    if "://" in str(path):
        raise ValueError(f"{path} is a URL: only local paths are supported. Mount it, or copy the folder afterwards.")
    return Path(os.path.abspath(path))


def is_taken(path: Path) -> bool:
    """Whether something stands at `path` that a new folder would take away."""
    return path.is_symlink() or path.is_file() or (path.is_dir() and any(path.iterdir()))


def check_free(path: Path) -> None:
    """Check that nothing does.

    Raises:
        FileExistsError: Something does.
    """
    if is_taken(path):
        raise FileExistsError(f"{path} exists and is not empty, and is not overwritten: choose another place.")


def replace_by(path: Path, target: Path) -> None:
    """Rename a file or folder to `target`; what stands there, file or folder, is removed afterwards.

    Raises:
        OSError: That fails; what stood there still does.
    """
    old = target.with_name(f".{target.name}{_REPLACED}")
    there = target.exists() or target.is_symlink()
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
    """Put back what stood at `path`, should a process have been killed between the two renames of a replacement."""
    old = path.with_name(f".{path.name}{_REPLACED}")
    if not path.exists() and not path.is_symlink() and old.exists():
        os.replace(old, path)


def remove_folder(path: Path) -> None:
    """Remove a folder such that no half of it is ever seen under its name."""
    going = _beside(path, _REMOVING)
    _remove(going)
    os.replace(path, going)
    _remove(going)


def _beside(target: Path, ending: str) -> Path:
    """A hidden name; Lightning takes every name with "hpc_ckpt_" in it for a checkpoint of a requeued job."""
    return target.with_name(f".{target.name.replace('hpc_ckpt_', 'hpc-ckpt-')}{ending}")


def sweep(parent: Path) -> None:
    """Clear away what killed processes left in `parent`: half-written or half-removed folders; and undo a replacement
    that was cut in two.
    """
    if not parent.is_dir():
        return
    for path in list(parent.iterdir()):
        if not path.name.startswith("."):
            continue
        if path.name.endswith(_REPLACED):
            target = path.with_name(path.name[1 : -len(_REPLACED)])
            if target.exists() or target.is_symlink():
                _remove(path)
            else:
                os.replace(path, target)
        elif path.name.endswith(_REMOVING) or (path.name.endswith(_WRITING) and not _in_use(path)):
            with suppress(OSError):
                _remove(path)


_LINUX_AT_FDCWD, _LINUX_RENAME_EXCHANGE = -100, 2


def _exchanged(one: Path, other: Path) -> bool:
    """Exchange two names at once: renameat2(2), which Linux has for most file systems and Python has no function for.

    Where it cannot, there is an instant between two renames in which neither stands under the name; `sweep` knows it.
    """
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return (
        rename is not None and rename(_LINUX_AT_FDCWD, names[0], _LINUX_AT_FDCWD, names[1], _LINUX_RENAME_EXCHANGE) == 0
    )


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
    """Whether no other process holds the lock; it is ours until it is closed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Have everything in a folder on the disk before its name is."""
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync_entry(Path(parent) / name)
        _sync_entry(Path(parent))


def _sync_entry(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
