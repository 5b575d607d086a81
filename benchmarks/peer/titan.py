"""torchtitan's Llama 3 with its `LoRAConverter`, sharded by its `parallelize_llama` as its trainer does.

It has models of its own, so that weights and gradients are renamed and permuted by its own state-dict adapter.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

torch._utils._get_available_device_type = lambda: "cpu"  # or torchtitan takes CUDA for there

from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan_utils
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention

from benchmarks.peer.jobs import Job, Mesh, Run, labels_of, make_optimizer, micro_batches
from tests.oracle import full
from tests.oracle.rows import SPLIT

NAMES = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def config_of(vocabulary: int) -> Any:
    """Return the tiny model's configuration."""
    dim, heads = SPLIT["hidden_size"], SPLIT["num_attention_heads"]
    layers = llama3._build_llama3_layers(
        n_layers=SPLIT["num_hidden_layers"],
        dim=dim,
        n_heads=heads,
        n_kv_heads=SPLIT["num_key_value_heads"],
        hidden_dim=SPLIT["intermediate_size"],
        rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=10000.0),
        fuse_qkv=False,
        attn_backend="flex",
    )
    for layer in layers:  # flex attention has no backward on a CPU; without documents in a row this computes the same
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocabulary,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=dim, eps=1e-6, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(
            in_features=dim, out_features=vocabulary, param_init=llama3._output_linear_init(dim)
        ),
        layers=layers,
    )


def peft_name(name: str) -> str:
    """Return PEFT's name of one of torchtitan's adapter parameters."""
    _, layer, rest = name.split(".", 2)
    module, factor, _ = rest.rsplit(".", 2)
    return f"base_model.model.model.layers.{layer}.{NAMES[module]}.{factor[:-1]}{factor[-1].upper()}.default.weight"


def train(job: Job, mesh: Mesh, folder: Path) -> Run:
    """Run on every rank."""
    dist.init_process_group("gloo")
    parallelism = ParallelismConfig(data_parallel_shard_degree=mesh.dp, tensor_parallel_degree=mesh.tp, spmd_backend="partial_dtensor")
    dims = ParallelDims.from_config(parallelism, mesh.ranks)
    titan_utils.set_spmd_backend(parallelism.spmd_backend)
    whole = load_file(folder / "base" / "model.safetensors")
    plain = config_of(len(whole["lm_head.weight"]))
    adapter = llama3.Llama3StateDictAdapter(plain, None)
    targets = [name.rsplit(".", 1)[-1] for name in NAMES]
    config = LoRAConverter.Config(rank=4, alpha=8.0, target_modules=targets).build().convert(
        config_of(len(whole["lm_head.weight"]))
    )
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    with torch.device("meta"):
        model = config.build()
    model = llama3.parallelize_llama(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder=str(folder),
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo has no sum with a factor
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    values = torch.load(folder / "values.pt")
    weights = adapter.from_hf({name: value.float() for name, value in whole.items()})
    heads, kv_heads = SPLIT["num_attention_heads"], SPLIT["num_key_value_heads"]
    rows_of = {"wq.lora_b": heads, "wk.lora_b": kv_heads}

    def permuted(name: str, value: Tensor, function: Any) -> Tensor:
        """Permute the output features of a query or key, as its rotary embedding wants."""
        found = [count for part, count in rows_of.items() if part in name]
        return function(value, found[0]) if found else value

    for name, parameter in model.named_parameters():
        if "lora_" in name:
            value = permuted(name, values[peft_name(name)].float(), adapter._reverse_permute)
        else:
            value = weights[name]
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
        (parameter.to_local() if isinstance(parameter, DTensor) else parameter).data.copy_(value)

    def gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return full tensors by PEFT's names."""
        return {peft_name(name): permuted(name, full(value), adapter._permute) for name, value in tensors.items()}

    loss_of = CrossEntropyLoss.Config(global_vocab_size=len(whole["lm_head.weight"])).build(
        compile_config=CompileConfig(enable=False)
    )
    context = titan_utils.get_spmd_context(parallel_dims=dims)
    run = Run()
    optimizer = make_optimizer(job, model.parameters())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for step in range(job.steps):
        for micro in micro_batches(job, step, dist.get_rank() // mesh.tp, mesh.dp):
            targets_of = torch.nn.functional.pad(labels_of(micro)[:, 1:], (0, 1), value=-100)
            tokens = torch.tensor(float(job.rows * (job.tokens - 1)))
            with context():
                loss, _ = loss_of(model(micro), targets_of, tokens)
                loss.backward()
        if step == 0:
            run.gradients = gathered({name: p.grad for name, p in trained.items() if p.grad is not None})
        if job.clip:
            titan_utils.clip_grad_norm_(list(trained.values()), job.clip)
        optimizer.step()
        optimizer.zero_grad()
    run.adapters = gathered(dict(trained))
    return run
