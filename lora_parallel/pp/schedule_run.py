"""Run the actions of one schedule on a rank: compute stages, and exchange hidden states and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from lora_parallel.layers.forward_arguments import without_cache
from lora_parallel.pp.links import Links
from lora_parallel.pp.microbatches import Microbatches
from lora_parallel.pp.schedules import Action

__all__ = ["ScheduleRun", "Stages", "Start"]

Start = Callable[[int], tuple[list[Tensor], list[Tensor | None]]]
"""Returns the tensors at which the backward pass of a micro-batch begins on the last stage, and their gradients."""


class Stages(Protocol):
    """Compute the stages of this rank."""

    def forward(
        self, action: Action, receive: Callable[[Tensor], Tensor] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what the model returns, or the hidden states for the next stage."""

    def backward(self, outputs: Sequence[Tensor], grads: Sequence[Tensor | None], is_last: bool) -> None:
        """Run a backward pass, which reduces gradients if it is the last of the schedule."""

    def around(self, action: Action, count: int) -> AbstractContextManager[Any]:
        """Return the context of an action, one of those of `count` micro-batches."""


class ScheduleRun:
    """Run forwards, and later or in turn backwards, of the micro-batches of one batch.

    Args:
        stages: Computes the stages of this rank.
        links: Connects this rank with its neighbours.
        batch: The micro-batches.
        last: The number of the last stage.
        grads: True if backwards follow.
        key: The kind of forward, in which all hidden states have one dtype.
        loss: Returns the context of the last stage's forwards.
    """

    def __init__(
        self,
        stages: Stages,
        links: Links,
        batch: Microbatches,
        last: int,
        grads: bool,
        key: str,
        loss: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._stages, self._links, self._batch, self._last = stages, links, batch, last
        self._grads, self._key, self._loss = grads, key, loss
        self._like: Tensor | None = None
        """A tensor like the hidden states between stages."""

        self._received: dict[tuple[int, int], Tensor] = {}
        """Inputs of stages by stage and micro-batch, until their backward."""

        self._sent: dict[tuple[int, int], Tensor] = {}
        """Outputs of stages that were sent, until their backward."""

        self._needed: dict[bool, list[int]] = {}
        """The places in the order of the actions that receive hidden states (True), or gradients."""

        self._awaited: dict[bool, int] = {}
        self._taken = 0
        self.outputs: dict[int, Any] = {}
        """Outputs of the model for each micro-batch, on the last stage's rank."""

        self.most_alive = 0
        """The largest number of micro-batches whose activations were kept at a time."""

    def run(self, order: Sequence[Action], start: Start | None = None) -> None:
        """Run actions.

        Args:
            order: The actions.
            start: Where backward passes begin on the last stage; None if there are none.
        """
        self._needed = {
            kind: [
                at
                for at, each in enumerate(order)
                if each.is_forward is kind and (each.stage > 0 if kind else each.stage < self._last)
            ]
            for kind in (True, False)
        }
        self._awaited, self._taken = {True: 0, False: 0}, 0
        backwards = [at for at, each in enumerate(order) if not each.is_forward]
        alive = 0
        for at, action in enumerate(order):
            self._await_until(at + 1)  # the next action's input comes while this one computes
            alive += 1 if action.is_forward else -1
            self.most_alive = max(self.most_alive, alive)
            with self._stages.around(action, self._batch.count):
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
        place = action.stage, action.microbatch
        is_last = action.stage == self._last
        args, kwargs = self._batch.part(action.microbatch)

        def receive(whole: Tensor) -> Tensor:
            if self._like is None:
                self._like = torch.empty(whole.shape, dtype=self._links.dtype(self._key), device=whole.device)
            if self._awaited[True] == self._taken:
                self._links.await_next(self._like, True)
                self._awaited[True] += 1
            self._taken += 1
            hidden = self._links.receive(True)
            if self._grads:
                self._received[place] = hidden.requires_grad_()
            return hidden

        with self._loss() if is_last else nullcontext():
            output = self._stages.forward(action, receive if action.stage else None, args, kwargs)
        if is_last:
            bare = without_cache(output)
            self.outputs[action.microbatch] = output if bare is None else bare
            return
        if self._like is None:
            self._like = torch.empty_like(output.detach(), memory_format=torch.contiguous_format)
        self._links.send(output, True, self._key)
        if self._grads:
            self._sent[place] = output

    def _backward(self, action: Action, start: Start, is_last: bool) -> None:
        place = action.stage, action.microbatch
        if action.stage == self._last:
            outputs, grads = start(action.microbatch)
        else:
            outputs, grads = [self._sent.pop(place)], [self._links.receive(False)]
        self._stages.backward(outputs, grads, is_last)
        if action.stage:
            hidden = self._received.pop(place)
            self._links.send(torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, False, self._key)
