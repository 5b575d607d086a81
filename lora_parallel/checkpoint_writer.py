"""Writing a checkpoint: collected on all ranks, written beside its place, renamed; in the background if asked to."""

from __future__ import annotations

import io
import logging
import shutil
import sys
from collections.abc import Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lora_parallel.adapter_folder import CARD, WEIGHTS, GatheredAdapter, gather_adapter
from lora_parallel.adapters import check_unmerged, peft_configs
from lora_parallel.agreement import agreed, check_alike
from lora_parallel.atomic import Scratch, check_free, is_taken, sweep
from lora_parallel.checkpoint_layout import (
    EXTRA,
    FORMAT,
    LAYOUT,
    STATE,
    adapter_folder,
    loose_key,
    optimizer_key,
)
from lora_parallel.gather import reshard
from lora_parallel.identity import fingerprints_of
from lora_parallel.integrity import ChecksummedWriter
from lora_parallel.optimizer_state import OptimizerState, optimizer_state
from lora_parallel.plain import check_plain, plain
from lora_parallel.random_state import gather_random_states
from lora_parallel.rendezvous import collective_call
from lora_parallel.retention import checksum, complete_checkpoints, prune, read_meta, write_meta
from lora_parallel.train_state import TrainState
from lora_parallel.upstream import is_rectangle

__all__ = ["may_be_replaced", "wait_for_save", "write_checkpoint"]

_log = logging.getLogger(__name__)


@torch.inference_mode(False)  # inside of which a DTensor cannot be detached
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
    """`save_checkpoint` for front ends. Collective.

    Args:
        path: As in `save_checkpoint`; absolute.
        state: What to save.
        extra: Entries for extra.pt.
        writer: Who will read `extra` again.
        replace: What stands at `path` is replaced once the new checkpoint is complete.
        keep_last: As in `save_checkpoint`.
        async_save: As in `save_checkpoint`.
    """
    wait_for_save()
    extra = plain(extra)
    _check_extra(extra)
    check_alike(directory=str(path), keep_last=keep_last, async_save=async_save, optimizers=list(state.optimizers))
    save = _Save(path, state, writer, replace, keep_last)
    try:
        with agreed():
            save.begin()
        with agreed():
            save.check_seen()
        tensors = save.collect(extra)
        if async_save:
            _start(save, tensors)
            return path
        if tensors:
            _write_state(tensors, save)
        with agreed():
            save.finish()
    except BaseException:
        save.discard()
        raise
    return path


