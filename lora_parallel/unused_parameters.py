"""Trained parameters that a backward pass does not reach on every data-parallel rank.

The data may decide which layers inside of a block are used: experts in a loop, a head for each task, another adapter on
each rank. FSDP2 reduces the gradients that a rank has, packed one after the other, so that ranks with others would add
up the gradients of unlike parameters in silence. Here every rank sends zeros for what it did not reach (DDP's
`find_unused_parameters`), and one all-reduce of a byte a parameter tells which ones no rank has reached: these have no
gradient at all, as in one process, so that an optimizer passes them over and decays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lora_parallel.grads import PartialGradients
from lora_parallel.mesh import AXES
from lora_parallel.unfinished_gradients import PostponedHooks
from lora_parallel.unit_order import ModelOrder
from lora_parallel.upstream import queue_after_backward

__all__ = ["UnusedParameters"]


class UnusedParameters:
    """Which trained parameters of one model the backward passes of a step have reached, on this rank and on any.

    Args:
        model: The sharded model.
        mesh: Its mesh.
        partial_gradients: Of its tensor parallelism.
        order: Of its FSDP2 units; None where it has none.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, partial_gradients: PartialGradients, order: ModelOrder | None
    ) -> None:
        axes = [axis for axis in AXES if axis != "tp" and mesh[axis].size() > 1]
        self._groups = [mesh.get_group(axis) for axis in axes] if order is not None else []
        self._trained = [p for p in model.parameters() if p.requires_grad] if self._groups else []
        self._device = mesh.device_type
        self._partial = partial_gradients
        self._order = order
        self._reductions = 0
        self._used: set[int] = set()
        self._had_gradient: list[bool] | None = None
        self._hooks = PostponedHooks()
        index_of = {parameter: index for index, parameter in enumerate(self._trained)}
        for module in model.modules():
            if self._trained and isinstance(module, FSDPModule):
                _Unit(module, index_of, self)

    def begin(self) -> None:
        """Called as a backward pass begins, before `PartialGradients.begin`."""
        if self._trained and self._had_gradient is None:
            self._had_gradient = [parameter.grad is not None for parameter in self._trained]
            self._reductions = cast(ModelOrder, self._order).reductions
            self._hooks.postpone(self._whole())
            queue_after_backward(self._end)

    def drop(self) -> None:
        """Forget everything, after an error ended a step on its way."""
        self._used.clear()
        self._had_gradient = None
        self._hooks.restore()

    def _whole(self) -> list[nn.Parameter]:
        """Those whose gradients are finished once they are reduced over dp."""
        partial = set(self._partial.parameters)
        return [parameter for parameter in self._trained if parameter not in partial]

    def _end(self) -> None:
        """Called after FSDP2's own last callback, which waits for its reductions."""
        had, self._had_gradient = self._had_gradient, None
        assert had is not None
        self._hooks.restore()
        if cast(ModelOrder, self._order).reductions == self._reductions:  # all ranks accumulate
            return
        used = torch.tensor([index in self._used for index in range(len(had))], dtype=torch.uint8, device=self._device)
        for group in self._groups:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
        whole = dict.fromkeys(self._whole())
        if len(self._used) < len(had):  # else there is none to look for, and an accelerator goes on undisturbed
            for index, by_any in enumerate(used.tolist()):
                parameter = self._trained[index]
                if by_any:
                    continue
                if not (parameter in whole and had[index]):  # the zeros, which went into what was there
                    parameter.grad = None
                whole.pop(parameter, None)
        self._used.clear()
        self._hooks.call(whole)


class _Unit:
    """One of FSDP2's units, whose gathered parameters tell when a gradient reaches them."""

    def __init__(self, unit: FSDPModule, index_of: Mapping[nn.Parameter, int], parameters: UnusedParameters) -> None:
        module = cast(nn.Module, unit)
        self._held = [
            (owner, key, index_of[parameter])
            for owner in _modules_of(module)
            for key, parameter in owner._parameters.items()
            if parameter is not None and parameter in index_of
        ]
        self._known: list[Tensor | None] = [None] * len(self._held)
        self._parameters = parameters
        # torch 2.13 has it. It sends zeros of the gathered parameter's dtype, where a pass in no_sync may have left
        # others with gradients of reduce_dtype, which cannot be sent together.
        self._sends_zeros = hasattr(unit, "set_reduce_scatter_unused_params")
        if self._sends_zeros:
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        if self._held:
            module.register_forward_pre_hook(self._begin)

    def _begin(self, *call: Any) -> None:
        """Called as the unit's forward begins, after FSDP2 has gathered its parameters."""
        if not torch.is_grad_enabled():
            return
        zeros = not (self._sends_zeros and self._parameters._partial.synchronise)
        for place, (owner, key, index) in enumerate(self._held):
            gathered = owner._parameters[key]
            assert gathered is not None
            if gathered is not self._known[place]:
                self._known[place] = gathered
                gathered.register_post_accumulate_grad_hook(partial(_add, self._parameters._used, index))
            if zeros and gathered.grad is None:
                gathered.grad = torch.zeros_like(gathered)


def _add(indices: set[int], index: int, parameter: Tensor) -> None:
    indices.add(index)


def _modules_of(unit: nn.Module) -> Iterator[nn.Module]:
    """The modules whose parameters FSDP2 gathers with this one's: not those of units inside."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _modules_of(child)
