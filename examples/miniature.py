"""Train LoRA on one Llama block under FSDP2 and tensor parallelism, and compare it with one process.

    torchrun --nproc-per-node 4 examples/miniature.py       # dp 2 x tp 2; with 2 processes, dp 1 x tp 2

This is what `lora_parallel` does, on torch and PEFT alone, without its speed, checks and files: docs/how_it_works.md.
"""

import copy
import logging
from functools import partial

import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

# A style is the placements over tp of the base weight [out, in], of lora_A [r, in] and of lora_B [out, r].
COLWISE = Shard(0), Replicate(), Shard(0)  # all of the input -> a slice of the output
ROWWISE = Shard(1), Shard(1), Replicate()  # a slice of the input -> a partial sum of the output
PLAN = {"q_proj": COLWISE, "k_proj": COLWISE, "v_proj": COLWISE, "o_proj": ROWWISE}
PLAN |= {"gate_proj": COLWISE, "up_proj": COLWISE, "down_proj": ROWWISE}
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
CONFIG._attn_implementation = "sdpa"


def cut(layer, style, tp):
    """Cut a PEFT layer over tp, base and LoRA as one unit; return the factor whose gradients are partial sums."""
    holders = [layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]]
    for holder, placement in zip(holders, style, strict=True):
        old = holder.weight
        holder.weight = nn.Parameter(distribute_tensor(old.data, tp, [placement]), requires_grad=old.requires_grad)
    own_forward = layer.forward

    def forward(x):
        if style is COLWISE:  # each rank's slice depends on all of x, so the gradient of x is the sum over ranks
            x = DTensor.from_local(x, tp, [Replicate()]).to_local(grad_placements=[Partial()])
        for holder in holders:  # attribute lookup finds this rank's plain tensors before the DTensors
            holder.__dict__["weight"] = holder._parameters["weight"].to_local()
        y = own_forward(x)  # PEFT's: base and LoRA are added while both are slices, or both are partial sums
        for holder in holders:
            del holder.__dict__["weight"]
        if style is ROWWISE:  # the one reduction, which the base layer needs anyway
            y = DTensor.from_local(y, tp, [Partial()]).redistribute(placements=[Replicate()]).to_local()
        return y

    layer.forward = forward
    return holders[1] if style is COLWISE else holders[2]


def finish(partial_factors, group):
    """Add up the gradients that are partial sums over tp, in one message, after FSDP2 has averaged them over dp."""
    shards = [factor.weight.grad.to_local() for factor in partial_factors]
    flat = torch.cat([shard.flatten() for shard in shards])
    dist.all_reduce(flat, group=group)
    for shard, whole in zip(shards, flat.split([shard.numel() for shard in shards]), strict=True):
        shard.copy_(whole.view_as(shard))


def train(block, batch, finish_gradients=lambda: None, steps=5):
    """Train the adapter of a block on rows [rows, tokens, features]; return its factors, whole."""
    rotary = LlamaRotaryEmbedding(CONFIG)(batch, torch.arange(batch.shape[1])[None])
    trained = {name: p for name, p in block.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    for _ in range(steps):
        block(batch, position_embeddings=rotary).square().mean().backward()
        finish_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in trained.items()}


def largest_error():
    """Return the largest relative difference of a factor that ranks have trained from that of one process."""
    torch.manual_seed(0)  # the same model and batch on all ranks
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    lora = LoraConfig(r=8, target_modules=list(PLAN), init_lora_weights=False)
    block = inject_adapter_in_model(lora, LlamaDecoderLayer(CONFIG, 0)).double()
    batch = torch.randn(4, 12, 64, dtype=torch.float64)
    wanted = train(copy.deepcopy(block), batch)  # in one process
    layers = {name: layer for name, layer in block.named_modules() if isinstance(layer, Linear)}
    factors = [cut(layer, PLAN[name.split(".")[-1]], mesh["tp"]) for name, layer in layers.items()]
    fully_shard(block, mesh=mesh["dp"])  # shards what tp has cut again, for storage, and averages gradients over dp
    rows = batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    found = train(block, rows, partial(finish, factors, mesh.get_group("tp")))
    return max(float((found[name] - factor).norm() / factor.norm()) for name, factor in wanted.items())


if __name__ == "__main__":
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # of how factors are gathered
    dist.init_process_group("gloo")
    error = largest_error()
    if dist.get_rank() == 0:
        print(f"lora_A and lora_B of 7 layers after 5 steps: relative difference from one process {error:.1e}")
    dist.destroy_process_group()
