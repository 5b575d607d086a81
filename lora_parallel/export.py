"""`export_merged`: a base with its adapter merged in, from shards to a folder that plain `from_pretrained` loads."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from peft import PeftModel
from peft.tuners.lora import Embedding, Linear, LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lora_parallel.adapters import check_unmerged
from lora_parallel.agreement import agreed, check_alike
from lora_parallel.atomic import Scratch, check_free, local_path
from lora_parallel.gather import class_of, local, region_of, reshard
from lora_parallel.quantised import Quantised
from lora_parallel.safetensors_writer import write_safetensors
from lora_parallel.selection import Selection, selection_of
from lora_parallel.sources import INDEX, Reader, Source
from lora_parallel.state import state_of
from lora_parallel.stored import Leaf, Region, StoredTensor
from lora_parallel.transformers_quantisers import reverted

__all__ = ["export_merged"]

_SIZE = re.compile(r"\s*(?=.*[1-9])\d+(\.\d+)?\s*[KMGT]B\s*", re.IGNORECASE)
"""What huggingface_hub takes, and is not zero."""


@torch.inference_mode(False)  # inside of which a DTensor cannot be detached
def export_merged(model: nn.Module, directory: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> Path:
    """Write the model with its active adapters merged into the base, as `merge_and_unload` and `save_pretrained` would
    in one process. Collective.

    Each rank merges the part of a weight that it holds; rank 0 receives and writes a few megabytes at a time, so no
    rank ever holds a full tensor beside its shard. The model itself stays as it is. A model without adapters is written
    as it is.

    Args:
        model: What `parallelize` returned.
        directory: The folder to write. It must not exist, or be empty.
        max_shard_size: Of a safetensors file, as in transformers' `save_pretrained`.

    Returns:
        The folder.

    Raises:
        FileExistsError: `directory` exists and is not empty.
        ValueError: The model was not parallelized, or has adapter layers that cannot be merged part by part or are
            merged already; `max_shard_size` is no positive size; or ranks call with different arguments.
        OSError: It cannot be written. All on every rank.
    """
    with agreed():
        target = local_path(directory)
        _check_size(max_shard_size)
    check_alike(directory=str(target), max_shard_size=max_shard_size)
    scratch, writer = Scratch(target), not dist.is_initialized() or dist.get_rank() == 0
    reshard(model)
    try:
        with agreed():
            state = state_of(model)
            if state is None:
                raise ValueError(f"this {type(model).__name__} was not parallelized; pass what parallelize returned.")
            check_unmerged(model)
            base = model.get_base_model() if isinstance(model, PeftModel) else model
            weights = _weights(base)
            if writer:
                check_free(target)
                scratch.make()
        source = _ShardedModel(Path(class_of(base).__name__), weights)
        leaves = source.list()
        with agreed():
            stored = _as_saved(base, leaves, weights)
            files = split_state_dict_into_shards_factory(
                stored,
                get_storage_size=lambda tensor: tensor.numel() * tensor.element_size(),
                filename_pattern="model{suffix}.safetensors",
                max_shard_size=max_shard_size,
            )
        total = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc="Merging", disable=not writer) as progress:
            for name, keys in files.filename_to_tensors.items():
                failure = write_safetensors(
                    scratch.path / name, {key: stored[key].node for key in keys}, writer, progress.update
                )
                with agreed():
                    if failure is not None:
                        raise failure
        with agreed():
            if writer:
                if files.is_sharded:
                    index = {"metadata": {"total_size": total}, "weight_map": files.tensor_to_filename}
                    (scratch.path / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
                _write_configs(base, scratch.path)
                _check(scratch.path, stored, files.tensor_to_filename)
                scratch.place()
    except BaseException:
        scratch.discard()
        raise
    return target


def _check_size(size: Any) -> None:
    if isinstance(size, str):
        positive = _SIZE.fullmatch(size) is not None
    else:
        positive = isinstance(size, int) and not isinstance(size, bool) and size > 0
    if not positive:
        raise ValueError(f"max_shard_size={size!r}: give a positive number of bytes, or a text such as '5GB'.")


# ---------------------------------------------------------------------- which tensors


@dataclass(frozen=True)
class _Weight:
    """One tensor of the merged model."""

    tensor: Tensor
    layer: LoraLayer | None = None
    """Whose adapters are to be merged into it."""

    selected: tuple[Selection, int] | None = None
    """How its rows are stored, and along which dim, if not as they are."""

    quantised: Quantised | None = None
    """The layer whose bytes `tensor` is some of."""

    dense_dtype: torch.dtype | None = None
    """Of a quantised weight: what it is written in."""

    @property
    def transposed(self) -> bool:
        """Whether it is [in, out] in the merged model, as `Conv1D` has it, which bitsandbytes turns round."""
        return issubclass(getattr(self.quantised, "source_cls", nn.Linear), Conv1D)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor that is merged."""
        layer = self.quantised
        return tuple(self.tensor.shape) if layer is None else (layer.out_features, layer.in_features)

    @property
    def dtype(self) -> torch.dtype:
        """In the merged model."""
        return self.dense_dtype or self.tensor.dtype


