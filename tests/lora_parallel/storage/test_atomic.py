"""Folders that are complete or not there, whatever happens while they are written."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from lora_parallel import storage
from lora_parallel.storage import Scratch, remove_folder, sweep


def written(target: Path, text: str, replace: bool = False) -> None:
    scratch = Scratch(target)
    scratch.make()
    (scratch.path / "file").write_text(text)
    try:
        scratch.place(replace)
    finally:
        scratch.discard()


def test_a_folder_is_there_when_it_is_placed(tmp_path):
    target = tmp_path / "deep" / "folder"
    scratch = Scratch(target)
    scratch.make()
    (scratch.path / "file").write_text("text")
    assert not target.exists()
    scratch.place()
    assert [path.name for path in target.iterdir()] == ["file"]
    assert [path.name for path in target.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("kind", ["folder", "file", "link", "empty folder"])
def test_what_is_there_is_replaced_if_asked(tmp_path, monkeypatch, kind, exchange):
    if not exchange:
        monkeypatch.setattr(storage, "_exchanged", lambda *names: False)
    target = tmp_path / "target"
    if kind == "folder":
        written(target, "old")
    elif kind == "file":
        target.write_text("old")
    elif kind == "link":
        written(tmp_path / "other", "linked")
        target.symlink_to("other")
    else:
        target.mkdir()
    if kind != "empty folder":
        with pytest.raises(FileExistsError, match="is not overwritten"):
            written(target, "new")
    written(target, "new", replace=True)
    assert not target.is_symlink()
    assert (target / "file").read_text() == "new"
    left = {"target", "other"} if kind == "link" else {"target"}
    assert {path.name for path in tmp_path.iterdir()} - {".target.writing"} == left
    if kind == "link":
        assert (tmp_path / "other" / "file").read_text() == "linked"


def test_a_failed_rename_leaves_the_old(tmp_path, monkeypatch):
    written(tmp_path / "target", "old")
    monkeypatch.setattr(storage, "_exchanged", lambda *names: False)
    real = os.replace

    def replace(source, target):
        if Path(source).name == ".target.writing":
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path / "target", "new", replace=True)
    assert (tmp_path / "target" / "file").read_text() == "old"


def test_what_is_discarded_is_gone_and_what_is_anothers_is_not(tmp_path):
    first, second = Scratch(tmp_path / "a"), Scratch(tmp_path / "a")
    first.make()
    with pytest.raises(BlockingIOError, match="another process is writing"):
        second.make()
    second.discard()
    assert first.path.is_dir()
    sweep(tmp_path)
    assert first.path.is_dir()
    first.discard()
    assert not any(tmp_path.iterdir())


def write_for_long(target: Path) -> None:
    scratch = Scratch(target)
    scratch.make()
    if os.fork() == 0:  # as a dataloader does; it outlives the writer, and keeps no lock once it runs
        (scratch.path / "file").write_text(str(os.getpid()))
    time.sleep(60)
    os._exit(0)


@pytest.mark.processes
def test_what_a_killed_process_left_is_swept(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=write_for_long, args=(tmp_path / "a",))
    process.start()
    half = tmp_path / ".a.writing" / "file"
    while not (half.exists() and half.read_text()):
        time.sleep(0.01)
    child = int(half.read_text())
    sweep(tmp_path)
    assert half.exists(), "it is being written"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    (tmp_path / ".b.writing").write_text("half a file")
    sweep(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert not any(tmp_path.iterdir())


def test_a_replacement_that_was_cut_in_two_is_undone(tmp_path):
    written(tmp_path / ".a.replaced", "old")
    written(tmp_path / "b", "new")
    written(tmp_path / ".b.replaced", "old")
    written(tmp_path / ".c.removing", "half")
    (tmp_path / ".hidden").mkdir()
    sweep(tmp_path)
    assert (tmp_path / "a" / "file").read_text() == "old"
    assert (tmp_path / "b" / "file").read_text() == "new"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", ".hidden"}


def test_removing(tmp_path):
    written(tmp_path / "a", "text")
    remove_folder(tmp_path / "a")
    assert not any(tmp_path.iterdir())
    sweep(tmp_path / "nothing there")
