"""Save an adapter of a sharded model as the folder that PEFT writes in one process, and load such a folder.

PEFT's own functions choose the tensors and their keys. The tensors are gathered a few at a time.
"""

from __future__ import annotations

import copy
import hashlib
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard
from peft import PeftConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_parallel.adapters.base_fingerprint import renew_fingerprints
from lora_parallel.adapters.inspection import (
    CARD,
    CONFIG,
    WEIGHTS,
    adapted_model,
    adapter_parameters,
    check_config,
    check_finite,
    check_unmerged,
    find_adapter,
    first_names,
    keys_on_disk,
    peft_configs,
    tensors_by_name,
    with_sorted_patterns,
)
from lora_parallel.adapters.peft_private import converted_adapter
from lora_parallel.distributed.dtensors import class_of, gather_on_rank_zero, local, region_of, reshard
from lora_parallel.distributed.meetings import collective_call
from lora_parallel.distributed.mesh import over_stages
from lora_parallel.distributed.rank_checks import agreed, is_rank_zero
from lora_parallel.distributed.replicas import warn_of_unequal_replicas
from lora_parallel.layers.layer_parameters import innermost
from lora_parallel.lazy.files import Reader, SafetensorsFile
from lora_parallel.state import mesh_of
from lora_parallel.storage import Scratch, local_path


@collective_call("save_adapter")
@torch.inference_mode(False)  # a DTensor cannot be detached in inference mode
def save_adapter(model: nn.Module, directory: str | os.PathLike[str], adapter_name: str = "default") -> Path:
    """Write an adapter as PEFT would in one process. Collective: call it on every rank with the same arguments.

    Tensors are gathered a few at a time and kept on rank 0's CPU. The base is not gathered, except for the embeddings
    that PEFT itself writes: those that are adapted or resized. Rank 0 writes the files into a folder beside the target,
    reads the weights back, compares them, and renames the folder, so that a new folder is complete or not there. If the
    target exists, its files are replaced one after the other, each as a whole, and its other files stay.

    Args:
        model: The model that `parallelize` returned, or any model with PEFT layers (also in one process, unsharded).
        directory: The adapter folder. As in PEFT, an adapter that is not "default" goes into a subfolder of its name.
        adapter_name: Name of the adapter to save.

    Returns:
        The folder that holds `adapter_model.safetensors` and `adapter_config.json`.

    Raises:
        ValueError: The model has no such adapter, an adapter is merged into the base, or holds values that are not
            finite; or ranks call with different arguments.
        RuntimeError: The written file does not hold every adapter tensor as gathered.
        OSError: The folder cannot be written. Every error is raised on every rank.
    """
    with agreed() as alike:
        path = local_path(directory)
        alike.update(directory=str(path), adapter_name=adapter_name)
    gathered = gather_adapter(model, adapter_name)
    with agreed():
        if is_rank_zero():
            gathered.write(path)
    return gathered.folder(path)


@dataclass(frozen=True)
class GatheredAdapter:
    """Hold a copy of an adapter that can be written while the model continues to train."""

    name: str
    tensors: dict[str, Tensor]
    """Full tensors on the CPU of rank 0, by their keys in the file; empty on other ranks."""

    names: dict[str, str]
    """Name of the parameter or buffer in the model, for each key in the file; on every rank."""

    config: PeftConfig
    base_class: type[nn.Module]
    holder: nn.Module

    def folder(self, directory: Path) -> Path:
        """Return the folder of this adapter: `directory` for "default", else a subfolder of the adapter's name."""
        return directory if self.name == "default" else directory / self.name

    def write(self, directory: Path, beside: Callable[[Path], None] | None = None) -> None:
        """Write the adapter folder, on rank 0 alone; `beside` writes other files into it before it is put in place."""
        directory = directory.resolve()  # if it is a link to another file system, the folder is renamed on that one
        target = self.folder(directory)
        for path in {directory, target}:
            if path.is_file():
                raise NotADirectoryError(f"{path} is a file: give a folder.")
        scratch = Scratch(target)
        scratch.make()
        try:
            save_file(self.tensors, scratch.path / WEIGHTS, metadata={"format": "pt"})
            named = {"base_model_class": self.base_class.__name__, "parent_library": self.base_class.__module__}
            config = with_sorted_patterns(self.config, self.tensors)  # and PEFT names the base's class in it
            config.save_pretrained(str(scratch.path), auto_mapping_dict=named if config.task_type is None else None)
            _compare(scratch.path / WEIGHTS, self.tensors)
            if beside is not None:
                beside(scratch.path)
            if isinstance(self.holder, PeftModel):
                self._write_card(directory / CARD, scratch.path)
                if target != directory:
                    os.replace(scratch.path / CARD, directory / CARD)
            if target.exists():
                scratch.place_files(last=WEIGHTS)
            else:
                scratch.place()
        finally:
            scratch.discard()

    def _write_card(self, present: Path, folder: Path) -> None:
        """Write PEFT's model card into `folder`; if there is a card at `present`, PEFT adds to that text."""
        if present.is_file():
            try:
                ModelCard.load(present)
            except Exception as error:
                raise ValueError(
                    f"{present} is no model card that PEFT can add to ({error}): write it in UTF-8, with metadata in "
                    "YAML, or move it away."
                ) from error
            shutil.copyfile(present, folder / CARD)
        self.holder.create_or_update_model_card(str(folder))  # type: ignore[operator]