def _weights(base: nn.Module) -> dict[str, _Weight]:
    """The parameters and persistent buffers of the merged model, by their names in it; a tied one under the first."""
    found: dict[str, _Weight] = {}
    seen: dict[int, tuple[str, bool]] = {}
    for prefix, module in base.named_modules():
        if _is_left_out(base, prefix):
            continue
        quantised = module if isinstance(module, Quantised) else None
        persistent = {key: b for key, b in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *persistent.items()):
            if tensor is None or (quantised is not None and key in quantised.scales):
                continue
            name = _plain(f"{prefix}.{key}" if prefix else key)
            layer = _adapted_by(base, prefix, key)
            merged = layer is not None and bool(_active(layer))
            if id(tensor) in seen:
                first, first_merged = seen[id(tensor)]
                if merged or first_merged:
                    raise ValueError(
                        f"{name} and {first} are one weight, and an adapter is on one of them only: merging it would "
                        "change both. Save the adapter (save_adapter) and merge it where it is used."
                    )
                continue
            seen[id(tensor)] = name, merged
            if merged:
                assert layer is not None
                _check_kind(name, layer)
            weight = _Weight(tensor, layer if merged else None, selection_of(module, key))
            if quantised is not None and key == "weight":
                weight = replace(weight, quantised=quantised, dense_dtype=_dense_dtype(base))
            found[name] = weight
    _check_all_merged(base, found)
    return found


def _check_all_merged(base: nn.Module, weights: Mapping[str, _Weight]) -> None:
    """An adapter of something that is no tensor of the model would be left out."""
    merged = {weight.layer for weight in weights.values()}
    for prefix, module in base.named_modules():
        if not isinstance(module, LoraLayer) or module in merged or _is_left_out(base, prefix):
            continue
        if _active(module):
            _refuse(_plain(prefix), f"a {class_of(base.get_submodule(prefix)).__name__} layer")


def _is_left_out(base: nn.Module, prefix: str) -> bool:
    """Whether a module is an adapter's, or one that an adapter's copy (`modules_to_save`) stands in for."""
    parts = prefix.split(".") if prefix else []
    for depth in range(len(parts)):
        owner = base.get_submodule(".".join(parts[:depth]))
        part = parts[depth]
        if isinstance(owner, ModulesToSaveWrapper):
            if part != "modules_to_save":
                return True
            if depth + 1 == len(parts) or parts[depth + 1] not in owner.active_adapters:
                return True
        elif isinstance(owner, BaseTunerLayer) and part != "base_layer":
            return True
    return False


def _plain(name: str) -> str:
    """Without what PEFT puts between: `base_layer`, `modules_to_save.<adapter>`."""
    parts = name.split(".")
    plain: list[str] = []
    skip = 0
    for part in parts:
        if skip:
            skip -= 1
        elif part == "modules_to_save":
            skip = 1
        elif part != "base_layer":
            plain.append(part)
    return ".".join(plain)


