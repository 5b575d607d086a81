"""LoRA on the experts of a mixture, shared by tensor parallel ranks in two ways; one step equals one process.

    torchrun --nproc-per-node 4 examples/experts.py --tp 2                 # slices of every expert on each rank
    torchrun --nproc-per-node 4 examples/experts.py --tp 4 --by-experts    # two of eight experts on each rank

CPU processes (GPUs, where there are some). Prints how the model is cut, and the largest difference of an adapter
gradient to that of plain PEFT in one process.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lora_parallel import ParallelConfig, build_mesh, parallelize

MODEL = Qwen3MoeConfig(
    vocab_size=1000,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=96,
    experts_implementation="eager",  # the others take no float64
)
LORA = LoraConfig(
    r=8,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    target_parameters=["experts.gate_up_proj", "experts.down_proj"],
    task_type="CAUSAL_LM",
)


def adapted() -> nn.Module:
    """In float64, the same on every rank, with adapters that are not zero."""
    torch.manual_seed(0)
    model = get_peft_model(Qwen3MoeForCausalLM(MODEL), LORA).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size; FSDP2 shards over the rest")
    parser.add_argument("--by-experts", action="store_true", help="some experts on each tp rank, not slices of all")
    args = parser.parse_args()

    logging.basicConfig(format="%(message)s")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # on how full_tensor gathers
    logging.getLogger("lora_parallel").setLevel(logging.INFO)  # the plan
    way = {"*.experts": "ep_dispatch_experts"} if args.by_experts else "auto"
    config = ParallelConfig(tp=args.tp, tp_plan=way)
    mesh = build_mesh(config)
    model = parallelize(adapted(), mesh, config)

    batch = torch.randint(1000, (8, 32), generator=torch.Generator().manual_seed(1))
    dp_size, dp_rank = mesh["dp_shard"].size(), mesh.get_local_rank("dp_shard")
    mine = batch.chunk(dp_size)[dp_rank].to(mesh.device_type)
    model(input_ids=mine, labels=mine).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: grad.full_tensor().cpu() for name, grad in gradients.items()}

    if dist.get_rank() == 0:
        alone = adapted()
        alone(input_ids=batch, labels=batch).loss.backward()
        want = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        worst = max(((whole[name] - grad).norm() / grad.norm()).item() for name, grad in want.items())
        print(f"{len(want)} adapter gradients; the largest relative difference to one process: {worst:.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
