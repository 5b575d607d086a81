"""`save_pretrained` in the user's own code, on a sharded model, where PEFT's and transformers' want whole tensors."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Literal

from peft import PeftModel
from torch import nn

from lora_parallel.adapter_folder import save_as_peft
from lora_parallel.adapters import adapted_model, peft_configs
from lora_parallel.agreement import agreed
from lora_parallel.export import export_merged

__all__ = ["allow_save_pretrained"]


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
            holder.__dict__["save_pretrained"] = partial(_save_pretrained, model, holder)


def _save_pretrained(
    model: nn.Module,
    holder: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: Literal["auto"] | bool = "auto",
    safe_serialization: bool = True,
    max_shard_size: int | str = "5GB",
    state_dict: dict[str, Any] | None = None,
    **others: Any,
) -> None:
    """Write the adapters' folders in PEFT's format, or a model without adapters. Collective: call it on every rank.

    Args:
        model: What `parallelize` returned.
        holder: The module whose `save_pretrained` it stands in for.
        save_directory: As in PEFT and transformers.
        is_main_process: Ignored: rank 0 writes.
        selected_adapters: As in PEFT.
        save_embedding_layers: As in PEFT.
        safe_serialization: Only True.
        max_shard_size: As in transformers, for a model without adapters.
        state_dict: Tensors that were gathered already: PEFT or transformers write them, on the process that asks.
        others: None is supported.

    Raises:
        TypeError: An argument that is not supported.
        ValueError: There is no such adapter. On every rank.
    """
    if state_dict is not None:
        arguments = {"is_main_process": is_main_process, "state_dict": state_dict, **others}
        if isinstance(holder, PeftModel):
            arguments |= {"selected_adapters": selected_adapters, "save_embedding_layers": save_embedding_layers}
        own: Any = type(holder)
        own.save_pretrained(holder, save_directory, **arguments)
        return
    configs = peft_configs(model)
    with agreed():
        unsupported = sorted(key for key, value in others.items() if value)
        if not safe_serialization:
            unsupported.append("safe_serialization=False")
        if unsupported:
            raise TypeError(f"save_pretrained of a sharded model does not support {', '.join(unsupported)}.")
        chosen = list(configs) if selected_adapters is None else selected_adapters
        unknown = [name for name in chosen if name not in configs]
        if unknown:
            raise ValueError(f"no adapter {unknown[0]!r} in the model; it has: {', '.join(configs) or 'none'}.")
    if not configs:
        export_merged(model, save_directory, max_shard_size)
        return
    for name in chosen:
        save_as_peft(model, save_directory, name, save_embedding_layers)
