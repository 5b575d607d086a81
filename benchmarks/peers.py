"""The sides of each case: our model, what people write by hand, and what other libraries do on the same mesh.

- All sides start from the same seed, so their weights, adapters and losses are equal.
- `lora_B` is filled: with PEFT's zeros the gradients of `lora_A` are zero, and unequal work would
  not show in the check that precedes the timing.
- A peer gets whatever a careful user would do: the optimizer's parameters and the norm clipping
  are grouped by mesh where stock torch needs that, and each decoder layer is compiled in place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from peft import LoraConfig, get_peft_model
from sides import Side
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
ADAMW: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@dataclass(frozen=True)
class Peer:
    """Something else that people use on a mesh. `build` takes the model, the case, the device and a folder."""

    title: str
    build: Callable[[nn.Module, Case, str, str], Built]


@dataclass(frozen=True)
class Case:
    """One mesh (dp_shard x tp), and the peers that are measured on it."""

    dp_shard: int
    tp: int
    peers: tuple[Peer, ...]

    @property
    def world_size(self) -> int:
        return self.dp_shard * self.tp


@dataclass
class Built:
    """A peer's model, how it wraps an optimizer, and how it runs a backward pass."""

    model: nn.Module
    wrap_optimizer: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer
    backward: Callable[[Tensor], Any] = Tensor.backward


def join(case: Case, rank: int, rendezvous: str, threads: int, timeout: float = 120) -> str:
    """Start a case's process group as torchrun would; returns the device's type."""
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.device_count() >= case.world_size else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case.world_size, "LOCAL_WORLD_SIZE": case.world_size}
    libraries = {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ.update({key: str(value) for key, value in {**places, **libraries}.items()})
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=case.world_size,
        timeout=timedelta(seconds=timeout),
    )
    return device


def draw_batch(case: Case, hidden: int, batch: int, sequence: int, device: str) -> Tensor:
    """A batch of this process's dp rank; tp peers draw the same one. The vocabulary is 4 * hidden."""
    generator = torch.Generator().manual_seed(dist.get_rank() // case.tp)
    return torch.randint(hidden * 4, (batch, sequence), generator=generator).to(device)


def build_base(hidden: int, layers: int, head_dim: int = HEAD_DIM) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // head_dim,
            num_key_value_heads=hidden // head_dim // 2,
            vocab_size=hidden * 4,
            use_cache=False,
        )
    )


def adapt(base: nn.Module) -> nn.Module:
    """Put LoRA on all seven linear layers, with `lora_B` filled."""
    targets = [name.rpartition(".")[2] for name in COLWISE + ROWWISE]
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=targets))  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return model


def build_model(hidden: int, layers: int, head_dim: int = HEAD_DIM) -> nn.Module:
    """A Llama with LoRA, equal on every process."""
    return adapt(build_base(hidden, layers, head_dim))


def build_ours(model: nn.Module, case: Case, device: str, adamw: str, compiled: bool = False) -> Side:
    options = {"compile": True} if compiled else {}  # another commit may not have the field
    config = ParallelConfig(dp_shard=case.dp_shard, tp=case.tp, **options)
    model = parallelize(model, build_mesh(config, device_type=device), config)
    return Side(model, _optimizer(model, adamw), clip_grad_norm_, device)


def build_peer(peer: Peer, model: nn.Module, case: Case, device: str, adamw: str, compiled: bool, scratch: str) -> Side:
    if compiled:
        check_compiler(device)
    built = peer.build(model, case, device, scratch)
    if compiled:
        for block in causal_lm_of(built.model).model.layers:
            # All sides share a process and the code of their blocks; each keeps graphs of its own.
            block.compile(isolate_recompiles=True)
    optimizer = built.wrap_optimizer(_optimizer(built.model, adamw))
    return Side(built.model, optimizer, clip_by_mesh, device, built.backward)


def check_compiler(device: str) -> None:
    if device == "cpu" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        raise RuntimeError("no C++ compiler, which inductor needs on a CPU")


def _optimizer(model: nn.Module, adamw: str) -> torch.optim.Optimizer:
    # One optimizer group a mesh: foreach and fused kernels refuse a list that mixes meshes, or
    # DTensors with plain tensors. A model whose trainables share one mesh gets one group.
    trainables = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": group} for group in group_by_mesh(trainables)]
    return torch.optim.AdamW(groups, lr=1e-4, **ADAMW[adamw])


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
    """The Hugging Face model inside a PEFT model, and inside of Fabric's wrapper."""
    return getattr(model, "module", model).get_base_model()


