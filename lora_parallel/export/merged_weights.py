"""List the tensors of a base with its adapters merged in, and read them from the ranks, a region at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from peft import PeftModel
from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from lora_parallel.adapters.inspection import first_names
from lora_parallel.distributed.dtensors import class_of, local, region_of
from lora_parallel.distributed.rank_checks import gather_objects
from lora_parallel.layers.layer_parameters import clean_parameter_name
from lora_parallel.layers.linear_classes import QuantisedLayer
from lora_parallel.layers.styles import RowPartition, partition_of
from lora_parallel.lazy.files import Reader, Source
from lora_parallel.lazy.graph import Leaf, Region, whole

Adapted = LoraLayer | TrainableTokensLayer
"""The layers of PEFT that change a weight."""


@dataclass(frozen=True)
class WeightForm:
    """Describe one tensor of the merged model to ranks that do not hold it."""

    name: str  # in the merged model
    first_name: str  # first name of a tied weight in the sharded model, the same on all pipeline stages that hold it
    shape: tuple[int, ...]  # shape of the tensor that adapters are merged into; [out, in] if it is quantised
    dtype: torch.dtype  # in the merged model
    device: str  # type of the device that the tensor is sent from
    # row partition by which the tensor is stored, and the dim of its rows; None if it is stored as it is
    selected: tuple[RowPartition, int] | None
    transposed: bool  # True for a quantised `Conv1D`, whose weight bitsandbytes transposes to [out, in]
    adapted_by: str  # name of the layer whose adapters are to be merged into the tensor; "" if there are none
    is_quantised: bool


@dataclass(frozen=True)
class MergedWeight:
    """Describe one tensor of the merged model."""

    tensor: Tensor
    place: str  # name of the tensor in the sharded model, the first of them if it is tied
    # layer whose adapters are to be merged into the tensor, and its name; None and "" if there are none to merge
    layer: Adapted | None = None
    adapted_by: str = ""
    # row partition by which the tensor is stored, and the dim of its rows; None if it is stored as it is
    selected: tuple[RowPartition, int] | None = None
    # layer whose weight `tensor` is, as bytes; None if the tensor is not quantised
    quantised: QuantisedLayer | None = None
    # dtype that a quantised weight is written in; None if the tensor is not quantised
    dense_dtype: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the tensor has in the merged model."""
        return self.dense_dtype or self.tensor.dtype

    def form(self, name: str, first_name: str) -> WeightForm:
        """Return the description for other ranks."""
        layer = self.quantised
        return WeightForm(
            name,
            first_name,
            shape=tuple(self.tensor.shape) if layer is None else (layer.out_features, layer.in_features),
            dtype=self.dtype,
            device=local(self.tensor).device.type,
            selected=self.selected,
            transposed=issubclass(getattr(layer, "source_cls", nn.Linear), Conv1D),
            adapted_by=self.adapted_by,
            is_quantised=layer is not None,
        )


