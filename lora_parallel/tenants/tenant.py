"""Hold the data of one tenant of a pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from peft import LoraConfig
from torch import Tensor

from lora_parallel.distributed.gather import local
from lora_parallel.tenants.factor import Factor
from lora_parallel.tenants.layer import TenantLayer
from lora_parallel.tenants.memory_budget import MemoryNeeds, state_bytes
from lora_parallel.tenants.optimizer_guard import OptimizerGuard

__all__ = ["Tenant"]


@dataclass(eq=False)
class Tenant:
    """Hold one tenant of a pool: its adapter's layers, its optimizer, and the gradients that wait for its step."""

    name: str
    config: LoraConfig
    seed: int
    """Seed of the tenant's dropout."""

    steps: int = 0
    needs: MemoryNeeds | None = None
    """Memory that the tenant takes of the pool's budget; None if the pool has no budget."""

    layers: list[TenantLayer] = field(default_factory=list)
    guard: OptimizerGuard | None = None
    finished: list[Tensor | None] = field(default_factory=list)
    """Gradient of each factor that has been summed over all ranks since the last step, or None."""

    forwards: int = 0
    """Number of training forwards that the tenant has taken part in; the tenant's dropout depends on it."""

    @property
    def has_sums(self) -> bool:
        """Return True if gradients that have been summed over ranks wait for the tenant's step."""
        return any(each is not None for each in self.finished)

    def waits(self) -> bool:
        """Return True if gradients wait for the tenant's step, whether or not they have been summed over ranks."""
        return self.has_sums or self.has_unsummed

    @property
    def factors(self) -> list[Factor]:
        """Return the factors of the adapter: `lora_A` and `lora_B` of each layer, in the order of the layers."""
        return [factor for layer in self.layers for factor in layer.factors[self.name]]

    def memory(self) -> dict[str, int]:
        """Count the bytes that this rank holds of the tenant: adapter, gathered copies, gradients, optimizer state."""
        parameters = [factor.parameter for factor in self.factors]
        waiting = [each for factor in self.factors for each in (factor.parameter.grad, factor.waiting)]
        gradients = [each for each in (*self.finished, *waiting) if each is not None]
        return {
            "adapter": sum(local(each).nbytes for each in parameters),
            "gathered": sum(whole.nbytes for factor in self.factors for whole in factor.gathered),
            "gradients": sum(local(each).nbytes for each in gradients),
            "optimizer": state_bytes(self.optimizer),
        }

    def check_between_steps(self, what: str) -> None:
        """Check that no gradient of the tenant waits for a step, since it would be lost.

        Args:
            what: The call that would lose it, for the message.

        Raises:
            ValueError: A gradient waits for a step.
        """
        if self.waits():
            raise ValueError(
                f"{what}: gradients of {self.name!r} wait for a step and would be lost: call step or zero_grad."
            )

    def add_sums(self, sums: Sequence[Tensor | None]) -> None:
        """Add gradients that have been summed over all ranks, one for each factor, to those that wait for a step."""
        self.finished = [
            before if new is None else new if before is None else before + new
            for before, new in zip(self.finished, sums, strict=True)
        ]

    def drop_gradients(self) -> None:
        """Let go of all gradients, summed or not."""
        self.finished = [None] * len(self.finished)
        for factor in self.factors:
            factor.drop_gradients()

    @property
    def has_unsummed(self) -> bool:
        """True if a gradient has not been summed over ranks."""
        return any(factor.has_gradient for factor in self.factors)

    def record(self) -> dict[str, int]:
        """Return the counters that a saved tenant goes on with."""
        return {"steps": self.steps, "forwards": self.forwards, "seed": self.seed}

    def resume(self, record: Mapping[str, int]) -> None:
        """Go on with the counters of a saved tenant, without gradients."""
        self.steps, self.forwards = record.get("steps", 0), record.get("forwards", 0)
        self.seed = record.get("seed", self.seed)
        for layer in self.layers:
            layer.reseed(self.name, self.seed)
        self.drop_gradients()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The tenant's optimizer."""
        assert self.guard is not None
        return self.guard.optimizer

    @property
    def gathers(self) -> bool:
        """Return True if a step gathers parameters, so that all ranks step at the same time."""
        return self.guard is not None and self.guard.gathers

    def step(self, max_norm: float | None) -> Tensor | None:
        """Step the optimizer with the summed gradients, clipped to `max_norm`; return the norm before clipping."""
        assert self.guard is not None
        norm = self.guard.step(self.finished, max_norm)
        self.steps += self.has_sums
        return norm
