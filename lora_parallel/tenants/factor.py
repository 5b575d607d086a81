"""A factor of one tenant's adapter: what is stored, what a rank computes with, where its gradient waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lora_parallel.gather import local
from lora_parallel.tenants.shards import Cut

__all__ = ["Factor"]


@dataclass
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

    gathered: Tensor | None = None
    """What this tp rank has of one that is shared out, while a step needs it."""

    waiting: Tensor | None = None
    """The gradient of that, of steps that are over."""

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return local(self.parameter).device

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what this tp rank has."""
        return tuple(local(self.parameter).shape) if self.cut is None else self.cut.shape

    def compute(self, weight: float, dtype: torch.dtype | None) -> Tensor:
        """What this rank computes with; its gradient is taken times `weight`."""
        held: Tensor = self.parameter
        if self.gathered is not None:
            held = self.gathered
        elif isinstance(self.parameter, DTensor):
            held = self.parameter.to_local()
        held = _Weighted.apply(held, weight)
        if self.rows is not None:
            held = held.index_select(0, self.rows.to(held.device))
        return held if dtype is None else held.to(dtype)

    def lend(self, whole: Tensor) -> None:
        """Let it be computed with what this tp rank has of it."""
        self.gathered = whole.requires_grad_()

    def take_back(self) -> None:
        """Keep the gradient of what was lent."""
        grad, self.gathered = None if self.gathered is None else self.gathered.grad, None
        if grad is not None:
            self.waiting = grad if self.waiting is None else self.waiting + grad

    @property
    def has_gradient(self) -> bool:
        """Whether one waits for its sum over ranks."""
        return self.waiting is not None or self.parameter.grad is not None

    def take_gradient(self) -> Tensor | None:
        """The gradient of what this tp rank has, which is not kept."""
        grad = self.parameter.grad if self.cut is None else self.waiting
        self.parameter.grad = self.waiting = None
        return None if grad is None else local(grad)

    def drop_gradient(self) -> None:
        """Let go of it."""
        self.take_gradient()

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
