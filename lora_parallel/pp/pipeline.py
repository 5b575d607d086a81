"""Run a model's forward as a schedule of micro-batches through pipeline stages.

The user calls the model as in one process. There are two ways to compute it:

- *One forward, one backward* ("1f1b", "interleaved"): where the model's own loss function makes the loss from labels,
  the backwards run inside the forward. Gradients are held until `loss.backward()`, which multiplies them by the
  gradient of the loss and adds them to `.grad`. (LoRA makes it cheap to hold them.)
- *Fill and drain* ("gpipe", and whatever else a model is called for): the forward computes all micro-batches, every
  rank is given what the last stage returns, and backward runs the backwards of all micro-batches. The loss may be
  anything that is computed from the outputs, the same on every rank.

Each forward reduces its own gradients over the data-parallel ranks, once, after its last micro-batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lora_parallel.config import ParallelConfig
from lora_parallel.distributed.dtensors import autocast_dtype, local, tensors_in
from lora_parallel.distributed.gradients import Gradients, backward_sync, clip_over_stages, held_apart
from lora_parallel.distributed.mesh import axis_rank
from lora_parallel.distributed.torch_private import forward_by_method, in_backward, last_backward, make_root, placed_as
from lora_parallel.fsdp.unit_order import ModelOrder
from lora_parallel.layers.layer_parameters import asks_for_cache, innermost, without_cache
from lora_parallel.layers.wrapped_forward import wrap_forward
from lora_parallel.pp.links import Links
from lora_parallel.pp.loss import LossCalls, LossFactors, OwnLoss
from lora_parallel.pp.microbatches import Joined, Microbatches, Outputs, SharedOutputs
from lora_parallel.pp.schedules import Action, drained, filled, one_forward_one_backward
from lora_parallel.pp.stage_model import LastStageTensor, StageContext, StageEnd, StageModel
from lora_parallel.state import ForwardCount, Setup
from lora_parallel.tp.sequence import OwnDraws, refuse_block_outputs


def refuse_outputs(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a forward that is asked for outputs of single blocks, of which each stage has some."""
    reason = "under pp each stage has outputs of its own blocks only, and the last one would return, or compute"
    refuse_block_outputs(model, kwargs, f"{reason} a loss of, those. Leave it False, or use pp=1.")


class Held(torch.autograd.Function):
    """Return the loss of a batch whose gradients are there already; backward gives them, times the loss's gradient."""

    # The gradients are sums over data-parallel ranks: `check` first compares the loss's gradient between ranks.

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, held: list[Tensor | None], check: Callable[[Tensor], None], *parameters: Tensor
    ) -> Tensor:
        ctx.check = check
        ctx.held, ctx.place = held, [placed_as(p) if isinstance(p, DTensor) else None for p in parameters]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.held is None:
            raise RuntimeError(_TWICE)
        held, ctx.held = ctx.held, None
        ctx.check(grads[0])
        scaled_gradients: list[Tensor | None] = [None] * len(held)
        for index, (gradient, place) in enumerate(zip(held, ctx.place, strict=True)):
            if gradient is not None:
                scaled = local(gradient).mul_(grads[0].to(local(gradient).device))
                scaled_gradients[index] = scaled if place is None else place(scaled)
        return None, None, None, *scaled_gradients


_TWICE = (
    "backward was called twice on what one forward of a pipeline returned, whose gradients are added once: add the "
    "losses and call backward once, or call the model again."
)


