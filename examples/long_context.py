"""Train on long rows whose tokens are divided between processes (context parallelism), and print what each one needs.

    torchrun --nproc-per-node 4 examples/long_context.py --tokens 32768 --cp 4
    torchrun --nproc-per-node 4 examples/long_context.py --tokens 8192 --cp 2 --cp-method all_gather
    python examples/long_context.py --tokens 32768    # plain PEFT in one process

CPU processes (GPUs, where there are some). The first two lines first run the third one on the same rows, and print the
losses of both and the memory that a process needs for activations and gradients: the most that it held during a step,
less what it held before the first step. `--no-compare` leaves the one process out. The first line takes about two
minutes on two cores, of which nearly all is attention.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lora_parallel import ParallelConfig, build_mesh, clip_grad_norm_, parallelize

VOCABULARY = 256
LORA = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
    task_type="CAUSAL_LM",
)


def adapted(tokens: int) -> nn.Module:
    """A Llama of two blocks with an adapter, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    return get_peft_model(LlamaForCausalLM(config), LORA).train()


def text(rows: int, tokens: int) -> Tensor:
    """Rows of tokens that count up from 0 to 31 and start again; one token in eight is a random one."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(VOCABULARY, (rows, tokens), generator=generator)
    is_noise = torch.rand(rows, tokens, generator=generator) < 1 / 8
    return torch.where(is_noise, noise, torch.arange(tokens) % 32)


# ---------------------------------------------------------------------------------------------------------- memory


def _status(key: str) -> int:
    """A number of bytes in Linux's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def start_peak(device: str) -> int:
    """Forget the peak of this process's memory so far, and return the bytes that it holds now."""
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        return torch.accelerator.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak(device: str) -> int:
    """The most bytes that this process held since `start_peak`."""
    return _status("VmHWM") if device == "cpu" else torch.accelerator.max_memory_allocated()


# -------------------------------------------------------------------------------------------------------- training


def train(model: nn.Module, rows: Tensor, steps: int, device: str) -> tuple[list[float], int]:
    """Take some steps, each on `rows`; return the losses, and the bytes that a step needs above what is held before."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    def step(ids: Tensor) -> float:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        return loss.item()

    step(rows[:, :64])  # what is loaded or allocated once, of libraries and process groups, is not a step's
    optimizer.zero_grad()
    before, losses = start_peak(device), []
    for _ in range(steps):
        losses.append(step(rows))
        optimizer.step()
        optimizer.zero_grad()
    return losses, peak(device) - before


def one_process(arguments: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Run this script in one process, of plain PEFT, on all cores; return its losses and its memory."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment["OMP_NUM_THREADS"] = str(os.cpu_count())
    command = [sys.executable, __file__, f"--tokens={arguments.tokens}", f"--steps={arguments.steps}", f"--rows={rows}"]
    command += ["--json"] + ["--activation-checkpointing"] * arguments.activation_checkpointing
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--cp", type=int, default=1, help="processes that divide the tokens of a row between them")
    parser.add_argument("--cp-method", choices=("ulysses", "all_gather"), default="ulysses")
    parser.add_argument("--activation-checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1, help="rows in a step of one process; of several: one a batch")
    parser.add_argument("--no-compare", action="store_true", help="do not run one process first")
    parser.add_argument("--json", action="store_true", help="in one process: print the result as JSON")
    args = parser.parse_args()

    warnings.filterwarnings("ignore", message=".*`is_gradient_checkpointing` is deprecated.*")  # transformers' own
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and args.cp == 1:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = accelerator.type if accelerator is not None else "cpu"
        model = adapted(args.tokens).to(device)
        if args.activation_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        losses, used = train(model, text(args.rows, args.tokens).to(device), args.steps, device)
        result = {"losses": losses, "bytes": used}
        print(json.dumps(result) if args.json else shown("one process, plain PEFT", result))
        return

    config = ParallelConfig(
        cp=args.cp, cp_method=args.cp_method, activation_checkpointing=args.activation_checkpointing
    )
    batches = world // args.cp
    alone = None
    if os.environ["RANK"] == "0" and not args.no_compare:  # the other ranks wait for this one to join them
        alone = one_process(args, batches)
        print(shown("one process, plain PEFT", alone), flush=True)
    mesh = build_mesh(config)
    model = parallelize(adapted(args.tokens), mesh, config)
    # cp peers are given the same whole row, and cut it themselves.
    mine = text(batches, args.tokens).chunk(batches)[mesh.get_local_rank("dp_shard")].to(mesh.device_type)
    losses, used = train(model, mine, args.steps, mesh.device_type)

    numbers = torch.tensor([*losses, used], dtype=torch.float64, device=mesh.device_type)
    everyone = [torch.empty_like(numbers) for _ in range(world)]
    dist.all_gather(everyone, numbers)
    if dist.get_rank() == 0:
        *mean, _ = torch.stack(everyone).mean(0).tolist()
        for rank, theirs in enumerate(everyone):
            result = {"losses": mean, "bytes": theirs[-1].item()}
            print(shown(f"rank {rank} of {world}, cp {args.cp}, {args.cp_method}", result))
        if alone is not None:
            worst = max(abs(ours - theirs) for ours, theirs in zip(mean, alone["losses"], strict=True))
            most = max(theirs[-1].item() for theirs in everyone)
            print(
                f"the largest difference of a loss: {worst:.1e}; memory: {most / alone['bytes']:.2f} of one process's"
            )
    dist.barrier()
    dist.destroy_process_group()


def shown(who: str, result: dict[str, Any]) -> str:
    losses = " ".join(f"{loss:.4f}" for loss in result["losses"])
    return f"{who:<40} loss {losses}   memory {result['bytes'] / 2**20:7.0f} MiB"


if __name__ == "__main__":
    main()
