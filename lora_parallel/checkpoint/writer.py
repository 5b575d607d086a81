"""Write a checkpoint: collect it on all ranks, write it to a folder beside its place, and rename that folder.

The writing can go on in the background.
"""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lora_parallel.adapters.adapter_folder import GatheredAdapter, gather_adapter
from lora_parallel.adapters.base_fingerprint import fingerprints_of
from lora_parallel.adapters.inspection import (
    CARD,
    WEIGHTS,
    check_finite,
    check_unmerged,
    loose_parameters,
    peft_configs,
)
from lora_parallel.checkpoint.files import (
    EXTRA,
    FORMAT,
    LAYOUT,
    STATE,
    ChecksummedWriter,
    adapter_folder,
    background_group,
    checksum,
    complete_checkpoints,
    finish_in_background,
    loose_key,
    optimizer_key,
    read_meta,
    wait_for_save,
    write_meta,
)
from lora_parallel.checkpoint.states import (
    OptimizerState,
    TrainState,
    gather_random_states,
    merged_records,
    optimizer_state,
)
from lora_parallel.distributed.dtensors import reshard
from lora_parallel.distributed.mesh import merged_over_stages, over_stages
from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.distributed.replicas import warn_of_unequal_replicas
from lora_parallel.distributed.torch_private import is_rectangle
from lora_parallel.storage import (
    Scratch,
    check_free,
    check_loadable,
    is_taken,
    remove_folder,
    saving_bar,
    sweep,
    without_numpy,
)


