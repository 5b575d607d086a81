"""Compare the bases of two models on any meshes, by a fingerprint of each frozen weight (the base fingerprint)."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel.adapters.inspection import adapter_parameters
from lora_parallel.distributed.dtensors import local, region_of, reshard
from lora_parallel.distributed.mesh import axis_rank, merged_over_stages, over_stages, sharded_axes, stage_group
from lora_parallel.layers.layer_parameters import clean_parameter_name
from lora_parallel.layers.styles import RowPartition, partition_of
from lora_parallel.state import StageTensors, state_of

_SAMPLES = 16


def base_fingerprints(
    model: nn.Module,
    mesh: DeviceMesh | None,
    dtype: torch.dtype | None = None,
    stage: StageTensors | None = None,
) -> dict[str, str]:
    """Return a fingerprint of each frozen weight, by its name without PEFT's additions. Collective.

    A fingerprint is a hash of the weight's shape, its dtype and 16 of its values, at places that depend on its name.
    That is enough to tell one model from another, or from the same one after further training, without reading all of
    it. Each rank contributes the values that it owns, in one all-reduce.

    Args:
        model: A model on a mesh, or a whole one.
        mesh: The model's mesh. None for a whole model; then nothing is communicated.
        dtype: Compute the fingerprints that the weights would have after a cast to this dtype.
        stage: Says which tensors other pipeline stages list, under pipeline parallelism.
    """
    reshard(model)
    adapters = adapter_parameters(model)
    frozen = {
        _name_in_base(name): p
        for name, p in model.named_parameters()
        if not p.requires_grad and name not in adapters and p.numel() and (stage is None or name not in stage.repeated)
    }
    arranged = {
        parameter: selected
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and (selected := partition_of(module, key)) is not None
    }
    shapes = {name: _shape(parameter, arranged.get(parameter)) for name, parameter in frozen.items()}
    sampled = [
        _samples(name, shapes[name], parameter, arranged.get(parameter), mesh, dtype)
        for name, parameter in frozen.items()
    ]
    values = torch.stack(sampled) if sampled else torch.empty(0, 0)
    if mesh is not None and dist.is_initialized() and sampled:
        dist.all_reduce(values, group=stage_group(mesh))
    prints = {
        name: hashlib.blake2b(f"{shapes[name]} {dtype or parameter.dtype} {row}".encode(), digest_size=8).hexdigest()
        for (name, parameter), row in zip(frozen.items(), values.tolist(), strict=True)
    }
    return merged_over_stages(prints, mesh)


def fingerprints_of(model: nn.Module) -> dict[str, str]:
    """Return the base fingerprints of a model as it was parallelized. Collective for one that was left on meta then."""
    # They are kept, as merging and unmerging an adapter changes the base by rounding.
    state = state_of(model)
    assert state is not None
    if state.fingerprints is not None:
        return state.fingerprints
    trained = {_name_in_base(name) for names in over_stages(state.trained, state.mesh) for name in names}
    present = base_fingerprints(model, state.mesh, stage=state.stage)
    return {name: digest for name, digest in present.items() if name not in trained}


def renew_fingerprints(model: nn.Module, names: Iterable[str]) -> None:
    """Compute the kept fingerprints of some parameters again, after these were given other values. Collective."""
    state = state_of(model)
    if state is not None and state.fingerprints is not None:
        present = base_fingerprints(model, state.mesh, stage=state.stage)
        plain = {_name_in_base(name) for name in names}
        state.fingerprints |= {name: digest for name, digest in present.items() if name in plain}


def check_base(
    stored: Mapping[str, str], present: Mapping[str, str], model: nn.Module, where: str, held: Iterable[str]
) -> None:
    """Check that the base is the one that adapters were trained on.

    Args:
        stored: The base fingerprints of the model that the adapters were trained on.
        present: The base fingerprints of the present model.
        model: The present model.
        where: The file or folder that `stored` was read from, for the error message.
        held: Names of parameters that are not compared, as their values are stored with the adapters.

    Raises:
        ValueError: A frozen weight is missing, or has other values, another shape or another dtype; or a weight is
            frozen in the present model only.
    """
    state = state_of(model)
    here = dict(model.named_parameters(remove_duplicate=False))
    names = {_name_in_base(name) for name in (here if state is None or state.stage is None else state.stage.names)}
    exempt = {_name_in_base(name) for name in held}
    stored, present = (
        {name: digest for name, digest in prints.items() if name not in exempt} for prints in (stored, present)
    )
    missing = [name for name in stored if name not in names]
    other = [name for name in stored if name in present and present[name] != stored[name]]
    more = [name for name in present if name not in stored]
    if missing or other or more:
        raise ValueError(
            f"{where} was trained on another base model: of its {len(stored)} frozen weights {len(missing)} are not in "
            f"this one (first: {missing[:1]}), {len(other)} have other values, shapes or dtypes (first: {other[:1]}); "
            f"{len(more)} of this one's were not frozen there, or not there (first: {more[:1]})."
        )


def _name_in_base(name: str) -> str:
    return clean_parameter_name(name.replace("base_model.model.", ""))


def _shape(parameter: Tensor, selected: tuple[RowPartition, int] | None) -> tuple[int, ...]:
    """Return the shape of a parameter in the model's checkpoint, before a row partition chose its rows."""
    return tuple(
        selected[0].size if selected is not None and dim == selected[1] else size
        for dim, size in enumerate(parameter.shape)
    )


def _samples(
    name: str,
    shape: tuple[int, ...],
    parameter: Tensor,
    selected: tuple[RowPartition, int] | None,
    mesh: DeviceMesh | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Return the bits of the sampled values that this rank contributes, int64 [16], with zero for all others."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    flat = torch.randint(prod(shape), (_SAMPLES,), generator=generator)
    bits = torch.zeros(_SAMPLES, dtype=torch.int64, device="cpu" if mesh is None else mesh.device_type)
    mine = local(parameter)
    if not mine.numel() or not _contributes(parameter, mesh):
        return bits
    indices = list(torch.unravel_index(flat, shape))  # one tensor [16] a dim
    if selected is not None:
        partition, dim = selected
        indices[dim] = partition.inverse[indices[dim]]
    indices = [index - part.start for index, part in zip(indices, region_of(parameter), strict=True)]
    inside = torch.ones(_SAMPLES, dtype=torch.bool)
    for index, size in zip(indices, mine.shape, strict=True):
        inside &= (index >= 0) & (index < size)
    chosen = mine[tuple(index[inside].to(mine.device) for index in indices)].to(dtype or parameter.dtype)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[chosen.element_size()]
    bits[inside.to(bits.device)] = chosen.contiguous().view(width).to(bits.device, torch.int64).reshape(-1)
    return bits


def _contributes(parameter: Tensor, mesh: DeviceMesh | None) -> bool:
    """Return True if this rank is the one that contributes, among the ranks that hold the same shard."""
    sharded = {*sharded_axes(parameter), "pp"}  # another stage holds other weights
    return mesh is None or all(axis in sharded or axis_rank(mesh, axis) == 0 for axis in mesh.mesh_dim_names or ())
