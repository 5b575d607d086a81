"""A model that no library knows, cut over tensor parallel ranks: no plan is written, and one step equals one process.

    torchrun --nproc-per-node 4 examples/own_model.py --tp 2
    torchrun --nproc-per-node 4 examples/own_model.py --tp 4 --sequence-parallel   # twice as many as key-value heads

CPU processes (GPUs, where there are some). Prints the plan that was derived, and the largest difference of an adapter
gradient to that of plain PEFT in one process.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lora_parallel import ParallelConfig, build_mesh, parallelize


class Attention(nn.Module):
    """Eight query heads, two key and value heads; one projection for all, head group by head group."""

    def __init__(self, width: int, heads: int = 8, kv_heads: int = 2) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, _ = x.shape
        grouped = self.qkv(x).view(rows, tokens, self.kv_heads, -1, self.head_dim)
        q, k, v = grouped[:, :, :, :-2], grouped[:, :, :, -2:-1], grouped[:, :, :, -1:]
        q, k, v = (part.expand_as(q).flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm_2, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class MLP(nn.Module):
    """Gate and up in one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 6 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(nn.functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, vocabulary: int = 1000, width: int = 128, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """Name the head, for --loss-parallel."""
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adapted() -> nn.Module:
    """In float64, the same on every rank, with adapters that are not zero."""
    torch.manual_seed(0)
    model = get_peft_model(Model(), LoraConfig(r=8, target_modules=["qkv", "out", "gate_up", "down"])).double()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size; FSDP2 shards over the rest")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--loss-parallel", action="store_true", help="leave the logits in slices over the vocabulary")
    args = parser.parse_args()

    logging.basicConfig(format="%(message)s")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # on how full_tensor gathers
    logging.getLogger("lora_parallel").setLevel(logging.INFO)  # the plan
    config = ParallelConfig(
        tp=args.tp,
        sequence_parallel=args.sequence_parallel,
        loss_parallel=args.loss_parallel,
        block_classes=["Block"],
    )
    mesh = build_mesh(config)
    model = parallelize(adapted(), mesh, config)

    batch = torch.randint(1000, (8, 32), generator=torch.Generator().manual_seed(1))
    dp_size, dp_rank = mesh["dp_shard"].size(), mesh.get_local_rank("dp_shard")
    loss = model(batch.chunk(dp_size)[dp_rank].to(mesh.device_type))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: grad.full_tensor().cpu() for name, grad in gradients.items()}

    if dist.get_rank() == 0:
        alone = adapted()
        alone(batch).backward()
        want = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
        worst = max(((whole[name] - grad).norm() / grad.norm()).item() for name, grad in want.items())
        print(f"{len(want)} adapter gradients; the largest relative difference to one process: {worst:.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
