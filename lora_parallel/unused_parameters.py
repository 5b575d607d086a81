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

from lora_parallel.gather import local
from lora_parallel.grads import PartialGradients
from lora_parallel.mesh import AXES
from lora_parallel.unfinished_gradients import PostponedHooks
from lora_parallel.unit_order import ModelOrder
from lora_parallel.upstream import queue_after_backward, reduces_gradients

__all__ = ["UnusedParameters"]


class UnusedParameters:
    """Note which trained parameters of a model the backward passes of a step reach, and have zeros sent for the rest.

    Args:
        model: The sharded model.
        mesh: Its mesh.
        partial_gradients: Of its tensor parallelism, which are looked at after the zeros are gone.
        order: Of its FSDP2 units; None where it has none.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, partial_gradients: PartialGradients, order: ModelOrder | None
    ) -> None:
        self._order = order
        self._groups = [mesh.get_group(axis) for axis in AXES if axis != "tp" and mesh[axis].size() > 1]
        self._trained = [p for p in model.parameters() if p.requires_grad] if order and self._groups else []
        self._device = mesh.device_type
        over_tp = set(partial_gradients.parameters)
        self._whole = {parameter: index for index, parameter in enumerate(self._trained) if parameter not in over_tp}
        """Those whose gradients are finished once they are reduced over dp, and their numbers."""

        self._used: set[int] = set()
        self._had_gradient: list[bool] | None = None
        self._forgets_units = False
        self._hooks = PostponedHooks()
        index_of = {parameter: index for index, parameter in enumerate(self._trained)}
        units = (_Unit(module, index_of, self._reach) for module in model.modules() if isinstance(module, FSDPModule))
        self._units = [unit for unit in units if unit.held]
        partial_gradients.ahead = self.begin

    def begin_forward(self) -> None:
        """Called as a forward of the model begins."""
        if self._forgets_units and torch.is_grad_enabled():
            self._forgets_units = False
            for unit in self._units:
                unit.send_zeros(False)

    def begin(self) -> None:
        """Called as a backward pass begins, at the latest by its first gradient."""
        if self._had_gradient is None and any(unit.watched for unit in self._units):
            self._had_gradient = [parameter.grad is not None for parameter in self._trained]
            self._hooks.postpone(self._whole)
            for unit in self._units:
                unit.fill()
            queue_after_backward(self._end)

    def drop(self) -> None:
        """Forget everything, after an error ended a step on its way."""
        self._used.clear()
        self._had_gradient = None
        self._hooks.restore()
        for unit in self._units:  # how far each rank came is its own
            unit.send_zeros(False)

    def _reach(self, index: int, parameter: Tensor) -> None:
        """Called with a gathered parameter whose gradient has come."""
        self.begin()
        self._used.add(index)

    def _has_more(self, index: int) -> bool:
        """Return True if zeros have met with the gradient of a loss term of the parameter itself."""
        gradient = self._trained[index].grad
        return gradient is not None and bool(local(gradient).any())

    def _end(self) -> None:
        """Called after FSDP2's own last callback, which waits for its reductions."""
        had, self._had_gradient = self._had_gradient, None
        assert had is not None
        assert self._order is not None
        self._hooks.restore()
        reduced = {index for unit in self._units if reduces_gradients(unit.module) for index in unit.watched}
        if not reduced:  # all ranks accumulate
            return
        self._forgets_units = True
        all_used = reduced <= self._used  # as a rule: an accelerator then goes on undisturbed
        by_any = torch.ones(len(had), dtype=torch.uint8, device=self._device)
        if not all_used:
            by_any.copy_(torch.tensor([index in self._used or self._has_more(index) for index in range(len(had))]))
        self._order.all_reduce("use of the parameters", by_any, dist.ReduceOp.MAX, self._groups)
        unused = set() if all_used else {index for index, used in enumerate(by_any.tolist()) if not used} & reduced
        for index in unused:
            parameter = self._trained[index]
            if not (parameter in self._whole and had[index]):  # the zeros, which went into what was there
                parameter.grad = None
        self._used -= reduced
        finished = reduced - unused
        self._hooks.call([parameter for parameter, index in self._whole.items() if index in finished])


class _Unit:
    """One of FSDP2's units, whose gathered parameters tell when a gradient reaches them.

    Args:
        module: The unit.
        index_of: The numbers of the parameters that train.
        reach: Called with the number of a parameter when a gradient has reached it.
    """

    def __init__(self, module: FSDPModule, index_of: Mapping[nn.Parameter, int], reach: Any) -> None:
        self.module = module
        self.held = [
            (owner, key, index_of[parameter])
            for owner in _modules_of(cast(nn.Module, module))
            for key, parameter in owner._parameters.items()
            if parameter is not None and parameter in index_of
        ]
        self.watched: set[int] = set()
        """The numbers of those that train still: a pool of tenants freezes the base that it is given."""

        self._gathered: list[Tensor | None] = [None] * len(self.held)
        self._reach = reach
        self._runs = False
        if self.held:
            cast(nn.Module, module).register_forward_pre_hook(self._begin)

    @torch.compiler.disable
    def _begin(self, *call: Any) -> None:
        """Called as the unit's forward begins, after FSDP2 has gathered its parameters."""
        if not torch.is_grad_enabled():
            return
        self.send_zeros(True)
        for place, (owner, key, index) in enumerate(self.held):
            gathered = owner._parameters[key]
            if gathered is not None and gathered.requires_grad and gathered is not self._gathered[place]:
                self._gathered[place] = gathered
                self.watched.add(index)
                gathered.register_post_accumulate_grad_hook(partial(self._reach, index))

    def send_zeros(self, runs: bool) -> None:
        """Have zeros sent for what is not reached; not for a unit that no rank runs, as for batches of another kind."""
        if runs != self._runs:
            self._runs = runs
            if hasattr(self.module, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
                self.module.set_reduce_scatter_unused_params(runs, recurse=False)

    def fill(self) -> None:
        """Put zeros where FSDP2 sends none.

        Those that it sends have the gathered parameter's dtype. Where passes that are not reduced leave gradients of
        reduce_dtype, all parameters must have one.
        """
        if not self._runs:
            return
        if not hasattr(self.module, "set_reduce_scatter_unused_params") or not reduces_gradients(self.module):
            for gathered in self._gathered:
                if gathered is not None and gathered.grad is None:
                    gathered.grad = torch.zeros_like(gathered)


def _modules_of(unit: nn.Module) -> Iterator[nn.Module]:
    """The modules whose parameters FSDP2 gathers with this one's: not those of units inside."""
    yield unit
    for child in unit.children():
        if not isinstance(child, FSDPModule):
            yield from _modules_of(child)