class Refused(torch.autograd.Function):
    """Return an output beside a loss whose backwards have run; a gradient of it is refused."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.detach() if isinstance(value, LastStageTensor) else value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            "a gradient came back through an output (the logits, perhaps) of a forward that was given labels: under "
            'pp_schedule="1f1b" and "interleaved" the backwards of the loss have run inside of it. Call the model '
            'without labels for a loss of your own, or use pp_schedule="gpipe"; for metrics, detach the output.'
        )


class Drained(torch.autograd.Function):
    """Return outputs whose gradients run the backwards of all micro-batches."""

    @staticmethod
    def forward(
        ctx: Any, run_backwards: Callable[[Sequence[Tensor | None]], list[Tensor | None]], count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        # `tensors`: `count` outputs, and the trained parameters, whose gradients `run_backwards` returns.
        ctx.run_backwards = run_backwards
        ctx.set_materialize_grads(False)
        values = tensors[:count]
        return tuple(value.detach() if isinstance(value, LastStageTensor) else value.clone() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.run_backwards is None:
            raise RuntimeError(_TWICE)
        run_backwards, ctx.run_backwards = ctx.run_backwards, None
        return (None, None, *[None] * len(grads), *run_backwards(grads))


# Returns the tensors at which the backward pass of a micro-batch begins on the last stage, and their gradients.
Start = Callable[[int], tuple[list[Tensor], list[Tensor | None]]]


class ScheduleRun:
    """Run forwards, and later or in turn backwards, of the micro-batches of one batch."""

    def __init__(
        self,
        pipeline: Pipeline,
        links: Links,
        batch: Microbatches,
        last: int,
        grads: bool,
        key: str,
        loss: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._pipeline, self._links, self.batch, self._last = pipeline, links, batch, last
        # Backwards follow if `grads`. `key`: the kind of forward, in which all hidden states have one dtype. `loss`:
        # makes the context of the last stage's forwards.
        self._grads, self._key, self._loss = grads, key, loss
        self._like: Tensor | None = None  # A tensor like the hidden states between stages
        # Inputs of stages by stage and micro-batch, until their backward.
        self._received: dict[tuple[int, int], Tensor] = {}
        self._sent: dict[tuple[int, int], Tensor] = {}  # Outputs of stages that were sent, until their backward
        # The places in the order of the actions that receive hidden states (True), or gradients.
        self._needed: dict[bool, list[int]] = {}
        self._awaited: dict[bool, int] = {}
        self._taken = 0
        self.outputs: dict[int, Any] = {}  # Outputs of the model for each micro-batch, on the last stage's rank

    def run(self, order: Sequence[Action], start: Start | None = None) -> None:
        """Run actions."""
        self._needed = {
            kind: [
                at
                for at, action in enumerate(order)
                if action.is_forward is kind and (action.stage > 0 if kind else action.stage < self._last)
            ]
            for kind in (True, False)
        }
        self._awaited, self._taken = {True: 0, False: 0}, 0
        backwards = [at for at, action in enumerate(order) if not action.is_forward]
        for at, action in enumerate(order):
            self._await_until(at + 1)  # the next action's input comes while this one computes
            with self._pipeline.around(action, self.batch.count):
                if action.is_forward:
                    self._forward(action)
                else:
                    assert start is not None
                    self._backward(action, start, at == backwards[-1])
        self._links.finish()

    def _await_until(self, at: int) -> None:
        """Begin to receive what the actions up to this place need, as soon as the shape of hidden states is known."""
        if self._like is None:
            return
        for is_hidden, places in self._needed.items():
            while self._awaited[is_hidden] < len(places) and places[self._awaited[is_hidden]] <= at:
                self._links.await_next(self._like, is_hidden)
                self._awaited[is_hidden] += 1

    def _forward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        is_last = action.stage == self._last
        args, kwargs = self.batch.part(action.microbatch)

        def receive(whole: Tensor) -> Tensor:
            if self._like is None:
                self._like = torch.empty(whole.shape, dtype=self._links.dtype(self._key), device=whole.device)
            if self._awaited[True] == self._taken:
                self._links.await_next(self._like, True)
                self._awaited[True] += 1
            self._taken += 1
            hidden = self._links.receive(True)
            if self._grads:
                self._received[key] = hidden.requires_grad_()
            return hidden

        with self._loss() if is_last else nullcontext():
            output = self._pipeline.forward(action, receive if action.stage else None, args, kwargs)
        if is_last:
            bare = without_cache(output)
            self.outputs[action.microbatch] = output if bare is None else bare
            return
        if self._like is None:
            self._like = torch.empty_like(output.detach(), memory_format=torch.contiguous_format)
        self._links.send(output, True, self._key)
        if self._grads:
            self._sent[key] = output

    def _backward(self, action: Action, start: Start, is_last: bool) -> None:
        key = action.stage, action.microbatch
        if action.stage == self._last:
            outputs, grads = start(action.microbatch)
        else:
            outputs, grads = [self._sent.pop(key)], [self._links.receive(False)]
        self._pipeline.backward(outputs, grads, is_last)
        if action.stage:
            hidden = self._received.pop(key)
            self._links.send(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, False, self._key)


class StageHooks(Protocol):
    """Define what a stage calls."""

    def begin_schedule(self) -> None:
        """Check, before a forward with gradients, that the parameters are as they were when the model was sharded."""

    def begin_stage(self) -> None:
        """Note that a stage begins, whose weights are gathered."""

    def watch(self, output: Any) -> None:
        """Watch the backward pass that begins at the tensors of `output`."""


class Pipeline:
    """Run the forwards of one model. It replaces the model's `forward`."""

    def __init__(
        self,
        model: nn.Module,
        inner: nn.Module,
        stages: StageModel,
        mesh: DeviceMesh,
        config: ParallelConfig,
        gradients: Gradients,
        count: ForwardCount,
        links: Links,
        loss: OwnLoss,
        hooks: StageHooks,
        order: ModelOrder | None,
    ) -> None:
        self._factors = LossFactors(mesh, links, order)
        self._model, self._inner, self._stages, self._config = model, inner, stages, config
        self._gradients, self._count, self._links, self._loss = gradients, count, links, loss
        self._device, self._hooks = mesh.device_type, hooks
        self._draws = OwnDraws(mesh.get_local_rank("pp"), model, count)
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._descriptions = SharedOutputs(links, mesh.device_type)
        self._own = model.forward
        self._signature = inspect.signature(self._own)
        self._begun = len(stages.stages) == 1 or not isinstance(model, FSDPModule)
        model.__dict__["_pipeline_stage"] = self._stage
        if isinstance(model, FSDPModule):
            forward_by_method(model, "_pipeline_stage")
        wrap_forward(model, lambda model, _, args, kwargs: self.run(args, kwargs))

    # ------------------------------------------------------------------------ a forward of the user's

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the model returns for a whole batch. Collective over the pipeline."""
        args, kwargs = _by_name(self._signature, args, kwargs)
        self._check(args, kwargs)
        grads = torch.is_grad_enabled()
        batch = Microbatches(args, kwargs, self._config.pp_microbatches, pads=not grads)
        calls = self._loss.begin(kwargs, batch)
        if not self._begun:
            self._begun = True
            make_root(self._model)
        device = torch.device(self._device)
        with self._failing_together():
            if grads:
                self._hooks.begin_schedule()
            self._draws.begin(device)
            try:
                if grads and calls.adds_up and self._config.pp_schedule != "gpipe":
                    return self._with_backwards(batch, calls)
                return self._filled(batch, calls, grads)
            finally:
                self._draws.end(device)

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._links.failure is not None:
            raise RuntimeError(
                f"an earlier step of this pipeline failed ({self._links.failure}), and messages between its stages may "
                "be lost: restart from a checkpoint."
            )
        if in_backward():
            raise RuntimeError(
                "the model was called in a backward pass, as by a checkpoint around the whole model, and its pipeline "
                "cannot run again there: checkpoint its blocks (activation_checkpointing=True)."
            )
        if not self._count.running:
            raise RuntimeError(
                "model.forward was called by itself: call the model (model(...)), whose hooks prepare the pipeline."
            )
        refuse_outputs(self._inner, kwargs)
        if asks_for_cache(args, kwargs):
            raise ValueError(
                "the model was given use_cache=True or a cache, of which each pipeline stage would have a part: leave "
                "both out, or use pp=1."
            )
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                "adapter_names: PEFT chooses the adapter of each row of the whole batch, and under pp blocks see "
                "micro-batches. Leave it out (set_adapter before parallelize), or use pp=1."
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in([args, kwargs])):
            raise ValueError(
                "an input of the model requires a gradient, which does not come back from other pipeline stages: "
                "let the model compute it (embeddings inside of the model), or use pp=1."
            )
        self._loss.check(kwargs, self._config.pp_microbatches)

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Tell the other ranks of the pipeline if this one fails, so that none waits for it until the timeout."""
        try:
            yield
        except BaseException as error:
            self._stages.context.end(None)
            self._links.fail(error)
            raise

    # ------------------------------------------------------------------------ the two ways

    def _with_backwards(self, batch: Microbatches, calls: LossCalls) -> Any:
        """Run forwards and backwards in turn; return outputs whose loss gives the gradients that are held."""
        run = self._new_run(batch, calls, grads=True)
        with held_apart(self._trained) as held:
            run.run(self._order(one_forward_one_backward), lambda index: ([calls.losses[index]], [None]))
        outputs, _ = self._share(run, calls)
        instead: dict[int, Tensor] = {}
        for at in outputs.differentiable:
            value = outputs.values[at]
            if outputs.described.leaves[at].kind == "loss":
                instead[at] = Held.apply(value, held, self._factors.check, *self._trained)
            else:
                instead[at] = Refused.apply(value, torch.empty(0, requires_grad=True))
        return outputs.build(instead)

    def _filled(self, batch: Microbatches, calls: LossCalls, grads: bool) -> Any:
        """Run forwards; return outputs whose backward runs the backwards."""
        run = self._new_run(batch, calls, grads)
        run.run(self._order(filled))
        calls.finish()
        outputs, parts = self._share(run, calls)
        leaves = outputs.differentiable if grads else []
        if not leaves:
            return outputs.build({})
        kinds = [outputs.described.leaves[at].kind for at in leaves]
        drain = partial(self._drain, run, calls, kinds, None if parts is None else [parts[at] for at in leaves])
        values = Drained.apply(drain, len(leaves), *(outputs.values[at] for at in leaves), *self._trained)
        return outputs.build(dict(zip(leaves, values, strict=True)))

    def _drain(
        self,
        run: ScheduleRun,
        calls: LossCalls,
        kinds: Sequence[str],
        parts: list[list[Any]] | None,
        grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Run the backwards of all micro-batches from the gradients of outputs; return the parameters'. Collective."""
        count = run.batch.count
        started: list[tuple[list[Tensor], list[Tensor | None]]] = [([], []) for _ in range(count)]
        for kind, values, grad in zip(kinds, parts or [], grads, strict=parts is not None):
            if grad is None:
                continue
            if kind == "loss":
                starts = calls.started(grad)
            else:
                chunks = grad.chunk(count) if count > 1 else [grad]
                starts = [([value], [chunk]) for value, chunk in zip(values, chunks, strict=True)]
            for (tensors, gradients), (more, theirs) in zip(started, starts, strict=True):
                tensors += more
                gradients += theirs
        if parts is not None:
            parts.clear()
        run.outputs.clear()
        with held_apart(self._trained) as held, self._failing_together():
            run.run(self._order(drained), lambda index: started[index])
        return held

    def _order(self, kind: Callable[[int, int, int, int], list[Action]]) -> list[Action]:
        stages = self._stages
        return kind(stages.pp, stages.rank, len(stages.stages), self._config.pp_microbatches)

    def _new_run(self, batch: Microbatches, calls: LossCalls, grads: bool) -> ScheduleRun:
        key = f"{'training' if self._model.training else 'evaluation'} {autocast_dtype(self._device)}"
        return ScheduleRun(self, self._links, batch, self._stages.count - 1, grads, key, calls.during)

    def _share(self, run: ScheduleRun, calls: LossCalls) -> tuple[Outputs, list[list[Any]] | None]:
        """Give all ranks what the last stage has returned; on its rank, return each leaf's values too."""
        mine = parts = total = None
        if run.outputs:
            results = [run.outputs[index] for index in range(run.batch.count)]
            total = calls.total() if calls.losses else None
            mine, parts = Joined.of(results, calls.losses, total, run.batch)
        described = self._descriptions.describe(mine)
        return Outputs(self._links, self._device, described, parts, total, fetches=calls.is_own), parts

    # ------------------------------------------------------------------------ a stage

    def _stage(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward; return what it returns on the last stage, and hidden states on the others."""
        self._hooks.begin_stage()
        try:
            return self._own(*args, **kwargs)
        except StageEnd as end:
            return end.hidden

    def forward(
        self, action: Action, receive: Callable[[Tensor], Tensor] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the model returns for a micro-batch, or the hidden states for the next stage."""
        stages, model = self._stages, self._model
        method: Any = model.__dict__["_pipeline_stage"]
        with stages.computing(action.stage):
            stages.context.begin(stages.bounds[action.stage], receive)
            output = method(*args, **kwargs)
            is_end = action.stage < stages.count - 1
            stages.context.end(output if is_end else None)
        if torch.is_grad_enabled():
            self._hooks.watch(output)
        return output

    def backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], is_last: bool) -> None:
        """Run the backward pass of a micro-batch in a stage; the last one of a schedule reduces gradients."""
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if output.requires_grad and (grad is not None or not output.dim())
        ]
        # Users call backward outside of autocast, too.
        with (
            backward_sync(self._model, self._gradients, enabled=is_last),
            last_backward(self._model, is_last, keeps_gathered=not self._config.reshard_after_forward),
            torch.autocast(self._device, enabled=False),
        ):
            if pairs:
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])

    @contextmanager
    def around(self, action: Action, count: int) -> Iterator[None]:
        """Let LoRA dropout know which rows of the batch an action computes."""
        self._count.microbatch, self._count.microbatches = action.microbatch, count
        try:
            yield
        finally:
            self._count.microbatch, self._count.microbatches = 0, 1


