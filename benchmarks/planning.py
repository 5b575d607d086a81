"""Seconds that the plan of a Llama under tensor parallelism takes, proven on all blocks and on two of each kind.

    python benchmarks/planning.py                          # 8B, 70B and 405B at tp 8: two minutes on 2 cores
    python benchmarks/planning.py --models tiny --tp 2     # a look

Models are on meta, with LoRA on all linear layers. Both sides run in one process, one after the other.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from unittest.mock import patch

from peft import LoraConfig, get_peft_model
from report import environment, write_files
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lora_parallel import meta_init
from lora_parallel.planning import plan as planner

SIZES = {
    "tiny": (64, 128, 6, 4, 2),
    "8B": (4096, 14336, 32, 32, 8),
    "70B": (8192, 28672, 80, 64, 8),
    "405B": (16384, 53248, 126, 128, 8),
}
"""Map names of models to their widths, number of blocks, and numbers of heads."""


def model_of(name: str) -> nn.Module:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    with meta_init():
        model = LlamaForCausalLM(LlamaConfig(**dict(zip(keys, SIZES[name], strict=True)), vocab_size=4096))
    return get_peft_model(model, LoraConfig(target_modules="all-linear"))


def seconds(model: nn.Module, tp: int, sequence_parallel: bool) -> tuple[float, float]:
    """Return the seconds of a plan that is proven on all blocks, and on few of them."""
    taken = []
    for known in (lambda inner: None, planner.proven_plan):
        with patch.object(planner, "proven_plan", known):
            start = time.perf_counter()
            planner.resolve_plan(model, None, tp, sequence_parallel)
            taken.append(time.perf_counter() - start)
    return taken[0], taken[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["8B", "70B", "405B"])
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    ways = {f"{name}{', sequence_parallel' * sp}": (name, sp) for name in options.models for sp in (False, True)}
    taken = {way: seconds(model_of(name), options.tp, sp) for way, (name, sp) in ways.items()}
    rows = [f"| {way} | {all_:.1f} | {few:.1f} | {all_ / few:.1f} |" for way, (all_, few) in taken.items()]
    head = [f"| Llama, tp {options.tp} | all blocks, s | two of a kind, s | ratio |", "|---|---|---|---|"]
    table = "\n".join([*head, *rows])
    record = {"environment": environment(), "options": {"models": options.models, "tp": options.tp}, "seconds": taken}
    write_files(options.output, "planning", table, record)
    print(f"{table}\n\nwritten to {options.output}")


if __name__ == "__main__":
    main()
