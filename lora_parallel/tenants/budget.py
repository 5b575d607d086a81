"""What a tenant will take, before it takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_parallel.gather import local

__all__ = ["wanted"]


def wanted(parameters: Sequence[nn.Parameter], optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> int:
    """The bytes of parameters, of their gradients and of the state of their optimizer on this rank.

    The optimizer is tried on parameters without values.

    Raises:
        ValueError: It cannot be.
    """
    bare = [nn.Parameter(torch.empty_like(local(parameter), device="meta")) for parameter in parameters]
    try:
        tried = optimizer(bare)
        for parameter in bare:
            parameter.grad = torch.empty_like(parameter)
        tried.step()
    except Exception as error:  # whatever an optimizer makes of tensors without values
        raise ValueError(
            f"the optimizer cannot be tried on parameters without values ({type(error).__name__}: {error}), so that "
            "nobody knows what it takes: leave the pool's budget out."
        ) from error
    state = sum(leaf.nbytes for leaf in tree_leaves(dict(tried.state)) if isinstance(leaf, Tensor))
    return 2 * sum(local(parameter).nbytes for parameter in parameters) + state
