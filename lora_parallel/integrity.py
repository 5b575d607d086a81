"""Find changed bytes in a checkpoint: each rank notes checksums of what it writes, and checks those of some files."""

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

from lora_parallel.agreement import agreed
from lora_parallel.checkpoint_layout import META
from lora_parallel.retention import alteration, checksum
from lora_parallel.upstream import file_of

__all__ = ["ChecksummedWriter", "check_bytes"]


class ChecksummedWriter(dcp.StorageWriter):
    """Writes a train state as torch's checkpoints do; each rank sends rank 0 the checksums of the files it wrote.

    They go along with what the ranks tell rank 0 of their files anyway, in a save in the background too.
    """

    def __init__(self, path: Path) -> None:
        self.checksums: dict[str, int] = {}
        """By the name of the file in the folder; on rank 0, once the save is complete."""

        # Not a base class: torch would let it stage a save in the background, which it does in another way.
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

    Ranks that see the same folder share its files out, so that each file is read once; a rank with a copy of its own,
    on a disk of its node perhaps, checks that.

    Args:
        path: The folder.
        meta: What its meta.json says.

    Raises:
        ValueError: One has not, on every rank.
    """
    with agreed():
        place = (path / META).stat()
        mine = (platform.node(), place.st_dev, place.st_ino)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    here = [rank for rank, theirs in enumerate(everyone) if theirs == mine]
    with agreed():
        fault = alteration(path, meta, _share(meta["files"], len(here), here.index(dist.get_rank())))
        if fault is not None:
            raise ValueError(f"the checkpoint {path} is damaged: {fault}. Resume from another one.")


def _share(sizes: Mapping[str, int], parts: int, index: int) -> set[str]:
    """Deal files out by their sizes, the largest first; return those of part `index`."""
    loads, mine = [0] * parts, set()
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        part = loads.index(min(loads))
        loads[part] += sizes[name]
        if part == index:
            mine.add(name)
    return mine
