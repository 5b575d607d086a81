"""Name, find and check the files of a checkpoint, and finish and remove checkpoints.

adapter/     PEFT's folder of the adapter "default", with subfolders for other adapters, by adapter name; if there are
             several models, one such folder for each in a subfolder, by model name
state/       torch DCP: optimizer states and trained parameters that no adapter holds, by parameter name
extra.pt     values that are no shards of tensors: settings of optimizers, random states, the caller's own entries
meta.json    format version, mesh, fingerprints of the base, versions, the size and checksum of each file, and a digest
             of itself; written last

Each rank records checksums of the files that it writes; before loading, each rank checks the checksums of some files.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import zlib
from collections.abc import Callable, Container, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.rank_checks import agreed, gather_objects
from lora_parallel.distributed.torch_private import file_of

FORMAT, DIGEST_SINCE = 2, 2
"""Format version that is written, and the first version in which meta.json has a digest of itself and the files in
state/ have checksums. All versions up to FORMAT can be read.
"""

ADAPTER, EXTRA, STATE, META = "adapter", "extra.pt", "state", "meta.json"
LAYOUT = frozenset({ADAPTER, EXTRA, STATE, META})
"""Names that this library writes in a checkpoint's folder; everything else there is the user's."""


def adapter_folder(path: Path, model: str, models: Iterable[str]) -> Path:
    """Return the folder of a model's adapters: adapter/ if the checkpoint holds one model, else adapter/<model>."""
    return path / ADAPTER if len(list(models)) == 1 else path / ADAPTER / model


def loose_key(parameter: str) -> str:
    """Return the name in state/ of a trained parameter that no adapter holds."""
    return f"model.{parameter}"


def optimizer_key(optimizer: str, parameter: str, key: str) -> str:
    """Return the name in state/ of a tensor that an optimizer keeps for a parameter under a key such as "exp_avg"."""
    return f"optimizer_{optimizer}.{parameter}.{key}"


_ENTRIES = {int: ("format", "number"), str: ("name", "writer"), dict: ("files", "parameters", "fingerprints")}


def read_meta(path: Path) -> dict[str, Any]:
    """Read a checkpoint's meta.json and check its entries.

    From format 2 on, every byte of the file must be as `write_meta` wrote it.

    Raises:
        ValueError: meta.json is damaged, or was not written by this library.
    """
    try:
        text = (path / META).read_text()
        meta = json.loads(text)
        for kind, keys in _ENTRIES.items():
            for key in keys:
                if not isinstance(meta[key], kind):
                    raise TypeError(f"{key} is a {type(meta[key]).__name__}")
        if not isinstance(meta.get("checksums", {}), dict):
            raise TypeError("checksums is no dict")
        if meta["format"] >= DIGEST_SINCE and text != _text({key: meta[key] for key in meta if key != "digest"}):
            raise ValueError("it is not what was written")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path / META} is damaged ({type(error).__name__}: {error}).") from error
    return meta


def write_meta(path: Path, meta: dict[str, Any]) -> None:
    """Write meta.json, with a digest of its other entries."""
    (path / META).write_text(_text(meta))


def _text(meta: dict[str, Any]) -> str:
    return json.dumps({**meta, "digest": zlib.crc32(json.dumps(meta).encode())}, indent=2) + "\n"


def find_damage(path: Path, meta: dict[str, Any]) -> str | None:
    """Describe the first file of a checkpoint that is missing or has another size; return None if there is none."""
    for name, size in meta["files"].items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size} bytes, and was written with {size}: it is truncated or changed"
    return None


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    total = 0
    with open(file, "rb") as stream:
        while block := stream.read(2**24):
            total = zlib.crc32(block, total)
    return total


def check_checksums(path: Path, meta: Mapping[str, Any], names: Container[str]) -> None:
    """Raise ValueError if the bytes of a file, one of `names`, do not match its checksum."""
    # In formats before 2, the shards in state/ have no checksums.
    for name, written in meta.get("checksums", {}).items():
        if name in names and checksum(path / name) != written:
            raise ValueError(
                f"the checkpoint {path} is damaged: {path / name} has other bytes than were written: the disk or a "
                "copy damaged it, or it was edited. Resume from another one."
            )


