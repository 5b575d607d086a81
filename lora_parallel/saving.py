"""`save_pretrained` in the user's own code, on a sharded model, where PEFT's and transformers' want whole tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import signature
from typing import Any, Literal

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from lora_parallel.adapter_folder import save_as_peft
from lora_parallel.adapters import adapted_model, peft_configs
from lora_parallel.agreement import agreed, check_alike
from lora_parallel.export import export_merged
from lora_parallel.rendezvous import collective_call

__all__ = ["allow_save_pretrained", "write_pretrained"]

_SUPPORTED = frozenset(
    {"is_main_process", "selected_adapters", "save_embedding_layers", "max_shard_size", "state_dict", "save_function"}
)


def allow_save_pretrained(model: nn.Module) -> None:
    """Make `save_pretrained` of a parallelized model, and of the base in a `PeftModel`, do the right thing.

    With adapters it writes their folders, as `save_adapter` does; without, the model, as `export_merged` does.
    """
    for holder in {
        model,
        adapted_model(model) or model,
        model.get_base_model() if isinstance(model, PeftModel) else model,
    }:
        if hasattr(holder, "save_pretrained"):
            own: Any = holder.save_pretrained
            holder.__dict__["save_pretrained"] = partial(_save_pretrained, model, own)


def _save_pretrained(model: nn.Module, own: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Write the adapters' folders in PEFT's format, or a model without adapters. Collective: call it on every rank.

    With `state_dict`, of tensors that were gathered already, it is PEFT's or transformers' own, on the process that
    asks. `is_main_process` and `save_function` are ignored: rank 0 writes, as the engine does.

    Args:
        model: What `parallelize` returned.
        own: What it stands in for: PEFT's or transformers' method.
        args: As that takes them.
        kwargs: As PEFT's and transformers' take them; `selected_adapters`, `save_embedding_layers` and
            `max_shard_size` may differ from what they have without.

    Raises:
        TypeError: An argument that is not supported.
        ValueError: There is no such adapter, or ranks call with different arguments. All on every rank.
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
    """What `save_pretrained` writes, of any parallelized model. Collective.

    Args:
        model: What `parallelize` returned.
        directory: As in PEFT and transformers.
        adapters: Which; None: all.
        save_embedding_layers: As in PEFT.
        max_shard_size: As in transformers, for a model without adapters.

    Raises:
        OSError: It cannot be written, on every rank.
    """
    names = list(peft_configs(model)) if adapters is None else list(adapters)
    if not names:
        export_merged(model, directory, max_shard_size)
    for name in names:
        save_as_peft(model, directory, name, save_embedding_layers)


def _defaults() -> dict[str, Any]:
    """Of all that PEFT's and transformers' `save_pretrained` take."""
    found = {**signature(PreTrainedModel.save_pretrained).parameters, **signature(PeftModel.save_pretrained).parameters}
    return {name: each.default for name, each in found.items() if each.default is not each.empty}


def _check_supported(given: Mapping[str, Any]) -> None:
    defaults = _defaults()
    unsupported = [
        f"{key}={value!r}" for key, value in given.items() if key not in _SUPPORTED and value != defaults.get(key)
    ]
    if unsupported:
        raise TypeError(f"save_pretrained of a sharded model does not support {', '.join(unsupported)}.")
