"""Train a model whose blocks are divided between processes (pipeline parallelism), and in one process, side by side.

    torchrun --nproc-per-node 2 examples/pipeline.py
    torchrun --nproc-per-node 2 examples/pipeline.py --schedule interleaved --microbatches 8
    torchrun --nproc-per-node 4 examples/pipeline.py --pp 2 --tp 2 --microbatches 8

CPU processes (GPUs, where there are some). First rank 0 fine-tunes the base model by plain PEFT, alone. Then all ranks
do it in stages: the model is built on meta, and each rank reads its own blocks only. Prints what each rank reads and
holds, the losses of both, how far they differ, and what plain PEFT makes of the adapter that the stages have saved. All
of it is float64, so that a difference is one of the maths and not of rounding (transformers computes the loss itself in
float32). About a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights
from report import quiet_libraries
from rich.console import Console
from rich.table import Table
from tiny_base import BASE_MODEL, train_and_validation_rows
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from lora_parallel import (
    ParallelConfig,
    build_mesh,
    clip_grad_norm_,
    meta_init,
    parallelize,
    read_plan,
    save_adapter,
)

LORA = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
STAGES_PER_RANK = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
console = Console(highlight=False)


def base() -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(BASE_MODEL, dtype=torch.float64)


def train(model: nn.Module, batches: list[Tensor], clip: Callable[[Any, float], Tensor]) -> list[float]:
    """The loop that you would write for one process; nothing in it knows of stages."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def held(model: nn.Module) -> tuple[str, int, int]:
    """Return what this rank holds: its layers in words, the bytes of the base, and the bytes that train."""
    blocks, others, sizes = set(), set(), {False: 0, True: 0}
    for name, parameter in model.named_parameters():
        found = re.search(r"layers\.(\d+)\.", name)
        if found:
            blocks.add(int(found.group(1)))
        else:
            others.add(name.removesuffix(".weight").rpartition(".")[2])
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        sizes[parameter.requires_grad] += local.nbytes
    first = ["embed_tokens"] if "embed_tokens" in others else []
    last = sorted(others - {"embed_tokens"}, reverse=True)
    numbers = ", ".join(map(str, sorted(blocks)))
    return ", ".join([*first, f"block{'s' * (len(blocks) > 1)} {numbers}", *last]), sizes[False], sizes[True]


def gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=2, help="pipeline-parallel size: processes that share the blocks")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size; FSDP2 shards over the rest")
    parser.add_argument("--microbatches", type=int, default=4, help="micro-batches that a batch is divided into")
    parser.add_argument("--schedule", choices=tuple(STAGES_PER_RANK), default="1f1b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a step, over all processes together")
    parser.add_argument("--output", type=Path, default=Path("outputs/pipeline"))
    args = parser.parse_args()
    quiet_libraries()

    rows, validation_rows = train_and_validation_rows(seed=0)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[: args.steps * args.batch_size]
    batches = list(rows[order].split(args.batch_size))
    is_first = os.environ.get("RANK") == "0"
    if is_first:  # the other ranks wait for this one to join them
        torch.manual_seed(0)  # the seed that parallelize injects adapters with
        plain = get_peft_model(base(), LORA).train()
        losses_of_plain = train(plain, batches, torch.nn.utils.clip_grad_norm_)

    stages = STAGES_PER_RANK[args.schedule]
    config = ParallelConfig(
        pp=args.pp,
        pp_microbatches=args.microbatches,
        pp_schedule=args.schedule,
        pp_stages_per_rank=stages,
        tp=args.tp,
    )
    mesh = build_mesh(config)
    with meta_init():
        model = base()
    # Looking first: the model is cut and sharded, and nothing is read.
    read = sum(each.bytes for each in read_plan(parallelize(model, mesh, config, LORA, materialize=False)))
    with meta_init():
        model = base()
    model = parallelize(model, mesh, config, LORA).train()

    # All ranks of a pipeline, and tp peers, are given the same rows.
    shares, share = mesh["dp_shard"].size(), mesh.get_local_rank("dp_shard")
    mine = [batch.chunk(shares)[share].to(mesh.device_type) for batch in batches]
    losses = train(model, mine, clip_grad_norm_)
    mean = [sum(each) / len(each) for each in zip(*gathered(losses), strict=True)]

    adapter = args.output.resolve() / "adapter"
    save_adapter(model, adapter)
    model.eval()
    with torch.no_grad():  # every rank is given the logits of the last stage
        logits = model(input_ids=validation_rows[:8].to(mesh.device_type)).logits.cpu()
    everyone = gathered((read, *held(model)))
    if is_first:
        print_stages(everyone, mesh, args, stages)
        print_losses(losses_of_plain, mean)
        print_differences(plain, adapter, logits, validation_rows[:8])
    dist.barrier()
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------------------- what is printed


def print_stages(everyone: list[Any], mesh: Any, args: argparse.Namespace, stages: int) -> None:
    sizes = " x ".join(f"{axis} {size}" for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    file = (BASE_MODEL / "model.safetensors").stat().st_size
    waiting = (args.pp - 1) / (stages * args.microbatches + args.pp - 1)
    console.print(f"\nmesh {sizes}; {args.schedule}, {args.microbatches} micro-batches")
    console.print(f"a rank waits for {waiting:.0%} of a step by the formula, if all stages take the same time\n")
    table = Table("rank", "holds", "reads, B", "of file", "base, B", "adapter, B", box=None, pad_edge=False)
    for at, column in enumerate(table.columns):
        column.justify, column.no_wrap = ("right" if at > 1 else "left"), True
    for rank, (read, layers, frozen, trained) in enumerate(everyone):
        table.add_row(str(rank), layers, f"{read:,}", f"{read / file:.0%}", f"{frozen:,}", f"{trained:,}")
    console.print(table)
    console.print("(the file is float32; what a rank holds is float64)\n")


def print_losses(plain: list[float], stages: list[float]) -> None:
    table = Table("step", "loss, one process", "loss, stages", "difference", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for step, (one, other) in enumerate(zip(plain, stages, strict=True), 1):
        table.add_row(str(step), f"{one:.6f}", f"{other:.6f}", shown(abs(one - other)))
    console.print(table)


def print_differences(plain: Any, adapter: Path, logits: Tensor, rows: Tensor) -> None:
    """Hold the saved adapter against that of one process, and its logits in plain PEFT against those of the stages."""
    want = {name: p.detach() for name, p in plain.named_parameters() if p.requires_grad}
    saved = load_peft_weights(str(adapter), device="cpu")
    found = {name.replace(".default", ""): p for name, p in want.items()}
    assert found.keys() == saved.keys()
    worst = max((saved[name] - p).norm() / p.norm() for name, p in found.items())
    loaded = PeftModel.from_pretrained(base(), adapter).eval()
    with torch.no_grad():
        expected = loaded(input_ids=rows).logits
        with loaded.disable_adapter():
            without = loaded(input_ids=rows).logits
    console.print(f"\nthe adapter was saved to {adapter}", soft_wrap=True)
    console.print("largest difference between stages and one process:")
    console.print(f"  of a tensor of the adapter, relative: {shown(worst)}")
    console.print(
        f"  of logits, the stages' and plain PEFT's with that folder: {shown((logits - expected).abs().max())}"
    )
    console.print(f"  (without the adapter that would be {shown((logits - without).abs().max())})")


def shown(value: Any) -> str:
    return f"{float(value):.1e}" if value else "0"


if __name__ == "__main__":
    main()
