"""Go on after a crash, with fewer machines, or after the notice that the job must end. No trainer, plain torch.

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:29500 \
        --rdzv-id elastic examples/elastic.py --tp 2    # in two terminals: two machines, one of which may be killed

    torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py    # one machine, whose processes may be killed

CPU processes (GPUs, where there are some). A step has the same rows on any number of processes: each data-parallel rank
takes its share of a fixed global batch. A process that dies ends the others; torchrun starts what is left anew, and the
script resumes from the newest checkpoint. SIGTERM to any process saves after the step and ends all of them with 0.

To start anew, remove OUTPUT.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from report import quiet_libraries
from tiny_base import BASE_MODEL, train_and_validation_rows
from transformers import AutoModelForCausalLM

from lora_parallel import (
    ParallelConfig,
    StopSignal,
    build_mesh,
    clip_grad_norm_,
    latest_checkpoint,
    load_checkpoint,
    meta_init,
    parallelize,
    save_adapter,
    save_checkpoint,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size; FSDP2 shards over the rest")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step, over all processes together")
    parser.add_argument("--output", type=Path, default=Path("outputs/elastic"))
    args = parser.parse_args()
    quiet_libraries()

    config = ParallelConfig(tp=args.tp)  # dp_shard="auto": the processes that there are, this time
    mesh = build_mesh(config)
    with meta_init():
        model = AutoModelForCausalLM.from_pretrained(BASE_MODEL)
    lora_config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = parallelize(model, mesh, config, lora_config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)

    step, checkpoints = 0, args.output.resolve() / "checkpoints"
    newest = latest_checkpoint(checkpoints)
    if newest is not None:
        step = load_checkpoint(model, optimizer, newest)["step"]
    if dist.get_rank() == 0:
        sizes = " x ".join(str(size) for size in mesh.shape)
        print(f"mesh {sizes} (dp_replicate x dp_shard x tp): from step {step} of {args.steps}", flush=True)

    rows, _ = train_and_validation_rows(seed=0)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    dp_size = mesh["dp_replicate"].size() * mesh["dp_shard"].size()
    dp_rank = mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank("dp_shard")
    if args.batch_size % dp_size:
        raise SystemExit(f"--batch-size {args.batch_size} must be a multiple of {dp_size}")
    stopping = False
    with StopSignal() as stop:
        while step < args.steps and not stopping:
            step += 1
            start = (step - 1) * args.batch_size % (len(rows) - args.batch_size + 1)
            batch = rows[order[start : start + args.batch_size]].chunk(dp_size)[dp_rank].to(mesh.device_type)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            stopping = stop.requested()
            if stopping or step % args.save_every == 0:
                save_checkpoint(model, optimizer, checkpoints / f"step-{step}", {"step": step}, keep_last=3)
        if not stopping:
            save_adapter(model, args.output / "adapter")
        if dist.get_rank() == 0:
            print(f"{'stopped' if stopping else 'finished'} after step {step}", flush=True)
        dist.barrier()
        dist.destroy_process_group()  # still in the block: a signal may come a second time


if __name__ == "__main__":
    main()
