"""Find changed bytes in a checkpoint.

Each rank records checksums of the files that it writes; before loading, each rank checks the checksums of some files.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.futures import Future

from lora_parallel.checkpoint.layout import META
from lora_parallel.checkpoint.meta import checksum, find_alteration
from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.distributed.torch_private import file_of

__all__ = ["ChecksummedWriter", "check_bytes"]


class ChecksummedWriter(dcp.StorageWriter):
    """Write a train state as torch's `FileSystemWriter` does, and collect the checksums of all files on rank 0.

    Each rank sends the checksums of its files along with the write results that torch gathers on rank 0 anyway, so a
    save in the background has them too.
    """

    def __init__(self, path: Path) -> None:
        self.checksums: dict[str, int] = {}
        """Checksums by the name of the file in the folder; filled on rank 0 once the save is complete."""

        # FileSystemWriter is not the base class: torch would let a subclass of it, an AsyncStager, stage a save in the
        # background, in another way than torch's own.
        self._files = dcp.FileSystemWriter(path)
        self._path = path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        results = self._files.write_data(plan, planner).wait()
        files = {file_of(result) for result in results}
        written: Future[Any] = Future()
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


def check_bytes(path: Path, meta: Mapping[str, Any]) -> None:
    """Check that a checkpoint's files have the bytes that were written. Collective.

    Ranks that see the same folder divide its files among themselves, so that each file is read once. A rank that sees a
    copy of its own, for example on a disk of its node, checks the whole copy.

    Args:
        path: The checkpoint's folder.
        meta: The contents of its meta.json.

    Raises:
        ValueError: A file has other bytes; raised on every rank.
    """
    with agreed():
        place = (path / META).stat()
        mine = (platform.node(), place.st_dev, place.st_ino)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    here = [rank for rank, theirs in enumerate(everyone) if theirs == mine]
    with agreed():
        fault = find_alteration(path, meta, _share(meta["files"], len(here), here.index(dist.get_rank())))
        if fault is not None:
            raise ValueError(f"the checkpoint {path} is damaged: {fault}. Resume from another one.")


def _share(sizes: Mapping[str, int], parts: int, index: int) -> set[str]:
    """Divide files into parts of about equal size, the largest file first; return the names in part `index`."""
    loads, mine = [0] * parts, set()
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        part = loads.index(min(loads))
        loads[part] += sizes[name]
        if part == index:
            mine.add(name)
    return mine
