"""Every byte of a checkpoint is as it was written, or it is refused: on every rank, and with nothing changed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from lora_parallel import load_checkpoint, save_checkpoint, wait_for_save
from lora_parallel.checkpoint.files import _share
from tests.lora_parallel.checkpoint.test_save_load import made, same, snapshot
from tests.oracle.workers import Failure, attempt

FLIPS = 2


def save(folder: Path) -> None:
    """In the foreground and in the background."""
    model, optimizer = made("2x1")
    save_checkpoint(model, optimizer, folder / "now", {"note": torch.arange(5)})
    save_checkpoint(model, optimizer, folder / "later", async_save=True)
    wait_for_save()


def damaged(good: Path, root: Path) -> dict[str, tuple[Path, str]]:
    """Copies of a checkpoint with one fault each, and the name of the file that is at fault."""
    draw, found = random.Random(0), {}

    def copied(name: str) -> Path:
        found[name] = (root / str(len(found)), "")
        shutil.copytree(good, found[name][0])
        return found[name][0]

    for file in sorted(each for each in good.rglob("*") if each.is_file() and each.name != "README.md"):
        inside = str(file.relative_to(good))
        for bit in draw.sample(range(8 * file.stat().st_size), FLIPS):
            name = f"bit {bit} of {inside}"
            path = copied(name)
            data = bytearray(file.read_bytes())
            data[bit // 8] ^= 1 << bit % 8
            (path / inside).write_bytes(data)
            found[name] = path, inside
    first, second = sorted((good / "state").glob("*.distcp"), key=lambda each: each.stat().st_size)[-2:]
    path = copied("swapped")
    shutil.copy(first, path / "state" / second.name)
    shutil.copy(second, path / "state" / first.name)
    found["swapped"] = path, "state/"
    return found


def try_all(mesh_text: str, paths: list[Path], good: Path) -> tuple[list[tuple[Any, bool]], bool]:
    model, optimizer = made(mesh_text, steps=2)
    before = snapshot(model, optimizer)
    found = []
    for path in paths:
        failure = attempt(load_checkpoint, model, optimizer, path)
        found.append((failure, same(before, snapshot(model, optimizer))))
    load_checkpoint(model, optimizer, good)
    return found, same(before, snapshot(model, optimizer))


def test_a_flipped_bit_in_any_file_is_refused(pool, tmp_path):
    pool.run(2, save, tmp_path)
    for kind in ("now", "later"):
        meta = json.loads((tmp_path / kind / "meta.json").read_text())
        assert meta["checksums"].keys() == meta["files"].keys()
        assert sum(name.endswith(".distcp") for name in meta["checksums"]) == 2
    good = tmp_path / "now"
    faults = damaged(good, tmp_path / "damaged")
    # As written before shards had checksums.
    old = tmp_path / "old"
    shutil.copytree(good, old)
    meta = json.loads((old / "meta.json").read_text())
    meta["checksums"] = {name: value for name, value in meta["checksums"].items() if not name.endswith(".distcp")}
    del meta["digest"]
    (old / "meta.json").write_text(json.dumps({**meta, "format": 1}, indent=2) + "\n")
    for found, unchanged in pool.run(2, try_all, "2x1", [path for path, _ in faults.values()], old):
        assert not unchanged
        for (name, (_, file)), (failure, kept) in zip(faults.items(), found, strict=True):
            assert isinstance(failure, Failure), f"{name} was accepted"
            assert failure.kind == "ValueError", (name, failure)
            assert kept, name
            assert file in failure.message or file == "meta.json", (name, failure.message)


def test_files_are_shared_out_by_their_sizes():
    sizes = {"a": 5, "b": 4, "c": 3, "d": 2, "empty": 0}
    parts = [_share(sizes, 2, index) for index in range(2)]
    assert parts == [{"a", "d", "empty"}, {"b", "c"}]
    assert _share({"a": 1}, 3, 2) == set()
