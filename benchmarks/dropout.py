"""Count what LoRA dropout costs: kernels and bytes, forward and backward, against torch's own dropout.

    python benchmarks/dropout.py                                # Llama-3-8B's widths at 4,096 tokens: 15 seconds
    python benchmarks/dropout.py --features 64 128 --tokens 32

- A LoRA linear layer in bfloat16 takes a forward and a backward with `lora_dropout` 0.05 and with 0; the difference is
  what dropout costs. Ours is parallelized on a mesh of one rank.
- A kernel is an operator that torch dispatches and that is neither a view nor an allocation; its bytes are those of the
  tensors that it reads and writes.
- `nn.Dropout` is several operators on a CPU and one on a GPU (`native_dropout`): both are in the table.
- The total is that of a Llama with LoRA on all seven linear layers of 32 blocks.
- Nothing is timed, and the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from meters import Kernels
from peft import LoraConfig, get_peft_model
from report import environment, write_files
from torch import Tensor, nn

from lora_parallel import ParallelConfig, build_mesh, parallelize

P = 0.05
BLOCKS, HIDDEN_LAYERS, MLP_LAYERS = 32, 6, 1  # of Llama-3-8B: a block's linear layers by the width of their input
OURS, PEFT, FUSED = "ours", "plain PEFT: `nn.Dropout` on a CPU", "torch's fused dropout, as on a GPU"
MIB, GIB = 2**20, 2**30

Costs = dict[str, np.ndarray]
"""Map each side to its kernels and bytes, int [2 (forward, backward), 2 (kernels, bytes)]."""


def adapted(features: int, p: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(features, 16, bias=False, dtype=torch.bfloat16))
    lora = LoraConfig(r=8, target_modules=["0"], lora_dropout=p, init_lora_weights=False)
    return get_peft_model(model, lora, autocast_adapter_dtype=False).train()


def parallelized(features: int, p: float) -> nn.Module:
    config = ParallelConfig()
    return parallelize(adapted(features, p), build_mesh(config, "cpu"), config)


def cost_of(call: Callable[[Tensor], Tensor], features: int, tokens: int, drops: bool) -> np.ndarray:
    """Count a forward and a backward at an input [1, tokens, features], after a first call that may prepare something.

    Raises:
        RuntimeError: Two forwards give the same though elements are dropped, or not the same though none are.
    """
    x = torch.randn(1, tokens, features).to(torch.bfloat16).requires_grad_()
    first = call(x).detach()
    with Kernels() as forward:
        y = call(x)
    if torch.equal(first, y) == drops:
        raise RuntimeError(f"two forwards with{'' if drops else 'out'} dropout are {'equal' if drops else 'not equal'}")
    grad = torch.ones_like(y)
    with Kernels() as backward:
        y.backward(grad)
    return np.array([[forward.count, forward.bytes], [backward.count, backward.bytes]])


def measure(features: int, tokens: int) -> Costs:
    costs = {}
    for side, build in ((OURS, parallelized), (PEFT, adapted)):
        with_dropout = cost_of(build(features, P), features, tokens, drops=True)
        costs[side] = with_dropout - cost_of(build(features, 0.0), features, tokens, drops=False)
    costs[FUSED] = cost_of(lambda x: torch.native_dropout(x, P, True)[0], features, tokens, drops=True)
    return costs


def table_of(title: str, rows: dict[str, Costs], unit: int) -> str:
    name = {MIB: "MiB", GIB: "GiB"}[unit]
    columns = [each for phase in ("forward", "backward") for each in (f"kernels {phase}", f"{name} {phase} (/ fused)")]
    lines = [f"| {title} | dropout | {' | '.join(columns)} |", f"|{'---|' * 6}"]
    for row, costs in rows.items():
        for side, cost in costs.items():
            cells = [
                f"{count:,} | {size / unit:,.1f} ({size / fused:.1f})"
                for (count, size), (_, fused) in zip(cost, costs[FUSED], strict=True)
            ]
            lines.append(f"| {row} | {side} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    widths = ("HIDDEN", "MLP")
    parser.add_argument("--features", nargs=2, type=int, default=[4096, 14336], metavar=widths, help="of the inputs")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    options = parser.parse_args()
    torch.manual_seed(0)
    hidden, mlp = (measure(features, options.tokens) for features in options.features)
    model = {side: BLOCKS * (HIDDEN_LAYERS * hidden[side] + MLP_LAYERS * mlp[side]) for side in hidden}
    layers = {f"{features:,} features": costs for features, costs in zip(options.features, (hidden, mlp), strict=True)}
    total = {f"{BLOCKS} blocks of {HIDDEN_LAYERS} + {MLP_LAYERS} layers": model}
    title = f"{options.tokens:,} tokens"
    table = f"{table_of(title, layers, MIB)}\n\n{table_of(title, total, GIB)}"
    costs = {row: {side: cost.tolist() for side, cost in sides.items()} for row, sides in (layers | total).items()}
    settings = {"features": options.features, "tokens": options.tokens, "p": P}
    write_files(options.output, "dropout", table, {"environment": environment(), "options": settings, "costs": costs})
    print(f"{table}\n\nwritten to {options.output}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
