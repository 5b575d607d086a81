"""The oracle: what one process with plain PEFT computes, and the same on a mesh, to be compared.

`reference` knows nothing of this project: transformers, PEFT and torch only. `sharded` runs on every rank of a process
group. Both return full tensors on the CPU. Any later capability is held against this pair.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.oracle import workers
from tests.oracle.caches import copied, kept

SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# The vocabulary is no multiple of 2: vocabulary shards are uneven on every mesh.
SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "use_cache": False,
}


@copied
def causal_lm(
    family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, **sizes: Any
) -> PreTrainedModel:
    """A tiny causal LM with random weights."""
    torch.manual_seed(seed)
    settings = {**SIZES, "tie_word_embeddings": False, **sizes}
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings)).to(dtype)
    if family == "phi3":
        return Phi3ForCausalLM(Phi3Config(**settings, pad_token_id=None)).to(dtype)
    return Qwen3ForCausalLM(Qwen3Config(**settings)).to(dtype)


def lora_config(**changes: Any) -> LoraConfig:
    """LoRA on all seven linear layers, r = 3 (less than four dp ranks have rows for)."""
    settings = {"r": 3, "lora_alpha": 6, "target_modules": SEVEN, "task_type": "CAUSAL_LM", **changes}
    return LoraConfig(**settings)


def fill_adapters(model: nn.Module, seed: int = 1) -> None:
    """Give every adapter tensor random values: with B = 0 most errors are invisible."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            parameter.data.copy_(values.to(parameter.dtype))


@dataclass(frozen=True)
class Case:
    """One training run."""

    family: str = "llama"
    dtype: torch.dtype = torch.float64
    steps: int = 4
    accumulate: int = 1
    clip: float | None = None
    lora: dict[str, Any] = field(default_factory=dict, hash=False)
    sizes: dict[str, Any] = field(default_factory=dict, hash=False)
    rows: int = 8
    """Rows of the global batch, over all data-parallel ranks and accumulated microbatches."""

    adapters: bool = True
    """False: no adapters, everything trains."""

    def batches(self) -> list[Tensor]:
        """One global batch a step, token ids [rows * accumulate, 12]."""
        generator = torch.Generator().manual_seed(5)
        vocabulary = self.sizes.get("vocab_size", SIZES["vocab_size"])
        size = (self.rows * self.accumulate, 12)
        return [torch.randint(0, vocabulary, size, generator=generator) for _ in range(self.steps)]

    def model(self) -> nn.Module:
        """Base and non-zero adapters, in full."""
        if not self.adapters:
            return causal_lm(self.family, self.dtype, **self.sizes).train()
        model = get_peft_model(causal_lm(self.family, self.dtype, **self.sizes), lora_config(**self.lora))
        fill_adapters(model)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(self.dtype)
        return model.train()


@dataclass
class Run:
    """What a run computed: full tensors by PEFT's parameter names."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    adapters: dict[str, Tensor]


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU. Collective for a DTensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def half_sum_of_squares(parameter: Tensor) -> Tensor:
    """Return a loss term whose gradient is the parameter itself. Collective for a DTensor."""
    squares = parameter.square().sum()
    return 0.5 * (squares.full_tensor() if isinstance(squares, DTensor) else squares)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train; one without elements does not, though PEFT may have it so (`bias="all"`)."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.numel()}


def reference(case: Case) -> Run:
    """Plain PEFT in this process."""
    model = case.model()
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    run = Run([], [], {}, {})
    for batch in case.batches():
        optimizer.zero_grad()
        total = 0.0
        for micro in batch.chunk(case.accumulate):
            loss = model(input_ids=micro, labels=micro).loss / case.accumulate
            loss.backward()
            total += loss.item()
        if case.clip is not None:
            run.norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), case.clip).item())
        if not run.gradients:
            run.gradients = {name: full(p.grad) for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
        run.losses.append(total)
    run.adapters = {name: full(p) for name, p in parameters.items()}
    return run


def parse_mesh(text: str) -> dict[str, int]:
    """The axis sizes: "2x4" is dp_shard x tp, "2x2x2" has dp_replicate in front, "1x2cp2pp2" has cp and pp too."""
    rest, _, pp = text.partition("pp")
    plain, _, cp = rest.partition("cp")
    sizes = [int(part) for part in plain.split("x")]
    replicate, shard, tp = sizes if len(sizes) == 3 else [1, *sizes]
    more = {axis: int(size) for axis, size in (("cp", cp), ("pp", pp)) if size}
    return {"dp_replicate": replicate, "dp_shard": shard, "tp": tp, **more}


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The text that `parse_mesh` reads these sizes from."""
    more = [f"{axis}{sizes[axis]}" for axis in ("cp", "pp") if sizes.get(axis, 1) > 1]
    return "x".join(str(sizes[axis]) for axis in ("dp_replicate", "dp_shard", "tp")) + "".join(more)