class SavePlanner(DefaultSavePlanner):
    """Plan a save as torch does, and show on rank 0 how many bytes of its shards are written."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self._bar = saving_bar("Saving states", sum(map(_bytes, plan.items)))
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = super().resolve_data(write_item)
        self._bar.update(_bytes(write_item))
        if self._bar.n == self._bar.total:
            self._bar.close()
        return data


def _bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else prod(data.chunk.sizes) * data.properties.dtype.itemsize


_log = logging.getLogger(__name__)


@torch.inference_mode(False)  # a DTensor cannot be detached in inference mode
def write_checkpoint(
    path: Path,
    state: TrainState,
    extra: Mapping[str, Any],
    writer: str,
    *,
    replace: bool = False,
    keep_last: int | None = None,
    async_save: bool = False,
) -> Path:
    """Write a checkpoint as `save_checkpoint` does, for front ends. Collective.

    Args:
        path: The checkpoint to write, an absolute path.
        state: The models and optimizers to save.
        extra: The front end's own entries for extra.pt.
        writer: The front end's name in meta.json; only the same front end can read the checkpoint.
        replace: Replace a checkpoint at `path` (see `may_be_replaced`) once the new one is complete.
        keep_last, async_save: As in `save_checkpoint`.
    """
    wait_for_save()
    extra = without_numpy(extra)
    with agreed() as alike:
        alike.update(directory=str(path), keep_last=keep_last, async_save=async_save, optimizers=list(state.optimizers))
        for key, value in extra.items():
            if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"{key!r} holds a DTensor, of which only rank 0's shard would be saved: save its full_tensor()."
                )
    save = _Save(path, state, writer, replace, keep_last)
    try:
        with agreed():
            save.begin()
        with agreed():
            if not save.scratch.lock.exists():
                raise OSError(
                    f"this rank does not see the folder that rank 0 made for {path}: save to a file system that all "
                    "nodes share."
                )
        tensors = save.collect(extra)
        if async_save:
            written = None
            if save.has_shards:  # DCP writes from copies, and its collectives have a process group of their own
                timeouts = [parallel.config.timeout_seconds for parallel in state.states.values()]
                group = background_group(max(timeouts, default=1800))
                written = dcp.async_save(tensors, storage_writer=save.state_writer, process_group=group)
            finish_in_background(partial(_finish, save, written))
            return path
        if save.has_shards:
            with _os_errors(save.folder):
                dcp.save(tensors, storage_writer=save.state_writer, planner=SavePlanner())
        with agreed():
            save.finish()
    except BaseException:
        save.scratch.discard()  # on rank 0, which made the folder
        raise
    return path


class _Save:
    """Collect one checkpoint and write it. Rank 0 writes all files but the shards in state/."""

    def __init__(self, path: Path, state: TrainState, writer: str, replace: bool, keep_last: int | None) -> None:
        self._state, self._writer, self._replace, self._keep_last = state, writer, replace, keep_last
        self.scratch = Scratch(path)
        self.folder = self.scratch.path
        """Folder to write in, which is beside the checkpoint's place."""

        self._rank = dist.get_rank()
        self._adapters: list[tuple[Path, GatheredAdapter]] = []
        self._optimizers: dict[str, OptimizerState] = {}
        self._other_state: dict[str, Any] = {}
        self._record = b""
        self._meta: dict[str, Any] = {}
        self.has_shards = False
        """True if any rank has shards to write to state/."""

        self.state_writer = ChecksummedWriter(self.folder / STATE)
        """Writer of every rank's shards, which also holds the checksums of their files."""

    def begin(self) -> None:
        """Take the states to save from the optimizers and modules, check them, and make the folder on rank 0."""
        target = self.scratch.target
        for model in self._state.models.values():
            check_unmerged(model)
            reshard(model)  # a forward may have left full parameters in place of the shards that optimizers hold
        names = self._state.parameter_names()
        check_finite(loose_parameters(self._state.module))  # adapters are checked as they are gathered
        self._optimizers = {name: optimizer_state(opt, names) for name, opt in self._state.optimizers.items()}
        others = without_numpy(self._state.other_state())
        self._other_state = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), others)
        for name, value in self._other_state.items():
            if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"{name} in the state dict is or holds a DTensor and is no parameter, and of it only rank 0's "
                    "shard would be saved: keep it as a plain tensor that all ranks have, or in a buffer that is not "
                    "persistent."
                )
            check_loadable(f"{name} in the state dict is what", value, "keep plain values and tensors there.")
        if self._rank == 0:
            if not (self._replace and may_be_replaced(target)):
                check_free(target)
            if target.parent not in _swept:
                sweep(target.parent)
                _swept.add(target.parent)
            self.scratch.make()

    def collect(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """Gather what rank 0 writes, `extra` included; return the tensors whose shards each rank writes. Collective."""
        models, mesh, states = self._state.models, self._state.mesh, self._optimizers
        parameters: dict[str, str] = {}
        for name, model in models.items():
            for adapter in peft_configs(model):
                folder, gathered = adapter_folder(self.folder, name, models), gather_adapter(model, adapter)
                self._adapters.append((folder, gathered))
                file = (gathered.folder(folder) / WEIGHTS).relative_to(self.folder)
                start = f"{name}." if name else ""
                parameters |= {f"{file}:{key}": f"{start}{parameter}" for key, parameter in gathered.names.items()}
        loose = loose_parameters(self._state.module)
        warn_of_unequal_replicas(loose, mesh)
        tensors = {loose_key(name): p.detach() for name, p in loose.items()}
        for name, optimizer in states.items():
            for parameter, values in optimizer.tensors.items():
                tensors |= {optimizer_key(name, parameter, key): tensor for key, tensor in values.items()}
        self.has_shards = any(over_stages(bool(tensors), mesh))
        records = {name: over_stages(optimizer.record, mesh) for name, optimizer in states.items()}
        buffers = {name: buffer.detach().cpu() for name, buffer in self._state.buffers().items()}
        with agreed():
            optimizers = {name: merged_records(of_stages) for name, of_stages in records.items()}
        record = {
            **extra,
            "models": list(models),
            "adapters": {name: list(peft_configs(model)) for name, model in models.items()},
            "forward_counts": {name: state.forward_count.done for name, state in self._state.states.items()},
            "optimizers": optimizers,
            "random": gather_random_states(mesh),
            "buffers": merged_over_stages(buffers, mesh),
            "other_state": merged_over_stages(self._other_state, mesh),
        }
        versions = {}
        for package in ("torch", "peft", "lightning-lora"):
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        self._meta = {
            "format": FORMAT,
            "name": self.scratch.target.name,
            "writer": self._writer,
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            "base": {name: _base_name(model) for name, model in models.items()},
            "parameters": parameters,
            "fingerprints": {name: fingerprints_of(model) for name, model in models.items()},
            "versions": versions,
        }
        with agreed():
            _check_rectangles(tensors)
            if self._rank == 0:  # serialise now: values may change before a background save writes them
                written = io.BytesIO()
                torch.save(record, written)
                self._record = written.getvalue()
                plain = {key: value for key, value in record.items() if key not in extra}
                check_loadable("an optimizer has settings or states that", plain, "use plain values and tensors.")
        return tensors

    def finish(self) -> None:
        """Write everything but the shards, and put the checkpoint in its place, on rank 0."""
        if self._rank != 0:
            return
        for folder, adapter in self._adapters:
            adapter.write(folder)
        (self.folder / EXTRA).write_bytes(self._record)
        # Users may edit or remove a model card, so it is not among the files that are checked.
        written = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        files = [path for path in written if path != self.scratch.lock and path.name != CARD]
        self._meta["files"] = {str(file.relative_to(self.folder)): file.stat().st_size for file in files}
        shards = {f"{STATE}/{name}": crc for name, crc in self.state_writer.checksums.items()}
        others = {name: checksum(self.folder / name) for name in self._meta["files"] if name not in shards}
        self._meta["checksums"] = {**others, **shards}
        target = self.scratch.target
        before = complete_checkpoints(target.parent)
        self._meta["number"] = max((read_meta(path)["number"] for path in before), default=0) + 1
        write_meta(self.folder, self._meta)
        for path in target.iterdir() if target.is_dir() and not target.is_symlink() else ():
            if path.name not in LAYOUT:  # the user's own file in the checkpoint that is replaced
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, self.folder / path.name)
        self.scratch.place(self._replace)
        if self._keep_last is not None:
            for path in complete_checkpoints(target.parent)[: -self._keep_last]:
                remove_folder(path)


