"""Run hooks around a model's forward and backward: counting, guards, recovery from a failed step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.distributed.gradients import PartialGradients, UnfinishedGradients
from lora_parallel.distributed.mesh import same_batch_groups
from lora_parallel.distributed.rank_checks import agreed, is_rank_zero
from lora_parallel.distributed.torch_private import (
    backward_pass,
    drop_gathered_gradients,
    in_backward,
    is_simulated,
    queue_after_backward,
)
from lora_parallel.fsdp.unit_order import ModelOrder, refuse_layer_drop
from lora_parallel.fsdp.unused_parameters import UnusedParameters
from lora_parallel.fsdp.wrapping import leave_inference_mode
from lora_parallel.layers.layer_parameters import asks_for, innermost
from lora_parallel.runtime.guards import check_values
from lora_parallel.runtime.refusals import Substitutes
from lora_parallel.runtime.same_batch import SameBatch
from lora_parallel.state import ForwardCount, ParallelState, Setup
from lora_parallel.tp.context import TPContext

log = logging.getLogger(__name__)


class StepHooks:
    """Register hooks on the forward of one parallelized model, which run before FSDP2's own."""

    # `first_batch_checks` are given the first batch, positional and keyword arguments; `recover` is called as a step
    # begins after one that failed. If `is_pipeline`, the model's forward calls `begin_schedule` before its stages, and
    # these call `begin_stage`, and `watch` with the tensors at which their backwards begin.
    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        count: ForwardCount,
        gradients: PartialGradients,
        context: TPContext | None,
        order: ModelOrder | None,
        first_batch_checks: Sequence[Callable[[Any, Any], None]] = (),
        recover: Callable[[], None] = lambda: None,
        is_pipeline: bool = False,
    ) -> None:
        self._gradients, self._count, self._context, self._order = gradients, count, context, order
        self._first_batch_checks, self._recover_pool, self._is_pipeline = list(first_batch_checks), recover, is_pipeline
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._substitutes = Substitutes(model)
        self._unfinished = UnfinishedGradients(model, gradients.parameters, is_pipeline)
        self._unused = UnusedParameters(model, mesh, gradients, order, root_is_called=not is_pipeline)
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._same_batch = SameBatch(mesh) if same_batch_groups(mesh) else None
        self._has_values = self._trained_once = False
        self._in_forward = False
        self._backward: int | None = None  # number of the backward pass that is running or has failed
        model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward():  # recomputed by a caller's checkpoint: nothing begins here
            return
        if not self._has_values:
            if not is_simulated():
                check_values(model)
            self._has_values = True
        if self._in_forward or self._backward is not None:
            self._recover(model)
        self._unused.begin_forward()
        self._reshard()  # gathered weights that an earlier forward left may be older than the last step
        self._substitutes.refuse(model)
        if isinstance(model, FSDPModule) and torch.is_grad_enabled() and not self._is_pipeline:
            self._check_frozen("FSDP2")
        if self._context is not None and asks_for("output_attentions", kwargs, innermost(model)):
            raise ValueError(
                "output_attentions=True: under tensor parallelism each rank has the attention of its own heads only, "
                "and would return that. Leave it False, or use tp=1."
            )
        with agreed() if self._first_batch_checks else nullcontext():
            while self._first_batch_checks:
                self._first_batch_checks.pop()(args, kwargs)
        if self._order is not None:
            if model.training and not self._trained_once:
                refuse_layer_drop(model)
                self._trained_once = True
            accumulates = torch.is_grad_enabled() and not self._gradients.synchronise
            mode = "training" if model.training else "evaluation"
            self._order.begin(f"for {mode}{' in no_sync' if accumulates else ''}", accumulates)
        self._count.advance(model.training)
        if self._same_batch is not None:
            self._same_batch.check([args, kwargs], model.training)
        self._in_forward = self._count.running = True

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if in_backward():
            return
        self._count.running = False
        if self._context is not None:
            self._context.forget_input()
        if output is None:  # the forward failed
            return
        self._in_forward = False
        if not self._is_pipeline:
            self.watch(output)
        if not torch.is_grad_enabled():
            self._reshard()  # no backward follows that would, and parameters() must give the sharded ones

    def begin_schedule(self) -> None:
        """Check, before a pipeline's forward with gradients, that nothing trains or has hooks unknown to it."""
        self._check_frozen("the pipeline")
        self._unfinished.check_hooks()

    def begin_stage(self) -> None:
        """Watch the parameters of the root unit in a stage's forward, once FSDP2 has gathered them."""
        self._unused.begin_root()

    def watch(self, output: Any) -> None:
        """Watch the backward pass that begins at the tensors of `output`."""
        this = self._count.current

        def backward_begins(grad: Tensor) -> None:
            self._count.current = this  # what is recomputed from here on belongs to this forward
            if self._backward not in (None, backward_pass()):
                raise RuntimeError(
                    "the last backward pass of this model failed, and what it left is of no use to another one: call "
                    "the model again before the next backward."
                )
            if self._backward is None:
                self._backward = backward_pass()
                self._unfinished.check_hooks()
                # Called here, not in a layer: a reentrant checkpoint runs the layers in backward passes of their own.
                self._gradients.begin()
                queue_after_backward(self._backward_ends)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(backward_begins)

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def _backward_ends(self) -> None:
        self._backward = None
        if self._context is not None:
            self._context.forget_input()  # that of a recomputed block, whose graph it would keep alive

    def _recover(self, model: nn.Module) -> None:
        """Reset the model after a step that did not finish, and drop the gradients accumulated so far."""
        if self._trained and is_rank_zero():
            log.warning("the last step did not finish: the gradients accumulated so far are dropped.")
        self._in_forward, self._backward = False, None
        self._gradients.drop()
        self._unused.drop()
        for parameter in self._trained:
            parameter.grad = None
        self._recover_pool()
        if self._order is not None:
            self._order.order.forget_place()
        if isinstance(model, FSDPModule):
            if not hasattr(model, "reset_iter_state"):
                raise RuntimeError(
                    f"the last step failed, and FSDP2 of torch {torch.__version__} cannot go on after that: restart "
                    "from a checkpoint, or use torch 2.13, which can."
                )
            model.reset_iter_state()
            for unit in self._units:
                drop_gathered_gradients(unit)

    def _check_frozen(self, what: str) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when the model was parallelized and is not any more: {what} would compute no "
                    "gradient for it. Set requires_grad, and activate adapters (set_adapter), before parallelize."
                )


def hook_steps(setup: Setup) -> None:
    """Collect the gradients that are partial sums over tp, and put the hooks of a step around the model's forward."""
    model, mesh, plan, gradients, count = setup.model, setup.mesh, setup.plan, setup.gradients, setup.count
    # As sharded by now; those of adapters that are not active too.
    gradients.manage(dict.fromkeys(p for owner, key in setup.partials if (p := owner._parameters[key]) is not None))
    zeroed = setup.lora_config is not None and setup.lora_config.init_lora_weights in (True, "gaussian")
    fresh = ("default",) if zeroed else ()
    styles = {name: style.name for name, style in plan.styles.values()}
    state = ParallelState(mesh, setup.config, styles, gradients, count, fresh, setup.materialize, setup.bare)
    checks = [each.check for each in plan.first_batch_checks]
    staged = setup.stages is not None
    setup.hooks = StepHooks(model, mesh, count, gradients, setup.context, setup.order, checks, state.recover, staged)
    setup.state = state
    leave_inference_mode(model)