def merged_weights(base: nn.Module) -> dict[str, MergedWeight]:
    """List what this rank holds of the merged model, by name; a tied tensor under each of its names."""
    weights: dict[str, MergedWeight] = {}
    places: dict[int, str] = {}  # first name of each tensor in the sharded model
    layer_names: dict[Any, str] = {module: name for name, module in base.named_modules()}
    inside = [name for module, name in layer_names.items() if isinstance(module, PeftModel)]  # of the user's module
    config_dtype = getattr(getattr(base, "config", None), "dtype", None)  # as transformers' dequantize
    dense_dtype = config_dtype if isinstance(config_dtype, torch.dtype) else torch.float32
    for prefix, module in base.named_modules():
        if _is_left_out(base, prefix):
            continue
        quantised = module if isinstance(module, QuantisedLayer) else None
        persistent = {key: b for key, b in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is None or (quantised is not None and key in quantised.scales):
                continue
            place = f"{prefix}.{key}" if prefix else key
            name = _merged_name(place)
            for holder in inside:
                name = name.replace(f"{holder}.base_model.model.", f"{holder}.", 1)
            layer = _adapted_by(base, prefix, key)
            if isinstance(layer, LoraLayer):
                _check_kind(name, layer)
            first = places.setdefault(id(tensor), place)
            weight = MergedWeight(tensor, first, layer, layer_names.get(layer, ""), partition_of(module, key))
            if quantised is not None and key == "weight":
                weight = replace(weight, quantised=quantised, dense_dtype=dense_dtype)
            weights[name] = weight
    merged_layers = {weight.layer for weight in weights.values()}
    for prefix, module in base.named_modules():
        remains = isinstance(module, LoraLayer) and module not in merged_layers and not _is_left_out(base, prefix)
        if remains and active_adapters(module):  # on something else than a tensor of the merged model
            _refuse(_merged_name(prefix), f"a {class_of(module).__name__} layer")
    return weights


def _is_left_out(base: nn.Module, prefix: str) -> bool:
    """Return True if the merged model does not have a module.

    Such a module is part of an adapter, or belongs to a layer that PEFT copies for `modules_to_save`: it is the layer's
    original where an active adapter has a copy of it, or the copy of an adapter that is not active.
    """
    parts = prefix.split(".") if prefix else []
    for depth in range(len(parts)):
        owner = base.get_submodule(".".join(parts[:depth]))
        part = parts[depth]
        if isinstance(owner, ModulesToSaveWrapper):
            copies = [name for name in owner.active_adapters if name in owner.modules_to_save]
            if part == "original_module":
                if copies:
                    return True
            elif part != "modules_to_save" or depth + 1 == len(parts) or parts[depth + 1] not in copies:
                return True
        elif isinstance(owner, BaseTunerLayer) and part != "base_layer":
            return True
    return False


def _merged_name(name: str) -> str:
    """Return the name in the merged model of a parameter or module, which may be in one of PEFT's wrappers."""
    wrapped = r"\b(modules_to_save\.[^.]+|token_adapter\.base_layer)(\.|$)"
    return clean_parameter_name(re.sub(wrapped, "", name)).removesuffix(".")


def _adapted_by(base: nn.Module, prefix: str, key: str) -> Adapted | None:
    """Return the layer whose active adapters change a parameter `key` of the module `prefix`, or None."""
    # With PEFT's `target_parameters` several LoRA layers may be nested around one module; each changes one parameter.
    while prefix.endswith(".base_layer"):
        prefix = prefix.removesuffix(".base_layer")
        owner = base.get_submodule(prefix)
        if isinstance(owner, TrainableTokensLayer):
            owner = owner.tied_adapter or owner  # the layer that has the rows of both ends of a tied weight
        if isinstance(owner, Adapted) and key == getattr(owner, "parameter_name", "weight"):
            return owner if active_adapters(owner) else None
    return None


def active_adapters(layer: Any) -> list[str]:
    """List the adapters of a PEFT layer that `merge_and_unload` would merge."""
    kinds = [getattr(layer, kind, ()) for kind in layer.adapter_layer_names]
    return [name for name in layer.active_adapters if any(name in kind for kind in kinds)]


def _check_kind(name: str, layer: LoraLayer) -> None:
    problem = None
    kind: Any = class_of(layer)  # type: ignore[arg-type]
    if kind not in (Linear, Embedding, ParamWrapper) and not isinstance(layer.get_base_layer(), QuantisedLayer):
        problem = f"a {kind.__name__} layer"
    for adapter in active_adapters(layer):
        if adapter in layer.lora_variant:
            problem = type(layer.lora_variant[adapter]).__name__
        elif layer.lora_bias.get(adapter):
            problem = "lora_bias=True"
    if problem is not None:
        _refuse(name, problem)


def _refuse(name: str, problem: str) -> NoReturn:
    raise ValueError(
        f"export_merged: the adapter of {name} ({problem}) cannot be merged part by part. Save the adapter "
        "(save_adapter) and merge it in one process with PEFT's merge_and_unload, after untying weights that are tied."
    )


Held = Mapping[str, tuple[WeightForm, Region]]
"""The weights that a rank holds, by name, each with the region that this rank can send."""


@dataclass(frozen=True, eq=False)
class MergedModel(Source):
    """Offer the merged model as a source of tensors. Reading a region of a tensor is collective.

    The ranks that hold parts of the region merge them and send them to rank 0. On other ranks, the tensor that a read
    returns has the region's shape and no meaningful values.
    """

    weights: Mapping[str, MergedWeight]  # the weights that this rank holds, by their names in the merged model
    held: Sequence[Held]  # the weights that each rank holds (see `held_by_ranks`)
    forms: Mapping[str, WeightForm]  # the weights of the merged model, on all pipeline stages, by name (see `forms_of`)
    # full A and B of each active adapter on the weight that was read last, as it may be read in many regions
    factors: dict[str, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    # full weight and scales, uint8, of the quantised weight that was read last, by the weight's name
    bytes: dict[str, dict[str, Tensor]] = field(default_factory=dict)

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
        held = zip(region, region_of(weight.tensor), strict=True)
        mine = local(weight.tensor)[tuple(slice(r.start - h.start, r.stop - h.start) for r, h in held)]
        return mine if weight.layer is None else self._with_adapters(key, mine.clone(), region)

    def _dequantised(self, key: str, region: Region) -> Tensor:
        weight, (rows, columns) = self.weights[key], region
        assert weight.quantised is not None
        dense = weight.quantised.dense_of({name: part[rows] for name, part in self.bytes[key].items()})
        return self._with_adapters(key, dense.to(weight.dtype)[:, columns].clone(), region)

    def _with_adapters(self, key: str, merged: Tensor, region: Region) -> Tensor:
        weight = self.weights[key]
        for adapter, (a, b) in self.factors[key].items() if weight.layer is not None else ():
            if isinstance(weight.layer, TrainableTokensLayer):
                _replace_rows(merged, a, b, region)
            else:
                merged += _delta(weight, adapter, a, b, region)
        return merged


def held_by_ranks(model: nn.Module, weights: Mapping[str, MergedWeight], start: str) -> Sequence[Held]:
    """Return what each rank holds of the merged model; names in its base begin with `start` in `model`. Collective."""
    first = first_names(model, [start + weight.place for weight in weights.values()])
    mine: dict[str, tuple[WeightForm, Region]] = {}
    for name, weight in weights.items():
        form = weight.form(name, first[start + weight.place].removeprefix(start))
        # All ranks of a stage gather a quantised weight; the first of them sends it.
        mine[name] = form, whole(form.shape) if form.is_quantised else region_of(weight.tensor)
    return gather_objects(mine)


def forms_of(held: Sequence[Held]) -> dict[str, WeightForm]:
    """Return the tensors of the merged model, by name. A tied tensor is listed once, under the first of its names.

    If adapters of one layer alone are to be merged into it, or of several layers, it is listed under all of its names.
    """
    forms = {form.name: form for of_rank in held for form, _ in of_rank.values()}
    by_weight: dict[str, list[WeightForm]] = {}
    for form in forms.values():
        by_weight.setdefault(form.first_name, []).append(form)
    for tied in by_weight.values():
        first = next((form for form in tied if form.name == form.first_name), tied[0])
        for other in tied if len({form.adapted_by for form in tied}) == 1 else ():
            if other is not first:
                del forms[other.name]
    return forms


def _factors(layer: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Gather the full A and B (or token indices and their rows) of each active adapter, by its name. Collective."""
    if isinstance(layer, TrainableTokensLayer):
        rows = layer.trainable_tokens_delta
        return {name: (torch.tensor(layer.token_indices[name]), _full(rows[name])) for name in active_adapters(layer)}
    pairs = {
        name: (layer.lora_A[name].weight, layer.lora_B[name].weight)
        if name in layer.lora_A
        else (layer.lora_embedding_A[name], layer.lora_embedding_B[name])
        for name in active_adapters(layer)
    }
    return {name: (_full(a), _full(b)) for name, (a, b) in pairs.items()}


def _replace_rows(weight: Tensor, indices: Tensor, rows: Tensor, region: Region) -> None:
    """Replace those of the rows with these indices that are in a region of the weight, as PEFT's `merge` does."""
    inside = (indices >= region[0].start) & (indices < region[0].stop)
    weight[(indices[inside] - region[0].start).to(weight.device)] = rows[inside.to(rows.device), region[1]].to(weight)


def _full(parameter: Any) -> Tensor:
    data = parameter.detach()
    return data.full_tensor() if isinstance(data, DTensor) else data


def _delta(weight: MergedWeight, adapter: str, a: Tensor, b: Tensor, region: Region) -> Tensor:
    """Compute the delta of one adapter for a region of the weight, by PEFT's own `get_delta_weight`.

    `a` and `b` are full; the region is in the order in which the weight's rows are stored.
    """
    layer: Any = weight.layer
    part: Any = object.__new__(class_of(layer))  # a shallow copy; copy.copy would have FSDP2's class build a layer
    part.__dict__.update(layer.__dict__)
    part.__dict__["_modules"] = dict(layer._modules)
    part.__dict__.pop("get_delta_weight", None)  # the override for the whole layer, which rearranges rows
    wanted = [torch.arange(part.start, part.stop) for part in region]
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
    *experts, out, features = (indices.to(a.device) for indices in wanted)
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
    region = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True))
    return None if any(part.start >= part.stop for part in region) else region
