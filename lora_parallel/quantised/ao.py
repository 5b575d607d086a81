"""Hold torchao's weight-only formats whose tensors are rows of the weight (int8, float8, intx; by row or by group)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard
from torch.utils.checkpoint import checkpoint

from lora_parallel.layers.linear_classes import QuantisedLayer, bytes_of
from lora_parallel.lazy.graph import Node
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.quantised.packed_weight import Bytes, Encoding, Packed

_WEIGHT = "qdata"


@dataclass(frozen=True)
class _Form:
    """Describe a quantised weight of torchao without its values."""

    kind: Any
    attributes: dict[str, Any]
    inner: dict[str, tuple[torch.dtype, int]]  # dtype and number of dims of each inner tensor of the weight, by name

    @staticmethod
    def of(weight: Any) -> _Form:
        names, attributes = weight.__tensor_flatten__()
        return _Form(type(weight), attributes, {n: (getattr(weight, n).dtype, getattr(weight, n).dim()) for n in names})

    def filled(self, tensors: dict[str, Tensor]) -> Any:
        """Return the quantised weight whose inner tensors have the bytes `tensors`, uint8 [rows, .] by name."""
        inner = {name: tensors[name].view(dtype) for name, (dtype, _) in self.inner.items()}
        inner = {name: t.flatten() if self.inner[name][1] == 1 else t for name, t in inner.items()}
        block = self.attributes["block_size"]
        here = type(block)(min(sizes) for sizes in zip(block, inner[_WEIGHT].shape, strict=True))
        return self.kind.__tensor_unflatten__(inner, {**self.attributes, "block_size": here}, None, None)


class LinearAO(QuantisedLayer):
    """Hold each inner tensor of torchao's quantised weight as bytes: data as `weight`, scales as `weight_scale`, ..."""

    _form: _Form

    @classmethod
    def take(cls, layer: Any) -> None:
        """Change a layer whose weight torchao has quantised, in place."""
        form = _Form.of(layer.weight)
        parts = {_key(name): bytes_of(getattr(layer.weight, name), layer.out_features) for name in form.inner}
        cls.hold(layer, parts, form)

    @classmethod
    def hold(cls, layer: Any, parts: Mapping[str, Tensor], form: _Form) -> None:
        """Let a layer hold the parameters `parts`, from which `form` makes the quantised weight, in place."""
        layer._form, block = form, form.attributes["block_size"][1]
        scales = {name: block >= layer.in_features for name in parts if name != "weight"}
        cls.replace_weight(layer, parts, scales, block)

    def cut_problem(self, style: Any, tp: int) -> str | None:
        """Refuse to cut the input of a format that quantises whole rows of it; else do as `QuantisedLayer`."""
        if style.weight == Shard(1) and self._form.attributes.get("act_quant_kwargs") is not None:
            return "it quantises the rows of its input, of which a tp rank would have a slice"
        return super().cut_problem(style, tp)

    def _quantised(self) -> Any:
        return self._form.filled({name: getattr(self, _key(name)).detach() for name in self._form.inner})

    def dense(self) -> Tensor:
        """Return the dequantised weight, [out, in], as torchao computes it."""
        return self._quantised().dequantize()

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output as `nn.Linear` does; backward dequantises the weight again, which torchao would keep."""
        weight = self._quantised()
        if torch.is_grad_enabled() and x.requires_grad:
            return checkpoint(F.linear, x, weight, self.bias, use_reentrant=False, preserve_rng_state=False)
        return F.linear(x, weight, self.bias)


def _key(name: str) -> str:
    return "weight" if name == _WEIGHT else f"weight_{name}"


def problem_ao(layer: Any) -> str | None:
    """Return the reason why a layer with a weight of torchao cannot be held as bytes, or None if it can."""
    shape, expected = tuple(layer.weight.shape), (layer.out_features, layer.in_features)
    if shape != expected:
        return f"its weight has shape {shape}, and the layer {expected}: the model's config is not its checkpoint's"
    return _problem(layer.weight)


def _problem(weight: Any) -> str | None:
    if not hasattr(weight, "__tensor_flatten__"):
        return "its quantiser leaves it as it is"
    names, attributes = weight.__tensor_flatten__()
    rows = weight.shape[0]
    block = attributes.get("block_size")
    fits = all(getattr(weight, name).dim() in (1, 2) and len(getattr(weight, name)) == rows for name in names)
    if block is None or len(block) != 2 or block[0] != 1 or not fits or _WEIGHT not in names:
        return f"{type(weight).__name__} is no format whose tensors are rows of the weight"
    if tuple(weight.qdata.shape) != tuple(weight.shape):
        return f"{type(weight).__name__} packs several features into one element"
    return None


# ---------------------------------------------------------------------- layers that are still on disk


def dense_ao(dense: Node, quantise: Callable[[nn.Linear], None]) -> Packed:
    """Return the weight [out, in] of a linear layer on disk as a node that `quantise` quantises when it is read."""
    out, features = dense.shape
    sample = _sample(features, dense.dtype, quantise)
    if problem := _problem(sample):
        raise ValueError(f"{problem}, and cannot be sharded")
    form = _Form.of(sample)

    def encode(block: Tensor) -> dict[str, Tensor]:
        weight = _quantised(block, quantise)
        return {_key(name): bytes_of(getattr(weight, name), len(block)) for name in form.inner}

    block = form.attributes["block_size"][1]
    widths = {_key(name): bytes_of(getattr(sample, name), 2).shape[1] for name in form.inner}
    of_rows = frozenset(name for name in widths if block >= features and name != "weight")
    encoding = Encoding(dense, block, encode, widths, of_rows)
    parts = {name: encoding.part(name) for name in widths}
    return Packed(parts, partial(LinearAO.hold, form=form), (out, features), dense.dtype)


def stored_ao(
    layer: Any, tensors: Mapping[str, LazyTensor], weight: Any, quantise: Callable[[nn.Linear], None]
) -> Packed:
    """Return the weight of a linear layer on meta as a node made of the tensors that torchao saved.

    `weight` is what torchao makes of these tensors, on meta; `quantise` quantises a linear layer as the config says.
    """
    if tuple(weight.shape) != (layer.out_features, layer.in_features):
        raise ValueError(
            f"the files hold a weight of shape {tuple(weight.shape)}, and the layer has "
            f"{(layer.out_features, layer.in_features)}: the config is not the checkpoint's"
        )
    if problem := _problem(weight):
        raise ValueError(f"{problem}, and cannot be sharded")
    form = _Form.of(weight)
    if said := disagrees(weight, quantise):
        raise ValueError(f"the files hold it {said}: the config is not the checkpoint's")
    parts = {_key(name): Bytes.of(tensors[name].node, layer.out_features) for name in form.inner}
    return Packed(parts, partial(LinearAO.hold, form=form), tuple(weight.shape), weight.dtype)


def disagrees(weight: Any, quantise: Callable[[nn.Linear], None]) -> str | None:
    """Return a text about the two formats if `weight` is quantised otherwise than by `quantise`, else None."""
    said = _named(_sample(weight.shape[1], weight.dtype, quantise))
    return None if _named(weight) == said else f"as {_named(weight)}, and the config says {said}"


def _quantised(block: Tensor, quantise: Callable[[nn.Linear], None]) -> Any:
    part = nn.Linear(block.shape[1], len(block), bias=False, device="meta")
    part.weight = nn.Parameter(block, requires_grad=False)
    quantise(part)
    weight = part.weight
    del part.weight  # torchao gives `part` a method that refers to it: it would stay until garbage is collected
    return weight


def _sample(features: int, dtype: torch.dtype, quantise: Callable[[nn.Linear], None]) -> Any:
    return _quantised(torch.ones(2, features, dtype=dtype), quantise)  # a block of two rows would show here


def _named(weight: Any) -> str:
    if not hasattr(weight, "__tensor_flatten__"):
        return f"{str(weight.dtype).removeprefix('torch.')}, not quantised"
    form = _Form.of(weight)
    inner = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, (dtype, _) in sorted(form.inner.items()))
    return f"{form.kind.__name__} ({inner}; blocks of {form.attributes.get('block_size', (0, 0))[-1]} features)"