# ---------------------------------------------------------------------- the peers


def plain_peft(model: nn.Module, case: Case, device: str, scratch: str) -> Built:
    """One process, no mesh: the model as PEFT made it."""
    return Built(model)


def shard_by_stock_styles(model: nn.Module, mesh: DeviceMesh) -> None:
    """Stock styles on `base_layer` and on the sharded LoRA factor, one by one.

    The other factor stays a plain tensor: it is replicated, and because each style reduces its own
    output (or its input's gradient), its gradient is already the full one on every rank.
    """
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


def shard_by_fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    """`fully_shard` on each decoder layer, then on the root."""
    for layer in causal_lm_of(model).model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_hand(model: nn.Module, case: Case, device: str, scratch: str) -> Built:
    mesh = init_device_mesh(device, (case.dp_shard, case.tp), mesh_dim_names=("dp_shard", "tp"))
    return Built(_sharded(model, mesh["dp_shard"], mesh["tp"]))


def lightning(model: nn.Module, case: Case, device: str, scratch: str) -> Built:
    """Stock `ModelParallelStrategy`, with a plan as in Lightning's documentation; Fabric, so that steps take turns."""

    def parallelized(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return _sharded(module, mesh["data_parallel"], mesh["tensor_parallel"])

    strategy = ModelParallelStrategy(parallelized, case.dp_shard, case.tp)  # type: ignore[arg-type]
    fabric = Fabric(accelerator=device, devices=case.world_size, strategy=strategy)
    fabric.launch()
    return Built(fabric.setup_module(model), fabric.setup_optimizers, fabric.backward)


def _sharded(model: nn.Module, dp: DeviceMesh, tp: DeviceMesh) -> nn.Module:
    if tp.size() > 1:
        shard_by_stock_styles(model, tp)
    if dp.size() > 1:
        shard_by_fsdp(model, dp)
    return model


def accelerate(model: nn.Module, case: Case, device: str, scratch: str) -> Built:
    """Accelerate's own FSDP2 wrapping, which it enters on accelerators only: hence the stand-in for `Accelerator`."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    stand_in = SimpleNamespace(
        device=torch.device(device),
        is_main_process=dist.get_rank() == 0,
        mixed_precision="no",
        parallelism_config=SimpleNamespace(fsdp_dim_names=["dp_shard"]),
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=init_device_mesh(device, (case.dp_shard,), mesh_dim_names=("dp_shard",)),
    )
    return Built(fsdp2_prepare_model(stand_in, model))


def transformers_tp(model: nn.Module, case: Case, device: str, scratch: str) -> Built:
    """The tensor parallelism of transformers itself, applied as it loads a checkpoint, and PEFT on what it returns."""
    from transformers.distributed import DistributedConfig  # not in every transformers that we support

    config = causal_lm_of(model).config
    path = f"{scratch}/base"
    if dist.get_rank() == 0:
        build_base(config.hidden_size, config.num_hidden_layers).save_pretrained(path)
    dist.barrier()
    sharded = LlamaForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=case.tp))
    return Built(adapt(sharded))


BY_HAND_FSDP = Peer("fully_shard by hand", by_hand)
LIGHTNING = Peer("Lightning ModelParallelStrategy", lightning)

CASES: dict[str, Case] = {
    "1x1": Case(1, 1, (Peer("plain PEFT", plain_peft),)),
    "1x2": Case(
        1, 2, (Peer("separate stock styles", by_hand), LIGHTNING, Peer("transformers' TP + PEFT", transformers_tp))
    ),
    "2x1": Case(2, 1, (BY_HAND_FSDP, LIGHTNING, Peer("Accelerate FSDP2 + PEFT", accelerate))),
    "2x2": Case(2, 2, (LIGHTNING,)),
}

Contestant = Callable[[], Any]


def contestants(
    case: Case, hidden: int, layers: int, device: str, adamw: str, compiled: bool, scratch: str
) -> dict[str, Contestant]:
    """How to build each side, ours first; with `compiled` each a second time with its blocks compiled."""

    def model() -> nn.Module:
        return build_model(hidden, layers).to(device)

    found: dict[str, Contestant] = {}
    for with_compile in (False, True) if compiled else (False,):
        suffix = ", compiled" if with_compile else ""
        found[f"ours{suffix}"] = partial(lambda c: build_ours(model(), case, device, adamw, c), with_compile)
        for peer in case.peers:
            found[f"{peer.title}{suffix}"] = partial(
                lambda p, c: build_peer(p, model(), case, device, adamw, c, scratch), peer, with_compile
            )
    return found
