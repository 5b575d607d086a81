"""`load_from_checkpoint` of a folder that the strategy wrote, in one process: Lightning's private API, in one place.

Lightning reads a checkpoint with `torch.load` before it builds the module, and has no hook for another kind. Its two
functions do as ever with anything that is no folder of ours; `tests/lightning_lora/test_loading.py` holds them to their
meaning.
"""

from __future__ import annotations

import importlib.util
import warnings
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lightning_lora.one_file import PACKED
from lora_parallel.checkpoint_reader import is_checkpoint, open_checkpoint_folder, state_dict_of

__all__ = ["TRAINER", "load_folders"]

TRAINER = "Trainer"
"""Who wrote a checkpoint that Trainer's strategy reads."""

_TRAINED = "lora_parallel_trained"


def load_folders() -> None:
    """Let `load_from_checkpoint` take folders, in every installed namespace. Done once."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(package.split(".")[0]) is not None:
            saving: Any = import_module(f"{package}.core.saving")
            if not hasattr(saving.pl_load, "__wrapped__"):
                saving.pl_load, saving._load_state = _reading(saving.pl_load), _filling(saving._load_state)


def _reading(own: Any) -> Any:
    @wraps(own)
    def load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if not (isinstance(path, (str, Path)) and is_checkpoint(Path(path))):
            read = own(path, map_location=map_location, weights_only=weights_only)
            if isinstance(read, dict) and read.pop(PACKED, None) is not None:
                read[_TRAINED], read["state_dict"] = read["state_dict"], {}
            return read
        found = open_checkpoint_folder(Path(path), TRAINER, weights_only)
        checkpoint: dict[str, Any] = found.record["trainer"]
        checkpoint["state_dict"] = {}
        checkpoint[_TRAINED] = state_dict_of(found)
        return checkpoint

    return load


def _filling(own: Any) -> Any:
    @wraps(own)
    def load_state(cls: Any, checkpoint: dict[str, Any], strict: bool | None = None, **kwargs: Any) -> Any:
        trained = checkpoint.pop(_TRAINED, None)
        if trained is None:
            return own(cls, checkpoint, **({} if strict is None else {"strict": strict}), **kwargs)
        with warnings.catch_warnings():  # of the base's keys, which the module has loaded itself
            warnings.filterwarnings("ignore", message="Found keys that are in the model state dict but not in")
            module = own(cls, checkpoint, strict=False, **kwargs)
        parameters: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        parameters |= dict(module.named_buffers(remove_duplicate=False))
        others = {name: value for name, value in trained.items() if name not in parameters}
        unknown = module.load_state_dict(others, strict=False).unexpected_keys
        untouched = [name for name, p in parameters.items() if p.requires_grad and name not in trained]
        if strict is not False and (unknown or untouched):
            raise ValueError(
                f"the checkpoint does not fit {cls.__name__}: {len(unknown)} of its parameters are not in the module "
                f"(first: {unknown[:1]}), {len(untouched)} that train are not in it (first: {untouched[:1]}). Where "
                "the strategy injected the adapter (lora_config), load the base and "
                "PeftModel.from_pretrained(base, checkpoint / 'adapter')."
            )
        with torch.no_grad():
            for name, values in trained.items():
                if name in parameters:
                    parameters[name].copy_(values)
        checkpoint["state_dict"] = trained  # Lightning looks at the device that they are on
        return module

    return load_state
