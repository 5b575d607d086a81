"""Count what LoRA adds to one block: kernels, bytes and what is kept for backward, of the base alone, PEFT and ours.

    python benchmarks/bytes.py                                  # one Llama-3-8B block, 4,096 tokens: ten seconds
    python benchmarks/bytes.py --hidden 256 --intermediate 512 --tokens 64

- One block takes a forward and a backward on meta, without values; attention is replaced by a sum. Rank 0 of each mesh
  runs among ranks that are not there; collectives are left out, and what FSDP2 copies for them.
- A kernel is an operator that torch dispatches, other than views and allocations. It counts the bytes of all tensors
  that it touches. A tensor that it changes in place counts once, and twice in the column "moved". The operators
  inside of autograd functions are counted. LoRA dropout, one kernel on a GPU, has a table of its own (`dropout.py`).
- A kernel is large if a tensor of it has an element for each token and feature of a layer. LoRA's are those beyond the
  base's.
- Under autocast, which knows no meta device, the tensors are torch's fake ones of a CPU: on one rank.
- Nothing is timed, and the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from meters import Kernels, distinct_bytes
from peft import LoraConfig, get_peft_model
from report import environment, write_files
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lora_parallel import ParallelConfig, build_mesh, meta_init, parallelize
from lora_parallel.cost.simulated_step import simulated_step
from lora_parallel.distributed.torch_private import fake_process_group, parameters_on_meta
from lora_parallel.replaced import replaced_entries

MESHES = {"1x1": {}, "1x2": {"tp": 2}, "2x2": {"tp": 2, "dp_shard": 2}}
BASE, PEFT, OURS = "the base alone", "PEFT", "ours"
AUTOCAST = "float32, autocast"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, AUTOCAST: torch.float32}
NOT_COUNTED = {"c10d", "_c10d_functional", "fsdp", "prim"}
"""Namespaces of collectives, of what FSDP2 copies for them, and of questions to fake tensors."""

GB = 1e9


@dataclass(frozen=True)
class Cost:
    """Hold what one forward and backward of a block takes."""

    kernels: int
    large: int
    bytes: int
    """Count the bytes of the tensors that each kernel touches, once where it changes a tensor in place."""

    moved: int
    """Count the same bytes, twice where a tensor is changed in place, because it is read and written."""

    saved: int
    """Bytes of the tensors that autograd keeps, parameters left out."""


class BlockKernels(Kernels):
    """Count too the bytes of the different tensors of each kernel, and the kernels with a tensor of `large` or more."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self._least = large
        self.large = self.touched = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in NOT_COUNTED:
            return func(*args, **(kwargs or {}))
        before = self.count
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.count > before:
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)}.values()
            self.large += any(tensor.numel() >= self._least for tensor in tensors)
            self.touched += sum(map(distinct_bytes, tensors))
        return result


def _no_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    groups = module.num_key_value_groups
    return (query + key.repeat_interleave(groups, 1) + value.repeat_interleave(groups, 1)).transpose(1, 2), None


def adapted(config: LlamaConfig, adapters: torch.dtype | None) -> nn.Module:
    """Return a model of one block in bfloat16, on meta; with LoRA on its linear layers, unless `adapters` is None."""
    with meta_init():
        model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    if adapters is None:
        return model.requires_grad_(False)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, low_cpu_mem_usage=True)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapters)
    return model.train()


def fake(tensor: Tensor) -> Tensor:
    """Return a tensor without values that is on the CPU to autocast, which does nothing on meta."""
    return FakeTensor(_MODE, tensor.detach(), torch.device("cpu"))


_MODE = FakeTensorMode(allow_non_fake_inputs=True)


def fake_parameters(model: nn.Module) -> None:
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(fake(parameter), parameter.requires_grad)


def cost_of(model: Any, config: LlamaConfig, tokens: int, tp: int, autocast: bool) -> Cost:
    """Count a forward and a backward of the model's block."""
    block = model.get_submodule(
        "base_model.model.model.layers.0" if hasattr(model, "peft_config") else "model.layers.0"
    )
    width = config.hidden_size // config.num_attention_heads
    narrow = width * config.num_key_value_heads // tp  # features of the smallest output
    x = torch.empty(1, tokens, config.hidden_size, dtype=torch.bfloat16, device="meta")
    position = torch.empty(1, tokens, width, dtype=torch.bfloat16, device="meta")
    if autocast:
        fake_parameters(model)
        x, position = fake(x), fake(position)
    x.requires_grad_()
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[Any, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and tensor.untyped_storage()._cdata not in parameters:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    counted = BlockKernels(tokens * narrow)
    with _MODE if autocast else simulated_step():
        with saving, counted, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = block(x, position_embeddings=(position, position))
        with counted:
            y.sum().backward()
    saved = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return Cost(counted.count, counted.large, counted.touched, counted.bytes, saved)


def measure(sizes: dict[str, int], tokens: int) -> Iterator[tuple[str, str, str, Cost]]:
    """Yield mesh, side, dtype of the adapters, and what a block takes."""
    config = LlamaConfig(num_hidden_layers=1, vocab_size=128, use_cache=False, **sizes)
    with replaced_entries([(ALL_ATTENTION_FUNCTIONS, "sdpa", _no_attention)]):
        for mesh, axes in MESHES.items():
            ranks = prod(axes.values())
            rows: list[tuple[str, str, Any]] = [(BASE, "", None)]
            names = [name for name in PRECISIONS if name != AUTOCAST or ranks == 1]
            rows += [(side, name, PRECISIONS[name]) for name in names for side in (PEFT, OURS)]
            for side, name, dtype in rows:
                settings = ParallelConfig(**axes, fused=side == OURS, require_adapters=side != BASE)
                model = adapted(config, dtype)
                with fake_process_group(ranks, 0), parameters_on_meta():
                    parallelize(model, build_mesh(settings, "cpu"), settings, materialize=False)
                    yield mesh, side, name, cost_of(model, config, tokens, settings.tp, name == AUTOCAST)


def table_of(costs: list[tuple[str, str, str, Cost]]) -> str:
    lines = [
        "| mesh | adapters | side | kernels | GB | of it LoRA | LoRA, moved | large kernels of LoRA | saved, GB |",
        f"|{'---|' * 9}",
    ]
    for mesh, side, name, cost in costs:
        if side == BASE:
            base = cost
        more = [""] * 3
        if side != BASE:
            more = [f"{(cost.bytes - base.bytes) / GB:.2f}", f"{(cost.moved - base.moved) / GB:.2f}"]
            more.append(f"{cost.large - base.large}")
        figures = (f"{cost.kernels}", f"{cost.bytes / GB:.1f}", *more, f"{cost.saved / GB:.2f}")
        lines.append(f"| {mesh} | {name} | {side} | {' | '.join(figures)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--key_value_heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    options = parser.parse_args()
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": options.intermediate,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.key_value_heads,
    }
    costs = [*measure(sizes, options.tokens)]
    table = table_of(costs)
    rows = [{"mesh": mesh, "side": side, "adapters": name, **vars(cost)} for mesh, side, name, cost in costs]
    settings = {**sizes, "tokens": options.tokens}
    write_files(options.output, "bytes", table, {"environment": environment(), "options": settings, "costs": rows})
    print(f"{table}\n\nwritten to {options.output}")


if __name__ == "__main__":
    main()