class _Save:
    """One checkpoint on its way to the disk. Rank 0 writes all but the shards."""

    def __init__(self, path: Path, state: TrainState, writer: str, replace: bool, keep_last: int | None) -> None:
        self._state, self._writer, self._replace, self._keep_last = state, writer, replace, keep_last
        self._scratch = Scratch(path)
        self._rank = dist.get_rank()
        self._adapters: list[tuple[Path, GatheredAdapter]] = []
        self._optimizers: dict[str, OptimizerState] = {}
        self._other_state: dict[str, Any] = {}
        self._record = b""
        self._meta: dict[str, Any] = {}
        self.state_writer = ChecksummedWriter(self.folder / STATE)
        """Writes the shards of all ranks, and keeps the checksums of their files."""

    @property
    def folder(self) -> Path:
        """Where to write."""
        return self._scratch.path

    @property
    def timeout_seconds(self) -> float:
        """Of collectives."""
        return self._state.parallel.config.timeout_seconds

    def begin(self) -> None:
        """Make the folder to write in."""
        target = self._scratch.target
        for model in self._state.models.values():
            check_unmerged(model)
            reshard(model)  # a forward may have left whole parameters in place of the optimizers'
        names = self._state.parameter_names()
        self._optimizers = {name: optimizer_state(each, names) for name, each in self._state.optimizers.items()}
        others = plain(self._state.other_state())
        self._other_state = tree_map_only(Tensor, lambda each: each.detach().cpu(), others)
        for name, value in self._other_state.items():
            _check_other(name, value)
        if self._rank != 0:
            return
        if not (self._replace and may_be_replaced(target)):
            check_free(target)
        if target.parent not in _swept:
            sweep(target.parent)
            _swept.add(target.parent)
        self._scratch.make()

    def check_seen(self) -> None:
        """Check that this rank sees the folder that rank 0 made."""
        if not self._scratch.lock.exists():
            raise OSError(
                f"this rank does not see the folder that rank 0 made for {self._scratch.target}: save to a file system "
                "that all nodes share."
            )

    def collect(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """Gather what rank 0 writes; return what every rank writes its shards of. Collective."""
        models, mesh, states = self._state.models, self._state.parallel.mesh, self._optimizers
        parameters: dict[str, str] = {}
        for name, model in models.items():
            for adapter in peft_configs(model):
                folder, gathered = adapter_folder(self.folder, name, models), gather_adapter(model, adapter)
                self._adapters.append((folder, gathered))
                file = (gathered.folder(folder) / WEIGHTS).relative_to(self.folder)
                own = {key: f"{name}.{each}" if name else each for key, each in gathered.names.items()}
                parameters |= {f"{file}:{key}": each for key, each in own.items()}
        record = {
            **extra,
            "models": list(models),
            "adapters": {name: list(peft_configs(model)) for name, model in models.items()},
            "forward_counts": {name: state.forward_count.done for name, state in self._state.states.items()},
            "optimizers": {name: state.record for name, state in states.items()},
            "random": gather_random_states(mesh),
            "buffers": {name: buffer.detach().cpu() for name, buffer in self._state.buffers().items()},
            "other_state": self._other_state,
        }
        self._meta = {
            "format": FORMAT,
            "name": self._scratch.target.name,
            "writer": self._writer,
            "mesh": dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
            "base": {name: _base_name(model) for name, model in models.items()},
            "parameters": parameters,
            "fingerprints": {name: fingerprints_of(model) for name, model in models.items()},
            "versions": {name: version(name) for name in ("torch", "peft", "lightning-lora") if _installed(name)},
        }
        tensors = {loose_key(name): p.detach() for name, p in self._state.loose_parameters().items()}
        for name, each in states.items():
            for parameter, kept in each.tensors.items():
                tensors.update({optimizer_key(name, parameter, key): tensor for key, tensor in kept.items()})
        with agreed():
            _check_rectangles(tensors)
            if self._rank == 0:  # now: what it holds may change before a save in the background gets to it
                written = io.BytesIO()
                torch.save(record, written)
                self._record = written.getvalue()
                own = {key: value for key, value in record.items() if key not in extra}
                check_plain("an optimizer has settings or states that", own, "use plain values and tensors.")
        return tensors

    def finish(self) -> None:
        """Write the rest, and put the checkpoint in its place."""
        if self._rank != 0:
            return
        for folder, adapter in self._adapters:
            adapter.write(folder)
        (self.folder / EXTRA).write_bytes(self._record)
        # A model card is the user's to edit or remove.
        files = [
            each
            for each in sorted(self.folder.rglob("*"))
            if each.is_file() and each != self._scratch.lock and each.name != CARD
        ]
        self._meta["files"] = {str(file.relative_to(self.folder)): file.stat().st_size for file in files}
        shards = {f"{STATE}/{name}": written for name, written in self.state_writer.checksums.items()}
        own = [name for name in self._meta["files"] if name not in shards]
        self._meta["checksums"] = {**{name: checksum(self.folder / name) for name in own}, **shards}
        before = complete_checkpoints(self._scratch.target.parent)
        self._meta["number"] = max((read_meta(each)["number"] for each in before), default=0) + 1
        write_meta(self.folder, self._meta)
        self._keep_others()
        self._scratch.place(self._replace)
        if self._keep_last is not None:
            prune(self._scratch.target.parent, self._keep_last)

    def _keep_others(self) -> None:
        """Take over what the user has put into the checkpoint that is replaced."""
        target = self._scratch.target
        for path in target.iterdir() if target.is_dir() and not target.is_symlink() else ():
            if path.name not in LAYOUT:
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                copy(path, self.folder / path.name)

    def discard(self) -> None:
        """Leave nothing."""
        if self._rank == 0:
            self._scratch.discard()


def may_be_replaced(path: Path) -> bool:
    """Whether a front end whose users expect it may replace what stands at `path`: a checkpoint or a link to one,
    nothing, or a file that is named as one.
    """
    if path.is_symlink():
        return _is_ours(path.resolve()) if path.exists() else path.suffix == _SUFFIX
    return not is_taken(path) or _is_ours(path)


_SUFFIX = ".ckpt"
"""What Lightning's users name checkpoints."""


def _is_ours(path: Path) -> bool:
    """Others have files called meta.json too."""
    if path.is_file():
        return path.suffix == _SUFFIX
    try:
        read_meta(path)
    except (OSError, ValueError):
        return False
    return True


def _check_extra(extra: Mapping[str, Any]) -> None:
    """A shard would be saved as rank 0's and read as everybody's."""
    with agreed():
        for key, value in extra.items():
            if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
                raise ValueError(
                    f"{key!r} holds a DTensor, of which only rank 0's shard would be saved: save its full_tensor()."
                )


def _check_other(name: str, value: Any) -> None:
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
        raise ValueError(
            f"{name} in the state dict is or holds a DTensor and is no parameter, and of it only rank 0's shard would "
            "be saved: keep it as a plain tensor that all ranks have, or in a buffer that is not persistent."
        )
    check_plain(f"{name} in the state dict is what", value, "keep plain values and tensors there.")


_swept: set[Path] = set()
"""Folders cleared of what killed processes left there, once a process."""


def _write_state(tensors: dict[str, Tensor], save: _Save) -> None:
    try:
        dcp.save(tensors, storage_writer=save.state_writer)
    except dcp.CheckpointException as error:  # raised on every rank
        raise OSError(f"the train state cannot be written to {save.folder}: {error}") from error


def _check_rectangles(tensors: dict[str, Tensor]) -> None:
    """DCP describes a shard as one rectangle of the full tensor; a packed placement is several."""
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


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


_pending: Future[None] | None = None
_own_destroy = dist.destroy_process_group
_groups: dict[Any, Any] = {}
"""The group that background saves communicate in, by the default group that it was made beside."""


def wait_for_save() -> None:
    """Wait until the save in flight, if there is one, is complete on disk. Collective.

    The end of a process and `torch.distributed.destroy_process_group` wait by themselves, but raise nothing.

    Raises:
        OSError: It could not be written, on every rank.
    """
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        _replace_everywhere(_destroy_afterwards, _own_destroy)
        with collective_call("wait_for_save"), agreed():
            pending.result()


def _start(save: _Save, tensors: dict[str, Tensor]) -> None:
    global _pending
    # DCP writes `tensors` from copies; the thread has its collectives to itself.
    written = None
    if tensors:
        written = dcp.async_save(
            tensors, storage_writer=save.state_writer, process_group=_background_group(save.timeout_seconds)
        )
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    _pending = thread.submit(_finish, save, written)
    thread.shutdown(wait=False)
    _replace_everywhere(_own_destroy, _destroy_afterwards)


def _replace_everywhere(one: Any, other: Any) -> None:
    """Of `destroy_process_group`, in torch and in every module that has imported it by name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("destroy_process_group") is one:
            names["destroy_process_group"] = other


def _destroy_afterwards(*args: Any, **kwargs: Any) -> None:
    """In place of torch's own while a save is in flight, whose group it would take away; scripts end with it."""
    _replace_everywhere(_destroy_afterwards, _own_destroy)
    if _pending is not None:
        futures.wait([_pending])
    _own_destroy(*args, **kwargs)


def _background_group(seconds: float) -> Any:
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return _groups[world]


def _finish(save: _Save, written: Any) -> None:
    try:
        if written is not None:
            written.result()
        save.finish()
    except BaseException as error:
        save.discard()
        _log.error("the checkpoint %s was not written: %s", save.folder, error)
        if isinstance(error, dcp.CheckpointException):
            raise OSError(f"the train state cannot be written to {save.folder}: {error}") from error
        raise