def gather_adapter(
    model: nn.Module, adapter_name: str = "default", save_embedding_layers: Literal["auto"] | bool = "auto"
) -> GatheredAdapter:
    """Gather the tensors that PEFT writes for an adapter, and copy its config; errors on every rank. Collective."""
    reshard(model)
    with agreed():
        check_unmerged(model)
        configs = peft_configs(model)
        if adapter_name not in configs:
            raise ValueError(f"no adapter {adapter_name!r} in the model; it has: {', '.join(configs) or 'none'}.")
        has_parameters = bool(adapter_parameters(model, adapter_name))
    anywhere = any(over_stages(has_parameters, mesh_of(model)))
    with agreed():  # ranks without a mesh may differ
        if not anywhere:
            raise ValueError(f"the adapter {adapter_name!r} has no parameters.")
    holder = adapted_model(model)
    assert holder is not None
    parameters = tensors_by_name(model)
    keys = keys_on_disk(model, holder, adapter_name, save_embedding_layers)
    saved = {name: parameters[name] for name in keys.values() if name in parameters}
    with agreed():
        check_finite(saved)
    warn_of_unequal_replicas(saved, mesh_of(model))
    gathered = gather_on_rank_zero(saved)
    base = innermost(holder)
    config: Any = copy.deepcopy(configs[adapter_name])
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
    config.inference_mode = True
    tensors = {key: gathered[name].clone() for key, name in keys.items()} if gathered else {}
    return GatheredAdapter(adapter_name, tensors, keys, config, class_of(base), holder)


def _compare(file: Path, state: dict[str, Tensor]) -> None:
    with safe_open(file, framework="pt") as written:
        missing = sorted(set(state) - set(written.keys()))
        wrong = [key for key in state if key not in missing and not torch.equal(written.get_tensor(key), state[key])]
    if missing or wrong:
        raise RuntimeError(
            f"{file} does not hold what was saved (missing: {missing[:3]}, different: {wrong[:3]}): nothing was put in "
            "place."
        )


_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@collective_call("load_adapter")
@torch.inference_mode(False)  # a DTensor cannot be detached in inference mode
def load_adapter(model: nn.Module, directory: str | os.PathLike[str], adapter_name: str = "default") -> None:
    """Fill an adapter of the model from a PEFT folder, each rank with its own slices. Collective.

    The model must have the adapter already, with the same layers and r. Nothing is changed unless everything fits.
    Values are converted to the dtypes of the model's adapter. As in PEFT, embeddings in the folder replace the base's.

    Args:
        model: The model that `parallelize` returned, on any mesh, or an unsharded model with PEFT layers.
        directory: The folder that holds `adapter_model.safetensors`. As in PEFT, for an adapter that is not "default"
            the subfolder of its name comes first, if it holds that file.
        adapter_name: Name of the adapter of the model to fill.

    Raises:
        FileNotFoundError: The folder, or a file in it, does not exist.
        ValueError: The file cannot be read, is of another PEFT type, holds values that are not finite numbers, or its
            keys and shapes are not exactly the adapter's; or ranks name different adapters or read different folders.
            Every error is raised on every rank.
    """
    read_adapter(model, find_adapter(directory, adapter_name), adapter_name).put()


@dataclass(frozen=True)
class ReadAdapter:
    """Hold an adapter that was read from a folder, until `put` writes it into the model."""

    model: nn.Module
    values: list[tuple[Tensor, Tensor]]
    """Pairs of this rank's part of a parameter and the values to write into it, of the same shape."""

    base: list[str]
    """Names of the parameters in `values` that belong to the base: embeddings that PEFT saved with the adapter."""

    names: dict[str, str]
    """Name of the parameter in the model, of any pipeline stage, for each key of the adapter itself in the file."""

    def put(self) -> None:
        """Write the adapter's values into the model. Collective."""
        with torch.no_grad():
            for target, value in self.values:
                target.copy_(value)
        if self.base:
            renew_fingerprints(self.model, self.base)


