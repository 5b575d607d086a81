"""Runs whose memory is predicted from a config and measured on ranks: kinds of training, and meshes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, Qwen3MoeConfig

from lora_parallel import ParallelConfig, build_mesh, meta_init, parallelize
from lora_parallel.cost.memory_plan import plan_memory
from lora_parallel.cost.mesh_cost import MeshCost
from lora_parallel.distributed.dtensors import local

RANKS, ROWS, TOKENS, STEPS = 4, 2, 256, 3
LLAMA = LlamaConfig(
    **{"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 4096},
    **{"num_attention_heads": 8, "num_key_value_heads": 4},
)
MIXTURE = Qwen3MoeConfig(
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 128, "num_experts": 8},
    **{"num_experts_per_tok": 2, "head_dim": 32},
)
FOUR_BITS = {
    **{"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    **{"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True},
}
LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclass(frozen=True)
class Run:
    """A kind of training; picklable."""

    config: Any
    lora: bool = True
    dtype: str = "bfloat16"
    quantization: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def parallel(self, mesh: dict[str, Any]) -> ParallelConfig:
        return ParallelConfig(require_adapters=self.lora, **{**self.options, **mesh})

    def predicted(self, mesh: dict[str, Any], ranks: int = RANKS) -> MeshCost:
        config = self.parallel(mesh)
        batch = ROWS * config.pp_microbatches * ranks // (config.pp * config.cp * config.tp)
        plan = plan_memory(
            self.config,
            config,
            gpus=ranks,
            sequence_length=TOKENS,
            batch_size=batch,
            rows=ROWS,
            lora_config=LORA if self.lora else None,
            full=not self.lora,
            quantization_config=self.quantization,
            dtype=getattr(torch, self.dtype),
            progress=False,
        )
        return plan.meshes[0]


KINDS = {
    "LoRA": Run(LLAMA),
    "LoRA, float32": Run(LLAMA, dtype="float32"),
    "LoRA, recomputed": Run(LLAMA, options={"activation_checkpointing": True}),
    "LoRA, base whole": Run(LLAMA, options={"shard_base": False}),
    "full": Run(LLAMA, lora=False),
    "QLoRA": Run(LLAMA, quantization=FOUR_BITS),
    "experts": Run(MIXTURE),
}
MESHES: dict[str, dict[str, Any]] = {
    "4x1": {"tp": 1},
    "2x2": {"tp": 2},
    "1x4": {"tp": 4},
    "1x2cp2": {"tp": 2, "cp": 2},
    "2x1pp2": {"pp": 2, "pp_microbatches": 4},
    "1x2pp2": {"pp": 2, "tp": 2, "pp_microbatches": 4},
}


def measure(run: Run, checkpoint: Path, mesh: dict[str, Any]) -> dict[str, float]:
    """On a rank: bytes of parameters and states, and the most that a step after the first one adds."""
    parallel = run.parallel(mesh)
    with meta_init():
        given = BitsAndBytesConfig(**run.quantization) if run.quantization else None
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=getattr(torch, run.dtype), quantization_config=given, use_cache=False
        )
        if run.lora:
            model = get_peft_model(model, deepcopy(LORA))  # PEFT writes the layers that it finds into it
    parallelize(model, build_mesh(parallel, "cpu"), parallel)
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(
        run.config.vocab_size, (ROWS * parallel.pp_microbatches, TOKENS), generator=torch.Generator().manual_seed(0)
    )

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    peaks = []
    for _ in range(STEPS):  # the smallest: a thread of gloo may hold what it has sent for a moment longer
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
        peaks.append(_peak(profiler))
    states = [each for state in optimizer.state.values() for each in state.values()]
    held = sum(local(each).numel() * each.element_size() for each in (*model.parameters(), *states))
    return {"held": held, "step": min(peaks)}


def _peak(profiler: Any) -> int:
    """The most bytes that torch's allocator had given out, above the fewest: what a step leaves, the next one frees."""
    most = least = given_out = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            given_out += event.nbytes()
            most, least = max(most, given_out), min(least, given_out)
    return most - least
