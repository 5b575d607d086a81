"""Time `generate`, token by token: fused LoRA layers, the same model with `fused=False`, and plain PEFT, in turns.

    python benchmarks/generate.py                   # 8 blocks, 40 rounds of 32 tokens: two minutes on 2 cores
    python benchmarks/generate.py --short           # 2 blocks, 3 rounds

- The model is that of `step.py`, in float32 and with a base in bfloat16, on one rank; its adapter is in float32.
- All sides must generate the same tokens in float32; in bfloat16 two tokens may be equally likely.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from peers import adapt, build_base
from report import environment, range_text, ratio_by_round, write_files
from torch import Tensor, nn
from tqdm import tqdm

from lora_parallel import ParallelConfig, build_mesh, parallelize

OURS, UNFUSED, PLAIN = "ours", "fused=False", "plain PEFT"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHORT = {"layers": 2, "rounds": 3, "tokens": 4}

Samples = dict[str, list[float]]
"""Map each side to the seconds of its calls of `generate`."""


def build_sides(options: argparse.Namespace, dtype: torch.dtype) -> dict[str, nn.Module]:
    sides = {}
    for name in (OURS, UNFUSED, PLAIN):
        model = adapt(build_base(options.hidden, options.layers).to(dtype)).eval()
        if name != PLAIN:
            config = ParallelConfig(fused=name == OURS)
            model = parallelize(model, build_mesh(config, "cpu"), config)
        sides[name] = model
    return sides


def generate(model: nn.Module, prompt: Tensor, tokens: int) -> Tensor:
    length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "use_cache": True}
    return model.generate(input_ids=prompt, do_sample=False, pad_token_id=0, **length)  # type: ignore[operator]


def measure(options: argparse.Namespace, dtype: str) -> Samples:
    """Time all sides in turns, in an order that is drawn anew for each round.

    Raises:
        RuntimeError: A side generates other tokens in float32 than plain PEFT.
    """
    sides = build_sides(options, DTYPES[dtype])
    prompt = torch.randint(options.hidden * 4, (1, 16), generator=torch.Generator().manual_seed(0))
    found = {name: generate(model, prompt, options.tokens) for name, model in sides.items()}  # [1, prompt + tokens]
    for name, tokens in found.items():
        if dtype == "float32" and not torch.equal(tokens, found[PLAIN]):
            raise RuntimeError(f"{name} generates other tokens than {PLAIN}")
    samples: Samples = {name: [] for name in sides}
    for number in tqdm(range(options.rounds), dtype):
        names = list(sides)
        random.Random(number).shuffle(names)
        for name in names:
            start = time.perf_counter()
            generate(sides[name], prompt, options.tokens)
            samples[name].append(time.perf_counter() - start)
    return samples


def table_of(results: dict[str, Samples], tokens: int) -> str:
    lines = ["| base | side | ms a token | ours / it, by round (95%) |", "|---|---|---|---|"]
    for dtype, samples in results.items():
        for name, seconds in samples.items():
            ratio, interval = ratio_by_round(samples[OURS], seconds)
            text = "" if name == OURS else f"{ratio:.2f} ({range_text(interval, 2)})"
            lines.append(f"| {dtype} | {name} | {1e3 * np.median(seconds) / tokens:.2f} | {text} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32, help="tokens that each call generates")
    parser.add_argument("--short", action="store_true", help=f"a short form: {SHORT}")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    if parser.parse_known_args()[0].short:
        parser.set_defaults(**SHORT)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    results = {dtype: measure(options, dtype) for dtype in DTYPES}
    table = table_of(results, options.tokens)
    settings = {name: getattr(options, name) for name in ("hidden", "layers", "rounds", "tokens")}
    record = {"environment": environment(), "options": settings, "seconds": results}
    write_files(options.output, "generate", table, record)
    print(f"{table}\n\nwritten to {options.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
