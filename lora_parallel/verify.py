"""The guards: what must hold after `parallelize`, checked on every rank with one small collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from lora_parallel.adapters import adapter_parameters
from lora_parallel.agreement import agreed, fingerprint, gather_numbers
from lora_parallel.gather import local
from lora_parallel.state import ParallelState

__all__ = ["tensors_in", "verify", "verify_same_batch"]


def verify(model: nn.Module, state: ParallelState) -> None:
    """Check a sharded model. Collective.

    Raises:
        RuntimeError: A base parameter would train, or an adapter parameter would not; a tensor is on meta; a fresh
            adapter is not the identity; or ranks hold different values of what they should hold alike. The error names
            the parameter and is raised on every rank.
    """
    with agreed():
        _check_on_device(model)
        if state.config.require_adapters:
            _check_trainables(model)
        _check_fresh(model, state.fresh_adapters)
    _check_replicas(model, state.mesh)


def _check_on_device(model: nn.Module) -> None:
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise RuntimeError(f"the {kind} {name} is on the meta device: it was never given a value.")


def _check_trainables(model: nn.Module) -> None:
    adapters = adapter_parameters(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in adapters:
            raise RuntimeError(
                f"the base parameter {name} would train. Freeze it (requires_grad_(False)), list its module in "
                "LoraConfig(modules_to_save=[...]), or set require_adapters=False."
            )
    active = _active_adapters(model)
    for name, parameter in adapters.items():
        if not parameter.requires_grad and active & set(name.split(".")):
            raise RuntimeError(
                f"the adapter parameter {name} would not train: set requires_grad_(True) (a PeftModel loaded without "
                "is_trainable=True is frozen), deactivate its adapter, or set require_adapters=False."
            )


def _active_adapters(model: nn.Module) -> set[str]:
    return {name for module in model.modules() if isinstance(module, LoraLayer) for name in module.active_adapters}


def _check_fresh(model: nn.Module, adapters: Iterable[str]) -> None:
    for adapter in adapters:
        for name, parameter in adapter_parameters(model, adapter).items():
            # PEFT zeroes B of a linear layer and A of an embedding.
            if (".lora_B." in name or ".lora_embedding_A." in name) and torch.count_nonzero(local(parameter)):
                raise RuntimeError(
                    f"the fresh adapter factor {name} is not zero: the model would not start as its base."
                )


def _check_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Ranks that hold the same shard of a trained parameter must hold the same values."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    prints = gather_numbers([fingerprint(local(p)) for p in parameters.values()], mesh.device_type)
    for index, (name, parameter) in enumerate(parameters.items()):
        for ranks in _peers(parameter, mesh):
            if len(set(prints[ranks, index].tolist())) > 1:
                raise RuntimeError(
                    f"{name} should be equal on ranks {ranks}, which hold the same shard of it, and is not: something "
                    "changed it on some ranks only."
                )


def _peers(parameter: Tensor, mesh: DeviceMesh) -> Iterator[list[int]]:
    """Groups of ranks that hold the same shard."""
    sharded: set[str] = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        sharded = {n for n, placement in zip(names, parameter.placements, strict=True) if not placement.is_replicate()}
    axes = list(mesh.mesh_dim_names or ())
    order = [axes.index(n) for n in axes if n in sharded] + [axes.index(n) for n in axes if n not in sharded]
    ranks = mesh.mesh.permute(order)
    split = 1
    for name in sharded:
        split *= mesh[name].size()
    yield from ranks.reshape(split, -1).tolist()


def verify_same_batch(mesh: DeviceMesh, inputs: Any) -> None:
    """Check that tp peers were given the same batch. Collective.

    Raises:
        RuntimeError: They were not, on every rank.
    """
    total = 0
    for tensor in tensors_in(inputs):
        total = (total * 1000003 + fingerprint(tensor)) % 2**62
    prints = gather_numbers([total], mesh.device_type)[:, 0]
    for ranks in mesh.mesh.reshape(-1, mesh["tp"].size()).tolist():
        if len(set(prints[ranks].tolist())) > 1:
            raise RuntimeError(
                f"ranks {ranks} are tensor parallel peers and were fed different batches: shard the data by "
                f"data-parallel rank (rank // {mesh['tp'].size()}), not by process."
            )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of dicts (model outputs of transformers are dicts), lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
