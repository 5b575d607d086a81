"""Adapter folders in PEFT's own format: saving, loading.

Source of the format: peft/utils/save_and_load.py and PeftModel.save_pretrained; what PEFT writes in one process is what
is written here, by PEFT's own functions, from tensors gathered a few at a time.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftConfig, PeftModel, PeftType
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_parallel.adapters import adapted_model, adapter_parameters, adapter_tensors, check_unmerged, peft_configs
from lora_parallel.agreement import agreed, check_alike
from lora_parallel.atomic import Scratch, local_path
from lora_parallel.gather import class_of, gather_on_rank_zero, local, region_of, reshard
from lora_parallel.identity import renew_fingerprints
from lora_parallel.names import embeddings_of
from lora_parallel.rendezvous import collective_call

__all__ = [
    "CARD",
    "WEIGHTS",
    "GatheredAdapter",
    "ReadAdapter",
    "check_config",
    "find_adapter",
    "gather_adapter",
    "load_adapter",
    "read_adapter",
    "save_adapter",
    "save_as_peft",
]

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_BLOCKS, _BLOCK_BYTES = 16, 4096
WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "README.md"


@collective_call("save_adapter")
def save_adapter(model: nn.Module, directory: str | os.PathLike[str], adapter_name: str = "default") -> Path:
    """Write the adapter as PEFT would in one process. Collective: call it on every rank with the same arguments.

    Tensors are gathered a few at a time and kept on rank 0's CPU. Of the base, only what PEFT itself writes is
    gathered: embeddings that are adapted or resized. Rank 0 writes beside the target, reads back, compares, and
    renames: a new folder is complete or not there. In a folder that exists each file is replaced whole, one after the
    other, and what else is there stays.

    Args:
        model: What `parallelize` returned, or any model with PEFT layers (also in one process, unsharded).
        directory: The adapter folder; as in PEFT, an adapter that is not "default" goes in a subfolder of its name.
        adapter_name: Which adapter.

    Returns:
        The folder that holds `adapter_model.safetensors` and `adapter_config.json`.

    Raises:
        ValueError: The model has no such adapter, or one that is merged into its base; or ranks call with different
            arguments.
        RuntimeError: The written file does not hold every adapter tensor as gathered.
        OSError: The folder cannot be written. All on every rank.
    """
    return save_as_peft(model, directory, adapter_name, "auto")


@torch.inference_mode(False)  # inside of which a DTensor cannot be detached
def save_as_peft(
    model: nn.Module,
    directory: str | os.PathLike[str],
    adapter_name: str,
    save_embedding_layers: Literal["auto"] | bool,
) -> Path:
    """`save_adapter`, with PEFT's own argument."""
    with agreed():
        place = local_path(directory)
    check_alike(directory=str(place), adapter_name=adapter_name, save_embedding_layers=save_embedding_layers)
    gathered = gather_adapter(model, adapter_name, save_embedding_layers)
    with agreed():
        if not dist.is_initialized() or dist.get_rank() == 0:
            gathered.write(place)
    return gathered.folder(place)


@dataclass(frozen=True)
class GatheredAdapter:
    """An adapter off the model and ready to be written, while the model trains on."""

    name: str
    tensors: dict[str, Tensor]
    """By their keys in the file, on the CPU of rank 0; empty elsewhere."""

    names: dict[str, str]
    """The parameter in the model behind each key, on every rank."""

    config: PeftConfig
    base_class: type[nn.Module]
    holder: nn.Module

    def folder(self, directory: Path) -> Path:
        """Where in `directory` PEFT keeps this adapter."""
        return directory if self.name == "default" else directory / self.name

    def write(self, directory: Path, beside: Callable[[Path], None] | None = None) -> None:
        """Write it. On rank 0.

        Args:
            directory: See `folder`.
            beside: Writes other files into the same folder, before it is put in place.

        Raises:
            RuntimeError: The written file does not hold every tensor as gathered.
            ValueError: A model card that is there cannot be read.
            OSError: The folder cannot be written.
        """
        directory = directory.resolve()  # a link to another file system: its folder is renamed there
        target = self.folder(directory)
        for path in {directory, target}:
            if path.is_file():
                raise NotADirectoryError(f"{path} is a file: give a folder.")
        scratch = Scratch(target)
        scratch.make()
        try:
            save_file(self.tensors, scratch.path / WEIGHTS, metadata={"format": "pt"})
            self._write_config(scratch.path)
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
        """PEFT's model card; it adds to what the user wrote."""
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

    def _write_config(self, directory: Path) -> None:
        """`adapter_config.json`, with the changes that `PeftModel.save_pretrained` makes on the way."""
        mapping = None
        if self.config.task_type is None:
            mapping = {"base_model_class": self.base_class.__name__, "parent_library": self.base_class.__module__}
        self.config.save_pretrained(str(directory), auto_mapping_dict=mapping)