def read_adapter(
    model: nn.Module, directory: str | os.PathLike[str], adapter_name: str = "default", same_dtypes: bool = False
) -> ReadAdapter:
    """Read an adapter from a folder (of no subfolder), each rank its own slices, and check that it fits. Collective."""
    # With `same_dtypes` optimizer states belong to the values: those of another dtype than the model's are refused.
    reshard(model)
    with agreed() as alike:
        alike["adapter_name"] = adapter_name
        check_unmerged(model)
        holder = adapted_model(model)
        configs = peft_configs(model)
        if holder is None or adapter_name not in configs:
            raise ValueError(f"no adapter {adapter_name!r} in the model; it has: {', '.join(configs) or 'none'}.")
        folder = Path(directory)
        check_config(folder, configs[adapter_name], model)
        alike["directory"] = f"a folder with digest {_digest(folder)}"
    of_adapter = keys_on_disk(model, holder, adapter_name, save_embedding_layers=False)
    # The folder may or may not hold embeddings: its writer chose.
    with_embeddings = hasattr(holder, "get_input_embeddings")
    more = keys_on_disk(model, holder, adapter_name, save_embedding_layers=True) if with_embeddings else {}
    source = SafetensorsFile(folder / WEIGHTS)
    with agreed(), source.open() as read:
        stored: Mapping[str, Any] = source.list()
        if not of_adapter.keys() <= stored.keys() <= (of_adapter | more).keys():
            stored = tensors = converted_adapter(folder, innermost(holder), configs[adapter_name], adapter_name)
            read = lambda key, region: tensors[key][region]  # noqa: E731
        keys = of_adapter | {key: name for key, name in more.items() if key in stored}
        targets = _targets(model, keys)
        values = _read_slices(source.path, stored, read, targets, keys)
        for key, parameter in targets.items():
            if same_dtypes and values[key].dtype != parameter.dtype:
                raise ValueError(
                    f"{folder / WEIGHTS}: {key} has dtype {values[key].dtype}, the model's has {parameter.dtype}: "
                    "build the adapter with the dtype that it was trained with (autocast_adapter_dtype, perhaps), or "
                    "fill it with load_adapter and start anew."
                )
    base = sorted(set(keys.values()) - set(of_adapter.values()))
    pairs = [(local(parameter), values[key]) for key, parameter in targets.items()]
    return ReadAdapter(model, pairs, base, of_adapter)


def _targets(model: nn.Module, keys: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of this rank that keys of a file belong to, by key; `keys` has the names of all stages."""
    # A tied weight may be on two pipeline stages, under another name on each. First names lack what PEFT adds, so that
    # layers that PEFT puts one around the other (for two parameters of experts) share theirs.
    tensors = tensors_by_name(model)
    first = first_names(model, {*tensors, *keys.values()})
    known = {first[name]: tensor for name, tensor in tensors.items()} | tensors
    found = {key: known.get(name, known.get(first[name])) for key, name in keys.items()}
    return {key: tensor for key, tensor in found.items() if tensor is not None}


def _digest(folder: Path) -> str:
    """Return a hash of an adapter folder's config, and of its weights' size, header and 16 blocks of 4 KiB."""
    content = hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=6)
    with open(folder / WEIGHTS, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = int.from_bytes(file.read(8), "little")
        content.update(str(size).encode() + file.read(min(header, size)))
        for index in range(16):
            file.seek(max(size - 4096, 0) * index // 15)
            content.update(file.read(4096))
    return content.hexdigest()


def _read_slices(
    file: Path, stored: Mapping[str, Any], read: Reader, targets: Mapping[str, Tensor], expected: Collection[str]
) -> dict[str, Tensor]:
    """Read this rank's slices of the tensors of a file, which must have exactly the expected keys."""
    keys = set(stored)
    missing, unexpected = sorted(set(expected) - keys), sorted(keys - set(expected))
    if missing or unexpected:
        raise ValueError(
            f"{file} does not fit the model's adapter: {len(missing)} keys are missing (first: {missing[:2]}), "
            f"{len(unexpected)} are unexpected (first: {unexpected[:2]})."
        )
    values = {}
    for key, parameter in targets.items():
        shape, dtype = tuple(stored[key].shape), stored[key].dtype
        if parameter.is_floating_point() and dtype not in _FLOATS:
            raise ValueError(f"{file}: {key} has dtype {dtype}, which no adapter has.")
        if shape != tuple(parameter.shape):
            raise ValueError(f"{file}: {key} has shape {shape}, the model's has {tuple(parameter.shape)}.")
        if not local(parameter).numel():
            values[key] = torch.empty_like(local(parameter))
        else:
            values[key] = read(key, region_of(parameter))
        if isinstance(parameter, nn.Parameter) and not torch.isfinite(values[key]).all():
            raise ValueError(f"{file}: {key} holds values that are not finite: the adapter is broken.")
    return values
