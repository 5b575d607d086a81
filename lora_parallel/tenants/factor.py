"""A factor of one tenant's adapter: what is stored, what a rank computes with, where its gradient waits."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lora_parallel.gather import local
from lora_parallel.tenants.shards import Cut

__all__ = ["Factor"]


@dataclass(eq=False)
class Factor:
    """One of "lora_A" and "lora_B" of a layer."""

    parameter: nn.Parameter
    """What the optimizer sees."""

    rows: Tensor | None
    """The rows that this rank computes with, of one that is stored whole."""

    partial: bool
    """Whether one rank's gradient is a partial sum over tp."""

    cut: Cut | None = None
    """How it is shared out over dp, if it is."""

    lent: weakref.WeakSet[Tensor] = field(default_factory=weakref.WeakSet)
    """What is alive of what was gathered of it, to compute with."""

    waiting: Tensor | None = None
    """The gradient of what was computed with; `parameter.grad` is of what else a loss takes of it: a penalty."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return local(self.parameter).device

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this tp rank has."""
        return tuple(local(self.parameter).shape) if self.cut is None else self.cut.shape

    def compute(self, lent: Tensor | None, weight: float, dtype: torch.dtype | None) -> Tensor:
        """What this rank computes with, of what was lent if it is shared out; its gradient is taken times `weight`."""
        held: Tensor = self.parameter if lent is None else lent
        if lent is None and torch.is_grad_enabled():
            held = self.lend(local(self.parameter))
        elif isinstance(held, DTensor):
            held = held.to_local()
        held = _Weighted.apply(held, weight)
        if self.rows is not None:
            held = held.index_select(0, self.rows.to(held.device))
        return held if dtype is None else held.to(dtype)

    def lend(self, whole: Tensor) -> Tensor:
        """What this tp rank has of it, to compute with: the gradient, whenever it comes, waits here."""
        whole.requires_grad_().register_post_accumulate_grad_hook(self._keep)
        if self.cut is not None:
            self.lent.add(whole)
        return whole

    def _keep(self, whole: Tensor) -> None:
        grad, whole.grad = whole.grad, None
        assert grad is not None
        self.waiting = grad if self.waiting is None else self.waiting + grad

    @property
    def has_gradient(self) -> bool:
        """Whether one waits for its sum over ranks."""
        return self.waiting is not None or self.parameter.grad is not None

    def take_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """The gradient of what this tp rank has, to be summed over ranks, and the one of the parameter itself, which
        every rank has as it is. Neither is kept.
        """
        found = self.waiting, self.parameter.grad
        self.drop_gradients()
        return found

    def drop_gradients(self) -> None:
        """Let go of them."""
        self.parameter.grad = self.waiting = None

    def placed(self, values: Tensor, dp_shard_rank: int) -> Tensor:
        """Values of what this tp rank has, as the parameter is placed."""
        like = torch.zeros_like(self.parameter, requires_grad=False)
        local(like).copy_(values if self.cut is None else self.cut.of(values, dp_shard_rank))
        return like


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.weight, None
