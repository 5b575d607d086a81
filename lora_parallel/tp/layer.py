"""Run a layer and its LoRA factors as one tensor parallel layer: stored as DTensors, computed on plain tensors.

Outside of its forward, the layer's parameters are DTensors on the `tp` axis, placed as the style says. While its
forward runs, or that of a compiled block around it, this rank's plain tensor shadows each parameter: attribute lookup
finds the plain tensor. The forward is the layer's own, whether it is PEFT's, `nn.Linear`'s or that of a subclass in the
model's code. The style adds one operation on the input and one on the output. So the outputs of base and LoRA are added
while both are slices or both are partial sums, and LoRA costs no collective of its own.

torch's own `ColwiseParallel` supports neither PEFT's layer types nor its dotted names; here neither matters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.pytorch_utils import Conv1D

from lora_parallel.distributed.collectives import (
    chunk_bounds,
    copy_all_to_tp,
    gather_last_dim,
    split_last_dim,
    sum_over_tp,
    unless_compiled,
)
from lora_parallel.fsdp.wrapping import is_at_rest
from lora_parallel.layers.layer_parameters import LayerTensor, base_of
from lora_parallel.layers.linear_classes import features_dim, is_linear
from lora_parallel.layers.styles import RowPartition, Style, partition_of
from lora_parallel.tp.context import TPContext
from lora_parallel.tp.experts import ExpertSharing

_TP_LAYER = "_lora_parallel_tp_layer"

# A parameter that trains, and True if the gradient that this rank computes is a partial sum over tp.
_Trained = tuple[DTensor, bool]


class TPLayer:
    """Run a layer with a style as one of the tp ranks. `apply_style` makes the layer's `forward` call `run`."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        style: Style,
        context: TPContext,
        tensors: list[LayerTensor],
        rows: Rows,
        partition: RowPartition | None,
        sharing: ExpertSharing | None,
    ):
        base = base_of(module)
        # Forward of the layer itself, called while this rank's plain tensors shadow its parameters.
        self.compute: Callable[..., Any] = module.forward
        self.name, self.style, self.context, self.tensors = name, style, context, tensors
        # Rows that this rank computes with, of tensors that are stored whole; output features and experts of each rank.
        self.rows, self.partition, self.sharing = rows, partition, sharing
        self.late_bias = style.leave in ("reduce", "tokens") and not isinstance(base, nn.Embedding)
        weight: Any = getattr(base, "weight", None)
        self.out_features: int | None = weight.shape[features_dim(base)] if is_linear(base) else None
        self.vocabulary = base.num_embeddings if isinstance(base, nn.Embedding) else 0
        self._shadowed = False
        # Bias [out] that is added after the sum over tp; None if the layer adds its bias itself.
        self._late: Tensor | None = None

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._shadowed:  # by the block around it
            return self._run(args, kwargs)
        try:
            shadow([(module, self)])
            return self._run(args, kwargs)
        finally:
            self.unshadow(module)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        style, context = self.style, self.context
        where = unless_compiled(self.name)
        outside = None
        if self.sharing is not None:
            args, kwargs = self._routed(self.sharing, args, kwargs)
        elif style.enter != "keep":
            first = None if args else next(iter(kwargs))
            x = args[0] if first is None else kwargs[first]
            if style.enter == "copy":
                x = context.copy(x, where)
            elif style.enter == "tokens":
                x = context.all_tokens(x, where)
            elif style.enter == "split":
                x = split_last_dim(x, context.group, where)
            else:
                x, outside = self._local_ids(x)
            if first is None:
                args = (x, *args[1:])
            else:
                kwargs[first] = x
        y = self.compute(*args, **kwargs)
        if self.sharing is not None:
            used = [*tree_leaves((args, kwargs)), *(t.owner.__dict__[t.key] for t in self.tensors)]
            y = AllUsed.apply(y, *(x for x in used if isinstance(x, Tensor) and x.requires_grad))
        if outside is not None:
            y = y.masked_fill(outside.unsqueeze(-1), 0)
        if style.leave in ("reduce", "tokens"):
            is_whole = style.leave == "reduce"
            y = sum_over_tp(y, context.group, where) if is_whole else context.chunks.reduce_scatter(y, where)
            return y if self._late is None else y + self._late.to(y.dtype)
        if style.leave == "gather":
            assert self.out_features is not None
            return gather_last_dim(y, self.out_features, context.group, where)
        return y

    def place_adapter(self, module: nn.Module, adapter: str) -> dict[str, tuple[nn.Parameter, Tensor | None, bool]]:
        """Place the factors of an adapter that was added after the layer was cut, as `apply_style` would have done."""
        # Returns each factor, its rows that this rank computes with (None: all), and True if its gradient is partial.
        base, factors = base_of(module), {}
        for role in ("lora_A", "lora_B"):
            tensor = LayerTensor(getattr(module, role)[adapter], "weight", role)
            cut = partition_in_layer(base, tensor, self.partition, {})
            rows = None if cut is None else cut[1].rows(self.context.rank)
            placement = placement_of(base, tensor, self.style) if rows is None else Replicate()
            tensor.put(self.context.place(tensor.parameter, placement))
            factors[role] = tensor.parameter, rows, role in self.style.partial_roles or rows is not None
        return factors

    def feature_offset(self, features: int) -> int:
        """Return the index of the first input feature that this rank has: 0 if every rank has the whole input."""
        split = isinstance(self.style.lora_A, Shard) and self.style.enter != "mask"
        return chunk_bounds(features, self.context.mesh.size(), self.context.rank)[0] if split else 0

    def _routed(self, sharing: ExpertSharing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of this rank's share of the experts; in backward their gradients are summed over tp."""
        leaves, structure = tree_flatten((args, kwargs))
        indices = [index for index, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        fed = copy_all_to_tp([leaves[index] for index in indices], self.context.group, unless_compiled(self.name))
        for index, x in zip(indices, fed, strict=True):
            leaves[index] = x
        return sharing.local_arguments(tree_unflatten(leaves, structure), self.context.rank)

    def _shadow(self, module: nn.Module, trained: Mapping[_Trained, Tensor]) -> None:
        self._shadowed, self._late = True, None
        for tensor in self.tensors:
            local = self._plain(tensor, trained)
            if self.late_bias and tensor.role == "bias":
                self._late = local
                # The forward of Conv1D always adds a bias.
                tensor.shadow(torch.zeros_like(local) if isinstance(tensor.owner, Conv1D) else None)
            else:
                tensor.shadow(local)
        base = base_of(module)
        if isinstance(base, nn.Embedding) and base.padding_idx is not None and self.style.enter == "mask":
            start, end = self._vocabulary_bounds()
            self._padding_idx = base.padding_idx
            base.padding_idx = base.padding_idx - start if start <= base.padding_idx < end else None

    def unshadow(self, module: nn.Module) -> None:
        """Let the layer's parameters be found again. Nothing happens if they are not shadowed."""
        self._shadowed, self._late = False, None
        for tensor in self.tensors:
            tensor.unshadow()
        base = base_of(module)
        if isinstance(base, nn.Embedding) and hasattr(self, "_padding_idx"):
            base.padding_idx = self._padding_idx

    def _trained(self) -> list[_Trained]:
        """Return the DTensors of the layer that train."""
        trained = []
        for tensor in self.tensors:
            parameter: Tensor = tensor.parameter
            if not isinstance(parameter, DTensor):
                continue
            if is_at_rest(parameter):
                raise RuntimeError(
                    f"{self.name} was called by itself, while FSDP2 holds its weights in shards: call the model that "
                    "was parallelized, or a whole block of it."
                )
            if not parameter.requires_grad:
                continue
            if partition_of(tensor.owner, tensor.key) is not None:
                raise RuntimeError(
                    f"the {tensor.key} of {self.name} was frozen when the model was parallelized. It is stored as the "
                    "rows that each tp rank computes with, and cannot train: set requires_grad before parallelize."
                )
            trained.append((parameter, self._is_partial(tensor)))
        return trained

    def _is_partial(self, tensor: LayerTensor) -> bool:
        return tensor.role in self.style.partial_roles or tensor in self.rows

    def _plain(self, tensor: LayerTensor, trained: Mapping[_Trained, Tensor]) -> Tensor:
        """Return the plain tensor that this rank computes with: its own, or its rows of one that is stored whole."""
        value: Tensor = tensor.parameter
        if isinstance(value, DTensor) and value.requires_grad:
            value = trained[value, self._is_partial(tensor)]
        elif isinstance(value, DTensor):
            with torch.no_grad():
                value = value.to_local()
        if tensor in self.rows:
            dim, rows = self.rows[tensor]
            return value.index_select(dim, rows.to(value.device))
        if tensor.role == "addend" and self.style.leave in ("reduce", "tokens"):
            return value * (self.context.rank == 0)
        return value

    def _vocabulary_bounds(self) -> tuple[int, int]:
        return chunk_bounds(self.vocabulary, self.context.mesh.size(), self.context.rank)

    def _local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return token ids as indices of this rank's rows, and a mask of the ids whose rows other ranks hold."""
        valid = ((ids >= 0) & (ids < self.vocabulary)).all()
        if ids.device.type == "cpu":
            if not valid:
                raise IndexError(
                    f"{self.name}: token ids from {int(ids.min())} to {int(ids.max())} are outside the vocabulary of "
                    f"{self.vocabulary}."
                )
        else:
            torch._assert_async(valid)  # as nn.Embedding does on an accelerator: the CPU need not wait
        start, end = self._vocabulary_bounds()
        outside = (ids < start) | (ids >= end)
        return (ids - start).masked_fill(outside, 0), outside


def shadow(layers: Collection[tuple[nn.Module, TPLayer]]) -> None:
    """Shadow the DTensors of a model's tensor parallel layers by this rank's plain tensors, until `unshadow`."""
    # The gradients of all layers are made DTensors in one operation: together they cost less.
    trained: dict[_Trained, Tensor] = {}
    if keys := list(dict.fromkeys(key for _, layer in layers for key in layer._trained())):
        gradients = next(layer.context.gradients for _, layer in layers)
        trained = dict(zip(keys, gradients.local(*zip(*keys, strict=True)), strict=True))
    for module, layer in layers:
        layer._shadow(module, trained)


class AllUsed(torch.autograd.Function):
    """Return `y` and make it depend on all tensors of `used`, so that each has a gradient, of zeros at least."""

    # An expert may get no token here, and other ranks still wait for this rank in the reduction of its gradient.

    @staticmethod
    def forward(ctx: Any, y: Tensor, *used: Tensor) -> Tensor:
        ctx.used = [(x.shape, x.dtype, x.device) for x in used]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = (torch.zeros(1, dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.used)
        return grads[0], *zeros


# Dim of a tensor that is stored whole, and the rows along it that this rank computes with, int64.
Rows = dict[LayerTensor, tuple[int, Tensor]]


def set_tp_layer(module: nn.Module, tp_layer: TPLayer) -> None:
    """Note on a layer the `TPLayer` that runs it."""
    module.__dict__[_TP_LAYER] = tp_layer


def tp_layer_of(module: nn.Module) -> TPLayer | None:
    """Return the `TPLayer` of a layer, or None if the layer has no style."""
    return module.__dict__.get(_TP_LAYER)


def placement_of(base: nn.Module, tensor: LayerTensor, style: Style) -> Placement:
    """Return the placement of a layer's tensor over tp."""
    # Styles are for [out, in], as `nn.Linear` stores weights. `Conv1D` stores [in, out].
    placement: Placement = getattr(style, tensor.role)
    if isinstance(placement, Shard) and tensor.dim is not None:
        return Shard(tensor.dim)
    if isinstance(placement, Shard) and isinstance(base, Conv1D) and tensor.role == "weight":
        return Shard(1 - placement.dim)
    return placement


def partition_in_layer(
    base: nn.Module, tensor: LayerTensor, partition: RowPartition | None, cuts: Mapping[str, tuple[int, RowPartition]]
) -> tuple[int, RowPartition] | None:
    """Return the dim and the row partition by which ranks choose rows of a tensor, or None if no partition applies."""
    if tensor.owner is base and tensor.key in cuts:
        return cuts[tensor.key]
    if partition is None or tensor.role == "lora_A":
        return None
    if tensor.role == "weight":
        return features_dim(base), partition
    has_outputs = tensor.role in ("bias", "lora_B", "magnitude", "per_output", "addend")
    return (tensor.dim or 0, partition) if has_outputs else None
