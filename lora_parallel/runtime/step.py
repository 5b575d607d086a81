"""Run what a step of a parallelized model needs around its forward and backward, from ordered lists of parts.

A part is any object with some of these methods, which are called in the order of the parts:

- `begin_forward(model, args, kwargs)`: before the model's forward, outside of recomputation; it may refuse the call.
- `end_forward()`: after the forward, also after one that failed.
- `begin_backward()`, `end_backward()`: as a backward pass begins at the model's outputs, and when it has accumulated
  every gradient.
- `begin_schedule()`, `begin_stage()`: as a pipeline's forward with gradients begins, and each stage in it.
- `recover()`: as a step begins after one that failed.

A part without a method costs nothing there. `parallelize` lists the parts of a model, in `hook_step`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lora_parallel.adapters.inspection import adapter_parameters
from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.distributed.gradients import GradientFinisher, ParametersNotInGraph, PartialSums
from lora_parallel.distributed.mesh import axis_size, same_batch_groups, sharded_axes
from lora_parallel.distributed.rank_checks import agreed, is_rank_zero
from lora_parallel.distributed.torch_private import (
    backward_pass,
    check_fsdp_end,
    gather_for_backward,
    in_backward,
    is_simulated,
    queue_after_backward,
    queue_fsdp_end,
)
from lora_parallel.fsdp.unused_parameters import UnusedParameters
from lora_parallel.fsdp.wrapping import Units, below, leave_inference_mode
from lora_parallel.layers.layer_parameters import lora_layers
from lora_parallel.runtime.compiled_blocks import refuse_whole_compile
from lora_parallel.runtime.guards import check_values
from lora_parallel.runtime.refusals import FrozenParameters, Substitutes, explain_passing
from lora_parallel.runtime.same_batch import SameBatch
from lora_parallel.state import ForwardCount, ParallelState, Setup, state_of

log = logging.getLogger(__name__)

FirstCheck = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Check the first batch, its positional and keyword arguments."""


class Step:
    """Call the parts of one model's step, from hooks on its forward.

    A backward pass begins where its gradient reaches the model first: at an output, at what a block or a layer outside
    of the blocks returns (the model may return its loss in any object, or keep it), or at a parameter. There FSDP2's
    own end of the pass is queued, and `_backward_ends` behind it, whoever came first.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        count: ForwardCount,
        parts: Sequence[Any],
        first: Sequence[FirstCheck],
        blocks: Collection[nn.Module],
    ) -> None:
        def methods(name: str) -> list[Callable[..., None]]:
            return [method for part in parts if (method := getattr(part, name, None)) is not None]

        self._begin_forward, self._end_forward = methods("begin_forward"), methods("end_forward")
        self._begin_backward, self._end_backward = methods("begin_backward"), methods("end_backward")
        self._begin_schedule, self._begin_stage = methods("begin_schedule"), methods("begin_stage")
        self._recover = methods("recover")
        self._count, self._first = count, list(first)
        self._is_first, self._is_sharded = True, mesh.size() > 1
        self._watches_outputs = axis_size(mesh, "pp") == 1  # a pipeline watches those of its stages
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._in_forward = False
        self._backward: int | None = None  # number of the backward pass that is running or has failed
        self._fsdp_root = model if isinstance(model, FSDPModule) else None
        self._has_tenants = lambda: (state := state_of(model)) is not None and state.pool is not None
        model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._returned)
        model.register_forward_hook(self._after, always_call=True)
        for _, module in below(model, {*blocks, *lora_layers(model)}):
            if next(module.parameters(), None) is not None:
                unit = module if isinstance(module, FSDPModule) else self._fsdp_root
                module.register_forward_hook(partial(self._inner_returned, unit))

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_sharded and torch.compiler.is_compiling():
            refuse_whole_compile()
        if in_backward():  # recomputed by a caller's checkpoint: nothing begins here
            return
        if self._is_first:
            self._check_first(model, args, kwargs)
        if self._in_forward or self._backward is not None:
            self._drop_failed_step()
        for begin in self._begin_forward:
            begin(model, args, kwargs)
        self._count.advance(model.training)
        self._in_forward = self._count.running = True

    def _check_first(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_simulated():
            check_values(model)
        if self._first:
            with agreed():
                for check in self._first:
                    check(args, kwargs)
        self._is_first = False

    def _returned(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if in_backward():
            return
        self._in_forward = False
        if self._watches_outputs:
            self.watch(output)

    def _inner_returned(self, unit: nn.Module | None, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self.watch(output, unit)

    def _after(self, *_: Any) -> None:
        if in_backward():
            return
        self._count.running = False
        for end in self._end_forward:
            end()
        if self._in_forward:  # the forward failed
            explain_passing()

    def begin_schedule(self) -> None:
        """Check, before a pipeline's forward with gradients, that nothing trains or has hooks unknown to it."""
        for begin in self._begin_schedule:
            begin()

    def begin_stage(self) -> None:
        """Begin a stage in a pipeline's forward, once FSDP2 has gathered the root unit's weights."""
        for begin in self._begin_stage:
            begin()

    def watch(self, output: Any, unit: nn.Module | None = None) -> None:
        """Watch for a backward pass that reaches the tensors of `output`, which FSDP unit `unit` has computed."""
        this = self._count.current

        def reached(grad: Tensor) -> None:
            self._count.current = this  # what is recomputed from here on belongs to this forward
            if self._backward not in (None, backward_pass()):
                if self._has_tenants():  # what a backward of one left is not another's, and `recover` drops it
                    self._backward = None
                    return self.begin_backward(after_failure=True)
                raise RuntimeError(
                    "the last backward pass of this model failed, or is not over (this one was called in a hook), and "
                    "what it left is of no use to another one: call the model again before the next backward."
                )
            self.begin_backward()

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(reached)
                if unit is not None:
                    gather_for_backward(unit, tensor)

    def begin_backward(self, after_failure: bool = False) -> None:
        """Begin a backward pass, if none has begun. A reentrant checkpoint runs passes inside of it: they are part."""
        if self._backward is not None:
            return
        self._backward = backward_pass()
        if self._fsdp_root is not None:
            queue_fsdp_end(self._fsdp_root, after_failure)
        for begin in self._begin_backward:
            begin()
        queue_after_backward(self._backward_ends)

    def _backward_ends(self) -> None:
        if self._fsdp_root is not None:
            check_fsdp_end(self._fsdp_root)
        self._backward = None
        for end in self._end_backward:
            end()

    def _drop_failed_step(self) -> None:
        """Reset the model after a step that did not finish, and drop the gradients accumulated so far."""
        if self._trained and is_rank_zero():
            log.warning("the last step did not finish: the gradients accumulated so far are dropped.")
        self._in_forward, self._backward = False, None
        for parameter in self._trained:
            parameter.grad = None
        for recover in self._recover:
            recover()


