"""The ways to load a checkpoint into a sharded model that `load.py` compares, and the checkpoint.

Each peer is given the same four processes and the same adapters, where it can take them. On a CPU safetensors maps
files: what `from_pretrained` returns is views of the file, and a page of it is read when it is first used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lora_parallel import ParallelConfig, Read, build_mesh, meta_init, parallelize, read_plan

DP_SHARD, TP = 2, 2
WORLD_SIZE = DP_SHARD * TP
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Mark = Callable[[str], None]
"""Told the name of a part of the loading when that part is done."""


@dataclass(frozen=True)
class Loader:
    """One way to get from a folder to a sharded model."""

    title: str
    mesh: str
    load: Callable[[str, Mark], nn.Module]


def write_checkpoint(directory: Path, gigabytes: float) -> int:
    """Write a random float32 Llama, embedding and head untied, in files of at most 500 MB; returns its bytes.

    Eight layers; the width follows from the size: a layer has 10.75 width^2 parameters, embedding and head 32 width^2.
    """
    width = max(64, round((gigabytes * 1e9 / 4 / (8 * 10.75 + 32)) ** 0.5 / 64) * 64)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=width * 11 // 4,
            num_hidden_layers=8,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=width * 16,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )
    model.save_pretrained(directory, max_shard_size="500MB")
    return sum(p.numel() * p.element_size() for p in model.parameters())


def adapter_config() -> LoraConfig:
    return LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS), task_type="CAUSAL_LM")


def parallel_config() -> ParallelConfig:
    return ParallelConfig(dp_shard=DP_SHARD, tp=TP)


def ours(path: str, mark: Mark) -> nn.Module:
    model: nn.Module
    with meta_init():
        model = AutoModelForCausalLM.from_pretrained(path)
    mark("from_pretrained")
    config = parallel_config()
    model = parallelize(model, build_mesh(config, device_type="cpu"), config, lora_config=adapter_config())
    mark("parallelize")
    return model


def our_read_plan(path: str) -> list[Read]:
    """What `ours` says that it will read."""
    with meta_init():
        model = AutoModelForCausalLM.from_pretrained(path)
    config, mesh = parallel_config(), build_mesh(parallel_config(), device_type="cpu")
    return read_plan(parallelize(model, mesh, config, lora_config=adapter_config(), materialize=False))


def in_memory(path: str, mark: Mark) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path)
    mark("from_pretrained")
    config = parallel_config()
    model = parallelize(model, build_mesh(config, device_type="cpu"), config, lora_config=adapter_config())
    mark("parallelize")
    return model


def accelerate_broadcast(path: str, mark: Mark) -> nn.Module:
    """What `Accelerator.prepare` does with `cpu_ram_efficient_loading`.

    Accelerate enters FSDP2 on accelerators only, hence the stand-in for its Accelerator; the function is its own. With
    tp in the mesh it broadcasts rank 0's shard in place of the tensor and fails, so all four ranks are dp_shard.
    """
    model: Any
    if dist.get_rank() == 0:
        model = AutoModelForCausalLM.from_pretrained(path)
    else:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    mark("from_pretrained")
    model = get_peft_model(model, adapter_config())
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        is_main_process=dist.get_rank() == 0,
        mixed_precision="no",
        parallelism_config=SimpleNamespace(fsdp_dim_names=["dp_shard"]),
        state=SimpleNamespace(
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
                cpu_ram_efficient_loading=True,
            )
        ),
        torch_device_mesh=init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("dp_shard",)),
    )
    model = fsdp2_prepare_model(accelerator, model)
    mark("get_peft_model, fsdp2_prepare_model")
    return model


def transformers_distributed(path: str, mark: Mark) -> nn.Module:
    """The base only: PEFT cannot be put on what this returns (it takes the shard's shape for the layer's)."""
    from transformers.distributed import DistributedConfig  # not in every transformers that we support

    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(tp_size=TP, fsdp_size=DP_SHARD)
    )
    mark("from_pretrained")
    return model


LOADERS: dict[str, Loader] = {
    "ours": Loader("ours: meta_init, parallelize", "2x2", ours),
    "in-memory": Loader("(a) from_pretrained on every rank, parallelize", "2x2", in_memory),
    "accelerate": Loader("(b) Accelerate: rank 0 loads, fsdp2_load_full_state_dict", "4x1", accelerate_broadcast),
    "transformers": Loader("(c) transformers' DistributedConfig, base only", "2x2", transformers_distributed),
}
