"""torchao: weight-only formats whose tensors are rows of the weight (int8, float8, intx; by row or by group)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lora_parallel.quantised.layer import Quantised, bytes_of

__all__ = ["LinearAO", "problem_ao"]

_WEIGHT = "qdata"


class LinearAO(Quantised):
    """Each inner tensor of the quantised weight as bytes: `weight` its data, `weight_scale` and others beside it."""

    _rebuilt: tuple[Any, dict[str, Any], dict[str, tuple[torch.dtype, int]]]

    @classmethod
    def take(cls, layer: Any) -> None:
        """Change a layer that is quantised, in place."""
        weight = layer.weight
        names, attributes = weight.__tensor_flatten__()
        inner = {name: getattr(weight, name) for name in names}
        del layer._parameters["weight"]
        for name, tensor in inner.items():
            setattr(layer, _key(name), bytes_of(tensor, len(tensor)))
        layer._rebuilt = type(weight), attributes, {name: (t.dtype, t.dim()) for name, t in inner.items()}
        layer.block = attributes["block_size"][1]
        whole = layer.block >= layer.in_features
        layer.scales = {_key(name): whole for name in names if name != _WEIGHT}
        layer.__class__ = cls

    def _quantised(self) -> Any:
        kind, attributes, inner = self._rebuilt
        tensors = {name: getattr(self, _key(name)).detach().view(dtype) for name, (dtype, _) in inner.items()}
        tensors = {name: t.flatten() if inner[name][1] == 1 else t for name, t in tensors.items()}
        block = attributes["block_size"]
        here = type(block)(min(each) for each in zip(block, tensors[_WEIGHT].shape, strict=True))
        return kind.__tensor_unflatten__(tensors, {**attributes, "block_size": here}, None, None)

    def dense(self) -> Tensor:
        """See `Quantised`."""
        return self._quantised().dequantize()

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`. torchao keeps the weight that it dequantises for backward; here it is dequantised again."""
        weight = self._quantised()
        if torch.is_grad_enabled() and x.requires_grad:
            return checkpoint(F.linear, x, weight, self.bias, use_reentrant=False, preserve_rng_state=False)
        return F.linear(x, weight, self.bias)


def _key(name: str) -> str:
    return "weight" if name == _WEIGHT else f"weight_{name}"


def problem_ao(layer: Any) -> str | None:
    """Why a layer with a weight of torchao cannot be held as bytes, or None if it can."""
    weight = layer.weight
    names, attributes = weight.__tensor_flatten__()
    rows = weight.shape[0]
    block = attributes.get("block_size")
    fits = all(getattr(weight, name).dim() in (1, 2) and len(getattr(weight, name)) == rows for name in names)
    if block is None or len(block) != 2 or block[0] != 1 or not fits or _WEIGHT not in names:
        return f"{type(weight).__name__} is no format whose tensors are rows of the weight"
    if tuple(weight.qdata.shape) != tuple(weight.shape):
        return f"{type(weight).__name__} packs several features into one element"
    return None