def _adapted_by(base: nn.Module, prefix: str, key: str) -> LoraLayer | None:
    """The layer whose adapters are on a parameter: of several that are one around the other (PEFT's
    `target_parameters`), each is on one.
    """
    while prefix.endswith(".base_layer"):
        prefix = prefix.removesuffix(".base_layer")
        owner = base.get_submodule(prefix)
        if isinstance(owner, LoraLayer) and key == getattr(owner, "parameter_name", "weight"):
            return owner
    return None


def _dense_dtype(base: nn.Module) -> torch.dtype:
    """As transformers' own `dequantize` writes them."""
    dtype = getattr(getattr(base, "config", None), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _active(layer: LoraLayer) -> list[str]:
    """The adapters of the layer that `merge_and_unload` would merge."""
    held = {*layer.lora_A, *layer.lora_embedding_A}
    return [name for name in layer.active_adapters if name in held]


def _check_kind(name: str, layer: LoraLayer) -> None:
    problem = None
    kind: Any = class_of(layer)  # type: ignore[arg-type]
    if kind not in (Linear, Embedding, ParamWrapper) and not isinstance(layer.get_base_layer(), Quantised):
        problem = f"a {kind.__name__} layer"
    for adapter in _active(layer):
        if adapter in layer.lora_variant:
            problem = type(layer.lora_variant[adapter]).__name__
        elif layer.lora_bias.get(adapter):
            problem = "lora_bias=True"
    if problem is not None:
        _refuse(name, problem)


def _refuse(name: str, problem: str) -> NoReturn:
    raise ValueError(
        f"export_merged: the adapter of {name} ({problem}) cannot be merged part by part. Save the adapter "
        "(save_adapter) and merge it in one process with PEFT's merge_and_unload."
    )


def _as_saved(base: nn.Module, merged: Mapping[str, Leaf], weights: Mapping[str, _Weight]) -> dict[str, StoredTensor]:
    """By the names, and in the shapes, that the model's checkpoints have on disk."""
    stored = {name: StoredTensor(leaf) for name, leaf in merged.items()}
    for name, weight in weights.items():
        if weight.selected is not None:
            selection, dim = weight.selected
            stored[name] = selection.restored(stored[name], dim)  # type: ignore[assignment]
        if weight.transposed:
            stored[name] = stored[name].T  # type: ignore[assignment]
    return dict(reverted(base, stored)) if isinstance(base, PreTrainedModel) else stored  # type: ignore[arg-type]


def _write_configs(base: nn.Module, folder: Path) -> None:
    config = copy.deepcopy(getattr(base, "config", None))
    if hasattr(config, "save_pretrained"):
        config.architectures = [class_of(base).__name__]  # type: ignore[union-attr]
        config.dtype = str(base.dtype).removeprefix("torch.")  # type: ignore[union-attr]
        if any(isinstance(module, Quantised) for module in base.modules()):
            del config.quantization_config  # type: ignore[union-attr]
        config.save_pretrained(folder)  # type: ignore[union-attr]
    generation = getattr(base, "generation_config", None)
    if hasattr(generation, "save_pretrained") and base.can_generate():  # type: ignore[operator]
        generation.save_pretrained(folder)  # type: ignore[union-attr]


def _check(folder: Path, stored: Mapping[str, StoredTensor], files: Mapping[str, str]) -> None:
    for key, tensor in stored.items():
        with safe_open(folder / files[key], framework="pt") as file:
            if key not in file.keys() or tuple(file.get_slice(key).get_shape()) != tuple(tensor.shape):  # noqa: SIM118
                raise RuntimeError(f"{folder / files[key]} does not hold {key}: nothing was put in place.")


# ---------------------------------------------------------------------- their values, from the ranks that have them


@dataclass(frozen=True, eq=False)
class _ShardedModel(Source):
    """The merged model as a source of tensors: a region of one is read from the ranks that hold it. Collective.

    Rank 0 gets the values; on other ranks what is read is memory of the same shape.
    """

    weights: Mapping[str, _Weight]
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
    for adapter in _active(layer):
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


def _delta(weight: _Weight, adapter: str, a: Tensor, b: Tensor, region: Region) -> Tensor:
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
