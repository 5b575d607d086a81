"""Make a layer tensor parallel in place: place its tensors over tp as its style says, and run its forward on them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial as partial_of
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from transformers.pytorch_utils import Conv1D

from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.adapters.peft_private import refuse_merge, refuse_unload, sum_weight_norm
from lora_parallel.distributed.collectives import all_reduce
from lora_parallel.distributed.dtensors import sharded_as
from lora_parallel.distributed.gradients import Gradients
from lora_parallel.distributed.torch_private import local_region
from lora_parallel.layers.layer_parameters import LayerTensor, base_of, layer_tensors
from lora_parallel.layers.linear_classes import features_dim
from lora_parallel.layers.styles import RowPartition, Style, set_partition
from lora_parallel.lazy.tracking import rearrange_lazy
from lora_parallel.state import Setup
from lora_parallel.tp.context import TPContext
from lora_parallel.tp.experts import ExpertSharing, adapter_cuts
from lora_parallel.tp.layer import Rows, TPLayer, partition_in_layer, placement_of, set_tp_layer


def apply_style(
    name: str,
    module: nn.Module,
    style: Style,
    context: TPContext,
    partition: RowPartition | None = None,
    cuts: Mapping[str, tuple[int, RowPartition]] | None = None,
    sharing: ExpertSharing | None = None,
) -> list[tuple[nn.Module, str]]:
    """Make `module` tensor parallel in place; return the holder and name of each parameter with partial gradients."""
    # `partition`: the output features of each rank, if not one chunk a rank. `cuts`: the dim and rows of each rank, by
    # name, of parameters that are cut although `style` leaves the layer whole.
    base = base_of(module)
    shares = _expert_tensors(module, sharing) if sharing is not None else {}
    tensors = [*shares] or layer_tensors(module, style)
    rows: Rows = {}
    partial: list[tuple[nn.Module, str]] = []
    for tensor in tensors:
        parameter, placement = tensor.parameter, placement_of(base, tensor, style)
        arranged = None
        if isinstance(parameter, DTensor):
            continue  # placed already: tied layers share the tensors that train
        cut = shares[tensor] if shares else partition_in_layer(base, tensor, partition, cuts or {})
        if shares and cut is not None:
            placement = Shard(cut[0])
        if cut is not None and not (shares and cut[1].is_chunked):
            dim, chosen = cut
            if isinstance(placement, Shard) and parameter not in context.keeps_row_order:
                arranged = chosen, dim
                set_partition(tensor.owner, tensor.key, chosen, dim)
                rearrange_lazy(tensor.owner, tensor.key, partial_of(chosen.arranged, dim=dim))
            else:
                placement = Replicate()
                rows[tensor] = dim, chosen.rows(context.rank)
        if isinstance(placement, Shard) or parameter in context.keeps_row_order or context.is_placed(parameter):
            tensor.put(context.place(parameter, placement, arranged))
            context.keeps_row_order.discard(parameter)  # else this set would keep the full copy in memory
        if tensor.role in style.partial_roles or tensor in rows:
            partial.append((tensor.owner, tensor.key))
    if isinstance(base, Conv1D) and style.lora_B == Shard(0):
        base.nf = context.slice_of(base.nf) if partition is None else partition.width
    tp_layer = TPLayer(name, module, style, context, tensors, rows, partition, sharing)
    if isinstance(module, LoraLayer) and sharing is None:
        offset = tp_layer.feature_offset(module.in_features or 0)
        for dropout in module.lora_dropout.values():
            if isinstance(dropout, TopologyInvariantDropout):
                dropout.feature_offset = offset
        if partition is not None:
            _merge_arranged(module, features_dim(base), partition)
        elif not isinstance(style.weight, Shard):
            _merge_whole(module)
        _prepare_adapters(name, module, style, context, partition is not None)
    for layer in _wrappers(module):
        refuse_merge(layer, "an adapter of experts")
    # Not by `wrap_forward`: a layer that is cut is never copied, and every step calls each one.
    module.forward = tp_layer.run
    set_tp_layer(module, tp_layer)
    return partial


def _wrappers(module: nn.Module) -> list[ParamWrapper]:
    """Return PEFT's layers around experts, outermost first. They are nested, and each adapts one parameter."""
    wrappers = []
    while isinstance(module, ParamWrapper):
        wrappers.append(module)
        module = module.base_layer
    return wrappers


