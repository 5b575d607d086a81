"""The two sides of each case: our model, and what people write by hand for the same mesh.

- Both sides start from the same seed, so their weights, adapters and losses are equal.
- `lora_B` is filled: with PEFT's zeros the gradients of `lora_A` are zero, and unequal work would
  not show in the check that precedes the timing.
- A peer gets whatever a careful user would do: the optimizer's parameters and the norm clipping
  are grouped by mesh where stock torch needs that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

from lora_parallel import ParallelConfig, build_mesh, clip_grad_norm_, parallelize

COLWISE = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWWISE = ("self_attn.o_proj", "mlp.down_proj")
HEAD_DIM = 64
MAX_NORM = 1.0


@dataclass(frozen=True)
class Case:
    """One mesh (dp_shard x tp), and the peer that is measured on it."""

    dp_shard: int
    tp: int
    peer: str
    build_peer: Callable[[nn.Module, str], nn.Module]

    @property
    def world_size(self) -> int:
        return self.dp_shard * self.tp


@dataclass
class Side:
    """One of the two contestants: a model with its optimizer and its way to clip."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[list[nn.Parameter], float], Tensor]

    def trainables(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def forward_backward(self, tokens: Tensor) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss.detach()

    def update(self) -> Tensor:
        """Clip, step, zero; returns the norm of the gradient before clipping."""
        norm = self.clip(self.trainables(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def build_model(hidden: int, layers: int) -> nn.Module:
    """A Llama with LoRA on all seven linear layers, equal on every process."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // HEAD_DIM,
            num_key_value_heads=hidden // HEAD_DIM // 2,
            vocab_size=hidden * 4,
            use_cache=False,
        )
    )
    targets = [name.rpartition(".")[2] for name in COLWISE + ROWWISE]
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def build_ours(model: nn.Module, case: Case, device: str, optimizer_options: dict[str, Any]) -> Side:
    config = ParallelConfig(dp_shard=case.dp_shard, tp=case.tp)
    model = parallelize(model, build_mesh(config, device_type=device), config)
    return _side(model, clip_grad_norm_, optimizer_options)


def build_peer(model: nn.Module, case: Case, device: str, optimizer_options: dict[str, Any]) -> Side:
    return _side(case.build_peer(model, device), clip_by_mesh, optimizer_options)


def _side(
    model: nn.Module,
    clip: Callable[[list[nn.Parameter], float], Tensor],
    optimizer_options: dict[str, Any],
) -> Side:
    # One optimizer group a mesh: foreach and fused kernels refuse a list that mixes meshes, or
    # DTensors with plain tensors. A model whose trainables share one mesh gets one group.
    trainables = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": group} for group in group_by_mesh(trainables)]
    return Side(model, torch.optim.AdamW(groups, lr=1e-4, **optimizer_options), clip)


def group_by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def clip_by_mesh(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Norm clipping with torch's own pieces; `torch.nn.utils.clip_grad_norm_` takes one mesh only."""
    groups = group_by_mesh(parameters)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    plain = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = plain[0] if len(plain) == 1 else torch.linalg.vector_norm(torch.stack(plain))
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def causal_lm_of(model: nn.Module) -> Any:
    """The Hugging Face model inside a PEFT model."""
    return model.get_base_model()  # type: ignore[operator]


def plain_peft(model: nn.Module, device: str) -> nn.Module:
    """One process, no mesh: the model as PEFT made it."""
    return model


def separate_stock_styles(model: nn.Module, device: str) -> nn.Module:
    """Stock styles on `base_layer` and on the sharded LoRA factor, one by one.

    The other factor stays a plain tensor: it is replicated, and because each style reduces its own
    output (or its input's gradient), its gradient is already the full one on every rank.
    """
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    causal_lm = causal_lm_of(model)
    parallelize_module(
        causal_lm,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    for layer in causal_lm.model.layers:
        plan: dict[str, ParallelStyle] = {}
        for name in COLWISE:
            plan[f"{name}.base_layer"] = ColwiseParallel()
            plan[f"{name}.lora_B.default"] = ColwiseParallel()
        for name in ROWWISE:
            plan[f"{name}.base_layer"] = RowwiseParallel()
            plan[f"{name}.lora_A.default"] = RowwiseParallel()
        parallelize_module(layer, mesh, plan)
    return model


def hand_written_fsdp(model: nn.Module, device: str) -> nn.Module:
    """`fully_shard` on each decoder layer, then on the root."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),), mesh_dim_names=("dp_shard",))
    for layer in causal_lm_of(model).model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


CASES: dict[str, Case] = {
    "1x1": Case(dp_shard=1, tp=1, peer="plain PEFT", build_peer=plain_peft),
    "1x2": Case(dp_shard=1, tp=2, peer="separate stock styles", build_peer=separate_stock_styles),
    "2x1": Case(dp_shard=2, tp=1, peer="fully_shard by hand", build_peer=hand_written_fsdp),
}
