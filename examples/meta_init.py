"""Load a model that no process ever holds: built on meta, each rank reads its own slices. No trainer, plain torch.

    torchrun --nproc-per-node 4 examples/meta_init.py

Four CPU processes (GPUs, where there are some), the model sharded two ways by FSDP2 and two ways by tensor parallelism.
Prints what each rank reads of the checkpoint, fine-tunes for a few steps, saves the adapter, and compares the sharded
model with what plain PEFT makes of the saved folder in one process.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel
from report import quiet_libraries
from rich.console import Console
from rich.table import Table
from tiny_base import BASE_MODEL, train_and_validation_rows
from torch import Tensor, nn
from tqdm import trange
from transformers import AutoModelForCausalLM

from lora_parallel import (
    ParallelConfig,
    Read,
    build_mesh,
    clip_grad_norm_,
    meta_init,
    parallelize,
    read_plan,
    save_adapter,
)


def load(base: Path) -> nn.Module:
    """A transformers model on meta that remembers its checkpoint."""
    with meta_init():
        return AutoModelForCausalLM.from_pretrained(base)


def print_plan(plan: list[Read], base: Path, mesh_text: str) -> None:
    """What every rank reads of every file. Collective."""
    mine = Counter()
    for read in plan:
        mine[Path(read.file or "").name] += read.bytes
    everyone: list[Counter] = [Counter()] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        table = Table(
            "file", "bytes", *(f"rank {rank}" for rank in range(len(everyone))), title=f"Reads on {mesh_text}"
        )
        for file in sorted(set().union(*everyone)):
            counts = [f"{reads[file]:,} ({reads[file] / (base / file).stat().st_size:.0%})" for reads in everyone]
            table.add_row(file, f"{(base / file).stat().st_size:,}", *counts)
        Console().print(table)


def logits(model: nn.Module, rows: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=rows).logits.float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size; FSDP2 shards over the rest")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step, over all processes together")
    parser.add_argument("--output", type=Path, default=Path("outputs/meta_init"))
    args = parser.parse_args()
    quiet_libraries()

    config = ParallelConfig(tp=args.tp)
    mesh = build_mesh(config)
    output = args.output.resolve()
    base = BASE_MODEL
    lora_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    mesh_text = "x".join(str(size) for size in mesh.shape) + " (dp_replicate x dp_shard x tp)"

    # Looking first: everything is sharded, nothing is read.
    print_plan(read_plan(parallelize(load(base), mesh, config, lora_config, materialize=False)), base, mesh_text)

    model = parallelize(load(base), mesh, config, lora_config).train()

    rows, validation_rows = train_and_validation_rows(seed=0)
    dp_size = mesh["dp_replicate"].size() * mesh["dp_shard"].size()
    dp_rank = mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
    if args.batch_size % dp_size:
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of {dp_size}")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    progress = trange(args.steps, desc="Fine-tuning", disable=dist.get_rank() != 0)
    for step in progress:
        start = step * args.batch_size % (len(rows) - args.batch_size + 1)
        batch = rows[order[start : start + args.batch_size]].chunk(dp_size)[dp_rank].to(mesh.device_type)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}")

    save_adapter(model, output / "adapter")
    sharded = logits(model, validation_rows[:4].to(mesh.device_type))
    if dist.get_rank() == 0:
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), output / "adapter")
        difference = (logits(plain, validation_rows[:4]) - sharded).abs().max().item()
        Console().print(f"adapter saved to {output / 'adapter'}")
        Console().print(f"largest difference of logits to plain PEFT with it: {difference:.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
