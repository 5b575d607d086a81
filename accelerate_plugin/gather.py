"""Gather and reduce the values of all data-parallel processes, in the functions that Accelerate and its users call.

`gather`, `gather_for_metrics` and `reduce` of an Accelerator, and `gather`, `gather_object` and `reduce` of
`accelerate.utils`, all call the three functions that `patches.py` replaces by those here. They know processes only, and
would repeat the values of peers of one batch (tensor, context and pipeline parallel ones), as if each had seen a batch
of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from accelerate_plugin.parallelism import parallelism_within_batch

__all__ = ["gather_objects", "gather_tensors", "reduce_tensors"]


def gather_tensors(original: Callable[..., Any], tensor: Any) -> Any:
    """Concatenate the tensors of all data-parallel processes, with one tensor for each batch."""
    gathered, parallelism = original(tensor), parallelism_within_batch()
    if parallelism is None:
        return gathered
    processes = parallelism.total_size

    def once(each: Tensor) -> Tensor:
        return parallelism.one_per_batch(each.unflatten(0, (processes, len(each) // processes))).flatten(0, 1)

    return recursively_apply(once, gathered)


def gather_objects(original: Callable[..., Any], object: Any) -> Any:
    """Join the lists of all data-parallel processes, with one list for each batch."""
    parallelism = parallelism_within_batch()
    if parallelism is None:
        return original(object)
    return [each for part in parallelism.one_per_batch(original([object])) for each in part]


def reduce_tensors(original: Callable[..., Any], func: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    """Apply a function to all tensors of `data`; the one that reduces gets one tensor for each batch.

    `reduce` itself is imported by name, also before this package is. What it calls, `recursively_apply`, is not.
    """
    parallelism, reduction = parallelism_within_batch(), kwargs.get("reduction")
    name = f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', '')}"
    reduces = name.startswith("accelerate.utils.operations.reduce.<locals>.")
    if not reduces or parallelism is None or reduction == "max":
        return original(func, data, *args, **kwargs)

    def once(tensor: Tensor, reduction: str, scale: float) -> Tensor:
        share = tensor if parallelism.is_first_of_batch else torch.zeros_like(tensor)
        total: Tensor = func(share, reduction="sum", scale=scale)
        return total / parallelism.dp_size if reduction == "mean" else total

    return original(once, data, *args, **kwargs)