def gather_adapter(
    model: nn.Module, adapter_name: str = "default", save_embedding_layers: Literal["auto"] | bool = "auto"
) -> GatheredAdapter:
    """Gather what PEFT writes for an adapter. Collective.

    Args:
        model: As in `save_adapter`.
        adapter_name: As in `save_adapter`.
        save_embedding_layers: As in `PeftModel.save_pretrained`.

    Raises:
        ValueError: The model has no such adapter, on every rank.
    """
    reshard(model)
    with agreed():
        check_unmerged(model)
        configs = peft_configs(model)
        if adapter_name not in configs:
            raise ValueError(f"no adapter {adapter_name!r} in the model; it has: {', '.join(configs) or 'none'}.")
        if not adapter_parameters(model, adapter_name):
            raise ValueError(f"the adapter {adapter_name!r} has no parameters.")
    holder = adapted_model(model)
    assert holder is not None
    parameters = _tensors(model)
    keys = _on_disk(model, holder, adapter_name, save_embedding_layers)
    gathered = gather_on_rank_zero({name: parameters[name] for name in keys.values()})
    base = holder.get_base_model() if isinstance(holder, PeftModel) else holder
    config: Any = copy.deepcopy(configs[adapter_name])
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
    config.inference_mode = True
    tensors = {key: gathered[name].clone() for key, name in keys.items()} if gathered else {}
    with agreed():
        for key, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise ValueError(
                    f"{key} of the adapter {adapter_name!r} holds values that are not finite: it is broken."
                )
    return GatheredAdapter(adapter_name, tensors, keys, config, class_of(base), holder)


def _on_disk(
    model: nn.Module, holder: nn.Module, adapter_name: str, save_embedding_layers: Literal["auto"] | bool
) -> dict[str, str]:
    """What PEFT writes for the adapter: the name in `model` of the parameter under each key. Collective.

    PEFT decides (on rank 0, since it may look at the base model's folder): besides the adapter's own tensors it writes
    the weights of input and output embeddings that are adapted or whose vocabulary has been resized.
    """
    prefix = _name_of(model, holder)
    names: dict[str, str] = {}
    with agreed():
        if not dist.is_initialized() or dist.get_rank() == 0:
            parameters = _tensors(model)
            own = adapter_tensors(model, adapter_name)
            embeddings = [name for name in _embedding_weights(model, holder) if name in parameters]
            wanted = {**{name: parameters[name] for name in embeddings}, **own}
            stand_ins: dict[str, Tensor] = {
                name: torch.empty(parameter.shape, device="meta") for name, parameter in wanted.items()
            }
            state = get_peft_model_state_dict(
                holder,
                state_dict={name.removeprefix(prefix): tensor for name, tensor in stand_ins.items()},
                adapter_name=adapter_name,
                save_embedding_layers=save_embedding_layers,
            )
            by_tensor = {id(tensor): name for name, tensor in stand_ins.items()}
            added = "" if isinstance(holder, PeftModel) else "base_model.model."
            names = {f"{added}{key}": by_tensor[id(tensor)] for key, tensor in state.items()}
            named = {id(parameters[name]) for name in names.values()}  # what tied layers share is written once
            if lost := sorted(name for name, tensor in own.items() if id(tensor) not in named):
                raise RuntimeError(f"PEFT does not name {len(lost)} tensors of {adapter_name!r} (first: {lost[0]}).")
    if dist.is_initialized() and dist.get_world_size() > 1:
        shared = [names]
        dist.broadcast_object_list(shared, src=0)
        names = shared[0]
    return names


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def _embedding_weights(model: nn.Module, holder: nn.Module) -> list[str]:
    """Names in `model` of the base weights of input and output embeddings, where the model says what these are."""
    base = holder.get_base_model() if isinstance(holder, PeftModel) else holder
    layers = [embeddings_of(base, side) for side in ("input", "output")]
    inner = {getattr(layer, "base_layer", layer) for layer in layers if layer is not None}
    return [f"{name}.weight" for name, module in model.named_modules() if module in inner]


