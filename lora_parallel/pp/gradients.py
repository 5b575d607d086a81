"""Connect autograd with the backwards of micro-batches: gradients that are held, and backwards that are to run.

`Held` gives gradients that are there already; `Drained` runs the backwards; `Refused` is for outputs that have neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.torch_private import placed_as
from lora_parallel.pp.loss import LossCalls
from lora_parallel.pp.microbatches import Joined, Microbatches
from lora_parallel.pp.schedules import ScheduleRun, Start
from lora_parallel.pp.stage_model import LastStageTensor


class Drains(Protocol):
    """Run the backwards of all micro-batches."""

    def drain(self, run: ScheduleRun, start: Start) -> None: ...


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
        found: list[Tensor | None] = []
        for gradient, place in zip(held, ctx.place, strict=True):
            if gradient is None:
                found.append(None)
                continue
            scaled = local(gradient).mul_(grads[0].to(local(gradient).device))
            found.append(scaled if place is None else place(scaled))
        return None, None, None, *found


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


class Drain:
    """Hold what backward needs to begin on the last stage, after the forwards of all micro-batches."""

    def __init__(
        self,
        pipeline: Drains,
        run: ScheduleRun,
        described: Joined,
        places: list[int],
        parts: list[list[Any]] | None,
        calls: LossCalls,
        batch: Microbatches,
    ) -> None:
        self._pipeline, self._run, self._batch = pipeline, run, batch
        self._described, self._places, self._parts, self._calls = described, places, parts, calls
        self._done = False

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        """Run the backwards, from the gradients of the outputs."""
        if self._done:
            raise RuntimeError(_TWICE)
        self._done = True
        count = self._batch.count
        started: list[tuple[list[Tensor], list[Tensor | None]]] = [([], []) for _ in range(count)]
        for at, grad in zip(self._places, grads, strict=True):
            if grad is None or self._parts is None:
                continue
            if self._described.leaves[at].kind == "loss":
                each = self._calls.started(grad)
            else:
                chunks = grad.chunk(count) if count > 1 else [grad]
                each = [([part], [chunk]) for part, chunk in zip(self._parts[at], chunks, strict=True)]
            for (tensors, own), (more, theirs) in zip(started, each, strict=True):
                tensors += more
                own += theirs
        self._parts = None
        self._run.outputs.clear()
        self._pipeline.drain(self._run, lambda index: started[index])


class Drained(torch.autograd.Function):
    """Return outputs whose gradients run the backwards of all micro-batches."""

    @staticmethod
    def forward(ctx: Any, drain: Drain, anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.drain = drain
        ctx.set_materialize_grads(False)
        return tuple(value.detach() if isinstance(value, LastStageTensor) else value.clone() for value in values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.drain.backward(grads)
        return (None, None, *[None] * len(grads))
