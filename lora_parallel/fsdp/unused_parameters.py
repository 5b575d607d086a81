"""Complete the gradients of trained parameters that a backward pass does not reach on every data-parallel rank.

The data may decide which layers inside of a block are used: experts in a loop, a head for each task, another adapter on
each rank. FSDP2 reduces the gradients that a rank has, packed one after the other. Ranks that have gradients of
different parameters would therefore add them up without an error. Here every rank sends zeros for the parameters that
it did not reach (as DDP's `find_unused_parameters` does), and one all-reduce of a byte per parameter tells which
parameters no rank has reached. These get no gradient at all, as in one process, so that an optimizer skips them and
applies no weight decay to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.gradients import Gradients
from lora_parallel.distributed.mesh import axis_size
from lora_parallel.distributed.torch_private import reduces_gradients, units_of
from lora_parallel.fsdp.unit_order import ModelOrder
from lora_parallel.fsdp.wrapping import below
from lora_parallel.sizes import AXES

_ZEROS = "_lora_parallel_zeros"


class UnusedParameters:
    """Note which trained parameters of a model the backward passes of a step reach, and send zeros for the others."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        gradients: Gradients,
        partial_sums: Collection[nn.Parameter],
        order: ModelOrder,
        root_is_called: bool = True,
    ) -> None:
        self._order = order
        self._groups = [mesh.get_group(axis) for axis in AXES if axis not in ("pp", "tp") and axis_size(mesh, axis) > 1]
        self._trained = [p for p in model.parameters() if p.requires_grad] if self._groups else []
        self._device = mesh.device_type
        self._gradients = gradients
        over_tp = set(partial_sums)
        # numbers of the trained parameters whose gradients are finished here; those of the others, by `PartialSums`
        self.unfinished = {p: index for index, p in enumerate(self._trained) if p not in over_tp}
        self._used: set[int] = set()
        self._had_gradient: list[bool] = []
        self._forgets_units = False
        index_of = {parameter: index for index, parameter in enumerate(self._trained)}
        units = (_Unit(modules, index_of, self._reach) for modules in units_of(model))
        self._units = [unit for unit in units if unit.trained]
        self._root = next((unit for unit in self._units if cast(nn.Module, unit.module) is model), None)
        for unit in self._units:
            if unit is not self._root or root_is_called:  # else `begin_stage` is called once its weights are gathered
                for module in unit.modules:
                    cast(nn.Module, module).register_forward_pre_hook(unit.begin)

    def begin_stage(self) -> None:
        """Watch the root unit's parameters in a stage of a pipeline, after FSDP2 has gathered them."""
        if self._root is not None:
            self._root.begin()

    def begin_forward(self, *call: Any) -> None:
        """Forget, as a forward with gradients begins after a finished step, which units ran in that step."""
        if self._forgets_units and torch.is_grad_enabled():
            self._forgets_units = False
            for unit in self._units:
                unit.send_zeros(False)

    def prepare(self) -> None:
        """Note which parameters have a gradient, and fill in zeros, once in a backward pass."""
        self._had_gradient = [parameter.grad is not None for parameter in self._trained]
        for unit in self._units:
            unit.fill()

    def drop(self) -> None:
        """Forget all notes about the current step, after an error has ended the step early."""
        self._used.clear()
        for unit in self._units:  # ranks may have run different units before the error
            unit.send_zeros(False)

    def _reach(self, index: int, parameter: Tensor) -> None:
        """Note that a gradient has reached trained parameter `index`; `parameter` is its gathered form."""
        self._gradients.reached()
        gradient = parameter.grad
        # For an input that a compiled graph uses without gradients alone, it is None, or zeros to which none is added.
        if gradient is not None and not (hasattr(gradient, _ZEROS) and local(gradient)._version == 0):
            self._used.add(index)

    def _has_more(self, index: int) -> bool:
        """Return True if a parameter filled with zeros also has the gradient of a loss term of the parameter itself."""
        gradient = self._trained[index].grad
        return gradient is not None and bool(local(gradient).any())

    def finish(self) -> list[nn.Parameter]:
        """Remove gradients of parameters that no rank has reached; return those that are whole now. Collective."""
        reduced = {index for unit in self._units if reduces_gradients(unit.module) for index in unit.watched}
        if not reduced:  # all ranks accumulate gradients and reduce none
            return []
        self._forgets_units = True
        count = len(self._trained)
        all_used = reduced <= self._used  # the usual case, in which the host need not wait for the accelerator
        by_any = torch.ones(count, dtype=torch.uint8, device=self._device)
        if not all_used:
            by_any.copy_(torch.tensor([index in self._used or self._has_more(index) for index in range(count)]))
        self._order.all_reduce("use of the parameters", by_any, dist.ReduceOp.MAX, self._groups)
        unused = set() if all_used else {index for index, used in enumerate(by_any.tolist()) if not used} & reduced
        for index in unused:
            parameter = self._trained[index]
            # An earlier gradient, to which zeros were added, stays.
            if not (parameter in self.unfinished and self._had_gradient[index]):
                parameter.grad = None
        self._used -= reduced
        finished = reduced - unused
        return [parameter for parameter, index in self.unfinished.items() if index in finished]


class _Unit:
    """Watch which gathered parameters of one FSDP unit gradients reach, and fill in zeros for the others."""

    def __init__(self, modules: list[FSDPModule], index_of: Mapping[nn.Parameter, int], reach: Any) -> None:
        self.modules, self.module = modules, modules[0]  # several of one unit: tied layers, of which not all may run
        inside = [inner for module in modules for _, inner in below(cast(nn.Module, module))]
        # trained parameters that FSDP2 gathers together, and their numbers
        self.trained = [
            (owner, key, index_of[parameter])
            for owner in (*cast("list[nn.Module]", modules), *(m for m in inside if not isinstance(m, FSDPModule)))
            for key, parameter in owner._parameters.items()
            if parameter is not None and parameter in index_of
        ]
        # numbers of the parameters that still train: a pool of tenants freezes the base that it is given
        self.watched: set[int] = set()
        self._gathered: list[Tensor | None] = [None] * len(self.trained)
        self._reach = reach
        self._runs = False

    @torch.compiler.disable
    def begin(self, *call: Any) -> None:
        """Watch the unit's parameters, as its forward begins and after FSDP2 has gathered them."""
        if not torch.is_grad_enabled():
            return
        self.send_zeros(True)
        for position, (owner, key, index) in enumerate(self.trained):
            gathered = owner._parameters[key]
            if gathered is not None and gathered.requires_grad and gathered is not self._gathered[position]:
                self._gathered[position] = gathered
                self.watched.add(index)
                gathered.register_post_accumulate_grad_hook(partial(self._reach, index))

    def send_zeros(self, runs: bool) -> None:
        """Start or stop sending zeros for parameters that are not reached: none for a unit that no rank runs."""
        if runs != self._runs and hasattr(self.module, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
            self.module.set_reduce_scatter_unused_params(runs, recurse=False)
        self._runs = runs

    def fill(self) -> None:
        """Put zeros in gathered parameters without a gradient, in backward passes for which FSDP2 cannot send them."""
        # These are all passes if torch is older than 2.13, and passes without a reduction, after which every parameter
        # must have a gradient in reduce_dtype: FSDP2's own zeros have the gathered parameter's dtype.
        if not self._runs:
            return
        if not hasattr(self.module, "set_reduce_scatter_unused_params") or not reduces_gradients(self.module):
            for gathered in self._gathered:
                if gathered is not None and gathered.grad is None:
                    gathered.grad = torch.zeros_like(gathered)
                    setattr(gathered.grad, _ZEROS, True)