def _name_of(model: nn.Module, inner: nn.Module) -> str:
    name = next(name for name, module in model.named_modules() if module is inner)
    return f"{name}." if name else ""


def _compare(file: Path, state: dict[str, Tensor]) -> None:
    with safe_open(file, framework="pt") as written:
        missing = sorted(set(state) - set(written.keys()))
        wrong = [key for key in state if key not in missing and not torch.equal(written.get_tensor(key), state[key])]
    if missing or wrong:
        raise RuntimeError(
            f"{file} does not hold what was saved (missing: {missing[:3]}, different: {wrong[:3]}): nothing was put in "
            "place."
        )


@collective_call("load_adapter")
@torch.inference_mode(False)  # inside of which a DTensor cannot be detached
def load_adapter(model: nn.Module, directory: str | os.PathLike[str], adapter_name: str = "default") -> None:
    """Fill the model's adapter from a PEFT folder, each rank with its own slices. Collective.

    The adapter must be there with the same layers and r; nothing is changed unless everything fits. Values are
    converted to the dtypes of the model's adapter. As in PEFT, embeddings that are in the folder are the base's then.

    Args:
        model: What `parallelize` returned, on any mesh, or an unsharded model with PEFT layers.
        directory: The folder that holds `adapter_model.safetensors`; as in PEFT, for an adapter that is not "default"
            the subfolder of its name is looked at first.
        adapter_name: Which of the model's adapters to fill.

    Raises:
        FileNotFoundError: There is no such folder or file.
        ValueError: The file cannot be read, is of another PEFT type, holds values that are not finite numbers, or its
            keys and shapes are not exactly the adapter's; or ranks name different adapters or read different folders.
            All on every rank.
    """
    read_adapter(model, find_adapter(directory, adapter_name), adapter_name).put()


def find_adapter(directory: str | os.PathLike[str], adapter_name: str) -> Path:
    """Where in a directory PEFT looks for an adapter: one that is not "default" may be in a subfolder of its name."""
    inside = Path(directory) / adapter_name
    return inside if adapter_name != "default" and (inside / WEIGHTS).is_file() else Path(directory)


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter that has been read and is not yet in the model."""

    model: nn.Module
    values: list[tuple[Tensor, Tensor]]
    """This rank's part of each parameter, and what goes there."""

    base: list[str]
    """The parameters among them that are the base's: embeddings, which PEFT writes and loads with an adapter."""

    names: dict[str, str]
    """The parameter in the model behind each of the adapter's own keys."""

    def put(self) -> None:
        """Put it into the model. Collective."""
        with torch.no_grad():
            for target, value in self.values:
                target.copy_(value)
        if self.base:
            renew_fingerprints(self.model, self.base)