def hook_step(setup: Setup) -> None:
    """List the parts of a model's step, and what finishes gradients, in the order in which they run; make its state."""
    model, mesh, plan, gradients = setup.model, setup.mesh, setup.plan, setup.gradients
    zeroed = setup.lora_config is not None and setup.lora_config.init_lora_weights in (True, "gaussian")
    styles = {name: style.name for name, style in plan.styles.values()}
    fresh = ("default",) if zeroed else ()
    state = ParallelState(mesh, setup.config, styles, gradients, setup.count, fresh, setup.materialize, setup.bare)
    setup.state = state
    # As sharded by now; those of adapters that are not active too.
    over_tp = dict.fromkeys(p for owner, key in setup.partials if (p := owner._parameters[key]) is not None)
    if axis_size(mesh, "tp") > 1:
        # Each tp rank computes the whole gradient of these, equal but for the rounding that its kernels choose: with
        # the mean they stay equal.
        adapters = {*adapter_parameters(model).values()}  # also of those that are not active
        trains = (p for p in model.parameters() if p.requires_grad or p in adapters)
        over_tp |= dict.fromkeys(p for p in trains if p.numel() and "tp" not in sharded_axes(p))
    is_pipeline, is_unit = setup.stages is not None, isinstance(model, FSDPModule)
    unused = None
    finishing: list[GradientFinisher] = []
    if setup.order is not None:
        unused = UnusedParameters(model, mesh, gradients, over_tp, setup.order, root_is_called=not is_pipeline)
        finishing.append(unused)  # first: it takes zeros away that FSDP2 was given, which the sums would take for parts
    if over_tp:
        finishing.append(PartialSums(gradients, list(over_tp), mesh.get_group("tp"), mesh.device_type))
    trained = [p for p in model.parameters() if p.requires_grad and (isinstance(p, DTensor) or p in over_tp)]
    gradients.finish_by(finishing, trained, meets_terms=not is_pipeline)
    if is_pipeline:
        unreached = ParametersNotInGraph(model, "a pipeline runs the backwards of micro-batches by itself")
    elif is_unit:
        unreached = ParametersNotInGraph(model, "FSDP2 computes with gathered parameters")
    else:
        why = "tensor parallel layers compute with plain tensors of their own"
        unreached = ParametersNotInGraph(model, why, gradients.leaves_of)
    parts = [
        unused,
        # Weights that an earlier forward left gathered may be older than the last step.
        Units(model, prefetches=setup.config.prefetch_blocks > 0),
        Substitutes(model),
        FrozenParameters(model) if is_unit or is_pipeline else None,
        setup.context,
        setup.order,
        SameBatch(mesh) if same_batch_groups(mesh) else None,  # after what may refuse a forward: it sends a message
        unreached,
        gradients,
        state,  # a pool of tenants, whose failed steps end here too
    ]
    leave_inference_mode(model)
    first = [each.check for each in plan.first_batch_checks]
    setup.step = Step(model, mesh, setup.count, [part for part in parts if part is not None], first, setup.blocks)
    gradients.reached = setup.step.begin_backward
