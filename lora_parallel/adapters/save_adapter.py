"""Save an adapter of a sharded model as the folder that PEFT writes in one process.

PEFT's own functions choose the tensors and their keys. The tensors are gathered a few at a time.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import ModelCard
from peft import PeftConfig, PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_parallel.adapters.config_check import with_sorted_patterns
from lora_parallel.adapters.inspection import (
    adapted_model,
    adapter_parameters,
    check_finite,
    check_unmerged,
    peft_configs,
)
from lora_parallel.adapters.peft_format import (
    CARD,
    WEIGHTS,
    keys_on_disk,
    tensors_by_name,
)
from lora_parallel.distributed.gather import class_of, gather_on_rank_zero, reshard
from lora_parallel.distributed.rank_checks import agreed, check_alike, is_rank_zero
from lora_parallel.distributed.rendezvous import collective_call
from lora_parallel.distributed.stages import over_stages
from lora_parallel.layers.module_names import innermost
from lora_parallel.state import mesh_of
from lora_parallel.storage.atomic import Scratch, local_path

__all__ = ["GatheredAdapter", "gather_adapter", "save_adapter"]


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
    with agreed():
        place = local_path(directory)
    check_alike(directory=str(place), adapter_name=adapter_name)
    gathered = gather_adapter(model, adapter_name)
    with agreed():
        if is_rank_zero():
            gathered.write(place)
    return gathered.folder(place)


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
        """Write the adapter folder. Only rank 0 calls it.

        Args:
            directory: The folder of all adapters; `folder` gives the one that is written.
            beside: Writes other files into a folder. It is called before the folder is put in place.

        Raises:
            RuntimeError: The written file does not hold every tensor as gathered.
            ValueError: The folder holds a model card that cannot be read.
            OSError: The folder cannot be written.
        """
        directory = directory.resolve()  # if it is a link to another file system, the folder is renamed on that one
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

    def _write_config(self, directory: Path) -> None:
        """Write `adapter_config.json`, with the changes that `PeftModel.save_pretrained` makes to the config."""
        mapping = None
        if self.config.task_type is None:
            mapping = {"base_model_class": self.base_class.__name__, "parent_library": self.base_class.__module__}
        config = with_sorted_patterns(self.config, self.tensors)
        config.save_pretrained(str(directory), auto_mapping_dict=mapping)


def gather_adapter(
    model: nn.Module, adapter_name: str = "default", save_embedding_layers: Literal["auto"] | bool = "auto"
) -> GatheredAdapter:
    """Gather the tensors that PEFT writes for an adapter, and copy its config. Collective.

    Args:
        model: As in `save_adapter`.
        adapter_name: As in `save_adapter`.
        save_embedding_layers: As in `PeftModel.save_pretrained`.

    Raises:
        ValueError: The model has no such adapter, an adapter is merged into the base, or values are not finite. The
            error is raised on every rank.
    """
    reshard(model)
    with agreed():
        check_unmerged(model)
        configs = peft_configs(model)
        if adapter_name not in configs:
            raise ValueError(f"no adapter {adapter_name!r} in the model; it has: {', '.join(configs) or 'none'}.")
        held = bool(adapter_parameters(model, adapter_name))
    anywhere = any(over_stages(held, mesh_of(model)))
    with agreed():
        if not anywhere:
            raise ValueError(f"the adapter {adapter_name!r} has no parameters.")
    holder = adapted_model(model)
    assert holder is not None
    parameters = tensors_by_name(model)
    keys = keys_on_disk(model, holder, adapter_name, save_embedding_layers)
    own = {name: parameters[name] for name in keys.values() if name in parameters}
    with agreed():
        check_finite(own)
    gathered = gather_on_rank_zero(own)
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
