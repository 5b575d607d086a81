"""Gather the values of all data-parallel processes, in the functions that Accelerate and its users gather by.

`Accelerator.gather` and `gather_for_metrics`, `accelerate.utils.gather` and `gather_object` all call the two functions
that `patches.py` replaces by those here. They know processes only, and would repeat the values of peers of one batch
(tensor, context and pipeline parallel ones), as if each had seen a batch of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.utils import recursively_apply
from torch import Tensor

from accelerate_plugin.parallelism import current_parallelism

__all__ = ["gather_objects", "gather_tensors"]


def gather_tensors(original: Callable[..., Any], tensor: Any) -> Any:
    """Concatenate the tensors of all data-parallel processes, with one tensor for each batch."""
    gathered, parallelism = original(tensor), current_parallelism()
    if parallelism is None or parallelism.non_data_parallel_size == 1:
        return gathered
    processes = parallelism.total_size

    def once(each: Tensor) -> Tensor:
        return parallelism.one_per_batch(each.unflatten(0, (processes, len(each) // processes))).flatten(0, 1)

    return recursively_apply(once, gathered)


def gather_objects(original: Callable[..., Any], object: Any) -> Any:
    """Join the lists of all data-parallel processes, with one list for each batch."""
    parallelism = current_parallelism()
    if parallelism is None or parallelism.non_data_parallel_size == 1:
        return original(object)
    return [each for part in parallelism.one_per_batch(original([object])) for each in part]
