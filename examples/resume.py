"""Stop a training job and go on, on another mesh if you like. No trainer, plain torch.

    torchrun --nproc-per-node 4 examples/resume.py --tp 2 --stop-after 30    # as if it were killed after 30 of 60 steps
    torchrun --nproc-per-node 2 examples/resume.py --tp 1                    # goes on from the newest checkpoint

CPU processes (GPUs, where there are some). Saves every ten steps in the background and keeps the newest three; at the
end merges the adapter into the base and checks that plain transformers loads the folder and computes the same.

To start anew, remove OUTPUT/checkpoints and OUTPUT/merged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from report import quiet_libraries
from rich.console import Console
from tiny_base import BASE_MODEL, train_and_validation_rows
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from lora_parallel import (
    ParallelConfig,
    build_mesh,
    clip_grad_norm_,
    export_merged,
    latest_checkpoint,
    load_checkpoint,
    meta_init,
    parallelize,
    save_checkpoint,
    wait_for_save,
)


def logits(model: nn.Module, rows: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(input_ids=rows).logits.float().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel size; FSDP2 shards over the rest")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--stop-after", type=int, help="leave after this many steps, without a word")
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step, over all processes together")
    parser.add_argument("--output", type=Path, default=Path("outputs/resume"))
    args = parser.parse_args()
    quiet_libraries()

    config = ParallelConfig(tp=args.tp)
    mesh = build_mesh(config)
    first_rank, console = dist.get_rank() == 0, Console()
    output = args.output.resolve()
    base = BASE_MODEL
    with meta_init():
        model = AutoModelForCausalLM.from_pretrained(base)
    lora_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = parallelize(model, mesh, config, lora_config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.steps)

    done = 0
    newest = latest_checkpoint(output / "checkpoints")
    if newest is not None:
        extra = load_checkpoint(model, optimizer, newest)
        scheduler.load_state_dict(extra["scheduler"])
        done = extra["step"]
    sizes = " x ".join(str(size) for size in mesh.shape)
    if first_rank:
        console.print(f"mesh {sizes} (dp_replicate x dp_shard x tp): going on after {done} of {args.steps} steps")

    rows, validation_rows = train_and_validation_rows(seed=0)
    dp_size = mesh["dp_replicate"].size() * mesh["dp_shard"].size()
    dp_rank = mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
    if args.batch_size % dp_size:
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of {dp_size}")
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    progress = tqdm(total=args.steps, initial=done, desc="Fine-tuning", disable=not first_rank)
    for step in range(done + 1, args.steps + 1):
        start = (step - 1) * args.batch_size % (len(rows) - args.batch_size + 1)
        batch = rows[order[start : start + args.batch_size]].chunk(dp_size)[dp_rank].to(mesh.device_type)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        progress.set_postfix(loss=f"{loss.item():.3f}")
        progress.update()
        if step % 10 == 0:
            extra = {"step": step, "scheduler": scheduler.state_dict()}
            save_checkpoint(model, optimizer, output / f"checkpoints/step-{step}", extra, keep_last=3, async_save=True)
        if step == args.stop_after:
            progress.close()
            if first_rank:
                console.print(f"stopped after step {step}; start again to go on")
            dist.destroy_process_group()
            return
    progress.close()
    wait_for_save()

    merged = export_merged(model, output / "merged")
    sharded = logits(model, validation_rows[:4].to(mesh.device_type))
    if first_rank:
        difference = (logits(AutoModelForCausalLM.from_pretrained(merged), validation_rows[:4]) - sharded).abs().max()
        console.print(f"merged model written to {merged}")
        console.print(f"largest difference of its logits in plain transformers: {difference.item():.1e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
