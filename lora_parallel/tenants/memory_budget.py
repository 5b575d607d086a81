"""Compute the memory that a tenant will take before it is added, and check that it fits into the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_parallel.distributed.gather import local
from lora_parallel.tenants.factor import Factor

__all__ = ["MemoryNeeds", "Optimizers", "check_fits", "memory_needs", "state_bytes"]

Optimizers = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""A function that makes an optimizer of parameters."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Hold the most bytes that a tenant takes at one time on this rank."""

    total: int
    state: int
    """Bytes of `total` that the state of the tenant's optimizer takes."""


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the number of bytes that an optimizer's state takes on this rank."""
    return sum(local(leaf).nbytes for leaf in tree_leaves(dict(optimizer.state)) if isinstance(leaf, Tensor))


def memory_needs(factors: Sequence[Factor], optimizer: Optimizers) -> MemoryNeeds:
    """Compute the most bytes that a tenant takes at one time on this rank.

    Counted are its parameters; the state of their optimizer; their gradients that have been summed over ranks; the
    gradients of a later backward that wait for their sum; and, for an adapter that is sharded over dp_shard, the values
    that a step gathers. The size of the optimizer's state is found by one step on parameters without values.

    Args:
        factors: The tenant's factors, placed as they will be; they need no values.
        optimizer: Makes an optimizer of parameters.

    Raises:
        ValueError: The optimizer fails on parameters without values.
    """
    bare = [nn.Parameter(torch.empty_like(local(factor.parameter), device="meta")) for factor in factors]
    try:
        tried = optimizer(bare)
        for parameter in bare:
            parameter.grad = torch.empty_like(parameter)
        tried.step()
        state = state_bytes(tried)
    except Exception as error:  # an optimizer may raise anything on tensors without values
        raise ValueError(
            f"the optimizer cannot be tried on parameters without values ({type(error).__name__}: {error}), so that "
            "nobody knows what it takes: leave the pool's budget out."
        ) from error
    held = sum(parameter.nbytes for parameter in bare)
    whole = sum(prod(factor.shape) * factor.parameter.dtype.itemsize for factor in factors)
    gathered = whole if any(factor.cut is not None for factor in factors) else 0
    return MemoryNeeds(state + 2 * held + whole + gathered, state)


def check_fits(name: str, needs: MemoryNeeds, others: Sequence[MemoryNeeds | None], budget: int) -> None:
    """Check that a new tenant fits into the budget beside the other tenants.

    Args:
        name: The name of the new tenant.
        needs: The memory that the new tenant takes.
        others: The memory that each tenant of the pool takes.
        budget: The bytes that all tenants together may take on a rank.

    Raises:
        ValueError: The new tenant takes more than is left of the budget.
    """
    left = budget - sum(each.total for each in others if each is not None)
    if needs.total > left:
        raise ValueError(
            f"the tenant {name!r} takes up to {needs.total:,} bytes on a rank (adapter, gradients, optimizer "
            f"state), and {max(left, 0):,} of the budget of {budget:,} are left: remove a "
            "tenant, lower r, share adapters out with shard=True, or raise the budget."
        )