def _by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, those by name that have one, as labels may be given by position."""
    names = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = dict(zip(names, args, strict=False))
    if len(named) < len(args) or named.keys() & kwargs.keys():  # *args, or the model's own error
        return args, kwargs
    return (), {**named, **kwargs}


def keep_own_stages(setup: Setup) -> None:
    """Take the layers of other pipeline stages out of the model, and out of what earlier passes found in it."""
    if setup.stage_layers is None:
        return
    model, mesh, config = setup.model, setup.mesh, setup.config
    setup.own_loss = OwnLoss(model)
    layers, bounds = setup.stage_layers
    setup.stage_layers = None  # it holds the layers of other stages
    rank, run = axis_rank(mesh, "pp"), StageContext(setup.entries)
    setup.stages = StageModel(model, layers, bounds, config.pp, rank, run, config.param_dtype, mesh.device_type)
    there = {module: module for module in model.modules()}
    setup.plan = setup.plan.of(there)
    if setup.places is not None:
        setup.places = setup.places.of(there)
    setup.blocks = [block for block in setup.blocks if block in there]


def run_stages(setup: Setup) -> None:
    """Make the forward of a model of stages run the schedule of micro-batches."""
    if setup.stages is None:
        return
    model, mesh, config, stages, state = setup.model, setup.mesh, setup.config, setup.stages, setup.state
    state.stage = stages.tensors
    clip_over_stages(model, mesh["pp"])
    links = Links(mesh, config.timeout_seconds, has_ring=len(stages.stages) > 1)
    state.pipeline = Pipeline(
        model,
        innermost(model),
        stages,
        mesh,
        config,
        setup.gradients,
        setup.count,
        links,
        setup.own_loss,
        setup.step,
        setup.order,
    )
