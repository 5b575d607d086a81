"""Wrap a model in FSDP2: a unit per block, one per set of tied layers in different blocks, and one for the rest."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from lora_parallel.config import ParallelConfig
from lora_parallel.distributed.mesh import axis_size, dp_mesh, dp_size, shard_size
from lora_parallel.fsdp.submodule_calls import is_at_rest
from lora_parallel.layers.layer_parameters import shared_parameters
from lora_parallel.layers.module_names import innermost

__all__ = ["check_scalars", "device_at_rest", "fsdp_blocks", "move_to_device", "shard_for_dp", "wants_fsdp"]


def wants_fsdp(mesh: DeviceMesh, config: ParallelConfig) -> bool:
    """Return True if FSDP2 has work: parameters to shard or replicate over dp, to offload, or a dtype to compute in."""
    return dp_mesh(mesh).size() > 1 or config.param_dtype is not None or config.cpu_offload


def device_at_rest(mesh: DeviceMesh, config: ParallelConfig) -> str:
    """Return the type of device that holds the parameters of FSDP2's units between two uses."""
    return "cpu" if config.cpu_offload else mesh.device_type


def move_to_device(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Move to the mesh's device what is not there yet, except the parameters that FSDP2 holds in the CPU's memory."""
    if not config.cpu_offload:
        model.to(mesh.device_type)  # FSDP2 takes note of the new parameters
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not is_at_rest(tensor):
            tensor.data = tensor.data.to(mesh.device_type)


def _offload_policy(mesh: DeviceMesh, config: ParallelConfig) -> OffloadPolicy:
    """Return FSDP2's policy, which holds for a whole unit: a block's base and adapters, or all else.

    Memory is pinned for copies that overlap with compute; without an accelerator there is nothing to pin it for.
    """
    return CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if config.cpu_offload else OffloadPolicy()


def check_scalars(model: nn.Module) -> None:
    """Check that FSDP2 can shard every parameter that trains.

    Raises:
        ValueError: A parameter without dims (a scalar) trains.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0 and parameter.requires_grad:
            raise ValueError(
                f"{name} is a scalar that trains, which FSDP2 cannot shard: freeze it (requires_grad_(False)), or give "
                "it the shape (1,)."
            )


def shard_for_dp(
    model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, config: ParallelConfig
) -> list[nn.Module]:
    """Make each block an FSDP unit, and the rest of the model another one.

    A block's base weights and adapters are in the same unit, hence in one all-gather.

    Returns:
        The layers that share a unit with layers of another block, because they share a weight.
    """
    sharding: dict[str, Any] = {
        "mesh": dp_mesh(mesh),
        "mp_policy": MixedPrecisionPolicy(param_dtype=config.param_dtype, reduce_dtype=_reduce_dtype(model, config)),
        "offload_policy": _offload_policy(mesh, config),
        "shard_placement_fn": partial(_shard_placement, shard_size(mesh)),
        # FSDP2 cannot shard a scalar. A frozen one (a temperature) stays whole on every rank.
        "ignored_params": {p for p in model.parameters() if p.dim() == 0 and not p.requires_grad},
    }
    tied = _tied_across(model, blocks)
    for layers in tied:
        fully_shard(layers, reshard_after_forward=False, **sharding)  # in use from the first of the layers to the last
    inside = [layer for layers in tied for layer in layers]
    for block in blocks:
        if block not in inside:
            fully_shard(block, reshard_after_forward=config.reshard_after_forward, **sharding)
    # The root's weights (embedding, head) are needed again as backward starts: they stay gathered until its end.
    fully_shard(model, reshard_after_forward=False, **sharding)
    if axis_size(mesh, "cp") > 1:
        # Each rank has the gradient of its tokens: over cp they are added up, over dp averaged.
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(dp_size(mesh))
                unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    return inside


def _tied_across(model: nn.Module, blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Return the sets of layers that share a weight and lie in different units; each set becomes a unit of its own.

    FSDP2 replaces the parameters of each unit by shards of its own, so that two units could not share a weight.
    """
    unit_of: dict[nn.Module, object] = {module: block for block in blocks for module in block.modules()}
    layer_of = {
        inner: layer for layer in model.modules() if isinstance(layer, BaseTunerLayer) for inner in layer.modules()
    }
    groups: list[list[nn.Module]] = []
    ties = [[layer_of.get(holder, holder) for holder, _ in places] for places in shared_parameters(model).values()]
    while apart := next((tie for tie in ties if len({id(unit_of.get(layer)) for layer in tie}) > 1), None):
        joined = [group for group in groups if any(unit_of.get(layer) is group for layer in apart)]
        groups = [group for group in groups if group not in joined]
        layers = dict.fromkeys(layer for part in (*joined, apart) for layer in part)
        inner = {module for layer in layers for module in layer.modules() if module is not layer}
        groups.append([layer for layer in layers if layer not in inner])
        unit_of.update({module: groups[-1] for layer in layers for module in layer.modules()})
    return groups


def _reduce_dtype(model: nn.Module, config: ParallelConfig) -> torch.dtype | None:
    """Return `config.reduce_dtype`, or None if gradients are at least as wide already."""
    wide = config.reduce_dtype
    computed = config.param_dtype or next((p.dtype for p in model.parameters() if p.requires_grad), None)
    if wide is None or computed is None or torch.finfo(computed).bits >= torch.finfo(wide).bits:
        return None
    return wide


def _shard_placement(dp_shard: int, parameter: nn.Parameter) -> Shard | None:
    """Return the placement over the first dim that `dp_shard` divides; None stands for dim 0, FSDP2's default.

    Sharding dim 0 of `lora_A` [r, in] with r < dp_shard would leave ranks empty. FSDP2 shards dims other than 0 only
    evenly; one that tp has split is split again. The result is None if no dim fits.
    """
    local: torch.Tensor = parameter
    if isinstance(parameter, DTensor):
        split = {placement.dim for placement in parameter.placements if isinstance(placement, Shard)}
        if any(parameter.shape[dim] % parameter.device_mesh.size() for dim in split):
            return None  # tp ranks hold slices of different sizes, and must all choose the same dim
        local = parameter.to_local()
    if local.numel() == 0 or local.dim() == 0 or local.shape[0] % dp_shard == 0:
        return None
    for dim in range(1, local.dim()):
        if local.shape[dim] % dp_shard == 0:
            return Shard(dim)
    return None


def fsdp_blocks(model: nn.Module, config: ParallelConfig) -> list[nn.Module]:
    """Return the modules that become one FSDP unit each: outermost instances of the block classes."""
    if config.block_classes == "auto":
        wanted = {name for module in model.modules() for name in (getattr(module, "_no_split_modules", None) or ())}
    else:
        wanted = set(config.block_classes)
        present = {type(module).__name__ for module in model.modules()}
        if wanted - present:
            raise ValueError(
                f"block_classes: {', '.join(sorted(wanted - present))} is no class of a module in the model; it has "
                f"{', '.join(sorted(present))}."
            )
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module is not model and type(module).__name__ in wanted and module not in inside:
            found.append(module)
            inside.update(module.modules())
    recomputes = config.activation_checkpointing and not hasattr(innermost(model), "gradient_checkpointing_enable")
    compiles = config.compile_arguments is not None
    for option, needs_blocks in (("activation_checkpointing=True", recomputes), ("compile=True", compiles)):
        if needs_blocks and not found:
            raise ValueError(f"{option}, but the model has no blocks: name their classes in block_classes=[...].")
    return found