def read_adapter(
    model: nn.Module, directory: str | os.PathLike[str], adapter_name: str = "default", same_dtypes: bool = False
) -> ReadAdapter:
    """Read what `load_adapter` fills the model with. Collective.

    Args:
        model: As in `load_adapter`.
        directory: The folder itself.
        adapter_name: As in `load_adapter`.
        same_dtypes: Refuse values of another dtype: optimizer states belong to them.
    """
    check_alike(adapter_name=adapter_name)
    reshard(model)
    with agreed():
        check_unmerged(model)
        holder = adapted_model(model)
        configs = peft_configs(model)
        if holder is None or adapter_name not in configs:
            raise ValueError(f"no adapter {adapter_name!r} in the model; it has: {', '.join(configs) or 'none'}.")
        folder = Path(directory)
        check_config(folder, configs[adapter_name])
        digest = _digest(folder)
    check_alike(directory=f"a folder with digest {digest}")
    parameters = _tensors(model)
    own = _on_disk(model, holder, adapter_name, save_embedding_layers=False)
    # Whoever wrote the folder chose whether embeddings are in it.
    with_embeddings = hasattr(holder, "get_input_embeddings")
    more = _on_disk(model, holder, adapter_name, save_embedding_layers=True) if with_embeddings else {}
    with agreed():
        keys = {**own, **{key: more[key] for key in _keys(folder / WEIGHTS) if key in more}}
        targets = {key: parameters[name] for key, name in keys.items()}
        values = _read_slices(folder / WEIGHTS, targets)
        for key, parameter in targets.items():
            if same_dtypes and values[key].dtype != parameter.dtype:
                raise ValueError(
                    f"{folder / WEIGHTS}: {key} has dtype {values[key].dtype}, the model's has {parameter.dtype}: "
                    "build the adapter with the dtype that it was trained with (autocast_adapter_dtype, perhaps), or "
                    "fill it with load_adapter and start anew."
                )
    base = sorted(set(keys.values()) - set(own.values()))
    return ReadAdapter(model, [(local(parameter), values[key]) for key, parameter in targets.items()], base, own)


def check_config(folder: Path, own: PeftConfig) -> None:
    """Check that an adapter folder holds an adapter like the model's.

    Raises:
        FileNotFoundError: It is no adapter folder.
        ValueError: It was trained with another type, r, alpha or scaling.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is no PEFT adapter folder: it has no {name}.")
    try:
        config = json.loads((folder / CONFIG).read_text())
        kind = config["peft_type"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / CONFIG} is no PEFT config ({type(error).__name__}: {error}).") from error
    if kind != PeftType.LORA.value:
        raise ValueError(f"{folder} holds an adapter of PEFT type {kind!r}; only LORA is supported.")
    if isinstance(own, LoraConfig):
        for field in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"):
            theirs, ours = config.get(field, getattr(own, field)), getattr(own, field)
            if theirs != ours:
                raise ValueError(
                    f"{folder} was trained with {field}={theirs!r}, the model's adapter has {field}={ours!r}: build "
                    "the adapter with the folder's own config."
                )


def _digest(folder: Path) -> str:
    """Of what is in a folder, wherever it is mounted: of the weights size, header and some blocks."""
    found = hashlib.blake2b((folder / CONFIG).read_bytes(), digest_size=6)
    with open(folder / WEIGHTS, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = int.from_bytes(file.read(8), "little")
        found.update(str(size).encode() + file.read(min(header, size)))
        for index in range(_BLOCKS):
            file.seek(max(size - _BLOCK_BYTES, 0) * index // (_BLOCKS - 1))
            found.update(file.read(_BLOCK_BYTES))
    return found.hexdigest()


def _keys(file: Path) -> list[str]:
    with _opened(file) as stored:
        return list(stored.keys())


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}).") from error


def _read_slices(file: Path, targets: dict[str, Tensor]) -> dict[str, Tensor]:
    with _opened(file) as stored:
        keys = set(stored.keys())
        missing, unexpected = sorted(set(targets) - keys), sorted(keys - set(targets))
        if missing or unexpected:
            raise ValueError(
                f"{file} does not fit the model's adapter: {len(missing)} keys are missing (first: {missing[:2]}), "
                f"{len(unexpected)} are unexpected (first: {unexpected[:2]})."
            )
        values = {}
        for key, parameter in targets.items():
            view = stored.get_slice(key)
            if parameter.is_floating_point() and view.get_dtype() not in _FLOATS:
                raise ValueError(f"{file}: {key} has dtype {view.get_dtype()}, which no adapter has.")
            shape = tuple(view.get_shape())
            if shape != tuple(parameter.shape):
                raise ValueError(f"{file}: {key} has shape {shape}, the model's has {tuple(parameter.shape)}.")
            if not local(parameter).numel():
                values[key] = torch.empty_like(local(parameter))
            else:
                values[key] = view[region_of(parameter)] if shape else stored.get_tensor(key)
            if not torch.isfinite(values[key]).all():
                raise ValueError(f"{file}: {key} holds values that are not finite: the adapter is broken.")
        return values
