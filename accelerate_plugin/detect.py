"""Find out whether a run is to train with `lora_parallel`.

The environment that `accelerate launch` sets, or the arguments of an Accelerator, ask for it.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin, InitProcessGroupKwargs, TorchDynamoPlugin

from accelerate_plugin.config_file import check_version, own_settings
from accelerate_plugin.parallelism import LoRAParallelism
from accelerate_plugin.plugin import LoRAParallelPlugin


def asked_by_environment() -> bool:
    """Return True if `accelerate launch` was configured for FSDP, or for tensor, context or pipeline parallelism."""
    return _flag("ACCELERATE_USE_FSDP") or (
        _flag("ACCELERATE_USE_PARALLELISM_CONFIG")
        and any(int(os.environ.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1")) > 1 for axis in ("TP", "CP", "PP"))
    )


def asks_for_pipeline() -> bool:
    """Return True if the configuration, or the plugin of an earlier Accelerator, asks for pipeline parallelism."""
    size = _given.pp_size if _given is not None else None
    return asked_by_environment() and (size or own_settings().get("pp_size", 1)) > 1


def has_accelerator() -> bool:
    """Return True if the machine has a GPU or another accelerator that torch can use."""
    return torch.accelerator.is_available()


def requested_parallelism(arguments: dict[str, Any]) -> LoRAParallelism | None:
    """Return the parallelism that an Accelerator's arguments and the environment ask for.

    Args:
        arguments: The arguments that `Accelerator` was given, by name.

    Returns:
        The parallelism; None if none of FSDP, tensor, context and pipeline parallelism is asked for.

    Raises:
        TypeError, ValueError: The arguments and the environment ask for something that is not supported, or contradict
            each other.
    """
    plugin = arguments.get("fsdp_plugin")
    given = arguments.get("parallelism_config")
    if given is None and arguments.get("torch_tp_plugin") is not None:
        given = ParallelismConfig(tp_size=arguments["torch_tp_plugin"].tp_size)
    if given is None and _flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        given = ParallelismConfig()
    if plugin is None and not asked_by_environment() and not _splits_batches(given):
        return None
    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        return None  # Accelerate has an error for it
    for name, argument in (("DEEPSPEED", "deepspeed_plugin"), ("MEGATRON_LM", "megatron_lm_plugin")):
        if _flag(f"ACCELERATE_USE_{name}") or arguments.get(argument) is not None or arguments.get(f"{argument}s"):
            raise ValueError(
                f"both {name} and FSDP are asked for: LoRA under FSDP2 and tensor parallelism does without {name}. "
                f"Remove {argument}, or the {name.lower()}_config of the configuration."
            )
    configured = own_settings()
    global _given
    if isinstance(plugin, LoRAParallelPlugin):
        _given = plugin
    elif plugin is None and _flag("ACCELERATE_USE_FSDP"):
        if "FSDP_VERSION" in os.environ or _given is None:
            check_version(int(os.environ.get("FSDP_VERSION", "1")))
        else:
            plugin = _given
    own = LoRAParallelPlugin.of(plugin) if plugin is not None else LoRAParallelPlugin()
    precision = arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return LoRAParallelism.choose(
        own, given, str(precision).lower(), _timeout(arguments), _compile(arguments), configured
    )


_given: LoRAParallelPlugin | None = None
"""Plugin of the last Accelerator in this process that was given a `LoRAParallelPlugin`; None if there was none.

Accelerate notes such an Accelerator in the environment by a flag only, ACCELERATE_USE_FSDP. A Trainer that is made
later resets Accelerate's state and sees only that flag; its settings come from here.
"""


def _splits_batches(given: ParallelismConfig | None) -> bool:
    return given is not None and (given.tp_size > 1 or given.cp_size > 1)


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def _timeout(arguments: dict[str, Any]) -> int | None:
    for handler in arguments.get("kwargs_handlers") or ():
        if isinstance(handler, InitProcessGroupKwargs) and isinstance(handler.timeout, timedelta):
            return max(1, int(handler.timeout.total_seconds()))
    return None


def _compile(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` that an Accelerator's arguments and the environment give.

    Returns:
        The arguments; None if nothing is to be compiled.
    """
    plugin = arguments.get("dynamo_plugin") or TorchDynamoPlugin(backend=arguments.get("dynamo_backend"))
    if plugin.backend == DynamoBackend.NO or plugin.disable:
        return None
    # Not by plugin.to_kwargs(), which leaves out what the environment says too.
    settings = {name: getattr(plugin, name) for name in ("mode", "fullgraph", "dynamic", "options")}
    given = {"backend": plugin.backend.value.lower(), **{name: each for name, each in settings.items() if each}}
    if given.get("mode") == "default":
        del given["mode"]  # torch.compile takes no options beside a mode
    if plugin.dynamic is False and "ACCELERATE_DYNAMO_USE_DYNAMIC" not in os.environ:
        given["dynamic"] = False  # `accelerate launch` says so where nobody has; there it would be a graph a length
    return given
