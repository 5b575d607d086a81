"""Find out whether a run is to train with `lora_parallel`, and on which mesh: `LoRAParallelism`.

The environment that `accelerate launch` sets, or the arguments of an Accelerator, ask for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend, FullyShardedDataParallelPlugin, InitProcessGroupKwargs, TorchDynamoPlugin
from torch.distributed.device_mesh import DeviceMesh

from accelerate_plugin.config_file import check_version, own_settings
from accelerate_plugin.plugin import LoRAParallelPlugin
from lora_parallel import build_mesh
from lora_parallel.integration import collective_call, dp_rank, dp_size, mesh_sizes, same_batch_groups


class LoRAParallelism(ParallelismConfig):
    """Extend Accelerate's `ParallelismConfig` by the user's plugin and the engine's config."""

    device_mesh: Any  # the engine's, once the Accelerator is made

    def __init__(
        self,
        plugin: LoRAParallelPlugin,
        requested: ParallelismConfig | None,
        mixed_precision: str,
        timeout_seconds: int | None,
        compile_arguments: Mapping[str, Any] | None,
        configured: Mapping[str, Any],
    ) -> None:
        """Combine the settings of the plugin with those of Accelerate's own configuration.

        `requested` is the `parallelism_config` of the arguments or the environment; `configured` are the settings that
        Accelerate does not know: "pp_size" and options of the engine.
        """
        sizes: dict[str, Any] = {}
        options = {name: value for name, value in configured.items() if name != "pp_size"}
        for axis in ("pp", "tp", "cp", "dp_shard", "dp_replicate"):
            chosen = getattr(plugin, f"{axis}_size")
            asked = configured.get("pp_size") if axis == "pp" else getattr(requested, f"{axis}_size", None)
            if chosen not in (None, "auto"):
                _check_equal(axis, chosen, asked)
            sizes[axis] = next((x for x in (chosen, asked) if x is not None), "auto" if axis == "dp_shard" else 1)
        if requested is not None and requested.sp_size > 1:
            raise ValueError(
                f"sp_size={requested.sp_size} is not supported by LoRAParallelPlugin: leave it at 1, and give cp_size, "
                "which divides the tokens of a batch between processes too."
            )
        self.plugin = plugin
        self.config = plugin.parallel_config(sizes, mixed_precision, timeout_seconds, compile_arguments, options)
        sizes = mesh_sizes(self.config, world_size())
        if requested is not None:
            _check_equal("dp_shard", sizes["dp_shard"], requested.dp_shard_size)
        if (sizes["tp"] > 1 or sizes["cp"] > 1) and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
            raise ValueError(
                f"dp_replicate_size={sizes['dp_replicate']} with tp_size={sizes['tp']}, cp_size={sizes['cp']} and "
                "dp_shard_size=1: Accelerate has no replicas of models that are not sharded over dp_shard. Use "
                f"dp_shard_size={sizes['dp_replicate']}, dp_replicate_size=1: as many different batches, and less "
                "memory."
            )
        self.pp_size = sizes["pp"]
        super().__init__(
            dp_replicate_size=sizes["dp_replicate"],
            dp_shard_size=sizes["dp_shard"],
            tp_size=sizes["tp"],
            cp_size=sizes["cp"],
            sp_size=1,
            cp_backend="torch",
        )

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Build the mesh of the engine."""
        return build_mesh(self.config, device_type)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Check nothing: `__init__` has, and Accelerate's method refuses one process and tensor parallelism alone."""

    # Accelerate's own properties know no pipeline parallelism.
    @property
    def total_size(self) -> int:
        """Return the number of processes."""
        return int(super().total_size) * self.pp_size

    @property
    def non_data_parallel_size(self) -> int:
        """Return the number of processes that see the same batch."""
        return int(super().non_data_parallel_size) * self.pp_size

    @property
    def dp_size(self) -> int:
        """Return the number of data-parallel ranks, which is the number of different batches in a step."""
        return dp_size(self.device_mesh)

    @property
    def dp_rank(self) -> int:
        """Return the data-parallel rank of this process; its pp, cp and tp peers have the same, and see one batch."""
        return dp_rank(self.device_mesh)

    @property
    def is_first_of_batch(self) -> bool:
        """Return True if this process is the first of those that see the same batch."""
        return all(dist.get_rank(group) == 0 for group in same_batch_groups(self.device_mesh))

    def one_per_batch(self, gathered: Any) -> Any:
        """Return one value for each batch, by data-parallel rank, from the values of all processes by rank."""
        return gathered[: self.total_size // self.pp_size : self.non_data_parallel_size // self.pp_size]

    @property
    def cp_enabled(self) -> bool:
        """Return False, so that neither Accelerate nor a Trainer cuts batches or refuses packing: the model cuts."""
        return False


def _check_equal(axis: str, size: int, asked: int | None) -> None:
    if asked not in (None, size):
        raise ValueError(
            f"{axis}_size is {size} by LoRAParallelPlugin and {asked} by parallelism_config: give one of the two, or "
            "equal sizes."
        )


def parallelism_of(accelerator: Accelerator) -> LoRAParallelism | None:
    """Return the `LoRAParallelism` of an Accelerator that trains with `lora_parallel`; None for any other."""
    config = accelerator.state.parallelism_config
    return config if isinstance(config, LoRAParallelism) else None


def current_parallelism() -> LoRAParallelism | None:
    """Return the `LoRAParallelism` of this process's Accelerators, which share one state; None if they have another."""
    config = AcceleratorState._shared_state.get("parallelism_config")
    return config if isinstance(config, LoRAParallelism) else None


def parallelism_within_batch() -> LoRAParallelism | None:
    """Return `current_parallelism` if several processes see one batch; None if each process has a batch of its own."""
    parallelism = current_parallelism()
    return parallelism if parallelism is not None and parallelism.non_data_parallel_size > 1 else None


Original = Callable[..., Any]


def standing_in(original: Original, instead: Callable[..., Any]) -> Original:
    """Return a function to put in the place of `original`: it calls `instead`, with `original` before the arguments."""

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        return instead(original, *args, **kwargs)

    return function


def replaces(name: str | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a method of Trainer, whose own runs if its Accelerator trains without `lora_parallel`."""
    # With a name the method is collective, and announced by it as `collective_call` does.

    def decorate(instead: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(instead)
        def method(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            if parallelism_of(self.accelerator) is None:
                return original(self, *args, **kwargs)
            with collective_call(name) if name is not None else nullcontext():
                return instead(self, *args, **kwargs)

        return method

    return decorate


def world_size() -> int:
    """Return the number of processes, also before there is a process group."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def asked_by_environment() -> bool:
    """Return True if `accelerate launch` was configured for FSDP, or for tensor, context or pipeline parallelism."""
    return flag("ACCELERATE_USE_FSDP") or (
        flag("ACCELERATE_USE_PARALLELISM_CONFIG")
        and any(int(os.environ.get(f"PARALLELISM_CONFIG_{axis}_SIZE", "1")) > 1 for axis in ("TP", "CP", "PP"))
    )


def asks_for_pipeline() -> bool:
    """Return True if the configuration, or the plugin of an earlier Accelerator, asks for pipeline parallelism."""
    size = _last_plugin.pp_size if _last_plugin is not None else None
    return asked_by_environment() and (size or own_settings().get("pp_size", 1)) > 1


def requested_parallelism(arguments: dict[str, Any]) -> LoRAParallelism | None:
    """Return the parallelism that an Accelerator's arguments and the environment ask for; None if for none."""
    plugin = arguments.get("fsdp_plugin")
    config = arguments.get("parallelism_config")
    if config is None and arguments.get("torch_tp_plugin") is not None:
        config = ParallelismConfig(tp_size=arguments["torch_tp_plugin"].tp_size)
    if config is None and flag("ACCELERATE_USE_PARALLELISM_CONFIG"):
        config = ParallelismConfig()
    if plugin is None and not asked_by_environment() and (config is None or max(config.tp_size, config.cp_size) < 2):
        return None
    if plugin is not None and not isinstance(plugin, FullyShardedDataParallelPlugin):
        return None  # Accelerate has an error for it
    for name, argument in (("DEEPSPEED", "deepspeed_plugin"), ("MEGATRON_LM", "megatron_lm_plugin")):
        if flag(f"ACCELERATE_USE_{name}") or arguments.get(argument) is not None or arguments.get(f"{argument}s"):
            raise ValueError(
                f"both {name} and FSDP are asked for: LoRA under FSDP2 and tensor parallelism does without {name}. "
                f"Remove {argument}, or the {name.lower()}_config of the configuration."
            )
    configured = own_settings()
    global _last_plugin
    if isinstance(plugin, LoRAParallelPlugin):
        _last_plugin = plugin
    elif plugin is None and flag("ACCELERATE_USE_FSDP"):
        if "FSDP_VERSION" in os.environ or _last_plugin is None:
            check_version(int(os.environ.get("FSDP_VERSION", "1")))
        else:
            plugin = _last_plugin
    return LoRAParallelism(
        LoRAParallelPlugin.of(plugin) if plugin is not None else LoRAParallelPlugin(),
        config,
        str(arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower(),
        _timeout(arguments),
        _compile(arguments),
        configured,
    )


_last_plugin: LoRAParallelPlugin | None = None
"""Plugin of this process's last Accelerator that was given a `LoRAParallelPlugin`, for a Trainer that is made later.

A Trainer resets Accelerate's state, and all that the environment keeps of the plugin is ACCELERATE_USE_FSDP.
"""


def flag(name: str) -> bool:
    """Return True if Accelerate reads an environment variable as true."""
    return os.environ.get(name, "false").lower() in ("true", "1", "yes")


def _timeout(arguments: dict[str, Any]) -> int | None:
    for handler in arguments.get("kwargs_handlers") or ():
        if isinstance(handler, InitProcessGroupKwargs) and isinstance(handler.timeout, timedelta):
            return max(1, int(handler.timeout.total_seconds()))
    return None


def _compile(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` that are asked for; None if nothing is to be compiled."""
    plugin = arguments.get("dynamo_plugin") or TorchDynamoPlugin(backend=arguments.get("dynamo_backend"))
    if plugin.backend == DynamoBackend.NO or plugin.disable:
        return None
    # Not by plugin.to_kwargs(), which leaves out what the environment says too.
    settings = {name: getattr(plugin, name) for name in ("mode", "fullgraph", "dynamic", "options")}
    chosen = {"backend": plugin.backend.value.lower(), **{name: value for name, value in settings.items() if value}}
    if chosen.get("mode") == "default":
        del chosen["mode"]  # torch.compile takes no options beside a mode
    if plugin.dynamic is False and "ACCELERATE_DYNAMO_USE_DYNAMIC" not in os.environ:
        chosen["dynamic"] = False  # `accelerate launch` says so where nobody has; there it would be a graph a length
    return chosen
