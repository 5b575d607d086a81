"""Check the conditions that must hold after `parallelize`, on every rank and with one small collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from lora_parallel.adapters.base_fingerprint import base_fingerprints
from lora_parallel.adapters.inspection import adapter_parameters
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.rank_checks import agreed, gather_objects
from lora_parallel.distributed.replicas import unequal_replicas
from lora_parallel.optimizers import check_optimizers
from lora_parallel.state import ParallelState, Setup, parallelized, state_of

# one entry per tied weight: the modules that hold the weight, each with its key there
Ties = Sequence[list[tuple[nn.Module, str]]]


def verify(model: nn.Module, state: ParallelState, ties: Ties = (), trains: bool = True) -> None:
    """Raise RuntimeError on every rank if a sharded model breaks a condition; `trains=False` leaves out what trains.
    Collective.

    A base parameter would train, or an adapter parameter would not; a tensor is on meta; the modules of a tied weight
    hold different tensors; a fresh adapter changes the model's outputs; or ranks hold different values of a shard that
    should be equal.
    """
    with agreed():
        if state.materialized:
            check_values(model)
        if state.config.require_adapters and trains:
            _check_trainables(model)
        _check_ties(model, ties)
        _check_fresh(model, state.fresh_adapters)
    _check_replicas(model, state.mesh)


def check_once_it_trains(model: nn.Module, state: ParallelState, lack: ValueError | None) -> None:
    """Check what trains of a model that has been evaluated so far, before it trains for the first time.

    A training forward, an optimizer that is given to `check_optimized`, or the first step of any other optimizer makes
    the check. `lack` is the error about a model without adapters, which is raised then.
    """
    if not state.config.require_adapters:
        return

    def check(together: bool = True) -> None:
        with agreed() if together else nullcontext():
            if lack is not None:
                raise lack
            _check_trainables(model)
        state.check_trains = None
        hook.remove()
        end_checking()

    def before_forward(model: nn.Module, args: object) -> None:
        if model.training and torch.is_grad_enabled():
            check()

    live = ref(model)  # the check of optimizers may be kept for ever, and must not hold `check`, which holds the model
    # No weak references: torch could not move the model then.
    trains = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}

    def before_step(optimizer: Optimizer) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if trains.isdisjoint(stepped) or (evaluated := live()) is None:
            return
        if any(id(parameter) in stepped for parameter in evaluated.parameters()):
            state: Any = state_of(evaluated)
            state.check_trains(False)  # of a pipeline some ranks may hold nothing, and step no optimizer

    hook = model.register_forward_pre_hook(before_forward)
    end_checking = check_optimizers(before_step)
    state.check_trains = check


def check_optimized(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
    """Check the models of optimizers, of those that were parallelized to be evaluated. Collective.

    Args:
        models: Modules that are parallelized, or hold models that are.
        optimizers: The optimizers.

    Raises:
        ValueError, RuntimeError: A model has no adapters, or something else of it trains, where adapters are required.
            The error is raised on every rank.
    """
    optimized = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for model in dict.fromkeys(model for module in models for model in parallelized(module).values()):
        state = state_of(model)
        if state is None or state.check_trains is None:
            continue
        holds = not optimized.isdisjoint(model.parameters())  # of a pipeline some ranks hold nothing that trains
        if any(gather_objects(holds)):
            state.check_trains()


def check_values(model: nn.Module) -> None:
    """Raise RuntimeError if a parameter or buffer of `model` is on the meta device: it was never given a value."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise RuntimeError(
                    f"the {kind} {name} is on the meta device: it was never given a value. Fill "
                    "it by from_pretrained or attach_checkpoint, and let parallelize materialize the model."
                )


def _check_ties(model: nn.Module, ties: Ties) -> None:
    names = {module: name for name, module in model.named_modules()}
    for holders in ties:
        if len({id(module._parameters[key]) for module, key in holders}) > 1:
            tied = " and ".join(f"{names[module]}.{key}" for module, key in holders)
            raise RuntimeError(f"{tied} were one tied weight, and are not after sharding: they would drift apart.")


def _check_trainables(model: nn.Module) -> None:
    adapters = adapter_parameters(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in adapters:
            raise RuntimeError(
                f"the base parameter {name} would train. Freeze it (requires_grad_(False)), list its module in "
                "LoraConfig(modules_to_save=[...]), or set require_adapters=False."
            )
    active = {name for layer in model.modules() if isinstance(layer, LoraLayer) for name in layer.active_adapters}
    for name, parameter in adapters.items():
        if not parameter.requires_grad and parameter.numel() and active & set(name.split(".")):
            raise RuntimeError(
                f"the adapter parameter {name} would not train: set requires_grad_(True) (a PeftModel loaded without "
                "is_trainable=True is frozen), deactivate its adapter, or set require_adapters=False."
            )


def _check_fresh(model: nn.Module, adapters: Iterable[str]) -> None:
    for adapter in adapters:
        for name, parameter in adapter_parameters(model, adapter).items():
            # PEFT zeroes B of a linear layer and A of an embedding.
            if (".lora_B." in name or ".lora_embedding_A." in name) and torch.count_nonzero(local(parameter)):
                raise RuntimeError(
                    f"the fresh adapter factor {name} is not zero: the model would not start as its base."
                )


def _check_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Check that ranks that hold the same shard of a trained parameter hold the same values."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and not p.is_meta}
    found = unequal_replicas(parameters, mesh)
    with agreed():
        if found:
            name, ranks = next(iter(found.items()))
            raise RuntimeError(
                f"{name} should be equal on ranks {ranks}, which hold the same shard of it, and is not: something "
                "changed it on some ranks only."
            )


def verify_result(setup: Setup) -> None:
    """Verify the sharded model, and note for checkpoints what trains of it, and what its base is."""
    model, state = setup.model, setup.state
    verify(model, state, setup.ties, setup.trains)
    if not setup.trains:
        check_once_it_trains(model, state, setup.lack)
    state.trained = frozenset(name for name, p in model.named_parameters() if p.requires_grad)
    if setup.materialize:
        state.fingerprints = base_fingerprints(model, setup.mesh, stage=state.stage)
