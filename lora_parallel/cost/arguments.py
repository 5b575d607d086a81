"""Check what a plan is asked for before anything is simulated, and read the model's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lora_parallel.config import ParallelConfig
from lora_parallel.cost.hardware import GPUS, Hardware
from lora_parallel.loading.known_quantisers import check_method

__all__ = [
    "check_gpus",
    "check_optimizer",
    "check_pipeline",
    "config_of",
    "hardware_of",
    "quantization_of",
]


def hardware_of(hardware: str | Hardware, gpu_memory: float | None) -> Hardware:
    """Return the numbers of a GPU, with another memory if one is given.

    Raises:
        ValueError: There is no such GPU, or it can have no such memory.
    """
    if isinstance(hardware, str):
        if hardware not in GPUS:
            raise ValueError(f"hardware={hardware!r}: give one of {', '.join(GPUS)}, or a Hardware with its numbers.")
        hardware = GPUS[hardware]
    if gpu_memory is None:
        return hardware
    if not gpu_memory > 0:
        raise ValueError(f"gpu_memory={gpu_memory}: give the GiB of a GPU's memory.")
    return replace(hardware, gpu_memory=gpu_memory)


def check_gpus(gpus: int, hardware: Hardware) -> None:
    """Check that whole machines have so many GPUs.

    Raises:
        ValueError: They do not.
    """
    per_node = hardware.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise ValueError(
            f"gpus={gpus} is no whole number of machines of {per_node} GPUs: give up to {per_node}, or a multiple of "
            f"{per_node}. (In Python a Hardware has its own gpus_per_node.)"
        )


def check_optimizer(name: str) -> None:
    """Check that a step of the optimizer can be simulated.

    Raises:
        ValueError: It is no class of `torch.optim` that steps without a closure.
    """
    kind = vars(torch.optim).get(name)
    base = torch.optim.Optimizer
    if not isinstance(kind, type) or not issubclass(kind, base) or kind is base:
        raise ValueError(f"optimizer={name!r}: give the name of a class of torch.optim, such as AdamW.")
    if kind is torch.optim.LBFGS:
        raise ValueError(
            f"optimizer={name!r} runs the model several times in a step, by a closure, for which there is no "
            "prediction: give another class of torch.optim, such as AdamW."
        )


def check_pipeline(config: ParallelConfig, microbatches: int) -> None:
    """Check that a config's pipeline has a prediction, and the micro-batches that the batch makes.

    Raises:
        ValueError: It does not.
    """
    if config.pp_schedule != "1f1b":
        raise ValueError(
            f'pp_schedule="{config.pp_schedule}" has no prediction: it holds more than "1f1b". Plan for '
            'pp_schedule="1f1b".'
        )
    if config.pp_microbatches != microbatches:
        raise ValueError(
            f"pp_microbatches={config.pp_microbatches}, and batch_size with rows make {microbatches} micro-batches on "
            "each data-parallel rank: give values that agree."
        )


def config_of(model: str | Path | PretrainedConfig | nn.Module) -> PretrainedConfig:
    """Return the config of a model: of a folder, of a file, of a name on the hub, or the model's own.

    Raises:
        ValueError: The model has code of its own, which a plan does not run.
        OSError: There is no config.
    """
    described: Any = model.config if isinstance(model, nn.Module) else model
    if isinstance(described, PretrainedConfig):
        return described
    name = str(described)
    is_here = Path(name).exists()
    if not is_here and (name.count("/") > 1 or name.startswith((".", "/", "~"))):  # no name on the hub
        raise FileNotFoundError(f"There is no folder {name} with a config.json.")
    try:
        settings, _ = PretrainedConfig.get_config_dict(name)
    except OSError as error:
        if is_here:
            raise
        first, *_ = str(error).split("\n")
        raise FileNotFoundError(
            f"There is no folder {name} here, and the model hub gave no config of that name: {first}"
        ) from error
    if "AutoConfig" in (settings.get("auto_map") or {}) and settings.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"{name} has code of its own (auto_map in its config), which a plan does not run: a plan can be made for "
            f"causal language models that transformers {transformers.__version__} has."
        )
    config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    return config


def quantization_of(given: Any, config: PretrainedConfig, name: str) -> dict[str, Any] | None:
    """Return the quantisation of the base as JSON holds it: what is given, else that of the config, or None.

    Raises:
        ValueError: The weights of such a base cannot be sharded.
    """
    held = given if given is not None else getattr(config, "quantization_config", None)
    if not held:
        return None
    held = held if isinstance(held, Mapping) else held.to_dict()
    method = held.get("quant_method")
    method = getattr(method, "value", method)
    try:
        check_method(name, str(method))
    except ValueError as error:
        raise ValueError(
            f"{error} Train on a bfloat16 copy (docs/recipes.md, gpt-oss), and plan for it with --quantization none "
            "(quantization_config={} in Python)."
        ) from error
    return {**held, "quant_method": method}
