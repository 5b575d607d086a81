"""The loss from slices of the logits (`loss_parallel`) against the loss from gathered ones: memory, messages and time.

    python benchmarks/loss.py                                  # tp 1, 2, 4 and 32k, 128k logits: minutes on 2 cores
    python benchmarks/loss.py --tp 2 --vocabulary 32768 --tokens 256 --rounds 2     # a look

- A forward and a backward of a Llama of one small block, in bfloat16, with LoRA on its query and its head: what is left
  is the head and the loss. Both sides are in the same processes and take turns.
- Loss and gradients of both sides must agree before anything is measured.
- Nothing here fails for being slow: it writes a table and the raw numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meters import MemoryMeter, Received, metered_memory
from peft import LoraConfig, get_peft_model
from report import environment
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from lora_parallel import ParallelConfig, build_mesh, parallelize

MIB = 2**20
SIDES = {"gathered": False, "sliced": True}


def model_of(vocabulary: int) -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=vocabulary, use_cache=False)).to(torch.bfloat16)
    lora = LoraConfig(r=8, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    return get_peft_model(model, lora, autocast_adapter_dtype=False).train()


class Case:
    """One size of the tp axis and of the vocabulary, on one rank."""

    def __init__(self, tp: int, vocabulary: int, tokens: int) -> None:
        self.device = "cuda" if torch.cuda.device_count() >= tp else "cpu"
        self.ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))
        self.ids = self.ids.to(self.device)
        self.models = {}
        for side, sliced in SIDES.items():
            config = ParallelConfig(tp=tp, loss_parallel=sliced)
            self.models[side] = parallelize(model_of(vocabulary), build_mesh(config, self.device), config)

    def step(self, side: str) -> Tensor:
        model = self.models[side]
        loss: Tensor = model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return loss.detach()

    def check(self) -> None:
        """Hold loss and gradients of both sides against each other."""
        found = {}
        for side, model in self.models.items():
            loss = self.step(side)
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
            found[side] = loss, torch.cat([grad.flatten().float() for grad in whole])
            model.zero_grad()
        (loss, grad), (other, of_other) = found.values()
        torch.testing.assert_close(loss, other, rtol=1e-6, atol=0)
        assert (grad - of_other).norm() <= 1e-2 * grad.norm(), "the sides have other gradients"

    def measured(self, side: str) -> tuple[float, int, int]:
        """Seconds, the most bytes above what is held between steps, and bytes received by this rank."""
        on_gpu = self.device == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        start, held = time.perf_counter(), torch.cuda.memory_allocated() if on_gpu else 0
        with nullcontext(MemoryMeter()) if on_gpu else metered_memory() as memory, Received() as received:
            self.step(side)
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        self.models[side].zero_grad()
        return seconds, torch.cuda.max_memory_allocated() - held if on_gpu else memory.anonymous, received.bytes


def measure(rank: int, tp: int, options: argparse.Namespace, rounds: int, store: Path, answers: Any) -> None:
    on_gpu = torch.cuda.device_count() >= tp
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=tp,
        timeout=timedelta(seconds=300),
    )
    torch.set_num_threads(1)
    for vocabulary in tqdm(options.vocabulary, desc=f"tp {tp}", disable=rank != 0):
        case = Case(tp, vocabulary, options.tokens)
        case.check()
        samples: dict[str, list[tuple[float, int, int]]] = {side: [] for side in SIDES}
        for index in range(rounds):
            for side in list(SIDES)[:: 1 if index % 2 else -1]:
                samples[side].append(case.measured(side))
        if rank == 0:
            answers.put((tp, vocabulary, samples))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[2**15, 2**17])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    options = parser.parse_args()
    memory = [each for tp in options.tp for each in run(tp, options, 2, {"MALLOC_MMAP_THRESHOLD_": str(MIB)})]
    times = [each for tp in options.tp for each in run(tp, options, options.rounds, {})]
    write_report(memory, times, options)


def run(tp: int, options: argparse.Namespace, rounds: int, variables: dict[str, str]) -> list[Any]:
    """Measure in new processes with these environment variables.

    Memory is measured with a threshold above which glibc returns to the system what is freed, so that all that is taken
    is seen. Time is measured without, as pages that are taken anew cost time.
    """
    answers = mp.get_context("spawn").SimpleQueue()
    os.environ.update(variables)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (tp, options, rounds, Path(scratch) / "store", answers)
        mp.start_processes(measure, arguments, nprocs=tp, start_method="spawn")
    for name in variables:
        del os.environ[name]
    return [answers.get() for _ in options.vocabulary]


def write_report(memory: list[Any], times: list[Any], options: argparse.Namespace) -> None:
    """A table and the raw numbers, of the first rank: the most memory of any round, the median of the times."""
    lines = [
        f"{options.tokens} tokens, {options.rounds} rounds; gathered -> sliced, MiB a rank.",
        "",
        "| tp | logits | one copy of all logits in bfloat16 | peak memory | received | time, sliced / gathered |",
        "|---|---|---|---|---|---|",
    ]
    for (tp, vocabulary, held), (*_, timed) in zip(memory, times, strict=True):
        taken, received = ([max(row[column] for row in held[side]) / MIB for side in SIDES] for column in (1, 2))
        ratios = [mine[0] / other[0] for mine, other in zip(timed["sliced"], timed["gathered"], strict=True)]
        lines.append(
            f"| {tp} | {vocabulary:,} | {2 * options.tokens * vocabulary / MIB:.0f} | "
            f"{taken[0]:.0f} -> {taken[1]:.0f} | {received[0]:.2f} -> {received[1]:.2f} | "
            f"{statistics.median(ratios):.2f} |"
        )
    table = "\n".join(lines) + "\n"
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "loss.md").write_text(table)
    samples = {"memory": memory, "times": times}
    raw = {**samples, "columns": ["seconds", "bytes of memory", "bytes received"], "environment": environment()}
    (options.output / "loss.json").write_text(json.dumps(raw, indent=2) + "\n")
    print(f"\n{table}\nwritten to {options.output}")


if __name__ == "__main__":
    main()
