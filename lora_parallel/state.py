"""Hold what the passes of `parallelize` share, and the state that they leave on a model for the rest of the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import ref

from peft import LoraConfig
from torch import nn
from torch.distributed import DeviceMesh

from lora_parallel.config import ParallelConfig
from lora_parallel.distributed.gradients import Gradients, backward_sync

_ATTRIBUTE = "_lora_parallel_state"
OTHER_STAGE = "_lora_parallel_other_stage"  # attribute of the modules that stand in for those of other pipeline stages


@dataclass
class ForwardCount:
    """Count the training forwards of a model, and know which of them is being computed now.

    The two numbers differ while backward recomputes an earlier forward (activation checkpointing). A hook on the
    model's outputs sets `current` back to the forward that made the outputs, before any of it is recomputed.
    """

    done: int = 0  # training forwards started so far; part of a checkpoint
    # the forward that is being computed or recomputed, whose dropout masks are needed
    current: int = field(default=0, repr=False)
    running: bool = field(default=False, repr=False)  # True if the model's forward is running
    microbatch: int = field(default=0, repr=False)  # index, in this rank's batch, of the one computed or recomputed
    microbatches: int = field(default=1, repr=False)  # number of micro-batches of a batch

    def share_of(self, dp_rank: int) -> int:
        """Return the index of the rows that are being computed, of shares as large as theirs of the global batch."""
        return dp_rank * self.microbatches + self.microbatch

    def advance(self, training: bool) -> None:
        """Count a forward that starts, if it is a training forward; recomputed ones are not counted."""
        if training:
            self.done += 1
            self.current = self.done


class AdapterPool(Protocol):
    """Define what the engine asks of a pool of adapters on one base, such as `TenantPool`."""

    def recover(self) -> None:
        """Drop what a failed step has left."""

    def check_export(self) -> None:
        """Check that exactly one adapter is active. Raise a ValueError otherwise: a sum of several would be merged."""


@dataclass(frozen=True)
class StageTensors:
    """Say which tensors of the whole model a rank holds, under pipeline parallelism."""

    names: frozenset[str]  # of all parameters and buffers of the whole model, tied weights included
    repeated: frozenset[str]  # held here, and listed by a rank with a smaller number on the pp axis
    tied: dict[str, str]  # first name of each tied weight by its other names, without PEFT's additions


@dataclass
class ParallelState:
    """Hold the state of one parallelized model."""

    mesh: DeviceMesh
    config: ParallelConfig
    # style of each layer that has one, by the layer's name without PEFT's additions; empty if tp is 1
    styles: dict[str, str]
    gradients: Gradients
    forward_count: ForwardCount
    # adapters that `parallelize` injected with an initialisation that makes B A zero
    fresh_adapters: tuple[str, ...] = ()
    materialized: bool = True  # False if the base weights were left on meta
    # Copy on meta of the model before it was sharded, for adapters that come later; the exception that says why copying
    # failed; None if the model has adapters or must have them.
    bare: nn.Module | Exception | None = field(default=None, repr=False)
    # pool of adapters that come and go on the model as their base
    pool: AdapterPool | None = field(default=None, repr=False)
    trained: frozenset[str] = frozenset()  # parameters that trained when the model was parallelized
    # of the base parameters when the model was parallelized, by name; None if it was left on meta
    fingerprints: dict[str, str] | None = None
    # checks what trains, of a model that was parallelized to be evaluated and has not trained yet
    check_trains: Callable[..., None] | None = field(default=None, repr=False)
    # tensors of the whole model and of this rank's stages; None without pipeline parallelism
    stage: StageTensors | None = field(default=None, repr=False)
    # the `pp.pipeline.Pipeline` that runs the model's forward
    pipeline: object | None = field(default=None, repr=False)

    def recover(self) -> None:
        """Drop what a failed step has left. It is called as the next step begins."""
        if self.pool is not None:
            self.pool.recover()

    def attach(self, model: nn.Module) -> None:
        """Store this state on `model`, where `state_of` finds it."""
        model.__dict__[_ATTRIBUTE] = self


@dataclass
class Setup:
    """Hold the arguments of `parallelize`, and what each of its passes leaves for the passes after it.

    This file is imported by the districts of the passes, so that it cannot import their classes: where a field is
    `Any`, its class is named beside it.
    """

    model: nn.Module
    mesh: DeviceMesh
    config: ParallelConfig
    lora_config: LoraConfig | None
    materialize: bool
    autocast_adapter_dtype: bool
    trains: bool
    lack: ValueError | None = None  # error about a model without adapters that is only evaluated
    # The parameters by name, before any is replaced; weak, as the memory of full ones is to be freed.
    before: dict[str, ref[nn.Parameter]] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()  # names of the adapters' parameters
    blocks: list[nn.Module] = field(default_factory=list)  # that become an FSDP unit each
    late: Any = None  # adapters.injection.LateAdapter of a model on meta
    bare: nn.Module | Exception | None = None  # as in `ParallelState`
    plan: Any = None  # planning.plan.Plan, an empty one without tp
    places: Any = None  # cp.regions.Places, under cp
    stage_layers: Any = None  # pp.stage_model.StageLayers and Bounds, until other stages are taken out of the model
    stages: Any = None  # pp.stage_model.StageModel, under pp
    own_loss: Any = None  # pp.loss.OwnLoss, under pp
    entries: list[Any] = field(default_factory=list)  # tp.sequence.Entry of cp and of sequence parallelism, for stages
    ties: list[list[tuple[nn.Module, str]]] = field(default_factory=list)  # holders of each tied weight
    count: ForwardCount = field(default_factory=ForwardCount)
    gradients: Gradients = field(init=False)
    context: Any = None  # tp.context.TPContext, under tp
    # Holders and keys of the parameters whose gradients are partial sums over tp.
    partials: list[tuple[nn.Module, str]] = field(default_factory=list)
    cp_context: Any = None  # cp.attention.CPContext, under cp
    # layers that share a weight with a layer of another block
    tied_across: list[nn.Module] = field(default_factory=list)
    order: Any = None  # fsdp.unit_order.ModelOrder, under FSDP2
    step: Any = None  # runtime.step.Step
    state: ParallelState = field(init=False)


def state_of(model: nn.Module) -> ParallelState | None:
    """Return the state that `parallelize` left on `model`, or None if there is none."""
    return model.__dict__.get(_ATTRIBUTE)


def parallelized(module: nn.Module) -> dict[str, nn.Module]:
    """Map names to the models in `module`, itself included under the name "", that have been parallelized."""
    return {name: model for name, model in module.named_modules() if state_of(model) is not None}


def mesh_of(module: nn.Module) -> DeviceMesh | None:
    """Return the mesh of the parallelized models in `module`, which all have the same; None if there are none.

    Raises:
        ValueError: `module` is inside of a model of which this rank has pipeline stages.
    """
    mesh = next((state.mesh for inner in module.modules() if (state := state_of(inner)) is not None), None)
    if mesh is None and any(OTHER_STAGE in inner.__dict__ for inner in module.modules()):
        raise ValueError(
            f"this {type(module).__name__} is inside of a model with pipeline stages, of which this rank has some: "
            "pass what parallelize returned."
        )
    return mesh


def names_elsewhere(module: nn.Module) -> set[str]:
    """Return the names, in `module`, of the parameters and buffers that only other pipeline stages hold there."""
    names = {
        f"{prefix}.{name}" if prefix else name
        for prefix, model in parallelized(module).items()
        if (state := state_of(model)) is not None and state.stage is not None
        for name in state.stage.names
    }
    here = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return names - {name for name, _ in here}


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients: within the context, `backward` reduces no gradient over any mesh axis.

    It has no effect under pipeline parallelism, where each forward reduces its own gradients.

    `.grad` is unspecified until the next backward outside of the context, which finishes the whole sum. Finish the sum
    before `zero_grad`, which cannot reach gradients that have not been reduced.

    Raises:
        ValueError: `model` did not come from `parallelize`.
    """
    state = state_of(model)
    if state is None:
        raise ValueError(f"no_sync: this {type(model).__name__} was not parallelized; pass what parallelize returned.")
    return backward_sync(model, state.gradients, enabled=False)
