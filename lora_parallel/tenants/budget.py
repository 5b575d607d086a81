"""What a tenant will take, before it takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_parallel.gather import local
from lora_parallel.tenants.factor import Factor

__all__ = ["Wants", "state_bytes", "wanted"]


@dataclass(frozen=True)
class Wants:
    """The most bytes that a tenant holds at a time on this rank."""

    total: int
    state: int
    """What of it is for the state of its optimizer."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of an optimizer's state on this rank."""
    return sum(local(leaf).nbytes for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


def wanted(factors: Sequence[Factor], optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Wants:
    """The most bytes that a tenant holds at a time on this rank.

    Its parameters and the state of their optimizer; their gradients, as summed over ranks, and those of a later
    backward that wait for their sum; and of an adapter that is shared out over dp, what a step gathers. The optimizer
    is tried on parameters without values.

    Args:
        factors: Placed as they will be; without values will do.
        optimizer: Makes it of the parameters.

    Raises:
        ValueError: It cannot be tried.
    """
    bare = [nn.Parameter(torch.empty_like(local(factor.parameter), device="meta")) for factor in factors]
    try:
        tried = optimizer(bare)
        for parameter in bare:
            parameter.grad = torch.empty_like(parameter)
        tried.step()
        state = state_bytes(tried)
    except Exception as error:  # whatever an optimizer makes of tensors without values
        raise ValueError(
            f"the optimizer cannot be tried on parameters without values ({type(error).__name__}: {error}), so that "
            "nobody knows what it takes: leave the pool's budget out."
        ) from error
    held = sum(parameter.nbytes for parameter in bare)
    whole = sum(prod(factor.shape) * factor.parameter.dtype.itemsize for factor in factors)
    gathered = whole if any(factor.cut is not None for factor in factors) else 0
    return Wants(state + 2 * held + whole + gathered, state)
