"""Hold a factor of one tenant's adapter: its stored parameter, the values to compute with and their gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor

from lora_parallel.distributed.gather import local
from lora_parallel.distributed.gradients import scale_gradient
from lora_parallel.tenants.shards import Cut, gather

__all__ = ["Factor", "gathered_factors"]


@dataclass(eq=False)
class Factor:
    """Hold one factor, `lora_A` or `lora_B`, of a tenant's adapter on one layer."""

    parameter: nn.Parameter
    """Parameter that the optimizer gets."""

    rows: Tensor | None
    """Rows that this rank computes with, int64 [rows], of a factor that is stored whole; None: all of its rows."""

    partial: bool
    """True if the gradient on one rank is a partial sum over tp."""

    cut: Cut | None = None
    """Layout of the factor's chunks over dp_shard; None if it is not sharded over dp_shard."""

    gathered: weakref.WeakSet[Tensor] = field(default_factory=weakref.WeakSet)
    """Gathered copies of the factor that are still alive, for instance in the graph of a forward."""

    waiting: Tensor | None = None
    """Gradient of the values that forwards computed with, before its sum over ranks; None if there is none.

    `parameter.grad` is another gradient: that of terms of a loss that use the parameter itself, such as a penalty.
    """

    @property
    def device(self) -> torch.device:
        """Return the device of the parameter."""
        return local(self.parameter).device

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the part that this tp rank has, before it is sharded over dp_shard."""
        return tuple(local(self.parameter).shape) if self.cut is None else self.cut.shape

    def compute(self, gathered: Tensor | None, weight: float, dtype: torch.dtype | None) -> Tensor:
        """Return the values that this rank computes with; their gradient is multiplied by `weight` on its way back.

        Args:
            gathered: The gathered values, if the factor is sharded over dp_shard; else None.
            weight: The share of the tenant's samples that is on this rank (`Route.weights`).
            dtype: Dtype to compute in; None: the stored one.
        """
        held: Tensor = self.parameter if gathered is None else gathered
        if gathered is None and torch.is_grad_enabled():
            held = self.lend(local(self.parameter))
        elif isinstance(held, DTensor):
            held = held.to_local()
        held = scale_gradient(held, weight)
        if self.rows is not None:
            held = held.index_select(0, self.rows.to(held.device))
        return held if dtype is None else held.to(dtype)

    def lend(self, whole: Tensor) -> Tensor:
        """Return `whole`, the part of the factor that this tp rank has, prepared to compute with.

        A hook on it adds its gradient to `waiting`, whenever a backward brings one.
        """
        whole.requires_grad_().register_post_accumulate_grad_hook(self._keep)
        if self.cut is not None:
            self.gathered.add(whole)
        return whole

    def _keep(self, whole: Tensor) -> None:
        grad, whole.grad = whole.grad, None
        assert grad is not None
        self.waiting = grad if self.waiting is None else self.waiting + grad

    @property
    def has_gradient(self) -> bool:
        """Return True if a gradient waits for its sum over ranks."""
        return self.waiting is not None or self.parameter.grad is not None

    def take_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return both gradients, and drop them here.

        Returns:
            The gradient of this tp rank's part, to be summed over ranks (`waiting`); and the gradient of the parameter
            itself, which is complete on every rank. None where there is no such gradient.
        """
        found = self.waiting, self.parameter.grad
        self.drop_gradients()
        return found

    def drop_gradients(self) -> None:
        """Drop both gradients."""
        self.parameter.grad = self.waiting = None

    def placed(self, values: Tensor, dp_shard_rank: int) -> Tensor:
        """Return a tensor placed as the parameter is, from values of the part that this tp rank has."""
        like = torch.zeros_like(self.parameter, requires_grad=False)
        local(like).copy_(values if self.cut is None else self.cut.of(values, dp_shard_rank))
        return like


def gathered_factors(factors: Sequence[Factor], mesh: DeviceMesh) -> dict[Factor, Tensor]:
    """Gather factors that are sharded over dp_shard, to compute with. Collective.

    Returns:
        The gathered values of each factor: the part that this tp rank has. Their gradients go to `Factor.waiting`.
    """
    cuts = [factor.cut for factor in factors if factor.cut is not None]
    gathered = gather([factor.parameter for factor in factors], cuts, mesh)
    return {factor: factor.lend(whole) for factor, whole in zip(factors, gathered, strict=True)}
