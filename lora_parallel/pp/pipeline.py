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
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lora_parallel.config import ParallelConfig
from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.distributed.gradients import PartialGradients, PostponedHooks, backward_sync
from lora_parallel.distributed.torch_private import forward_by_method, in_backward, last_backward, make_root
from lora_parallel.fsdp.unit_order import ModelOrder
from lora_parallel.layers.layer_parameters import asks_for, asks_for_cache
from lora_parallel.pp.gradients import Drain, Drained, Held, Refused
from lora_parallel.pp.links import Links
from lora_parallel.pp.loss import LossCalls, LossFactors, OwnLoss
from lora_parallel.pp.microbatches import Joined, Microbatches, Outputs, SharedOutputs
from lora_parallel.pp.schedules import Action, ScheduleRun, Start, drained, filled, one_forward_one_backward
from lora_parallel.pp.stage_model import StageEnd, StageModel
from lora_parallel.state import ForwardCount
from lora_parallel.tp.sequence import OwnDraws


def refuse_outputs(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a forward that is asked for outputs of single blocks, of which each stage has some."""
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        if asks_for(name, kwargs, model):
            raise ValueError(
                f"{name}=True: under pp each stage has outputs of its own blocks only, and the last one would return, "
                "or compute a loss of, those. Leave it False, or use pp=1."
            )


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
        gradients: PartialGradients,
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
        # The largest number of micro-batches whose activations this rank kept at a time in the last forward.
        self.most_alive = 0
        # Returns a context that an action runs in, with the wait for its input, to look at a schedule.
        self.trace: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()
        model.__dict__["_pipeline_stage"] = self._stage
        if isinstance(model, FSDPModule):
            forward_by_method(model, "_pipeline_stage")
        model.forward = self._forward()

    def _forward(self) -> Callable[..., Any]:
        """Return what replaces the model's `forward`, with the signature of that one, which Trainer reads."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.run(args, kwargs)

        forward.__wrapped__ = self._own  # type: ignore[attr-defined]
        return forward

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
        for each in tensors_in([args, kwargs]):
            if each.requires_grad and torch.is_grad_enabled():
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
        before = [parameter.grad for parameter in self._trained]
        for parameter in self._trained:
            parameter.grad = None
        hooks = PostponedHooks()
        hooks.postpone(self._trained)
        try:
            run.run(self._order(one_forward_one_backward), lambda index: ([calls.losses[index]], [None]))
            held = [parameter.grad for parameter in self._trained]
        finally:
            hooks.restore()
            for parameter, grad in zip(self._trained, before, strict=True):
                parameter.grad = grad
        self.most_alive = run.most_alive
        outputs, described, _ = self._share(run, batch, calls)
        instead: dict[int, Tensor] = {}
        for at in outputs.differentiable:
            value = outputs.values[at]
            if described.leaves[at].kind == "loss":
                instead[at] = Held.apply(value, held, self._factors.check, *self._trained)
            else:
                instead[at] = Refused.apply(value, torch.empty(0, requires_grad=True))
        return outputs.build(instead)

    def _filled(self, batch: Microbatches, calls: LossCalls, grads: bool) -> Any:
        """Run forwards; return outputs whose backward runs the backwards."""
        run = self._new_run(batch, calls, grads)
        run.run(self._order(filled))
        self.most_alive = run.most_alive
        calls.finish()
        outputs, described, parts = self._share(run, batch, calls)
        places = outputs.differentiable if grads else []
        if not places:
            return outputs.build({})
        drain = Drain(self, run, described, places, parts, calls, batch)
        values = Drained.apply(drain, torch.empty(0, requires_grad=True), *(outputs.values[at] for at in places))
        return outputs.build(dict(zip(places, values, strict=True)))

    def drain(self, run: ScheduleRun, start: Start) -> None:
        """Run the backwards of all micro-batches, inside of a backward pass of the user's. Collective."""
        hooks = PostponedHooks()
        hooks.postpone(self._trained)
        with self._failing_together():
            try:
                run.run(self._order(drained), start)
            finally:
                hooks.restore()
        hooks.call([parameter for parameter in self._trained if parameter.grad is not None])

    def _order(self, kind: Callable[[int, int, int, int], list[Action]]) -> list[Action]:
        stages = self._stages
        return kind(stages.pp, stages.rank, len(stages.stages), self._config.pp_microbatches)

    def _new_run(self, batch: Microbatches, calls: LossCalls, grads: bool) -> ScheduleRun:
        autocast = torch.get_autocast_dtype(self._device) if torch.is_autocast_enabled(self._device) else None
        key = f"{'training' if self._model.training else 'evaluation'} {autocast}"
        return ScheduleRun(self, self._links, batch, self._stages.count - 1, grads, key, calls.during)

    def _share(
        self, run: ScheduleRun, batch: Microbatches, calls: LossCalls
    ) -> tuple[Outputs, Joined, list[list[Any]] | None]:
        """Give all ranks what the last stage has returned."""
        mine = parts = total = None
        if run.outputs:
            results = [run.outputs[index] for index in range(batch.count)]
            total = calls.total() if calls.losses else None
            mine, parts = Joined.of(results, calls.losses, total, batch)
        described = self._descriptions.describe(mine)
        outputs = Outputs(self._links, self._device, described, parts, total, fetches=calls.is_own)
        return outputs, described, parts

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
            with self.trace(action):
                yield
        finally:
            self._count.microbatch, self._count.microbatches = 0, 1


def _by_name(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, those by name that have one, as labels may be given by position."""
    names = [name for name, each in signature.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = dict(zip(names, args, strict=False))
    if len(named) < len(args) or named.keys() & kwargs.keys():  # *args, or the model's own error
        return args, kwargs
    return (), {**named, **kwargs}
