"""Run a layer and its LoRA factors as one tensor parallel layer: stored as DTensors, computed on plain tensors.

Outside of its forward, the layer's parameters are DTensors on the `tp` axis, placed as the style says (on `dp_shard`
too, while FSDP2 does not hold them gathered). While its forward runs, or that of a compiled block around it, this
rank's plain tensor shadows each parameter: attribute lookup finds the plain tensor. The forward is the layer's own,
whether it is PEFT's, `nn.Linear`'s or that of a subclass in the model's code. The style adds one operation on the input
and one on the output. So the outputs of base and LoRA are added while both are slices or both are partial sums, and
LoRA costs no collective of its own.

The plain tensors share the memory of the DTensors and are made once, not in each forward. Those that train are leaves
of the graph; a hook gives their gradients to the DTensors (`distributed/gradients.py`). So autograd meets no DTensor,
an operation on which takes the host up to ten times as long as on a plain tensor.

torch's own `ColwiseParallel` supports neither PEFT's layer types nor its dotted names; here neither matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
)
from lora_parallel.distributed.torch_private import local_tensor
from lora_parallel.fsdp.wrapping import is_at_rest
from lora_parallel.layers.layer_parameters import LayerTensor, base_of
from lora_parallel.layers.linear_classes import features_dim, is_linear
from lora_parallel.layers.styles import RowPartition, Style, partition_of
from lora_parallel.tp.context import TPContext
from lora_parallel.tp.experts import ExpertSharing

_TP_LAYER = "_lora_parallel_tp_layer"


@dataclass(slots=True, eq=False)
class _Shadow:
    """Hold the plain tensor of this rank that stands for one parameter of a layer while the layer computes."""

    tensor: LayerTensor
    partial: bool  # True if the gradient that this rank computes is a partial sum over tp
    rows: tuple[int, Tensor] | None  # dim and rows that this rank computes with, of a tensor that is stored whole
    is_zero: bool  # True for a tensor that another rank adds to the partial sum of the outputs
    is_late: bool  # True for a bias that is added after the sum over tp
    # What the plain tensor was made of: the parameter (FSDP2 swaps it for a gathered one), its local tensor (`model.to`
    # gives it another), and whether it trained.
    parameter: Tensor | None = None
    local: Tensor | None = None
    trains: bool = False
    value: Any = None

    def is_current(self, parameter: Tensor | None) -> bool:
        """Return True if the plain tensor is that of `parameter` as it is now."""
        return (
            parameter is not None
            and parameter is self.parameter
            and parameter.requires_grad is self.trains
            and (self.local is None or local_tensor(parameter) is self.local)
        )


@dataclass(frozen=True)
class _Padding:
    """Hold the row of an embedding's padding token: of the whole table, and of this rank's rows, if it is one."""

    base: nn.Embedding
    whole: int
    here: int | None


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
        self.name, self.style, self.context = name, style, context
        # Output features and experts of each rank.
        self.partition, self.sharing = partition, sharing
        weight: Any = getattr(base, "weight", None)
        self.out_features: int | None = weight.shape[features_dim(base)] if is_linear(base) else None
        self.vocabulary = base.num_embeddings if isinstance(base, nn.Embedding) else 0
        sums = style.leave in ("reduce", "tokens")
        device = context.mesh.device_type
        self._shadows = [
            _Shadow(
                tensor,
                partial=tensor.role in style.partial_roles or tensor in rows,
                rows=(rows[tensor][0], rows[tensor][1].to(device)) if tensor in rows else None,
                is_zero=tensor.role == "addend" and sums and context.rank > 0,
                is_late=tensor.role == "bias" and sums and not isinstance(base, nn.Embedding),
            )
            for tensor in tensors
        ]
        self._always_has_bias = isinstance(base, Conv1D)  # whose forward adds one in any case
        self._padded: _Padding | None = None
        if isinstance(base, nn.Embedding) and base.padding_idx is not None and style.enter == "mask":
            start, end = self._vocabulary_bounds()
            padding = base.padding_idx
            self._padded = _Padding(base, padding, padding - start if start <= padding < end else None)
        self._shadowed = False
        # Bias [out] that is added after the sum over tp; None if the layer adds its bias itself.
        self._late: Tensor | None = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward; it takes the place of the module's own."""
        if self._shadowed:  # by the block around it
            return self._run(args, kwargs)
        try:
            self.shadow()
            return self._run(args, kwargs)
        finally:
            self.unshadow()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        style, context = self.style, self.context
        # In a graph, which serves this layer of every block, no name; torch 2.11 guards a name that is an argument.
        where = "" if torch.compiler.is_compiling() else self.name
        outside = None
        if self.sharing is not None:
            args, kwargs = self._routed(self.sharing, args, kwargs, where)
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
            used = [
                *tree_leaves((args, kwargs)),
                *(shadow.tensor.owner.__dict__[shadow.tensor.key] for shadow in self._shadows),
            ]
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

    def _routed(self, sharing: ExpertSharing, args: tuple[Any, ...], kwargs: dict[str, Any], where: str) -> Any:
        """Return the arguments of this rank's share of the experts; in backward their gradients are summed over tp."""
        leaves, structure = tree_flatten((args, kwargs))
        indices = [index for index, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        fed = copy_all_to_tp([leaves[index] for index in indices], self.context.group, where)
        for index, x in zip(indices, fed, strict=True):
            leaves[index] = x
        return sharing.local_arguments(tree_unflatten(leaves, structure), self.context.rank)

    def shadow(self) -> None:
        """Let this rank's plain tensors be found in the place of the layer's parameters, until `unshadow`."""
        self._shadowed, self._late = True, None
        for shadow in self._shadows:
            owner, key = shadow.tensor.owner, shadow.tensor.key
            parameter = owner._parameters[key]
            if not shadow.is_current(parameter):
                self._renew(shadow, parameter)
            value = shadow.value
            if shadow.rows is not None:
                dim, rows = shadow.rows
                value = value.index_select(dim, rows.to(value.device))
            elif shadow.is_zero:
                value = value * 0
            if shadow.is_late:
                self._late, value = value, torch.zeros_like(value) if self._always_has_bias else None
            owner.__dict__[key] = value  # attribute lookup finds it before `_parameters`: names and registration stay
        if self._padded is not None:
            self._padded.base.padding_idx = self._padded.here

    def unshadow(self) -> None:
        """Let the layer's parameters be found again. Nothing happens if they are not shadowed."""
        self._shadowed, self._late = False, None
        for shadow in self._shadows:
            shadow.tensor.owner.__dict__.pop(shadow.tensor.key, None)
        if self._padded is not None:
            self._padded.base.padding_idx = self._padded.whole

    def _renew(self, shadow: _Shadow, parameter: Any) -> None:
        """Make the plain tensor of a parameter: this rank's part of it, as a leaf of the graph if it trains."""
        if is_at_rest(parameter):
            raise RuntimeError(
                f"{self.name} was called by itself, while FSDP2 holds its weights in shards: call the model that "
                "was parallelized, or a whole block of it."
            )
        shadow.parameter, shadow.trains, shadow.local, shadow.value = (
            parameter,
            parameter.requires_grad,
            None,
            parameter,
        )
        if isinstance(parameter, DTensor):
            shadow.value = shadow.local = local_tensor(parameter)
            if parameter.requires_grad:
                if partition_of(shadow.tensor.owner, shadow.tensor.key) is not None:
                    raise RuntimeError(
                        f"the {shadow.tensor.key} of {self.name} was frozen when the model was parallelized. It is "
                        "stored as the rows that each tp rank computes with, and cannot train: set requires_grad "
                        "before parallelize."
                    )
                shadow.value = self.context.gradients.leaf(parameter, shadow.partial)

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