def dp_of(text: str) -> int:
    """Return the number of batches that a mesh computes at a time."""
    sizes = parse_mesh(text)
    return sizes["dp_replicate"] * sizes["dp_shard"]


def ranks_of(text: str) -> int:
    """How many processes a mesh takes."""
    return prod(parse_mesh(text).values())


@kept
def mesh_of(text: str) -> DeviceMesh:
    """The mesh of these sizes; each makes process groups, so one for all tests of a rank."""
    from lora_parallel import ParallelConfig, build_mesh

    return build_mesh(ParallelConfig(**parse_mesh(text), timeout_seconds=workers.COLLECTIVE_TIMEOUT), "cpu")


def on_mesh(text: str, **config: Any) -> tuple[DeviceMesh, Any]:
    """The mesh of these sizes and a `ParallelConfig` for it: what `parallelize` wants."""
    from lora_parallel import ParallelConfig

    return mesh_of(text), ParallelConfig(**parse_mesh(text), timeout_seconds=workers.COLLECTIVE_TIMEOUT, **config)


def over_stages(mine: dict[str, Any], text: str) -> dict[str, Any]:
    """What the pipeline stages of a mesh hold together; no two of them may hold the same. Collective with a pp axis."""
    if "pp" not in text:
        return mine
    mesh = mesh_of(text)
    everyone: list[Any] = [None] * mesh["pp"].size()
    dist.all_gather_object(everyone, mine, group=mesh.get_group("pp"))
    merged: dict[str, Any] = {}
    for theirs in everyone:
        assert not merged.keys() & theirs.keys()
        merged |= theirs
    return merged


def sharded(case: Case, mesh_text: str, **config: Any) -> Run:
    """The same on a mesh; on every rank."""
    from lora_parallel import clip_grad_norm_, no_sync, parallelize
    from lora_parallel.distributed.mesh import dp_rank, dp_size

    mesh, settings = on_mesh(mesh_text, **config)
    model = parallelize(case.model(), mesh, settings)
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    run = Run([], [], {}, {})
    for batch in case.batches():
        optimizer.zero_grad()
        total = 0.0
        micros = batch.chunk(case.accumulate)
        for index, micro in enumerate(micros):
            mine = micro.chunk(dp_size(mesh))[dp_rank(mesh)]
            last = index == len(micros) - 1
            with contextlib.nullcontext() if last else no_sync(model):
                loss = model(input_ids=mine, labels=mine).loss / case.accumulate
                loss.backward()
            total += loss.item()
        if case.clip is not None:
            run.norms.append(clip_grad_norm_(parameters.values(), case.clip).item())
        if not run.gradients:
            run.gradients = {name: full(p.grad) for name, p in parameters.items() if p.grad is not None}
        optimizer.step()
        mean = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(mean)
        run.losses.append(mean.item() / dist.get_world_size())
    run.adapters = {name: full(p) for name, p in parameters.items()}
    return run


def sharded_many(cases: list[tuple[Case, str]]) -> list[Run]:
    """Several runs in one process group."""
    return [sharded(case, mesh) for case, mesh in cases]


ROUNDING = 16
"""How many units of rounding of the largest tensor say nothing: the order of a sum, which processors choose, is worth
that much.
"""


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor], rounding_counts: bool = False) -> float:
    """The largest relative error of a tensor, by norm. Both sides must have the same keys.

    An error that is within the rounding of the largest tensor is none: a gradient that is zero in exact arithmetic is
    what the processor made of the cancelling terms, and has no digit that two processors share. To be told, in a table,
    it counts, but for tensors that are nothing more themselves. For values that must be equal bit by bit there is
    `differing`.
    """
    assert got.keys() == want.keys(), sorted(got.keys() ^ want.keys())[:4]
    scales = {name: tensor.double().norm().item() for name, tensor in want.items()}
    largest = max(scales.values(), default=0.0)
    errors = [0.0]
    for name, tensor in want.items():
        assert tensor.shape == got[name].shape, (name, tensor.shape, got[name].shape)
        error = (got[name].double() - tensor.double()).norm().item()
        rounding = ROUNDING * torch.finfo(tensor.dtype).eps * largest
        if error <= rounding and not (rounding_counts and scales[name] > 1000 * rounding):
            continue
        errors.append(error / scales[name] if scales[name] else float("inf"))
    return torch.tensor(errors, dtype=torch.float64).max().item()  # NaN, if any is


def differing(got: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that are not equal bit by bit, or that one side lacks."""
    shared = got.keys() & want.keys()
    unequal = {name for name in shared if got[name].shape != want[name].shape or not torch.equal(got[name], want[name])}
    return sorted((got.keys() ^ want.keys()) | unequal)
