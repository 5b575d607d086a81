"""Prove that layer groups can be cut: run the model as each tp rank would, and compare the input of every layer.

The input of a consumer must be the rank's slice of its input in the whole model. The input of every other layer, and
the model's output, must be the same as in the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.distributed.collectives import chunk_bounds
from lora_parallel.layers.module_names import without_block_numbers
from lora_parallel.tracing.config_view import viewed_with
from lora_parallel.tracing.layer_group import LayerGroup
from lora_parallel.tracing.trace_errors import FailedError, TraceError
from lora_parallel.tracing.tracer import Call, Tracer

__all__ = ["proven", "same", "verify_rank", "verify_ranks"]

_TOLERANCE = 1e-4
"""Largest relative difference from rounding, in float32. A mistake makes a difference of the order of 1."""


def verify_ranks(tracer: Tracer, layer_groups: Sequence[LayerGroup], tp: int, ranks: Iterable[int]) -> str | None:
    """Run the model as each of `ranks` would, and return the first problem as text, or None if all is right.

    Args:
        tracer: The run of the whole model that is compared with.
        layer_groups: The layer groups that are cut.
        tp: Size of the tp axis.
        ranks: The tp ranks to run as.
    """
    for rank in ranks:
        problem = verify_rank(tracer, layer_groups, tp, rank)
        if problem is not None:
            return problem
    return None


def proven(
    tracer: Tracer, layer_groups: list[LayerGroup], tp: int, ranks: Collection[int], rejected: dict[str, str]
) -> list[LayerGroup]:
    """Return the layer groups that the model can be cut by, as `verify_ranks` shows.

    Usually these are all. If all together fail, kinds of layer groups (those with equal layer names but for numbers)
    are added one after the other, and a kind that fails is left out.

    Args:
        tracer: The run of the whole model that is compared with.
        layer_groups: The candidates.
        tp: Size of the tp axis.
        ranks: The tp ranks to run as.
        rejected: Receives the reason for each layer that is left out, by name.
    """
    if verify_ranks(tracer, layer_groups, tp, ranks) is None:
        return layer_groups
    kinds: dict[tuple[str, ...], list[LayerGroup]] = {}
    for layer_group in layer_groups:
        kinds.setdefault(tuple(without_block_numbers(name) for name in layer_group.layers), []).append(layer_group)
    kept: list[LayerGroup] = []
    for group in kinds.values():
        problem = verify_ranks(tracer, [*kept, *group], tp, ranks)
        if problem is None:
            kept += group
        else:
            rejected.update({name: problem for layer_group in group for name in layer_group.layers})
    return kept


class _EnoughError(TraceError):
    """End a run early, since everything that was to be checked has been checked."""


def verify_rank(
    tracer: Tracer, layer_groups: Sequence[LayerGroup], tp: int, rank: int, until: LayerGroup | None = None
) -> str | None:
    """Run the model as one rank would, and return the problem as text, or None if all is right.

    Args:
        tracer: The run of the whole model that is compared with.
        layer_groups: The layer groups that are cut.
        tp: Size of the tp axis.
        rank: The tp rank to run as.
        until: End the run after the last call of this layer group; None runs the whole model.
    """
    consumers = {name for layer_group in layer_groups for name in layer_group.consumers}
    producers = {
        name: partition.ranks[rank] for layer_group in layer_groups for name, partition in layer_group.producers.items()
    }
    last = -1 if until is None else max(index for index, call in enumerate(tracer.calls) if call.layer in until.layers)

    def stand_in(index: int, call: Call, fed: Tensor) -> Tensor:
        if until is not None and index > last:
            raise _EnoughError
        want = call.fed
        if call.layer in consumers:
            start, stop = chunk_bounds(want.shape[-1], tp, rank)
            want = want[..., start:stop]
        if not same(fed, want):
            raise TraceError(f"{call.layer} is not fed what it should be by a rank's share of the features")
        return call.output(producers.get(call.layer))

    with _cut_to(layer_groups, rank):
        try:
            outputs = tracer.run_again(stand_in)
        except _EnoughError:
            return None
        except FailedError as error:
            return f"with a rank's share of the features the code around it fails ({error})"
        except TraceError as error:
            return str(error)
    if len(outputs) != len(tracer.outputs) or not all(map(same, outputs, tracer.outputs)):
        return "what the model returns changes"
    return None


def same(got: Tensor, want: Tensor) -> bool:
    """Return True if a tensor of one run equals that of another, apart from rounding.

    Where the expected values are not all finite, only the places of finite values are compared.
    """
    if got.shape != want.shape:
        return False
    want = want.detach()
    if not want.is_floating_point():
        return torch.equal(got, want)
    if not want.numel():
        return True
    largest = want.abs().max()
    if not largest.isfinite():
        return torch.equal(got.isfinite(), want.isfinite())
    return bool((got - want).abs().max() <= _TOLERANCE * largest.clamp_min(1e-6))


@contextmanager
def _cut_to(layer_groups: Iterable[LayerGroup], rank: int) -> Iterator[None]:
    """Cut the parameters and sizes of the tracer's copy of the model to those of a rank, within the context."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for layer_group in layer_groups:
            for module, values in layer_group.attributes.items():
                for key, value in values.items():
                    undo.append((module.__dict__, key, module.__dict__[key]))
                    module.__dict__[key] = viewed_with(module.__dict__[key], value)
            for (module, key), cut in layer_group.between.items():
                if cut is not None:
                    dim, partition = cut
                    parameter: Any = module._parameters[key]
                    undo.append((module._parameters, key, parameter))
                    part = parameter.detach().index_select(dim, partition.rows(rank))
                    module._parameters[key] = nn.Parameter(part)
        yield
    finally:
        for held, key, value in reversed(undo):
            held[key] = value
