"""The values of a base with its adapters merged in, from the ranks that have them, a region at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import Embedding, LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lora_parallel.gather import class_of, local, region_of
from lora_parallel.merged_weights import MergedWeight, active_adapters
from lora_parallel.nodes import Leaf, Region
from lora_parallel.sources import Reader, Source

__all__ = ["MergedModel"]


@dataclass(frozen=True, eq=False)
class MergedModel(Source):
    """The merged model as a source of tensors: a region of one is read from the ranks that hold it. Collective.

    Rank 0 gets the values; on other ranks what is read is memory of the same shape.
    """

    weights: Mapping[str, MergedWeight]
    regions: list[dict[str, Region]] = field(default_factory=list)
    """What each rank holds of each."""
    factors: dict[str, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Of the weight that is being read, which may be read in many regions."""
    bytes: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Of the weight that is being read, if it is quantised: all of its parts."""

    def list(self) -> dict[str, Leaf]:
        mine = {name: region_of(weight.tensor) for name, weight in self.weights.items()}
        everyone: list[Any] = [mine]
        if dist.is_initialized():
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
        self.regions.extend(everyone)
        return {name: Leaf(self, name, weight.shape, weight.dtype) for name, weight in self.weights.items()}

    @contextmanager
    def open(self) -> Iterator[Reader]:
        yield self._read

    def _read(self, key: str, region: Region) -> Tensor:
        weight = self.weights[key]
        if weight.layer is not None and key not in self.factors:
            self.factors.clear()
            self.factors[key] = _factors(weight.layer)
        rank = dist.get_rank() if dist.is_initialized() else 0
        block = torch.empty([part.stop - part.start for part in region], dtype=weight.dtype)
        if weight.quantised is not None:
            # Shards of scales need not be of the rows that a shard of the weight is of: bytes, which are few, in full.
            if key not in self.bytes:
                self.bytes.clear()
                names = ("weight", *weight.quantised.scales)
                self.bytes[key] = {name: _full(weight.quantised.get_parameter(name)) for name in names}
            return self._dequantised(key, region).cpu() if rank == 0 else block
        done: list[Region] = []
        for owner, held in enumerate(self.regions):
            shared = _intersection(held[key], region)
            if shared is None or shared in done:  # nothing of it, or a replica
                continue
            done.append(shared)
            inside = tuple(slice(s.start - r.start, s.stop - r.start) for s, r in zip(shared, region, strict=True))
            if rank == owner:
                part = self._merged(key, shared)
                if rank == 0:
                    block[inside] = part.cpu()
                else:
                    dist.send(part.contiguous(), dst=0)
            elif rank == 0:
                part = torch.empty(block[inside].shape, dtype=block.dtype, device=local(weight.tensor).device)
                dist.recv(part, src=owner)
                block[inside] = part.cpu()
        return block

    def _merged(self, key: str, region: Region) -> Tensor:
        """This rank's values of a region that it holds, with the adapters merged as PEFT merges them."""
        weight = self.weights[key]
        held = region_of(weight.tensor)
        mine = local(weight.tensor)[
            tuple(slice(r.start - h.start, r.stop - h.start) for r, h in zip(region, held, strict=True))
        ]
        if weight.layer is None:
            return mine
        return self._with_adapters(key, mine.clone(), region)

    def _dequantised(self, key: str, region: Region) -> Tensor:
        weight, (rows, columns) = self.weights[key], region
        assert weight.quantised is not None
        dense = weight.quantised.dense_of({name: part[rows] for name, part in self.bytes[key].items()})
        return self._with_adapters(key, dense.to(weight.dtype)[:, columns].clone(), region)

    def _with_adapters(self, key: str, merged: Tensor, region: Region) -> Tensor:
        weight = self.weights[key]
        for adapter, (a, b) in self.factors[key].items() if weight.layer is not None else ():
            merged += _delta(weight, adapter, a, b, region)
        return merged


def _factors(layer: LoraLayer) -> dict[str, tuple[Tensor, Tensor]]:
    """The full A and B of each active adapter. Collective."""
    found = {}
    for adapter in active_adapters(layer):
        pair = (
            [layer.lora_A[adapter].weight, layer.lora_B[adapter].weight]
            if adapter in layer.lora_A
            else [
                layer.lora_embedding_A[adapter],
                layer.lora_embedding_B[adapter],
            ]
        )
        a, b = (_full(parameter) for parameter in pair)
        found[adapter] = a, b
    return found


def _full(parameter: Any) -> Tensor:
    data = parameter.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data


def _delta(weight: MergedWeight, adapter: str, a: Tensor, b: Tensor, region: Region) -> Tensor:
    """PEFT's own `get_delta_weight`, for a region of the weight."""
    layer: Any = weight.layer
    part: Any = object.__new__(class_of(layer))  # a copy; FSDP2's own class would build one
    part.__dict__.update(layer.__dict__)
    part.__dict__["_modules"] = dict(layer._modules)
    part.__dict__.pop("get_delta_weight", None)  # the whole layer's, rearranged
    wanted = [torch.arange(each.start, each.stop) for each in region]
    if weight.selected is not None:
        selection, dim = weight.selected
        wanted[dim] = selection.order[wanted[dim]]
    if len(region) == 3:  # of experts
        wanted[0] = wanted[0].repeat(2)  # of which PEFT takes a single one for a matrix
        part.__dict__["num_experts"] = len(wanted[0])
        if not layer._did_swap_in_out_features:
            wanted = [wanted[0], wanted[2], wanted[1]]
    elif isinstance(layer, Embedding) or layer.fan_in_fan_out:
        wanted.reverse()  # stored transposed: B makes columns, A rows
    *experts, out, features = (each.to(a.device) for each in wanted)
    for some in experts:
        a = a.unflatten(0, (layer.num_experts, -1))[some].flatten(0, 1)
        b = b.unflatten(1, (-1, layer.num_experts))[:, :, some].flatten(1)
    a, b = a[:, features], b[out]
    if isinstance(layer, ParamWrapper):
        stand_in = torch.empty(0, dtype=weight.dtype, device=a.device)
        part.__dict__["get_param"] = lambda: stand_in
    if isinstance(layer, Embedding):
        part.__dict__["_modules"].update(
            lora_embedding_A=nn.ParameterDict({adapter: nn.Parameter(a, requires_grad=False)}),
            lora_embedding_B=nn.ParameterDict({adapter: nn.Parameter(b, requires_grad=False)}),
        )
    else:
        part.__dict__["_modules"].update(
            lora_A=nn.ModuleDict({adapter: _Factor(a)}), lora_B=nn.ModuleDict({adapter: _Factor(b)})
        )
    delta = part.get_delta_weight(adapter)
    return delta[: len(delta) // 2] if len(region) == 3 else delta


class _Factor(nn.Module):
    """A weight, where PEFT expects a layer that has one."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def _intersection(one: Region, other: Region) -> Region | None:
    found = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(part.start >= part.stop for part in found) else found