def _expert_tensors(module: nn.Module, sharing: ExpertSharing) -> dict[LayerTensor, tuple[int, RowPartition] | None]:
    """Return the parameters of a module of experts and of its adapters."""
    base = base_of(module)
    tensors: dict[LayerTensor, tuple[int, RowPartition] | None] = {}
    for inner in base.modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                is_base = inner is base
                cut = sharing.cuts.get(key) if is_base else None
                role = "weight" if cut is not None else "addend" if is_base and key in sharing.addends else "other"
                tensors[LayerTensor(inner, key, role)] = cut
    for wrapper in _wrappers(module):
        for adapter in wrapper.lora_A:
            cuts = adapter_cuts(wrapper, adapter, sharing)
            for role in ("lora_A", "lora_B"):
                cut = cuts.get(role)
                partial = cut is None or not cut[1].is_chunked
                owner = getattr(wrapper, role)[adapter]
                tensors[LayerTensor(owner, "weight", role if partial else "weight")] = cut
    return tensors


def _prepare_adapters(name: str, module: LoraLayer, style: Style, context: TPContext, selected: bool) -> None:
    """Sum DoRA's norms of a rowwise weight over tp, and refuse merges that would be wrong for slices."""
    if not isinstance(style.weight, Shard):
        return

    def total(x: Tensor) -> Tensor:  # without a name in graphs: see `TPLayer._run`
        return all_reduce(x, context.group, "DoRA weight norm", "" if torch.compiler.is_compiling() else name)

    for adapter, dora in module.lora_magnitude_vector.items():
        if style.leave in ("reduce", "tokens"):
            sum_weight_norm(dora, total)
        refuse_merge(module, f"the DoRA adapter {adapter!r}")
    for adapter, biased in module.lora_bias.items():
        if biased and selected:
            refuse_merge(module, f"the adapter {adapter!r} (lora_bias=True)")


def _merge_whole(module: Any) -> None:
    """Let PEFT merge adapters into a base weight that tp does not cut: the delta weight is gathered to match it."""
    delta_weight = getattr(module, "get_delta_weight", None)
    if delta_weight is None:
        return

    def get_delta_weight(adapter: str) -> Tensor:
        delta, weight = delta_weight(adapter), module.get_base_layer().weight.detach()
        whole = delta.full_tensor() if isinstance(delta, DTensor) else delta
        return sharded_as(whole[local_region(weight)].contiguous(), weight) if isinstance(weight, DTensor) else whole

    module.get_delta_weight = get_delta_weight


def _merge_arranged(module: Any, dim: int, partition: RowPartition) -> None:
    """Let PEFT merge adapters into a base weight whose rows are rearranged, by rearranging the delta weight alike."""
    delta_weight = module.get_delta_weight
    module.get_delta_weight = lambda adapter: partition.arranged(delta_weight(adapter), dim)


def shard_over_tp(setup: Setup) -> None:
    """Apply the plan's style to each layer, and note the parameters whose gradients are partial sums over tp.

    The model's `Gradients` are made here, without tp too.
    """
    model, mesh, plan = setup.model, setup.mesh, setup.plan
    tp = mesh["tp"].size()
    setup.gradients = Gradients(tp)
    if tp == 1:
        return
    context = setup.context = TPContext(mesh, setup.gradients, model, setup.count)
    for module, (name, style) in plan.styles.items():
        setup.partials += apply_style(
            name, module, style, context, plan.partitions.get(module), plan.cuts.get(module), plan.sharings.get(module)
        )
    context.forget_originals()
    refuse_unload(model)