def may_be_replaced(path: Path) -> bool:
    """Return True if a front end whose users expect it may replace what is at `path`.

    It may replace nothing or an empty folder, a checkpoint of this library, a file that is named *.ckpt, and a link to
    one of the last two.
    """
    if path.is_symlink():
        return _is_ours(path.resolve()) if path.exists() else path.suffix == _SUFFIX
    return not is_taken(path) or _is_ours(path)


_SUFFIX = ".ckpt"  # of the names that Lightning's users give to checkpoints


def _is_ours(path: Path) -> bool:
    """Return True if `path` is a checkpoint of this library, by its meta.json's contents, or a file named *.ckpt."""
    if path.is_file():
        return path.suffix == _SUFFIX
    try:
        read_meta(path)
    except (OSError, ValueError):
        return False
    return True


_swept: set[Path] = set()
"""Folders that this process has cleared of leftovers of killed processes; each is cleared once."""


@contextmanager
def _os_errors(folder: Path) -> Iterator[None]:
    """Raise an OSError where torch cannot write a train state; torch's own error is raised on every rank."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise OSError(f"the train state cannot be written to {folder}: {error}") from error


def _check_rectangles(tensors: dict[str, Tensor]) -> None:
    """Check that this rank's shards are rectangles of the full tensors, the only form that torch DCP can describe."""
    # A shard of several fused matrices, each of which is split by itself, consists of several rectangles.
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and not is_rectangle(tensor):
            raise ValueError(
                f"this rank's shard of {name} ({tensor.placements}) is not one rectangle of the full tensor "
                f"{tuple(tensor.shape)}: torch's checkpoints would store other rows than it holds. Parallelize the "
                "layer with a style of this library."
            )


def _base_name(model: nn.Module) -> str | None:
    config = getattr(model, "config", None)
    return getattr(model, "name_or_path", None) or getattr(config, "name_or_path", None) or None


def _finish(save: _Save, written: Any) -> None:
    try:
        if written is not None:
            with _os_errors(save.folder):
                written.result()
        save.finish()
    except BaseException as error:
        save.scratch.discard()
        _log.error("the checkpoint %s was not written: %s", save.folder, error)
        raise
