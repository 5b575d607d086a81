"""The tables of docs/results/plans.md: `plan_memory` for models of four sizes on four numbers of GPUs.

    python -m benchmarks.plans                   # some minutes a model; writes into docs/results/plans.md
    python -m benchmarks.plans --models 8B       # a look, without writing

Models are described by the sizes that their authors publish; no weights and no config are downloaded.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("PYTHONWARNINGS", "ignore")

from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from accelerate_plugin.check_and_plan import cost_text
from benchmarks.tables import RESULTS, dated, write_between
from lora_parallel import MemoryPlan, plan_memory

PAGE = RESULTS / "plans.md"
MARK = "<!-- written by make table NAME=plan -->"
CLUSTERS = (1, 4, 8, 64)
BATCH, TOKENS = 64, 4096


def llama(hidden: int, intermediate: int, layers: int, heads: int) -> PretrainedConfig:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
    return LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256)


MODELS: dict[str, tuple[str, PretrainedConfig]] = {
    "8B": ("Llama 3.1 8B", llama(4096, 14336, 32, 32)),
    "70B": ("Llama 3.1 70B", llama(8192, 28672, 80, 64)),
    "405B": ("Llama 3.1 405B", llama(16384, 53248, 126, 128)),
    "30B-A3B": (
        "Qwen3 30B-A3B, a mixture of 128 experts, adapters on attention",
        Qwen3MoeConfig(
            **{"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48},
            **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936},
            **{"num_experts": 128, "num_experts_per_tok": 8},
        ),
    ),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def section(name: str) -> str:
    """Return a model's table: the recommended mesh of each cluster, and what holds on it."""
    from peft import LoraConfig

    title, config = MODELS[name]
    targets = ATTENTION if "experts" in title else "all-linear"
    adapter = LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM")
    plans = [
        plan_memory(config, gpus=gpus, sequence_length=TOKENS, batch_size=BATCH, lora_config=adapter)
        for gpus in CLUSTERS
    ]
    lines = [
        f"## {title}",
        "",
        "| GPUs | recommended | weights | trained | blocks | logits | total GiB | sent in a step, GiB | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(row(plan) for plan in plans)])


def row(plan: MemoryPlan) -> str:
    best = plan.recommended
    if best is None:
        possible = [each.total for each in plan.meshes if not each.refused]
        least = f"the smallest mesh needs {min(possible) / 2**30:.0f} GiB" if possible else "no mesh is possible"
        return f"| {plan.gpus} | none: {least} | | | | | | | |"
    return f"| {plan.gpus} | {' | '.join(cost_text(best))} |"


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    text = "\n\n".join(section(name) for name in args.models)
    print(text)
    if args.models == list(MODELS):
        total = f"{len(args.models)} models on {len(CLUSTERS)} numbers of GPUs"
        write_between(PAGE, MARK, f"{dated(total)}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
