"""What `parallelize` leaves on a model for the rest of the engine: its mesh, config, plan and running state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import nn
from torch.distributed import DeviceMesh

from lora_parallel.config import ParallelConfig
from lora_parallel.dropout import ForwardCount
from lora_parallel.grads import PartialGradients, backward_sync

__all__ = ["ParallelState", "no_sync", "parallelized", "state_of"]

_ATTRIBUTE = "_lora_parallel_state"


@dataclass
class ParallelState:
    """One parallelized model's state."""

    mesh: DeviceMesh
    config: ParallelConfig
    styles: dict[str, str]
    """Style of each layer that has one, by its name in PEFT's terms; empty where tp is 1."""

    gradients: PartialGradients
    forward_count: ForwardCount
    fresh_adapters: tuple[str, ...] = ()
    """Adapters injected here with an initialisation that makes B A zero."""

    materialized: bool = True
    """False: base weights were left on meta."""

    bare: nn.Module | Exception | None = field(default=None, repr=False)
    """The model on meta as it was before it was sharded, for adapters that come later, or why there is no copy of it;
    None where it has adapters.
    """

    recoveries: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """What is called when a step turns out to have failed on its way, as the next one begins."""

    pooled: bool = False
    """Whether it is the base of a `TenantPool`."""

    trained: frozenset[str] = frozenset()
    """The parameters that trained when the model was parallelized, by name."""

    fingerprints: dict[str, str] | None = None
    """Of the base as it was then (see `lora_parallel.identity`); None where it was left on meta."""

    def attach(self, model: nn.Module) -> None:
        """Remember this state on `model`."""
        model.__dict__[_ATTRIBUTE] = self


def state_of(model: nn.Module) -> ParallelState | None:
    """The state that `parallelize` left on `model`, or None."""
    return model.__dict__.get(_ATTRIBUTE)


def parallelized(module: nn.Module) -> dict[str, nn.Module]:
    """The models in `module`, itself included under the name "", that have been parallelized."""
    return {name: each for name, each in module.named_modules() if state_of(each) is not None}


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate: within the context, `backward` reduces no gradient over any axis.

    `.grad` is unspecified until the next backward outside of the context, which finishes the whole sum. Finish it
    before `zero_grad`, which cannot reach what has not been reduced.

    Raises:
        ValueError: `model` did not come from `parallelize`.
    """
    state = state_of(model)
    if state is None:
        raise ValueError(f"no_sync: this {type(model).__name__} was not parallelized; pass what parallelize returned.")
    return backward_sync(model, state.gradients, enabled=False)
