"""A layer and its LoRA factors as one tensor parallel unit: DTensors at rest, plain tensors in compute.

At rest a unit's parameters are DTensors on the `tp` axis, placed as its style says. While its forward runs, each
parameter is shadowed by this rank's plain tensor, and the forward is the layer's own: PEFT's, the model's subclass's,
`nn.Linear`'s. What the style adds stands around it: one operation on the input, one on the output. So base and LoRA
contributions are added while both are slices or both are partial sums, and LoRA costs no collective of its own.

Stock `ColwiseParallel` knows neither PEFT's layer types nor its dotted names; here neither matters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial as partial_of
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers.pytorch_utils import Conv1D

from lora_parallel.at_rest import is_at_rest
from lora_parallel.collectives import (
    all_reduce,
    chunk_bounds,
    copy_all_to_tp,
    gather_last_dim,
    split_last_dim,
    sum_of_tokens,
    sum_over_tp,
)
from lora_parallel.deferred import rearrange_stored
from lora_parallel.dropout import TopologyInvariantDropout
from lora_parallel.experts import Sharing, adapter_cuts
from lora_parallel.layers import UnitTensor, base_of, features_dim, is_linear, unit_tensors
from lora_parallel.peft_hooks import refuse_merge, sum_weight_norm
from lora_parallel.selection import Selection, selection_of, set_selection
from lora_parallel.styles import Style
from lora_parallel.tp_context import TPContext
from lora_parallel.upstream import local_region

__all__ = ["AllUsed", "Unit", "apply_style", "unit_of"]


_UNIT = "_lora_parallel_unit"


class Unit:
    """The forward of one styled layer. Bound to the layer as its `forward`."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        style: Style,
        context: TPContext,
        tensors: list[UnitTensor],
        rows: _Rows,
        selection: Selection | None,
        sharing: Sharing | None,
    ):
        base = base_of(module)
        self.compute: Callable[..., Any] = module.forward
        """The layer's own forward, on what this rank has."""
        self.selection = selection
        self.sharing = sharing
        self.rows = rows
        self.name = name
        self.style = style
        self.context = context
        self.tensors = tensors
        self.late_bias = style.leave in ("reduce", "tokens") and not isinstance(base, nn.Embedding)
        weight: Any = getattr(base, "weight", None)
        self.out_features: int | None = weight.shape[features_dim(base)] if is_linear(base) else None
        self.vocabulary = base.num_embeddings if isinstance(base, nn.Embedding) else 0

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        style, context = self.style, self.context
        outside = None
        if self.sharing is not None:
            args, kwargs = self._routed(self.sharing, args, kwargs)
        elif style.enter != "keep":
            first = None if args else next(iter(kwargs))
            x = args[0] if first is None else kwargs[first]
            if style.enter == "copy":
                x = context.copy(x, self.name)
            elif style.enter == "tokens":
                x = context.all_tokens(x, self.name)
            elif style.enter == "split":
                x = split_last_dim(x, context.group, self.name)
            else:
                x, outside = self._local_ids(x)
            if first is None:
                args = (x, *args[1:])
            else:
                kwargs[first] = x
        bias = self._shadow(module)
        try:
            y = self.compute(*args, **kwargs)
            if self.sharing is not None:
                used = [*tree_leaves((args, kwargs)), *(t.owner.__dict__[t.key] for t in self.tensors)]
                y = AllUsed.apply(y, *(x for x in used if isinstance(x, Tensor) and x.requires_grad))
        finally:
            self._unshadow(module)
        if outside is not None:
            y = y.masked_fill(outside.unsqueeze(-1), 0)
        if style.leave in ("reduce", "tokens"):
            add_up = sum_over_tp if style.leave == "reduce" else sum_of_tokens
            y = add_up(y, context.group, self.name)
            return y if bias is None else y + bias.to(y.dtype)
        if style.leave == "gather":
            assert self.out_features is not None
            return gather_last_dim(y, self.out_features, context.group, self.name)
        return y

    def place_adapter(self, module: nn.Module, adapter: str) -> dict[str, tuple[nn.Parameter, Tensor | None, bool]]:
        """Place the factors of an adapter that comes after the layer was cut, as they would have been with it.

        Args:
            module: A PEFT layer, with the adapter in full on every rank, on the layer of this unit.
            adapter: Its name.

        Returns:
            "lora_A" and "lora_B": the parameter; the rows of it that this rank computes with, if it is stored whole and
            these are not all; and whether the gradient of one rank is a partial sum over tp.
        """
        base, found = base_of(module), {}
        for role in ("lora_A", "lora_B"):
            tensor = UnitTensor(getattr(module, role)[adapter], "weight", role)
            cut, placement = _cut(base, tensor, self.selection, {}), _placement(base, tensor, self.style)
            rows = None if cut is None else cut[1].rows(self.context.rank)
            if rows is not None:
                placement = Replicate()
            tensor.put(self.context.place(tensor.parameter, placement))
            found[role] = tensor.parameter, rows, role in self.style.partial or rows is not None
        return found

    def feature_offset(self, features: int) -> int:
        """The first of a layer's input features that this rank has."""
        split = isinstance(self.style.lora_A, Shard) and self.style.enter != "mask"
        return chunk_bounds(features, self.context.mesh.size(), self.context.rank)[0] if split else 0

    def _routed(self, sharing: Sharing, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of experts, the gradients of which are sums over what each rank computes."""
        leaves, structure = tree_flatten((args, kwargs))
        places = [place for place, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        fed = copy_all_to_tp([leaves[place] for place in places], self.context.group, self.name)
        for place, x in zip(places, fed, strict=True):
            leaves[place] = x
        return sharing.routed(tree_unflatten(leaves, structure), self.context.rank)

    def _shadow(self, module: nn.Module) -> Tensor | None:
        """Put plain tensors in front of the unit's DTensors; return the bias that is to be added after the sum."""
        late = None
        for tensor in self.tensors:
            local = self._local(tensor)
            if self.late_bias and tensor.role == "bias":
                late = local
                # Conv1D adds one whatever it is.
                tensor.shadow(torch.zeros_like(local) if isinstance(tensor.owner, Conv1D) else None)
            else:
                tensor.shadow(local)
        base = base_of(module)
        if isinstance(base, nn.Embedding) and base.padding_idx is not None and self.style.enter == "mask":
            start, end = self._vocabulary_bounds()
            inside = start <= base.padding_idx < end
            self._padding_idx = base.padding_idx
            base.padding_idx = base.padding_idx - start if inside else None
        return late

    def _unshadow(self, module: nn.Module) -> None:
        for tensor in self.tensors:
            tensor.unshadow()
        base = base_of(module)
        if isinstance(base, nn.Embedding) and hasattr(self, "_padding_idx"):
            base.padding_idx = self._padding_idx

    def _local(self, tensor: UnitTensor) -> Tensor:
        """What this rank computes with."""
        held = self._held(tensor)
        if tensor in self.rows:
            dim, rows = self.rows[tensor]
            return held.index_select(dim, rows.to(held.device))
        if tensor.role == "addend" and self.style.leave in ("reduce", "tokens"):
            return held * (self.context.rank == 0)
        return held

    def _held(self, tensor: UnitTensor) -> Tensor:
        """What this rank holds, for gradients that are finished when backward returns."""
        parameter = tensor.parameter
        if not isinstance(parameter, DTensor):
            return parameter
        if is_at_rest(parameter):
            raise RuntimeError(
                f"{self.name} was called by itself, while FSDP2 holds its weights in shards: call the model that was "
                "parallelized, or a whole block of it."
            )
        if not parameter.requires_grad:
            with torch.no_grad():
                return parameter.to_local()
        if selection_of(tensor.owner, tensor.key) is not None:
            raise RuntimeError(
                f"the {tensor.key} of {self.name} was frozen when the model was parallelized. It is stored as the rows "
                "that each tp rank computes with, and cannot train: set requires_grad before parallelize."
            )
        if tensor.role in self.style.partial or tensor in self.rows:
            return self.context.gradients.local(parameter)
        return parameter.to_local()

    def _vocabulary_bounds(self) -> tuple[int, int]:
        return chunk_bounds(self.vocabulary, self.context.mesh.size(), self.context.rank)

    def _local_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids relative to this rank's rows, and which of them are on another rank (0 stands in for those)."""
        valid = ((ids >= 0) & (ids < self.vocabulary)).all()
        if ids.device.type == "cpu":
            if not valid:
                raise IndexError(
                    f"{self.name}: token ids from {int(ids.min())} to {int(ids.max())} are outside the vocabulary of "
                    f"{self.vocabulary}."
                )
        else:
            torch._assert_async(valid)  # as nn.Embedding does on an accelerator: no synchronisation
        start, end = self._vocabulary_bounds()
        outside = (ids < start) | (ids >= end)
        return (ids - start).masked_fill(outside, 0), outside


class AllUsed(torch.autograd.Function):
    """Gives what no token was computed with a gradient of zeros: other ranks wait for it in their reductions."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *used: Tensor) -> Tensor:
        ctx.used = [(x.shape, x.dtype, x.device) for x in used]
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        zeros = (torch.zeros(1, dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.used)
        return grads[0], *zeros


_Rows = dict[UnitTensor, tuple[int, Tensor]]
"""The dim, and the rows of it that this rank computes with, of a tensor that is stored whole."""


def apply_style(
    name: str,
    module: nn.Module,
    style: Style,
    context: TPContext,
    selection: Selection | None = None,
    cuts: Mapping[str, tuple[int, Selection]] | None = None,
    sharing: Sharing | None = None,
) -> list[tuple[nn.Module, str]]:
    """Make `module` a tensor parallel unit, in place: place its tensors, and run its own forward on local ones.

    Args:
        name: The layer's name, for errors.
        module: A layer, or a PEFT layer on one.
        style: Where its tensors go.
        context: Of the model.
        selection: The output features of each rank, where `style` cuts these and they are not one chunk a rank.
        cuts: The dim and the rows by which parameters of a layer that is whole otherwise are cut, by their names.
        sharing: Of experts.

    Returns:
        The parameters whose gradients on one rank will be partial sums over tp: what holds each, and its name there.
    """
    base = base_of(module)
    shares = _expert_tensors(module, sharing) if sharing is not None else {}
    tensors = [*shares] or unit_tensors(module, style)
    rows: _Rows = {}
    partial: list[tuple[nn.Module, str]] = []
    for tensor in tensors:
        parameter, placement = tensor.parameter, _placement(base, tensor, style)
        arranged = None
        if isinstance(parameter, DTensor):
            continue  # of tied layers, which share what trains
        cut = shares[tensor] if shares else _cut(base, tensor, selection, cuts or {})
        if shares and cut is not None:
            placement = Shard(cut[0])
        if cut is not None and not (shares and cut[1].is_chunked):
            dim, chosen = cut
            if isinstance(placement, Shard) and parameter not in context.stored_whole:
                arranged = chosen, dim
                set_selection(tensor.owner, tensor.key, chosen, dim)
                rearrange_stored(tensor.owner, tensor.key, partial_of(chosen.arranged, dim=dim))
            else:
                placement = Replicate()
                rows[tensor] = dim, chosen.rows(context.rank)
        if isinstance(placement, Shard) or parameter in context.stored_whole or context.is_placed(parameter):
            tensor.put(context.place(parameter, placement, arranged))
            context.stored_whole.discard(parameter)  # or it would hold the full copy
        if tensor.role in style.partial or tensor in rows:
            partial.append((tensor.owner, tensor.key))
    if isinstance(base, Conv1D) and style.lora_B == Shard(0):
        base.nf = context.slice_of(base.nf) if selection is None else selection.width
    unit = Unit(name, module, style, context, tensors, rows, selection, sharing)
    if isinstance(module, LoraLayer) and sharing is None:
        offset = unit.feature_offset(module.in_features or 0)
        for dropout in module.lora_dropout.values():
            if isinstance(dropout, TopologyInvariantDropout):
                dropout.feature_offset = offset
        if selection is not None:
            _merge_arranged(module, features_dim(base), selection)
        elif not isinstance(style.weight, Shard):
            _merge_whole(module)
        _prepare_adapters(name, module, style, context, selection is not None)
    if isinstance(module, ParamWrapper):
        for layer in _wrappers(module):
            refuse_merge(layer, "an adapter of experts")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unit.run(self, *args, **kwargs)

    module.__dict__[_UNIT] = unit
    module.forward = MethodType(forward, module)
    return partial


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a layer is, if it has a style."""
    return module.__dict__.get(_UNIT)


def _wrappers(module: nn.Module) -> list[ParamWrapper]:
    """PEFT's layers around experts, one in the other: each adapts one parameter."""
    found = []
    while isinstance(module, ParamWrapper):
        found.append(module)
        module = module.base_layer
    return found


def _expert_tensors(module: nn.Module, sharing: Sharing) -> dict[UnitTensor, tuple[int, Selection] | None]:
    """The parameters of experts and of their adapters, with the dim that is cut and each rank's part of it."""
    base = base_of(module)
    tensors: dict[UnitTensor, tuple[int, Selection] | None] = {}
    for inner in base.modules():
        for key, parameter in inner._parameters.items():
            if parameter is not None:
                own = inner is base
                cut = sharing.cuts.get(key) if own else None
                role = "weight" if cut is not None else "addend" if own and key in sharing.addends else "other"
                tensors[UnitTensor(inner, key, role)] = cut
    for wrapper in _wrappers(module):
        for adapter in wrapper.lora_A:
            cuts = adapter_cuts(wrapper, adapter, sharing)
            for role in ("lora_A", "lora_B"):
                cut = cuts.get(role)
                partial = cut is None or not cut[1].is_chunked
                owner = getattr(wrapper, role)[adapter]
                tensors[UnitTensor(owner, "weight", role if partial else "weight")] = cut
    return tensors


def _placement(base: nn.Module, tensor: UnitTensor, style: Style) -> Placement:
    """Styles speak of weights as nn.Linear stores them, [out, in]."""
    placement: Placement = getattr(style, tensor.role)
    if isinstance(placement, Shard) and tensor.dim is not None:
        return Shard(tensor.dim)
    if isinstance(placement, Shard) and isinstance(base, Conv1D) and tensor.role == "weight":
        return Shard(1 - placement.dim)
    return placement


def _cut(
    base: nn.Module, tensor: UnitTensor, selection: Selection | None, cuts: Mapping[str, tuple[int, Selection]]
) -> tuple[int, Selection] | None:
    """The dim and the rows that a rank chooses of a unit's tensor, if it does."""
    if tensor.owner is base and tensor.key in cuts:
        return cuts[tensor.key]
    if selection is None or tensor.role == "lora_A":
        return None
    if tensor.role == "weight":
        return features_dim(base), selection
    return (tensor.dim or 0, selection) if tensor.role in ("bias", "lora_B", "magnitude", "output", "addend") else None


def _prepare_adapters(name: str, module: LoraLayer, style: Style, context: TPContext, selected: bool) -> None:
    """What a style asks of DoRA and of biases beside their placement."""
    if not isinstance(style.weight, Shard):
        return
    for adapter, dora in module.lora_magnitude_vector.items():
        if style.leave in ("reduce", "tokens"):
            sum_weight_norm(dora, lambda squares: all_reduce(squares, context.group, "DoRA weight norm", name))
        refuse_merge(module, f"the DoRA adapter {adapter!r}")
    for adapter, biased in module.lora_bias.items():
        if biased and selected:
            refuse_merge(module, f"the adapter {adapter!r} (lora_bias=True)")


def _merge_whole(module: Any) -> None:
    """PEFT adds what an adapter comes to, to a base that tensor parallelism has no hold of here."""
    own = getattr(module, "get_delta_weight", None)
    if own is None:
        return

    def get_delta_weight(adapter: str) -> Tensor:
        delta, weight = own(adapter), module.get_base_layer().weight.detach()
        whole = delta.full_tensor() if isinstance(delta, DTensor) else delta
        if not isinstance(weight, DTensor):
            return whole
        part = whole[local_region(weight)].contiguous()
        return DTensor.from_local(
            part, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    module.get_delta_weight = get_delta_weight


def _merge_arranged(module: Any, dim: int, selection: Selection) -> None:
    """PEFT adds what an adapter comes to, to a base whose rows are arranged otherwise here."""
    own = module.get_delta_weight

    def get_delta_weight(adapter: str) -> Tensor:
        return selection.arranged(own(adapter), dim)

    module.get_delta_weight = get_delta_weight
