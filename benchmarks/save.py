"""Saving a LoRA fine-tune from shards, ours against the other ways, on four processes.

    python benchmarks/save.py                                  # a 0.5 GB base, five rounds: about a minute on 2 cores
    python benchmarks/save.py --gigabytes 0.05 --rounds 2      # a look

- One process group holds one sharded model; each round saves it each way once, and who goes first rotates.
- Each peer saves what it saves: with PEFT on FSDP2 that is the whole model, its frozen base included.
- Nothing here fails for being slow: it writes a table and bars.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from loaders import TARGETS, adapter_config, write_checkpoint
from matplotlib import pyplot as plt
from meters import Received
from report import environment
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from lora_parallel import (
    ParallelConfig,
    build_mesh,
    meta_init,
    parallelize,
    save_adapter,
    save_checkpoint,
    wait_for_save,
)

WORLD_SIZE = 4
MIB = 2**20


@dataclass(frozen=True)
class Way:
    """One way to save."""

    title: str
    saves: str
    save: Callable[[nn.Module, torch.optim.Optimizer, Path], None]


def ours(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    save_checkpoint(model, optimizer, path)


def ours_adapter(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    save_adapter(model, path)


def full_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Torch's own way to one file; what is saved is what PEFT's model has, the base too."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    _write(state, path)


def accelerate_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """What `Accelerator.get_state_dict` does under FSDP2 (accelerate 1.15, accelerator.py), and a file of it."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True)
    _write(get_model_state_dict(model, options=options), path)


def lightning_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """What Lightning's ModelParallelStrategy writes by default: sharded state of model and optimizer through DCP."""
    options = StateDictOptions(cpu_offload=True)
    state = {
        "state_dict": get_model_state_dict(model, options=options),
        "optimizer_0": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=path)


def _write(state: dict[str, Any], path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        torch.save(state, path / "model.pt")
    dist.barrier()


WAYS = {
    "ours": Way("ours: save_checkpoint", "adapters, optimizer, random states", ours),
    "ours, adapter": Way("ours: save_adapter", "adapters", ours_adapter),
    "full": Way("get_model_state_dict(full_state_dict=True), torch.save", "adapters and base", full_state_dict),
    "accelerate": Way("Accelerate's get_state_dict, torch.save", "adapters and base", accelerate_state_dict),
    "lightning": Way("Lightning's ModelParallelStrategy, sharded", "adapters, base, optimizer", lightning_sharded),
}


def measure(rank: int, base: Path, folder: Path, store: Path, rounds: int, answers: Any) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=120)
    )
    torch.set_num_threads(1)
    config = ParallelConfig(dp_shard=WORLD_SIZE)
    with meta_init():
        model: nn.Module = AutoModelForCausalLM.from_pretrained(base)
    model = parallelize(model, build_mesh(config, device_type="cpu"), config, lora_config=adapter_config())
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    ids = torch.arange(16).view(1, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    names = list(WAYS)
    progress = tqdm(total=rounds * len(names), desc="Saving", disable=rank != 0)
    for index in range(rounds + 1):  # the first warms up
        for name in names[index % len(names) :] + names[: index % len(names)]:
            path = folder / f"{index}-{name}"
            dist.barrier()
            with Received() as received:
                start = time.perf_counter()
                WAYS[name].save(model, optimizer, path)
                dist.barrier()
                seconds = time.perf_counter() - start
            everyone: list[int] = [0] * WORLD_SIZE
            dist.all_gather_object(everyone, received.bytes)
            if rank == 0:
                written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
                if index:
                    answers.put((name, seconds, sum(everyone), written))
                    progress.update()
                shutil.rmtree(path)
            dist.barrier()
    wait_for_save()
    progress.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5, help="size of the base, float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = write_checkpoint(folder / "base", args.gigabytes)
        answers = mp.get_context("spawn").SimpleQueue()
        context = mp.start_processes(
            measure,
            (folder / "base", folder / "saves", folder / "store", args.rounds, answers),
            nprocs=WORLD_SIZE,
            start_method="spawn",
            join=False,
        )
        samples: dict[str, list[tuple[float, int, int]]] = {name: [] for name in WAYS}
        for _ in range(args.rounds * len(WAYS)):
            while answers.empty():
                if context.join(timeout=0.1):
                    raise SystemExit("the processes ended early")
            name, *sample = answers.get()
            samples[name].append(tuple(sample))
        while not context.join():
            pass
    write_report(samples, size, args)


def write_report(samples: dict[str, list[tuple[float, int, int]]], size: int, args: argparse.Namespace) -> None:
    """A table, a picture and the raw numbers."""
    args.output.mkdir(parents=True, exist_ok=True)
    mine = [seconds for seconds, *_ in samples["ours"]]
    lines = [
        f"Base of {size / MIB:.0f} MiB, LoRA r = 16 on {len(TARGETS)} layers a block, 4x1, {args.rounds} rounds.",
        "",
        "| way to save | saves | seconds, median (range) | / ours, by round | MiB received, all ranks | MiB written |",
        "|---|---|---|---|---|---|",
    ]
    medians, written = [], []
    for name, way in WAYS.items():
        seconds = sorted(each for each, *_ in samples[name])
        ratios = sorted(each / own for (each, *_), own in zip(samples[name], mine, strict=True))
        medians.append(seconds[len(seconds) // 2])
        written.append(samples[name][0][2] / MIB)
        lines.append(
            f"| {way.title} | {way.saves} | {medians[-1]:.3f} ({seconds[0]:.3f} to {seconds[-1]:.3f}) | "
            f"{ratios[len(ratios) // 2]:.1f} | {samples[name][0][1] / MIB:.1f} | {written[-1]:.1f} |"
        )
    table = "\n".join(lines) + "\n"
    (args.output / "save.md").write_text(table)
    raw = {"samples": samples, "columns": ["seconds", "bytes received", "bytes written"], "environment": environment()}
    (args.output / "save.json").write_text(json.dumps(raw, indent=2) + "\n")
    figure, axes = plt.subplots(1, 2, figsize=(11, 3), layout="constrained", sharey=True)
    for axis, values, label in ((axes[0], medians, "seconds"), (axes[1], written, "MiB written")):
        bars = axis.barh([way.title for way in WAYS.values()], values, color=["tab:blue"] * 2 + ["tab:orange"] * 3)
        axis.bar_label(bars, fmt="%.2f" if label == "seconds" else "%.0f", padding=3)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
    axes[0].invert_yaxis()
    figure.savefig(args.output / "save.png", dpi=150)
    print(f"\n{table}\nwritten to {args.output}")


if __name__ == "__main__":
    main()
