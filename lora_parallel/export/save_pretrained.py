"""Make `save_pretrained`, called in the user's own code, work on a sharded model.

The methods of PEFT and transformers need full tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any, Literal

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from lora_parallel.adapters.inspection import adapted_model, peft_configs
from lora_parallel.adapters.save_adapter import save_as_peft
from lora_parallel.distributed.rank_checks import agreed, check_alike
from lora_parallel.distributed.rendezvous import collective_call
from lora_parallel.export.merged import write_merged
from lora_parallel.layers.module_names import innermost

__all__ = ["allow_save_pretrained", "write_pretrained"]

_SUPPORTED = frozenset(
    {"is_main_process", "selected_adapters", "save_embedding_layers", "max_shard_size", "state_dict", "save_function"}
)


def allow_save_pretrained(model: nn.Module) -> None:
    """Replace `save_pretrained` of a parallelized model, and of the base in a `PeftModel`, by one for sharded models.

    If the model has adapters, the new method writes their folders, as `save_adapter` does; if it has none, it writes
    the model, as `export_merged` does, into a folder that may hold other files.
    """
    for holder in {model, adapted_model(model) or model, innermost(model)}:
        if hasattr(holder, "save_pretrained"):
            own: Any = holder.save_pretrained
            holder.__dict__["save_pretrained"] = partial(_save_pretrained, model, own)


def _save_pretrained(model: nn.Module, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Write the adapters' folders in PEFT's format, or a model without adapters. Collective: call it on every rank.

    If a `state_dict` is given, whose tensors were gathered already, PEFT's or transformers' own method is called
    instead, on the calling process alone. `is_main_process` and `save_function` are ignored: rank 0 writes, with the
    engine's own functions.

    Args:
        model: The model that `parallelize` returned.
        own: PEFT's or transformers' method, which this function replaces.
        args: The positional arguments of that method.
        kwargs: The keyword arguments of PEFT's and transformers' methods. Beside those that are named above, only
            `selected_adapters`, `save_embedding_layers` and `max_shard_size` may differ from their defaults.

    Raises:
        TypeError: An argument is not supported.
        ValueError: The model has no such adapter, or ranks call with different arguments. All on every rank.
    """
    names = list(signature(own).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("state_dict") is not None:
        own(*args, **kwargs)
        return
    with collective_call("save_pretrained"):
        configs = peft_configs(model)
        with agreed():
            signature(own).bind(*args, **kwargs)
            directory = given.pop(names[0])
            _check_supported(given)
            arguments = {**_defaults(), **given}
            chosen = list(configs) if arguments["selected_adapters"] is None else list(arguments["selected_adapters"])
            unknown = [name for name in chosen if name not in configs]
            if unknown:
                raise ValueError(f"no adapter {unknown[0]!r} in the model; it has: {', '.join(configs) or 'none'}.")
        check_alike(selected_adapters=chosen)
        write_pretrained(model, directory, chosen, arguments["save_embedding_layers"], arguments["max_shard_size"])


def write_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    adapters: Iterable[str] | None = None,
    save_embedding_layers: Literal["auto"] | bool = "auto",
    max_shard_size: int | str = "50GB",
) -> None:
    """Write a parallelized model's adapters, or a model without adapters, as `save_pretrained` does. Collective.

    Args:
        model: The model that `parallelize` returned.
        directory: The folder to write, as in PEFT and transformers.
        adapters: The names of the adapters to write; None: all.
        save_embedding_layers: As in PEFT.
        max_shard_size: As in transformers; it applies to a model without adapters.

    Raises:
        OSError: The folder cannot be written; raised on every rank.
    """
    names = list(peft_configs(model)) if adapters is None else list(adapters)
    if not names:
        write_merged(model, directory, max_shard_size, beside_others=True)
    for name in names:
        save_as_peft(model, directory, name, save_embedding_layers)


def _defaults() -> dict[str, Any]:
    """Return the defaults of all arguments that PEFT's and transformers' `save_pretrained` take."""
    found = {**signature(PreTrainedModel.save_pretrained).parameters, **signature(PeftModel.save_pretrained).parameters}
    return {name: each.default for name, each in found.items() if each.default is not each.empty}


def _check_supported(given: Mapping[str, Any]) -> None:
    defaults = _defaults()
    unsupported = [
        f"{key}={value!r}" for key, value in given.items() if key not in _SUPPORTED and value != defaults.get(key)
    ]
    if unsupported:
        raise TypeError(f"save_pretrained of a sharded model does not support {', '.join(unsupported)}.")
