"""Read a checkpoint: each rank reads its own slices, and no model or optimizer is changed before everything fits."""

from __future__ import annotations

import errno
import hashlib
import json
import pickle
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from lora_parallel.adapters.adapter_folder import read_adapter
from lora_parallel.adapters.base_fingerprint import check_base, fingerprints_of
from lora_parallel.adapters.inspection import check_unmerged, find_adapter, loose_parameters, peft_configs
from lora_parallel.checkpoint.files import (
    EXTRA,
    FORMAT,
    META,
    STATE,
    adapter_folder,
    check_bytes,
    check_checksums,
    find_damage,
    loose_key,
    of_another,
    optimizer_key,
    read_meta,
    wait_for_save,
    written_here,
)
from lora_parallel.checkpoint.states import TrainState, check_optimizer, group_names, restored
from lora_parallel.distributed.dtensors import local, region_of
from lora_parallel.distributed.mesh import over_stages
from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.lazy.files import DcpDirectory, Reader
from lora_parallel.lazy.graph import Region, whole
from lora_parallel.storage import restore_replaced


@dataclass(frozen=True)
class Contents:
    """Hold what was read from a checkpoint on disk when it was opened."""

    path: Path
    meta: dict[str, Any]
    record: dict[str, Any]
    """Contents of extra.pt."""

    @property
    def optimizers(self) -> dict[str, Any]:
        """Return the record of each optimizer (see `OptimizerState`), by optimizer name; empty if none was saved."""
        return self.record["optimizers"]

    @property
    def dp(self) -> int:
        """Return the number of data-parallel ranks that wrote it."""
        sizes = self.meta["mesh"]
        return int(sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1))

    def adapter_folder(self, model: str) -> Path:
        return adapter_folder(self.path, model, self.record["models"])

    def held_by(self, model: str) -> list[str]:
        """List the parameters of a model that its adapter folders hold, by their names in that model."""
        start = f"{model}." if model else ""
        return [name.removeprefix(start) for name in self.meta["parameters"].values() if name.startswith(start)]


def is_checkpoint(path: Path) -> bool:
    """Return True if there is a checkpoint at `path`: its meta.json, which is written last, is there."""
    return (path / META).is_file()


def read_checkpoint(path: Path, writer: str, weights_only: bool | None = None) -> Contents:
    """Open a checkpoint as `open_checkpoint_folder` does, on every rank or on none. Collective.

    A save in flight is completed first, and a replacement of `path` that was cut short is undone. Arguments and errors
    are those of `open_checkpoint_folder`; a ValueError also if ranks read different checkpoints. All on every rank.
    """
    wait_for_save()
    with agreed():
        if dist.get_rank() == 0:
            restore_replaced(path)
    with agreed():
        meta, inode = _complete(path, writer), (path / META).stat()
    check_bytes(path, meta, inode)
    with agreed() as alike:
        # Ranks may have picked different checkpoints as the newest, or mounted the same one at different paths: compare
        # names and digests, and no paths.
        digest = hashlib.blake2b((path / META).read_bytes(), digest_size=6).hexdigest()
        alike["checkpoint"] = f"{meta['name']} ({digest})"
        contents = Contents(path, meta, _record(path, weights_only))
    return contents


def open_checkpoint_folder(path: Path, writer: str, weights_only: bool | None = None) -> Contents:
    """Open a checkpoint and check all of its files, on this rank alone.

    Args:
        path: The checkpoint.
        writer: The front end that reads; it can only read checkpoints that it wrote.
        weights_only: As in `torch.load`; None means True.

    Raises:
        FileNotFoundError: There is nothing at `path`.
        ValueError: There is no complete checkpoint of this format at `path`, or it is damaged or of another writer.
    """
    meta = _complete(path, writer)
    check_checksums(path, meta, meta["files"])
    return Contents(path, meta, _record(path, weights_only))


