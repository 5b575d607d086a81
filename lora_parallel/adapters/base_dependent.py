"""Initialise adapters that are computed from base weights (DoRA, PiSSA, OLoRA) while the base is still on disk.

PEFT computes them a layer at a time, so a layer's weights are in memory for that time alone. PiSSA and OLoRA subtract
what the adapter starts with from the base weight. That is two thin factors: they are kept, and each rank subtracts its
part of their product from the part of the weight that it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.lazy.graph import Block, Node, ReadNode, Region, read
from lora_parallel.lazy.lazy_tensor import LazyParameter
from lora_parallel.lazy.tracking import direct_tensors, replace_tensor


@dataclass(frozen=True, eq=False)
class Residual(Block):
    """Represent a weight from which the product of two thin factors has been subtracted, in float32."""

    weight: Node
    left: Tensor  # [rows, r], float32
    right: Tensor  # [r, columns], float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def inputs(self) -> tuple[Node, ...]:
        return (self.weight,)

    def needs(self, region: Region) -> Iterator[tuple[Node, Region]]:
        yield self.weight, region

    def blocks(self, regions: Sequence[Region], read: ReadNode, device: str) -> Iterator[Tensor]:
        for region in regions:
            product = self.left[region[0]].to(device) @ self.right[:, region[1]].to(device)
            yield (read(self.weight, region, device).float() - product).to(self.dtype)


def factors_in(model: nn.Module) -> dict[str, Tensor]:
    """Return the factors that are subtracted from a model's weights, by name."""

    def residuals(node: Node) -> Iterator[Residual]:
        if isinstance(node, Residual):
            yield node
        for parent in node.inputs:
            yield from residuals(parent)

    lazy = ((name, p.node) for name, p in model.named_parameters() if isinstance(p, LazyParameter))
    found = ((name, residual) for name, node in lazy for residual in residuals(node))
    return {f"{name} {key}": getattr(residual, key) for name, residual in found for key in ("left", "right")}


@contextmanager
def in_memory(base: nn.Module) -> Iterator[None]:
    """Hold a module's own weights in memory within the context, instead of on disk; changes to them are lost."""
    waiting = {key: tensor for key, tensor in direct_tensors(base) if isinstance(tensor, LazyParameter)}
    for key, tensor in waiting.items():
        values = read(tensor.node)
        is_parameter = key in base._parameters
        replace_tensor(base, key, nn.Parameter(values, tensor.requires_grad) if is_parameter else values)
    try:
        yield
    finally:
        for key, tensor in waiting.items():
            replace_tensor(base, key, tensor)


def initialise_from(layer: Any, adapter_name: str, initialise: Callable[[], None]) -> None:
    """Let PEFT initialise an adapter from its base's weight, and keep on disk what it leaves of the weight.

    Args:
        layer: A LoRA layer.
        adapter_name: Name of the adapter.
        initialise: Sets the values of the layer's `lora_A` and `lora_B` for the adapter, and may replace the weight.

    Raises:
        RuntimeError: The new weight is not the old one less the adapter's product.
    """
    base = layer.get_base_layer()
    waiting = base._parameters["weight"]
    if not isinstance(waiting, LazyParameter):
        initialise()
        return
    with in_memory(base):
        before = base.weight.detach().clone()
        initialise()
        after = base.weight.detach()
    if torch.equal(after, before):
        return
    left = layer.scaling[adapter_name] * layer.lora_B[adapter_name].weight.detach().float()  # [out, r]
    right = layer.lora_A[adapter_name].weight.detach().float().clone()  # [r, in]
    left, right = (right.T, left.T) if layer.fan_in_fan_out else (left, right)
    if not torch.allclose(after, (before.float() - left @ right).to(after.dtype)):
        raise RuntimeError(f"PEFT's initialisation of {adapter_name!r} leaves another weight than W - scaling * B A.")
    waiting.source.node = Residual(waiting.node, left, right)
