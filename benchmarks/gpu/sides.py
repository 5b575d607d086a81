"""The models that are timed: ours and what people would take instead, on one frozen base where there is one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from peers import CASES, by_hand, causal_lm_of, clip_by_mesh, group_by_mesh
from peft import LoraConfig, get_peft_model
from sides import Side
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.gpu.outcomes import NotInstalled, NotSupported
from benchmarks.gpu.steps import OURS
from benchmarks.gpu.training import place
from lora_parallel import clip_grad_norm_, parallelize
from tests.oracle import SEVEN, parse_mesh

Shape = Mapping[str, int]


def bare(shape: Shape, layers: int, device: str) -> nn.Module:
    """A Llama in bf16 with random weights, made on the device; equal on every rank."""
    config = LlamaConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=layers,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=shape["sequence"],
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def twin(base: nn.Module) -> nn.Module:
    """Another model on the very same parameters: a frozen base that several sides share."""
    return copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})


def adapted(base: nn.Module, r: int) -> nn.Module:
    """With PEFT's adapters on all seven linear layers, in float32 as PEFT makes them; B is filled."""
    model = get_peft_model(base, LoraConfig(r=r, lora_alpha=2 * r, target_modules=SEVEN, task_type="CAUSAL_LM"))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:  # drawn on the CPU: the same on any device
            values = torch.randn(parameter.shape, generator=generator) * (0.02 if "lora_B" in name else 0.01)
            parameter.data.copy_(values)
    return model.train()


def sides(
    base: Callable[[], nn.Module],
    mesh: str,
    ours: Sequence[str],
    peers: Sequence[str],
    r: int,
    device: str,
    backend: str,
    autocast: bool,
) -> Iterator[tuple[str, Side | str]]:
    """Yield the name of each side with the side, or with the reason why it is refused or not installed.

    Args:
        base: Gives each side its base.
        mesh: dp_shard x tp.
        ours: Names in `steps.OURS`.
        peers: Names in `steps.PEERS`, or the peer of `benchmarks.peers` on this mesh.
        r: Of the adapters.
        device: Its type.
        backend: Of `torch.compile`, for the peers.
        autocast: Run forwards under `torch.autocast` in bfloat16.
    """
    for name in ours:
        options = OURS[name]
        if "shard_base" in options and parse_mesh(mesh)["dp_shard"] == 1:
            continue
        try:
            where, config = place(mesh, device, options)
        except NotSupported as refusal:
            yield name, f"not supported: {refusal}"
            continue
        yield name, _side(parallelize(adapted(base(), r), where, config), clip_grad_norm_, device, autocast)
    for name in peers:
        try:
            yield name, _side(_peer(name, mesh, base(), r, device, backend), clip_by_mesh, device, autocast)
        except NotInstalled as missing:
            yield name, f"not installed: {missing}"


def _side(model: nn.Module, clip: Callable[[list[nn.Parameter], float], Tensor], device: str, autocast: bool) -> Side:
    if autocast:  # as Accelerate has it: of the forward alone
        model.forward = torch.autocast(device, torch.bfloat16)(model.forward)
    groups: Any = [{"params": each} for each in group_by_mesh([p for p in model.parameters() if p.requires_grad])]
    return Side(model, torch.optim.AdamW(groups, lr=1e-4, fused=device == "cuda"), clip, device)


def _peer(name: str, mesh: str, base: nn.Module, r: int, device: str, backend: str) -> nn.Module:
    if name in _PREPARED:
        _PREPARED[name]()(base)
    model = adapted(base, r)
    if name == "PEFT + torch.compile":
        for layer in causal_lm_of(model).model.layers:  # block by block, as torch's guide to compile time has it
            layer.compile(backend=backend)
    elif name == "Unsloth's fused LoRA":
        _fuse(model)
    elif mesh in CASES and name in (peer.title for peer in CASES[mesh].peers) and mesh != "1x1":
        return by_hand(model, CASES[mesh], device, "").model
    return model


def _liger() -> Callable[[nn.Module], None]:
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    except Exception as error:
        raise NotInstalled(f"liger-kernel cannot be imported: {error}") from error
    # Its rotary kernel would replace transformers' own for every side.
    return lambda base: apply_liger_kernel_to_llama(rope=False, model=base)


def _unsloth() -> Callable[[nn.Module], None]:
    try:
        from unsloth.kernels import apply_lora_mlp_swiglu  # noqa: F401
    except Exception as error:  # it raises what it likes where it does not like the machine
        raise NotInstalled(f"unsloth cannot be imported: {error}") from error
    return lambda base: None


def _fuse(model: nn.Module) -> None:
    """Unsloth's fused MLP with LoRA in each layer; its fused q, k, v want an attention of its own."""
    from unsloth.kernels import apply_lora_mlp_swiglu

    for layer in causal_lm_of(model).model.layers:
        layer.mlp.forward = MethodType(apply_lora_mlp_swiglu, layer.mlp)


_PREPARED: dict[str, Callable[[], Callable[[nn.Module], None]]] = {"Liger": _liger, "Unsloth's fused LoRA": _unsloth}
"""Peers that need a package: a function that imports it, and gives what is done to the base before the adapters."""