def _complete(path: Path, writer: str) -> dict[str, Any]:
    """Return the meta.json of a checkpoint, after a check that it is complete and of this format and writer."""
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}.")
    if not is_checkpoint(path):
        raise ValueError(
            written_here(path, writer)
            or f"{path} is not a checkpoint that this library wrote (a folder with {META}). Load what another one "
            "wrote into the model before training."
        )
    try:
        stated = json.loads((path / META).read_text()).get("format")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path / META} is damaged ({error}).") from error
    if stated not in range(1, FORMAT + 1):
        raise ValueError(
            f"{path} has checkpoint format {stated!r}; this version reads formats 1 to {FORMAT}. Use the version that "
            "wrote it, or a later one."
        )
    meta = read_meta(path)
    fault = find_damage(path, meta)
    if fault is not None:
        raise ValueError(f"the checkpoint {path} is incomplete: {fault}. Resume from another one.")
    if meta["writer"] != writer:
        raise ValueError(of_another(path, meta["writer"], writer))
    return meta


def _record(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Read extra.pt and check that it has all entries of a checkpoint."""
    try:
        record = torch.load(path / EXTRA, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path / EXTRA} holds Python objects (hyperparameters, perhaps) that weights_only=True does not read. "
            f"If you trust the file, load with weights_only=False. Cause: {error}"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # EINVAL: a seek to a damaged offset
            raise
        raise ValueError(f"{path / EXTRA} cannot be read ({error}): it is damaged. Resume from another one.") from error
    entries = ("models", "adapters", "forward_counts", "optimizers", "random", "buffers", "other_state")
    lacking = [key for key in entries if not isinstance(record, dict) or key not in record]
    if lacking:
        raise ValueError(f"{path / EXTRA} is damaged: it lacks {lacking[0]!r}.")
    return record


def state_dict_of(found: Contents) -> dict[str, Any]:
    """Return the saved module's state dict, as far as the checkpoint holds it, with full tensors, in one process.

    The checkpoint holds trained parameters, buffers and other states; the frozen base is not among them.
    """
    tensors: dict[str, Tensor] = {}
    files: dict[str, dict[str, str]] = {}
    for location, name in found.meta["parameters"].items():
        file, _, key = location.rpartition(":")
        files.setdefault(file, {})[key] = name
    for file, names in files.items():
        with safe_open(found.path / file, framework="pt") as stored:
            tensors |= {name: stored.get_tensor(key) for key, name in names.items()}
    source = DcpDirectory(found.path / STATE)
    if loose := _stored_loose(source):
        with source.open() as reader:
            tensors |= {name: reader(loose_key(name), whole(leaf.shape)) for name, leaf in loose.items()}
    return {**tensors, **found.record["buffers"], **found.record["other_state"]}


def _stored_loose(source: DcpDirectory) -> dict[str, Any]:
    """Return what a checkpoint's state/ holds of trained parameters that are in no adapter, by name."""
    leaves = source.list() if source.path.is_dir() else {}
    return {key.removeprefix(loose_key("")): leaf for key, leaf in leaves.items() if key.startswith(loose_key(""))}


def load_models(found: Contents, state: TrainState) -> list[Callable[[], None]]:
    """Read the models' adapters, other trained parameters, buffers and other states. Collective.

    Returns:
        Functions that put the values into the models. Calling them is collective.

    Raises:
        ValueError: Something of this is not as in the checkpoint, or the base is not; raised on every rank.
    """
    present = {name: fingerprints_of(model) for name, model in state.models.items()}
    with agreed():
        for name, model in state.models.items():
            check_unmerged(model)
            if name not in found.record["models"]:
                raise ValueError(f"{found.path} holds no model {name!r}; it holds {found.record['models']}.")
            saved, here = found.record["adapters"][name], list(peft_configs(model))
            if sorted(saved) != sorted(here):
                raise ValueError(f"{found.path} holds the adapters {sorted(saved)}, the model has {sorted(here)}.")
            check_base(found.meta["fingerprints"][name], present[name], model, str(found.path), found.held_by(name))
    adapters = [
        read_adapter(model, find_adapter(found.adapter_folder(name), adapter), adapter, same_dtypes=True)
        for name, model in state.models.items()
        for adapter in peft_configs(model)
    ]
    names = set(loose_parameters(state.module)), set(state.buffers()), set(state.other_state())
    stages = zip(*over_stages(names, state.mesh), strict=True)
    loose_names, buffer_names, other_names = (set().union(*of_stages) for of_stages in stages)
    with agreed():
        values = [*_read_loose(found, state, loose_names), *_read_buffers(found, state, buffer_names)]
        others = _other_state(found, state, other_names)

    def commit() -> None:
        for adapter in adapters:
            adapter.put()
        with torch.no_grad():
            for target, value in values:
                target.copy_(value)
        if other_names:
            with agreed():
                state.load_other_state(others)

    return [commit]


def _of_models(saved: Mapping[str, Any], contents: Contents, state: TrainState) -> dict[str, Any]:
    """Leave out what belongs to saved models that are not in `state`: a front end may load only some of them."""
    elsewhere = tuple(f"{name}." for name in contents.record["models"] if name not in state.models)
    return {name: value for name, value in saved.items() if not name.startswith(elsewhere)}


def _read_buffers(contents: Contents, state: TrainState, names: set[str]) -> list[tuple[Tensor, Tensor]]:
    here = state.buffers()
    stored = _of_models(contents.record["buffers"], contents, state)
    wrong = [name for name in here if name in stored and here[name].shape != stored[name].shape]
    if wrong := wrong or sorted(names ^ stored.keys()):
        raise ValueError(
            f"the buffers in {contents.path} are not the model's: {wrong[0]} is not in both, or has another shape."
        )
    return [(buffer, stored[name]) for name, buffer in here.items()]


def _other_state(contents: Contents, state: TrainState, names: set[str]) -> dict[str, Any]:
    stored = _of_models(contents.record["other_state"], contents, state)
    if other := sorted(names ^ stored.keys()):
        raise ValueError(f"the state dict has other entries than in {contents.path}: {other[0]} is not in both.")
    return {name: stored[name] for name in state.other_state()}


def _read_loose(contents: Contents, state: TrainState, names: set[str]) -> list[tuple[Tensor, Tensor]]:
    loose = loose_parameters(state.module)
    source = DcpDirectory(contents.path / STATE)
    stored = _of_models(_stored_loose(source), contents, state)
    for name, leaf in stored.items():
        here = loose.get(name)
        if here is not None and (leaf.shape, leaf.dtype) != (tuple(here.shape), here.dtype):
            raise ValueError(
                f"{name} has shape {leaf.shape} and dtype {leaf.dtype} in {contents.path}, the model's has "
                f"{tuple(here.shape)} and {here.dtype}."
            )
    more, lacking = names - stored.keys(), stored.keys() - names
    if more or lacking:
        raise ValueError(
            f"other parameters train than in {contents.path}: {len(more)} are not in it (first: {sorted(more)[:1]}), "
            f"{len(lacking)} of it do not train here (first: {sorted(lacking)[:1]})."
        )
    if not loose:
        return []
    with source.open() as reader:
        return [
            (local(p), reader(loose_key(name), region_of(p)) if local(p).numel() else local(p))
            for name, p in loose.items()
        ]


def load_optimizers(found: Contents, state: TrainState) -> list[Callable[[], None]]:
    """Read the optimizers' states. Collective.

    Returns:
        Functions that put the states into the optimizers, one for each.

    Raises:
        ValueError: The checkpoint holds no state for an optimizer, or one that does not fit it; raised on every rank.
    """
    names = state.parameter_names()
    source = DcpDirectory(found.path / STATE)
    commits = []
    groups = {name: group_names(optimizer, names, state.mesh) for name, optimizer in state.optimizers.items()}
    with agreed():
        for name, optimizer in state.optimizers.items():
            if name not in found.optimizers:
                raise ValueError(f"{found.path} holds no state of optimizer {name!r}.")
            check_optimizer(optimizer, names, groups[name], found.optimizers[name])
        for name, optimizer in state.optimizers.items():
            record = found.optimizers[name]
            with source.open() if record["tensors"] else nullcontext() as reader:
                commits.append(restored(optimizer, names, record, partial(_read_state, reader, name)))
    return commits


def _read_state(reader: Reader | None, optimizer: str, parameter: str, key: str, region: Region) -> Tensor:
    assert reader is not None  # the record lists tensors
    return reader(optimizer_key(optimizer, parameter, key), region)


def resume_counting(found: Contents, state: TrainState) -> None:
    """Set each model's count of training forwards, on which dropout masks depend, to the saved count."""
    for name, model_state in state.states.items():
        model_state.forward_count.done = found.record["forward_counts"][name]
