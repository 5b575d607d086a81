"""A layer and its LoRA factors as one tensor parallel unit: DTensors at rest, plain tensors in compute.

At rest a unit's parameters are DTensors on the `tp` axis, placed as its style says. While its forward runs, each
parameter is shadowed by this rank's plain tensor, and the forward is the layer's own: PEFT's, the model's subclass's,
`nn.Linear`'s. What the style adds stands around it: one operation on the input, one on the output. So base and LoRA
contributions are added while both are slices or both are partial sums, and LoRA costs no collective of its own.

Stock `ColwiseParallel` knows neither PEFT's layer types nor its dotted names; here neither matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from lora_parallel.collectives import chunk_bounds, copy_to_tp, gather_last_dim, split_last_dim, sum_over_tp
from lora_parallel.dropout import TopologyInvariantDropout
from lora_parallel.grads import PartialGradients
from lora_parallel.styles import Style

__all__ = ["TPContext", "UnitTensor", "apply_style", "base_of", "shared_parameters", "unit_tensors"]


def base_of(module: Any) -> nn.Module:
    """The layer under a PEFT layer, or the layer itself."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


@dataclass(frozen=True)
class UnitTensor:
    """One parameter of a unit."""

    owner: nn.Module
    """The module (or `nn.ParameterDict`) that holds it."""

    key: str
    """Its name there."""

    role: str
    """"weight", "bias", "lora_A" or "lora_B": the field of `Style` that places it."""


def unit_tensors(module: nn.Module) -> list[UnitTensor]:
    """The parameters of a layer and of its adapters, with the role that each plays in a style.

    A parameter of a layer that is no linear layer and no embedding has the role of a bias: one element for each output
    feature.
    """
    base = base_of(module)
    tensors = [
        UnitTensor(base, key, "weight" if key == "weight" else "bias")
        for key, parameter in base._parameters.items()
        if parameter is not None
    ]
    if isinstance(module, LoraEmbedding):
        for adapter in module.lora_embedding_A:
            tensors.append(UnitTensor(module.lora_embedding_A, adapter, "lora_A"))
            tensors.append(UnitTensor(module.lora_embedding_B, adapter, "lora_B"))
    elif isinstance(module, LoraLayer):
        for adapter in module.lora_A:
            tensors.append(UnitTensor(module.lora_A[adapter], "weight", "lora_A"))
            tensors.append(UnitTensor(module.lora_B[adapter], "weight", "lora_B"))
    return tensors


