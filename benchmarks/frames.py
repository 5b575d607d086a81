"""The files and functions of the product that a steady training step calls, and how often.

    python benchmarks/frames.py                                 # the third step of a small Llama on 2x2: ten seconds
    python benchmarks/frames.py --mesh 1x2 --dropout 0.1

- The step is forward, backward, clipping, AdamW and zero_grad, as in the quick start, on plain Llama blocks with LoRA
  on all linear layers.
- A profile function (`threading.setprofile_all_threads`, or what comes nearest before Python 3.12) counts each call of
  a function of `lora_parallel` on rank 0, in every thread. A file without a call is not needed to understand the step.
- The ranks are a fake process group of one process, whose collectives send nothing: what is called is the same. On two
  meshes over gloo the list was compared with that of real ranks.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from peft import LoraConfig
from report import environment, write_files
from transformers import LlamaConfig, LlamaForCausalLM

import lora_parallel
from lora_parallel import ParallelConfig, build_mesh, clip_grad_norm_, parallelize
from lora_parallel.distributed.torch_private import fake_process_group

ROOT = Path(lora_parallel.__file__).parents[1]
STEPS = 3
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}

Calls = Counter[tuple[str, str]]
"""Count calls by file, relative to the repository, and function."""


def count_calls(calls: Calls, step: Any) -> None:
    """Run `step`, and count the calls of functions of the product in it."""
    package = str(ROOT / "lora_parallel")

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            code = frame.f_code
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            calls[str(Path(code.co_filename).relative_to(ROOT)), name] += 1

    set_all = getattr(threading, "setprofile_all_threads", threading.setprofile)
    set_all(profile)
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
        set_all(None)


def calls_of_a_step(dp_shard: int, tp: int, layers: int, dropout: float) -> Calls:
    """Return the calls of the last of `STEPS` steps on rank 0 of a mesh."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=layers, **SIZES))
    config = ParallelConfig(dp_shard=dp_shard, tp=tp)
    lora = LoraConfig(r=8, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    tokens = torch.randint(256, (1, 12))
    calls: Calls = Counter()
    with fake_process_group(dp_shard * tp, 0):
        parallelize(model, build_mesh(config, "cpu"), config, lora)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained)

        def step() -> None:
            model(input_ids=tokens, labels=tokens).loss.backward()
            clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(STEPS - 1):
            step()
        count_calls(calls, step)
    return calls


def markdown_table(calls: Calls) -> str:
    files: dict[str, Calls] = {}
    for (file, name), number in calls.items():
        files.setdefault(file, Counter())[file, name] = number
    lines = ["| file | calls | functions |", "|---|---|---|"]
    for file, inside in sorted(files.items()):
        named = ", ".join(f"{name} {number}" for (_, name), number in inside.most_common())
        lines.append(f"| `{file}` | {inside.total()} | {named} |")
    lines += ["", f"{len(files)} files, {calls.total()} calls"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2x2", help="dp_shard x tp")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0, help="of LoRA")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    options = parser.parse_args()
    dp_shard, tp = map(int, options.mesh.split("x"))
    calls = calls_of_a_step(dp_shard, tp, options.layers, options.dropout)
    table = markdown_table(calls)
    settings = {"mesh": options.mesh, "layers": options.layers, "dropout": options.dropout}
    record = {
        "environment": environment(),
        "options": settings,
        "calls": [[*place, number] for place, number in calls.items()],
    }
    write_files(options.output, "frames", table, record)
    print(f"{table}\n\nwritten to {options.output}")


if __name__ == "__main__":
    main()
