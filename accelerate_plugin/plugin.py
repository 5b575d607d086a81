"""Define `LoRAParallelPlugin`, the value of `Accelerator(fsdp_plugin=...)`; the environment can ask for one too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, PeftConfig
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from accelerate_plugin.config_file import check_precision, check_version
from lora_parallel import ParallelConfig
from lora_parallel.integration import check_positive, suggest_arguments


@suggest_arguments
class LoRAParallelPlugin(FullyShardedDataParallelPlugin):
    """Train LoRA under FSDP2 and tensor parallelism, with the results of training on one device.

        accelerator = Accelerator(fsdp_plugin=LoRAParallelPlugin(tp_size=2))

    Settings that are not given come from the places where Accelerate finds them: an explicit `parallelism_config`, or
    `fsdp_config` and `parallelism_config` of `accelerate config`, through the environment.
    """

    def __init__(
        self,
        tp_size: int | None = None,
        dp_shard_size: int | Literal["auto"] | None = None,
        dp_replicate_size: int | None = None,
        lora_config: LoraConfig | None = None,
        tp_plan: Literal["auto"] | Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        block_classes: Literal["auto"] | Sequence[str] | None = None,
        reshard_after_forward: bool | None = None,
        activation_checkpointing: bool | None = None,
        cpu_offload: bool | None = None,
        require_adapters: bool | None = None,
        autocast_adapter_dtype: bool = True,
        reduce_dtype: torch.dtype | None = torch.float32,
        seed: int = 0,
        timeout_seconds: int | None = None,
        cp_size: int | None = None,
        cp_method: Literal["ulysses", "all_gather"] | None = None,
        pp_size: int | None = None,
        pp_microbatches: int | None = None,
        pp_schedule: Literal["1f1b", "gpipe", "interleaved"] | None = None,
        pp_stages_per_rank: int | None = None,
        pp_split: Literal["auto"] | Sequence[str] = "auto",
        shard_base: bool | None = None,
        prefetch_blocks: int = 0,
        fused: bool | None = None,
    ) -> None:
        """Keep the settings; no process group or mesh is made yet.

        `lora_parallel.ParallelConfig` documents the options; its `tp` is `tp_size` here, and so on. None takes what
        Accelerate's configuration says (`parallelism_config_pp_size` and the like), or else the engine's default.

        Args:
            lora_config: Adapter to inject into a model that has none and trains.
            autocast_adapter_dtype: Keep injected adapters of a 16-bit base in float32, as PEFT does.

        Raises:
            TypeError, ValueError: A value cannot work, or asks for something that is not supported.
        """
        if lora_config is not None and not isinstance(lora_config, PeftConfig):
            raise TypeError(f"lora_config is a {type(lora_config).__name__}: give a peft.LoraConfig.")
        sizes = {"tp_size": tp_size, "cp_size": cp_size, "pp_size": pp_size, "dp_replicate_size": dp_replicate_size}
        for name, size in sizes.items():
            if size is not None:
                check_positive(name, size)
        super().__init__(
            fsdp_version=2,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            cpu_offload=cpu_offload,
            state_dict_type="FULL_STATE_DICT",  # of a base; with the sharded type Trainer refuses save_only_model
            cpu_ram_efficient_loading=False,  # each rank reads its own shard: there is nothing to broadcast
        )
        _check_unused(self)
        self.pp_size, self.cp_size, self.tp_size = pp_size, cp_size, tp_size
        self.dp_shard_size, self.dp_replicate_size = dp_shard_size, dp_replicate_size
        self.lora_config, self.autocast_adapter_dtype = lora_config, autocast_adapter_dtype
        self.timeout_seconds = timeout_seconds
        configurable = {
            "cp_method": cp_method,
            "pp_microbatches": pp_microbatches,
            "pp_schedule": pp_schedule,
            "pp_stages_per_rank": pp_stages_per_rank,
            "require_adapters": require_adapters,
            "shard_base": shard_base,
            "fused": fused,
            "tp_plan": tp_plan,
        }
        self._chosen = {name: value for name, value in configurable.items() if value is not None}
        self._options: dict[str, Any] = {
            **self._chosen,
            "pp_split": pp_split,
            "prefetch_blocks": prefetch_blocks,
            "sequence_parallel": sequence_parallel,
            "loss_parallel": loss_parallel,
            "block_classes": block_classes or self.transformer_cls_names_to_wrap or "auto",
            "reshard_after_forward": self.reshard_after_forward,
            "activation_checkpointing": self.activation_checkpointing,
            "cpu_offload": isinstance(self.cpu_offload, CPUOffloadPolicy),
            "reduce_dtype": reduce_dtype,
            "seed": seed,
        }
        ParallelConfig(**self._options, pp=pp_size or 1)  # bad options are an error here

    @classmethod
    def of(cls, plugin: FullyShardedDataParallelPlugin) -> LoRAParallelPlugin:
        """Return a `LoRAParallelPlugin` with the settings of an FSDP plugin of Accelerate, or `plugin` if it is one.

        Raises:
            ValueError: The plugin asks for FSDP1, or for something that is not supported.
        """
        if isinstance(plugin, cls):
            return plugin
        check_version(plugin.fsdp_version)
        _check_unused(plugin)
        policy = plugin.mixed_precision_policy
        reduce_dtype = policy.reduce_dtype if isinstance(policy, MixedPrecisionPolicy) else None
        return cls(
            block_classes=plugin.transformer_cls_names_to_wrap,
            reshard_after_forward=plugin.reshard_after_forward,
            activation_checkpointing=plugin.activation_checkpointing,
            cpu_offload=isinstance(plugin.cpu_offload, CPUOffloadPolicy),
            reduce_dtype=reduce_dtype or torch.float32,
        )

    def parallel_config(
        self,
        sizes: Mapping[str, Any],
        mixed_precision: str,
        timeout_seconds: int | None = None,
        compile_arguments: Mapping[str, Any] | None = None,
        configured: Mapping[str, Any] = MappingProxyType({}),
    ) -> ParallelConfig:
        """Return the config of the engine.

        Args:
            sizes: The sizes of the mesh axes, named `pp`, `tp`, `cp`, `dp_shard` and `dp_replicate`.
            mixed_precision: Accelerate's mixed precision: "no", "bf16", ...
            timeout_seconds: The timeout of the process group, if the user set one; else None.
            compile_arguments: The arguments of `torch.compile`; None to compile nothing.
            configured: Options of the configuration file or the environment, by the engine's names.

        Raises:
            ValueError: An option is not supported, or the plugin and the configuration contradict each other.
        """
        check_precision(mixed_precision)
        for name, value in configured.items():
            if self._chosen.get(name, value) != value:
                raise ValueError(
                    f"{name} is {self._chosen[name]!r} by LoRAParallelPlugin and {value!r} by the configuration: give "
                    "one of the two, or the same."
                )
        return ParallelConfig(
            **{**self._options, **configured},
            **sizes,
            param_dtype=torch.bfloat16 if mixed_precision == "bf16" else None,
            timeout_seconds=self.timeout_seconds or timeout_seconds or 1800,
            compile=compile_arguments if compile_arguments is not None else False,
        )


def _check_unused(plugin: FullyShardedDataParallelPlugin) -> None:
    """Refuse settings of an FSDP plugin that would have no effect here."""
    policy = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy)
    if policy is not None and getattr(policy, "__name__", "") != "transformer_auto_wrap_policy":
        raise ValueError(
            f"fsdp_auto_wrap_policy is {getattr(policy, '__name__', policy)!r}: only TRANSFORMER_BASED_WRAP is "
            "supported, with fsdp_transformer_layer_cls_to_wrap or the model's own blocks."
        )
    for name, key in (
        ("ignored_modules", "fsdp_ignored_modules"),
        ("activation_checkpointing_offload", "fsdp_activation_checkpointing_offload"),
        ("param_init_fn", "param_init_fn"),
    ):
        if getattr(plugin, name, None):  # accelerate 1.13 cannot offload what is recomputed
            raise ValueError(f"{key}={getattr(plugin, name)!r} is not supported by LoRAParallelPlugin: remove it.")
