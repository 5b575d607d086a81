"""Extend Accelerate's `ParallelismConfig` by the mesh that the engine works on: `LoRAParallelism`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import DeviceMesh

from accelerate_plugin.plugin import LoRAParallelPlugin
from lora_parallel import ParallelConfig, build_mesh
from lora_parallel.integration import collective_call, dp_rank, dp_size, mesh_sizes, same_batch_groups


class LoRAParallelism(ParallelismConfig):
    """Hold the `parallelism_config` of an Accelerator that trains with `lora_parallel`.

    Args:
        plugin: The plugin with the user's settings.
        config: The config of the engine; its sizes fit the number of processes.
    """

    def __init__(self, plugin: LoRAParallelPlugin, config: ParallelConfig) -> None:
        sizes = mesh_sizes(config, world_size())
        super().__init__(
            dp_replicate_size=sizes["dp_replicate"],
            dp_shard_size=sizes["dp_shard"],
            tp_size=sizes["tp"],
            cp_size=sizes["cp"],
            sp_size=1,
            cp_backend="torch",
        )
        self.plugin, self.config, self.pp_size = plugin, config, sizes["pp"]

    @classmethod
    def choose(
        cls,
        plugin: LoRAParallelPlugin,
        given: ParallelismConfig | None,
        mixed_precision: str,
        timeout_seconds: int | None,
        compile_arguments: Mapping[str, Any] | None = None,
        configured: Mapping[str, Any] = MappingProxyType({}),
    ) -> LoRAParallelism:
        """Combine the settings of the plugin with those of Accelerate's own configuration.

        Args:
            plugin: The plugin; a size of None leaves the choice to `given`.
            given: An explicit `parallelism_config`, or the one that the environment describes, or None.
            mixed_precision: Accelerate's mixed precision: "no", "bf16", ...
            timeout_seconds: The timeout of the process group, if the user set one; else None.
            compile_arguments: The arguments of `torch.compile`; None to compile nothing.
            configured: Settings of the configuration file or the environment that Accelerate does not know:
                "pp_size", and options of the engine.

        Raises:
            ValueError: The plugin and `given` name different sizes; a setting, an axis or the precision is not
                supported; or the product of the sizes is not the world size.
        """
        sizes: dict[str, Any] = {}
        options = {name: value for name, value in configured.items() if name != "pp_size"}
        for axis in ("pp", "tp", "cp", "dp_shard", "dp_replicate"):
            own = getattr(plugin, f"{axis}_size")
            other = configured.get("pp_size") if axis == "pp" else getattr(given, f"{axis}_size", None)
            sizes[axis] = next((each for each in (own, other) if each is not None), "auto" if axis == "dp_shard" else 1)
            if "auto" not in (own, sizes[axis]):
                _check_equal(axis, sizes[axis], other)
        if given is not None and given.sp_size > 1:
            raise ValueError(
                f"sp_size={given.sp_size} is not supported by LoRAParallelPlugin: leave it at 1, and give cp_size, "
                "which divides the tokens of a batch between processes too."
            )
        config = plugin.parallel_config(sizes, mixed_precision, timeout_seconds, compile_arguments, options)
        sizes = mesh_sizes(config, world_size())
        if given is not None:
            _check_equal("dp_shard", sizes["dp_shard"], given.dp_shard_size)
        if (sizes["tp"] > 1 or sizes["cp"] > 1) and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
            raise ValueError(
                f"dp_replicate_size={sizes['dp_replicate']} with tp_size={sizes['tp']}, cp_size={sizes['cp']} and "
                "dp_shard_size=1: Accelerate has no replicas of models that are not sharded over dp_shard. Use "
                f"dp_shard_size={sizes['dp_replicate']}, dp_replicate_size=1: as many different batches, and less "
                "memory."
            )
        return cls(plugin, config)

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """Build the mesh of the engine."""
        return build_mesh(self.config, device_type)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Check nothing, since `choose` has checked the sizes.

        Accelerate's own method refuses meshes of one process, and those with tensor parallelism only.
        """

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh; it exists once the Accelerator is made."""
        assert self.device_mesh is not None
        return self.device_mesh

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
        return dp_size(self.mesh)

    @property
    def dp_rank(self) -> int:
        """Return the data-parallel rank of this process; its pp, cp and tp peers have the same, and see one batch."""
        return dp_rank(self.mesh)

    @property
    def is_first_of_batch(self) -> bool:
        """Return True if this process is the first of those that see the same batch."""
        return all(dist.get_rank(group) == 0 for group in same_batch_groups(self.mesh))

    def one_per_batch(self, gathered: Any) -> Any:
        """Return one value for each batch, in the order of data-parallel ranks.

        Args:
            gathered: The values of all processes in the order of their ranks: a list, or a tensor [processes, ...].
        """
        return gathered[: self.total_size // self.pp_size : self.non_data_parallel_size // self.pp_size]

    @property
    def cp_enabled(self) -> bool:
        """Return False, so that neither Accelerate nor a Trainer cuts batches or refuses packing: the model cuts."""
        return False


def _check_equal(axis: str, own: int, other: int | None) -> None:
    if other not in (None, own):
        raise ValueError(
            f"{axis}_size is {own} by LoRAParallelPlugin and {other} by parallelism_config: give one of the two, or "
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


def collective_method(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that announces a method of Trainer as `collective_call` does.

    Only methods of a Trainer whose Accelerator trains with `lora_parallel` are announced.

    Args:
        name: The method, as the user knows it.
    """

    def decorate(instead: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(instead)
        def method(own: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
            if parallelism_of(self.accelerator) is None:
                return instead(own, self, *args, **kwargs)
            with collective_call(name):
                return instead(own, self, *args, **kwargs)

        return method

    return decorate


def world_size() -> int:
    """Return the number of processes, also before there is a process group."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
