"""Read a base with its adapters merged in from the ranks that hold its shards, a region at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import Embedding, LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lora_parallel.adapters.inspection import first_names
from lora_parallel.distributed.gather import class_of, local, region_of
from lora_parallel.export.merged_weights import MergedWeight, WeightForm, active_adapters, refuse_one_of_two
from lora_parallel.lazy.files import Reader, Source
from lora_parallel.lazy.graph import Leaf, Region, whole

__all__ = ["MergedModel", "forms_of", "held_by_ranks"]


Held = Mapping[str, tuple[WeightForm, Region]]
"""The weights that a rank holds, by name, each with the region that this rank can send."""


@dataclass(frozen=True, eq=False)
class MergedModel(Source):
    """Offer the merged model as a source of tensors. Reading a region of a tensor is collective.

    The ranks that hold parts of the region merge them and send them to rank 0. On other ranks, the tensor that a read
    returns has the region's shape and no meaningful values.
    """

    weights: Mapping[str, MergedWeight]
    """The weights that this rank holds, by their names in the merged model."""

    held: Sequence[Held]
    """The weights that each rank holds (see `held_by_ranks`)."""

    forms: Mapping[str, WeightForm]
    """The weights of the merged model, on all pipeline stages, by name (see `forms_of`)."""

    factors: dict[str, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    """Full A and B of each active adapter on the weight that was read last, by the weight's name.

    They are kept because a weight may be read in many regions.
    """
    bytes: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Full weight and scales, uint8, of the quantised weight that was read last, by the weight's name."""

    def list(self) -> dict[str, Leaf]:
        return {name: Leaf(self, name, form.shape, form.dtype) for name, form in self.forms.items()}

    @contextmanager
    def open(self) -> Iterator[Reader]:
        yield self._read

    def _read(self, key: str, region: Region) -> Tensor:
        form = self.forms[key]
        if key in self.weights:
            self._gather(key)
        rank = dist.get_rank() if dist.is_initialized() else 0
        block = torch.empty([part.stop - part.start for part in region], dtype=form.dtype)
        done: list[Region] = []
        for owner, held in enumerate(self.held):
            shared = _intersection(held[key][1], region) if key in held else None
            if shared is None or shared in done:  # this rank holds no part of it, or a replica
                continue
            done.append(shared)
            inside = tuple(slice(s.start - r.start, s.stop - r.start) for s, r in zip(shared, region, strict=True))
            if rank == owner:
                part = self._dequantised(key, shared) if form.is_quantised else self._merged(key, shared)
                if rank == 0:
                    block[inside] = part.cpu()
                else:
                    dist.send(part.contiguous(), dst=0)
            elif rank == 0:
                part = torch.empty(block[inside].shape, dtype=block.dtype, device=form.device)
                dist.recv(part, src=owner)
                block[inside] = part.cpu()
        return block

    def _gather(self, key: str) -> None:
        """Gather what the ranks of this stage need in full of a weight. Collective over them."""
        weight = self.weights[key]
        if weight.layer is not None and key not in self.factors:
            self.factors.clear()
            self.factors[key] = _factors(weight.layer)
        # A rank's shard of the scales may be of other rows than its shard of the weight: gather both in full, which
        # takes little memory because they are quantised.
        if weight.quantised is not None and key not in self.bytes:
            self.bytes.clear()
            names = ("weight", *weight.quantised.scales)
            self.bytes[key] = {name: _full(weight.quantised.get_parameter(name)) for name in names}

    def _merged(self, key: str, region: Region) -> Tensor:
        """Return the values of a region that this rank holds, with the adapters merged as PEFT merges them."""
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


def held_by_ranks(model: nn.Module, weights: Mapping[str, MergedWeight], start: str) -> Sequence[Held]:
    """Return what each rank holds of the merged model, in the order of ranks. Collective.

    Args:
        model: The parallelized model.
        weights: What this rank holds.
        start: The beginning of the names in `model` of what is in the base model.
    """
    first = first_names(model, [start + weight.place for weight in weights.values()])
    mine: dict[str, tuple[WeightForm, Region]] = {}
    for name, weight in weights.items():
        form = weight.form(name, first[start + weight.place].removeprefix(start))
        # All ranks of a stage gather a quantised weight; the first of them sends it.
        mine[name] = form, whole(form.shape) if form.is_quantised else region_of(weight.tensor)
    everyone: list[Any] = [mine]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    return everyone


def forms_of(held: Sequence[Held]) -> dict[str, WeightForm]:
    """Return the tensors of the merged model, by name. A tied tensor is listed once, under the first of its names.

    Args:
        held: What each rank holds.

    Raises:
        ValueError: An adapter is on one of two layers with a tied weight, which are on different pipeline stages.
    """
    forms = {form.name: form for each in held for form, _ in each.values()}
    by_weight: dict[str, list[WeightForm]] = {}
    for form in forms.values():
        by_weight.setdefault(form.first_name, []).append(form)
    for tied in by_weight.values():
        first = next((form for form in tied if form.name == form.first_name), tied[0])
        for form in tied:
            if form is first:
                continue
            if form.is_merged or first.is_merged:
                refuse_one_of_two(form.name, first.name)
            del forms[form.name]
    return forms


def _factors(layer: LoraLayer) -> dict[str, tuple[Tensor, Tensor]]:
    """Gather the full A and B of each active adapter of a layer, by adapter name. Collective."""
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
    """Compute the delta of one adapter for a region of the weight, by PEFT's own `get_delta_weight`.

    Args:
        weight: The weight that is merged.
        adapter: The name of the adapter.
        a: The full A of the adapter.
        b: The full B of the adapter.
        region: The region of the weight, in the order in which its rows are stored.
    """
    layer: Any = weight.layer
    part: Any = object.__new__(class_of(layer))  # a shallow copy; copy.copy would have FSDP2's class build a layer
    part.__dict__.update(layer.__dict__)
    part.__dict__["_modules"] = dict(layer._modules)
    part.__dict__.pop("get_delta_weight", None)  # the override for the whole layer, which rearranges rows
    wanted = [torch.arange(each.start, each.stop) for each in region]
    if weight.selected is not None:
        partition, dim = weight.selected
        wanted[dim] = partition.order[wanted[dim]]
    if len(region) == 3:  # [experts, ., .]
        wanted[0] = wanted[0].repeat(2)  # PEFT would treat a single expert as a plain matrix
        part.__dict__["num_experts"] = len(wanted[0])
        if not layer._did_swap_in_out_features:
            wanted = [wanted[0], wanted[2], wanted[1]]
    elif isinstance(layer, Embedding) or layer.fan_in_fan_out:
        wanted.reverse()  # the weight is stored transposed: its columns come from B, its rows from A
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
    """Hold a LoRA factor as `weight`, where PEFT expects a layer that has one."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def _intersection(one: Region, other: Region) -> Region | None:
    found = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(part.start >= part.stop for part in found) else found