class ChecksummedWriter(dcp.StorageWriter):
    """Write a train state as torch's `FileSystemWriter` does, and collect the checksums of all files on rank 0."""

    def __init__(self, path: Path) -> None:
        self.checksums: dict[str, int] = {}
        """Checksums by the name of the file in the folder; filled on rank 0 once the save is complete."""

        # FileSystemWriter is not the base class: torch would let a subclass of it, an AsyncStager, stage a save in the
        # background, in another way than torch's own.
        self._files = dcp.FileSystemWriter(path)
        self._path = path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[Any]:
        # The checksums go along with the results that torch gathers anyway, so a save in the background has them too.
        results = self._files.write_data(plan, planner).wait()
        files = {file_of(result) for result in results}
        written: torch.futures.Future[Any] = torch.futures.Future()
        written.set_result((results, {file: checksum(self._path / file) for file in files}))
        return written

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        for _, checksums in results:
            self.checksums |= checksums
        self._files.finish(metadata, [of_rank for of_rank, _ in results])

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._files.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return self._files.prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return self._files.prepare_global_plan(plans)

    def storage_meta(self) -> StorageMeta | None:
        return self._files.storage_meta()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._files.reset(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return dcp.FileSystemWriter.validate_checkpoint_id(checkpoint_id)


def check_bytes(path: Path, meta: Mapping[str, Any], of_meta: os.stat_result) -> None:
    """Check that a checkpoint's files have the bytes that were written; errors on every rank. Collective."""
    # Ranks that see the same folder read each file once among them; one with a copy of its own checks the whole copy.
    mine = (platform.node(), of_meta.st_dev, of_meta.st_ino)
    here = [rank for rank, theirs in enumerate(gather_objects(mine)) if theirs == mine]
    with agreed():
        check_checksums(path, meta, _share(meta["files"], len(here), here.index(dist.get_rank())))


def _share(sizes: Mapping[str, int], parts: int, index: int) -> set[str]:
    """Divide files into parts of about equal size, the largest file first; return the names in part `index`."""
    loads, mine = [0] * parts, set()
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        part = loads.index(min(loads))
        loads[part] += sizes[name]
        if part == index:
            mine.add(name)
    return mine


_CALLS = {
    "lora_parallel": ("lora_parallel.save_checkpoint", "lora_parallel.load_checkpoint(model, optimizer, {path!r})"),
    "Accelerator": ("accelerator.save_state", "accelerator.load_state({path!r})"),
    "Trainer of transformers": ("transformers' Trainer", "trainer.train(resume_from_checkpoint={folder!r})"),
    "Trainer": ("Lightning's Trainer", "trainer.fit(module, ckpt_path={path!r})"),
    "Fabric": ("fabric.save", "fabric.load({path!r}, state)"),
}
"""Calls that write and read a checkpoint, by the writer that meta.json names: `{path}` stands for the checkpoint, and
`{folder}` for the folder that it is in, the own checkpoint of transformers' Trainer.
"""


def of_another(path: Path, wrote: str, reads: str) -> str:
    """Return a message that says which call wrote a checkpoint, which one reads it, and how to load its adapter.

    `wrote` is the writer that its meta.json names, `reads` the writer whose checkpoints the caller reads.
    """
    asked = _CALLS.get(reads, (reads, ""))[0]
    call, counterpart = _CALLS.get(wrote, (wrote, ""))
    by = f"{counterpart.format(path=str(path), folder=str(path.parent))} reads it. " if counterpart else ""
    return (
        f"{path} was written by {call}, and this reads what {asked} writes, with other loops and schedulers: {by}"
        f"Its adapter alone: lora_parallel.load_adapter(model, {str(path / 'adapter')!r})."
    )


def written_here(path: Path, reads: str) -> str | None:
    """Return a message about the checkpoints in a folder that is none itself; None if it holds none or is not there."""
    inside = sorted(file.parent for file in path.glob(f"[!.]*/{META}") if file.is_file())
    writers = [read_meta(checkpoint)["writer"] for checkpoint in inside]
    if reads in writers:
        return (
            f"{path} is not a checkpoint, but has {len(inside)} in it ({', '.join(c.name for c in inside[:4])}): "
            f"give the path of one. lora_parallel.latest_checkpoint({str(path)!r}) finds the newest."
        )
    return of_another(inside[0], writers[0], reads) if inside else None


_pending: Future[None] | None = None
_own_destroy = dist.destroy_process_group
_groups: dict[Any, Any] = {}
"""Process group of background saves, by the default process group that existed when it was made."""


def wait_for_save() -> None:
    """Wait until the save in flight, if there is one, is complete on disk. Collective.

    The end of a process and `torch.distributed.destroy_process_group` also wait for the save, but do not raise its
    errors.

    Raises:
        OSError: The checkpoint could not be written; raised on every rank.
    """
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        _replace_everywhere(_destroy_afterwards, _own_destroy)
        with collective_call("wait_for_save"), agreed():
            pending.result()


def finish_in_background(finish: Callable[[], None]) -> None:
    """Let a thread put a checkpoint in place; `wait_for_save` and the end of the process group wait for it."""
    global _pending
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    _pending = thread.submit(finish)
    thread.shutdown(wait=False)
    _replace_everywhere(_own_destroy, _destroy_afterwards)


def _replace_everywhere(one: Any, other: Any) -> None:
    """Replace `destroy_process_group`, where it is `one`, by `other` in torch and in modules that import it by name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("destroy_process_group") is one:
            names["destroy_process_group"] = other


def _destroy_afterwards(*args: Any, **kwargs: Any) -> None:
    """Wait for the save in flight, then destroy the process group: torch has no hook that runs before it."""
    _replace_everywhere(_destroy_afterwards, _own_destroy)
    if _pending is not None:
        futures.wait([_pending])
    _own_destroy(*args, **kwargs)


def background_group(seconds: float) -> Any:
    """Return the process group of background saves, with this timeout. Collective at the first call."""
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return _groups[world]


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None if it holds none or does not exist.

    The newest checkpoint is the one that was saved last, by a number that every save in a folder counts up, not by
    clocks. A checkpoint is complete if all of its files are there in their full length. The call is not collective;
    each rank that makes it must see the folder.
    """
    checkpoints = complete_checkpoints(Path(directory))
    return checkpoints[-1] if checkpoints else None


def complete_checkpoints(directory: Path) -> list[Path]:
    """List the complete checkpoints in a folder, oldest first."""
    checkpoints = []
    for path in directory.iterdir() if directory.is_dir() else ():
        with suppress(OSError, ValueError):  # no checkpoint of this library, or not readable by this user
            if not (path.name.startswith(".") or path.is_symlink()) and not find_damage(path, meta := read_meta(path)):
                checkpoints.append((meta["number"], path.name, path))
    return [path for *_, path in sorted(checkpoints)]