def shared_parameters(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """The parameters that more than one module holds (tied weights), with their holders."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(module)
    return {parameter: modules for parameter, modules in holders.items() if len(modules) > 1}


class TPContext:
    """What all units of one model share: the tp axis, the partial gradients, and the input last fed to slices."""

    def __init__(self, mesh: DeviceMesh, gradients: PartialGradients, model: nn.Module) -> None:
        self.mesh = mesh["tp"]
        self.group = self.mesh.get_group()
        self.rank = self.mesh.get_local_rank()
        self.gradients = gradients
        self._shared: dict[nn.Parameter, nn.Parameter | None] = dict.fromkeys(shared_parameters(model))
        self._last: tuple[Tensor, tuple[object, ...], Tensor] | None = None

    def place(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        """`parameter` as a DTensor over tp that holds this rank's slice and nothing of the rest.

        A parameter that two layers share (tied head and embedding) stays shared.
        """
        placed = self._shared.get(parameter)
        if placed is not None:
            return placed
        full = parameter.detach()
        if isinstance(placement, Shard):
            start, end = chunk_bounds(full.shape[placement.dim], self.mesh.size(), self.rank)
            local = full.narrow(placement.dim, start, end - start).clone(memory_format=torch.contiguous_format)
        else:
            local = full.contiguous()
        sharded = DTensor.from_local(
            local if local.is_meta else local.to(self.mesh.device_type),
            self.mesh,
            [placement],
            run_check=False,
            shape=full.shape,
            stride=torch.empty(full.shape, device="meta").stride(),
        )
        placed = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
        if parameter in self._shared:
            self._shared[parameter] = placed
        return placed

    def forget_originals(self) -> None:
        """Free the full copies of shared parameters; all others were freed as they were placed."""
        self._shared.clear()

    def copy(self, x: Tensor, where: str) -> Tensor:
        """`x` fed to slices. Layers called in a row with the same tensor share one reduction of its gradient.

        q, k and v, or gate and up, are such layers. Identity decides, so nothing is assumed of the model: a layer that
        is fed anything else gets a reduction of its own.
        """
        version = -1 if x.is_inference() else x._version
        key = (version, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        if self._last is not None and self._last[0] is x and self._last[1] == key:
            return self._last[2]
        copied = copy_to_tp(x, self.group, where)
        self._last = (x, key, copied)
        return copied

    def forget_input(self) -> None:
        """Let go of the last input, once the model's forward has ended."""
        self._last = None


class _Unit:
    """The forward of one styled layer. Bound to the layer as its `forward`."""

    def __init__(self, name: str, module: nn.Module, style: Style, context: TPContext, tensors: list[UnitTensor]):
        base = base_of(module)
        self.name = name
        self.style = style
        self.context = context
        self.tensors = tensors
        self.late_bias = style.leave == "reduce" and not isinstance(base, nn.Embedding)
        self.out_features = base.weight.shape[0] if isinstance(base, nn.Linear) else None
        self.vocabulary = base.num_embeddings if isinstance(base, nn.Embedding) else 0

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        style, context = self.style, self.context
        outside = None
        if style.enter != "keep":
            first = None if args else next(iter(kwargs))
            x = args[0] if first is None else kwargs[first]
            if style.enter == "copy":
                x = context.copy(x, self.name)
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
            y = forward(*args, **kwargs)
        finally:
            self._unshadow(module)
        if outside is not None:
            y = y.masked_fill(outside.unsqueeze(-1), 0)
        if style.leave == "reduce":
            y = sum_over_tp(y, context.group, self.name)
            return y if bias is None else y + bias.to(y.dtype)
        if style.leave == "gather":
            assert self.out_features is not None
            return gather_last_dim(y, self.out_features, context.group, self.name)
        return y

    def _shadow(self, module: nn.Module) -> Tensor | None:
        """Put plain tensors in front of the unit's DTensors; return the bias that is to be added after the sum."""
        late = None
        for tensor in self.tensors:
            local = self._local(tensor)
            if self.late_bias and tensor.role == "bias":
                late = local
                _shadow_one(tensor, None)
            else:
                _shadow_one(tensor, local)
        base = base_of(module)
        if isinstance(base, nn.Embedding) and base.padding_idx is not None and self.style.enter == "mask":
            start, end = self._vocabulary_bounds()
            inside = start <= base.padding_idx < end
            self._padding_idx = base.padding_idx
            base.padding_idx = base.padding_idx - start if inside else None
        return late

    def _unshadow(self, module: nn.Module) -> None:
        for tensor in self.tensors:
            _unshadow_one(tensor)
        base = base_of(module)
        if isinstance(base, nn.Embedding) and hasattr(self, "_padding_idx"):
            base.padding_idx = self._padding_idx

    def _local(self, tensor: UnitTensor) -> Tensor:
        parameter = _parameter(tensor)
        if not isinstance(parameter, DTensor):
            return parameter
        if not parameter.requires_grad:
            with torch.no_grad():
                return parameter.to_local()
        if tensor.role in self.style.partial:
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


def _parameter(tensor: UnitTensor) -> nn.Parameter:
    parameter = tensor.owner._parameters[tensor.key]
    assert parameter is not None
    return parameter


def _set_parameter(tensor: UnitTensor, parameter: nn.Parameter) -> None:
    tensor.owner._parameters[tensor.key] = parameter


def _shadow_one(tensor: UnitTensor, local: Tensor | None) -> None:
    """Attribute lookup finds the instance dictionary before `_parameters`, so names and registration stay."""
    tensor.owner.__dict__[tensor.key] = local


def _unshadow_one(tensor: UnitTensor) -> None:
    tensor.owner.__dict__.pop(tensor.key, None)


def apply_style(name: str, module: nn.Module, style: Style, context: TPContext) -> None:
    """Make `module` a tensor parallel unit, in place: place its tensors, and run its own forward on local ones."""
    tensors = unit_tensors(module)
    for tensor in tensors:
        parameter = context.place(_parameter(tensor), getattr(style, tensor.role))
        _set_parameter(tensor, parameter)
    if isinstance(module, LoraLayer):
        split = isinstance(style.lora_A, Shard) and style.enter != "mask"
        offset = chunk_bounds(module.in_features or 0, context.mesh.size(), context.rank)[0] if split else 0
        for dropout in module.lora_dropout.values():
            if isinstance(dropout, TopologyInvariantDropout):
                dropout.feature_offset = offset
    unit = _Unit(name, module, style, context, tensors)
    own_forward = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return unit.run(self, own_forward, *args, **kwargs)

    module.forward = MethodType(forward, module)
