"""A few steps of a small model, by plain PEFT on one device or sharded over a mesh, in one of four precisions.

The bounds:

- The reference is plain PEFT in float64 on the same device, with the very values that the precision stores.
- In float64 errors are rounding. In a narrower precision they are judged by those of plain PEFT in that precision: ours
  may be `AS_PLAIN` times as far from the reference, for sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.outcomes import NotSupported
from lora_parallel import ParallelConfig, build_mesh, clip_grad_norm_, parallelize
from lora_parallel.distributed.mesh import merged_over_stages
from lora_parallel.integration import dp_rank, dp_size
from tests.oracle import SEVEN, Run, parse_mesh, relative_error, trained

AS_PLAIN = 2.0
TELLING = 0.1
"""Largest error of plain PEFT by which ours can still be judged: a gradient that lacks a part is further away."""

ROWS, TOKENS, STEPS, CLIP = 8, 16, 3, 0.5
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "vocab_size": 1031,  # no multiple of 2: uneven shards
    "max_position_embeddings": TOKENS,
    "use_cache": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Precision:
    """The dtypes of one way to train."""

    base: torch.dtype
    adapters: torch.dtype
    computed: torch.dtype | None = None
    """`param_dtype`: what FSDP2 casts to; plain PEFT is compared in this dtype throughout."""

    gradients: float = 0.0
    """Bound of the gradients' error where plain PEFT's own error gives none, or a smaller one."""

    adapters_after: float = float("inf")
    losses: float = 1e-2


PRECISIONS = {
    "float64": Precision(torch.float64, torch.float64, None, 1e-12, 1e-10, 1e-6),
    "float32": Precision(torch.float32, torch.float32, None, 1e-5, 1e-3, 1e-5),
    "bf16": Precision(torch.bfloat16, torch.float32),
    "bf16-mixed": Precision(torch.float32, torch.float32, torch.bfloat16),
}


class UnprovenConfig(ParallelConfig):
    """A config that takes cpu_offload, which `ParallelConfig` refuses until it has run over NCCL: here it does."""

    REFUSED: ClassVar = {name: why for name, why in ParallelConfig.REFUSED.items() if name != "cpu_offload"}


def place(mesh_text: str, device: str, options: dict[str, Any]) -> tuple[DeviceMesh, ParallelConfig]:
    """The mesh and the config for `parallelize`.

    Raises:
        NotSupported: `ParallelConfig` refuses the options.
    """
    sizes: dict[str, Any] = {**parse_mesh(mesh_text), "timeout_seconds": 120}
    UnprovenConfig(**sizes)  # what is wrong with these is no refusal
    try:
        config = UnprovenConfig(**sizes, **options)
    except (TypeError, ValueError) as refusal:
        raise NotSupported(str(refusal)) from refusal
    return build_mesh(config, device), config


def llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def adapted(base: nn.Module, **lora: Any) -> nn.Module:
    """In float32 on the CPU, where every machine draws the same values; B is filled.

    It is small: the rounding of a narrow dtype must stay rounding, which with large random adapters it does not.
    """
    settings = {"r": 8, "lora_alpha": 16, "target_modules": SEVEN, "task_type": "CAUSAL_LM", **lora}
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model.train()


def cast(model: nn.Module, precision: Precision, device: str, dtype: torch.dtype | None = None) -> nn.Module:
    """The values as the precision stores them, then in one dtype throughout if there is one; on the device."""
    for name, parameter in model.named_parameters():
        stored = precision.adapters if "lora_" in name else precision.base
        parameter.data = parameter.data.to(stored).to(dtype or stored)
    return model.to(device)


def batches(vocabulary: int = SIZES["vocab_size"]) -> list[Tensor]:
    """One global batch a step, token ids [rows, tokens]."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(vocabulary, (ROWS, TOKENS), generator=generator) for _ in range(STEPS)]


def train(
    model: nn.Module,
    device: str,
    clip: Callable[[list[nn.Parameter], float], Tensor] = torch.nn.utils.clip_grad_norm_,
    share: int = 0,
    shares: int = 1,
) -> Run:
    """Take the steps on a share of each batch; what is found is in full, losses are those of the whole batch."""
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    run = Run([], [], {}, {})
    for batch in batches():
        optimizer.zero_grad()
        mine = batch.chunk(shares)[share].to(device)
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        if not run.gradients:
            run.gradients = {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None}
        run.norms.append(clip(list(parameters.values()), CLIP).item())
        optimizer.step()
        mean = loss.detach().double()
        if shares > 1:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        run.losses.append(mean.item())
    run.adapters = {name: whole(p) for name, p in parameters.items()}
    return run


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU. Collective for a DTensor, whose part may be on the CPU while its group is NCCL's."""
    held = tensor.detach()
    if not isinstance(held, DTensor):
        return held.cpu().clone()
    part = held.to_local().to(held.device_mesh.device_type)
    sent = DTensor.from_local(
        part, held.device_mesh, held.placements, run_check=False, shape=held.shape, stride=held.stride()
    )
    return sent.full_tensor().cpu().clone()


def apart(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor, rounding included."""
    return relative_error(got, want, rounding_counts=True)


def sharded(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> Run:
    """The same through `parallelize`."""
    model = parallelize(model, mesh, config)
    run = train(model, mesh.device_type, clip_grad_norm_, dp_rank(mesh), dp_size(mesh))
    run.gradients = merged_over_stages(run.gradients, mesh)
    run.adapters = merged_over_stages(run.adapters, mesh)
    return run


def judged(got: Run, plain: Run, want: Run, precision: Precision) -> dict[str, Any]:
    """The errors of ours with their bounds, and the gradients' error of plain PEFT in the same precision."""
    own = apart(plain.gradients, want.gradients)
    return {
        "errors": {
            "gradients": [apart(got.gradients, want.gradients), max(precision.gradients, AS_PLAIN * own)],
            "losses": [_differ(got.losses, want.losses), precision.losses],
            "first norm": [_differ(got.norms[:1], want.norms[:1]), max(precision.gradients, AS_PLAIN * own)],
            **(
                {"adapters": [apart(got.adapters, want.adapters), precision.adapters_after]}
                if precision.adapters_after < float("inf")
                else {}
            ),
            "plain PEFT itself": [own, TELLING],
        },
        "plain PEFT": own,
    }


def _differ(got: list[float], want: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(got, want, strict=True))
