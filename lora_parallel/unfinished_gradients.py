"""Ways of getting at a gradient other than `.grad` after `backward()`, which is where it is finished.

FSDP2 computes with gathered parameters of its own: the sharded ones, which `model.parameters()` gives, are in no graph.
Over tp the gradients of replicated factors are partial sums until the backward pass ends (see `grads`). What a user's
code would find on these ways is nothing, or one rank's part: refused here, but for hooks of
`register_post_accumulate_grad_hook`, which run when the gradient is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lora_parallel.upstream import gradient_hooks, on_gradients_of, post_accumulate_hooks

__all__ = ["PostponedHooks", "UnfinishedGradients", "refuse_early_hooks"]


class PostponedHooks:
    """Users' post-accumulate hooks of parameters whose gradients autograd accumulates before they are finished."""

    def __init__(self) -> None:
        self._postponed: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def postpone(self, parameters: Collection[nn.Parameter]) -> None:
        """Have autograd, and FSDP2, call nothing in their place."""
        for parameter in parameters:
            if registered := post_accumulate_hooks(parameter):
                self._postponed.append((registered, dict(registered)))
                registered.update(dict.fromkeys(registered, _do_nothing))

    def restore(self) -> None:
        """Put them back, but for those that were removed meanwhile."""
        for registered, hooks in self._postponed:
            registered.update({number: hook for number, hook in hooks.items() if number in registered})
        self._postponed.clear()

    @torch.no_grad()
    def call(self, parameters: Collection[nn.Parameter]) -> None:
        """Call those of parameters whose gradients are finished now."""
        for parameter in parameters:
            for hook in list(post_accumulate_hooks(parameter).values()):
                hook(parameter)


def _do_nothing(parameter: Tensor) -> None:
    pass


class UnfinishedGradients:
    """The trained parameters of one model whose gradients autograd does not have, or has a part of.

    Args:
        model: The sharded model.
        partial: Its parameters whose gradients are partial sums over tp until a backward pass ends.
    """

    def __init__(self, model: nn.Module, partial: Collection[nn.Parameter]) -> None:
        trained = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._gathered = trained if isinstance(model, FSDPModule) else {}
        self._partial = {parameter: trained[parameter] for parameter in partial if parameter in trained}
        self._watched = list((self._gathered or self._partial).items())
        if self._watched:
            _MODELS.add(self)
            _watch_passes()

    def check_hooks(self) -> None:
        """Called as a backward pass begins.

        Raises:
            RuntimeError: A parameter has a hook of `register_hook`.
        """
        for parameter, name in self._watched:
            if gradient_hooks(parameter):
                what = "would never be called" if self._gathered else "would be given this rank's part of a sum over tp"
                raise RuntimeError(
                    f"{name} has a hook of register_hook (or register_multi_grad_hook), which {what}. Use "
                    "parameter.register_post_accumulate_grad_hook, which is called when parameter.grad is finished, or "
                    "look at .grad after backward()."
                )

    def check_asked(self, inputs: Sequence[Any], accumulate: bool) -> None:
        """Called before a backward pass that computes the gradients of `inputs` only.

        Raises:
            RuntimeError: One of these is a parameter of which autograd has none, or a part.
        """
        for each in inputs:
            if not isinstance(each, nn.Parameter):
                continue
            if each in self._gathered:
                raise RuntimeError(
                    f"{'backward(inputs=...)' if accumulate else 'torch.autograd.grad'} is asked for the gradient of "
                    f"{self._gathered[each]}, and would give none: FSDP2 computes with gathered parameters. {_REMEDY}"
                )
            if not accumulate and each in self._partial:
                raise RuntimeError(
                    f"torch.autograd.grad is asked for the gradient of {self._partial[each]}, and would give this "
                    f"rank's part of a sum over tp. {_REMEDY}"
                )


_REMEDY = (
    "Call loss.backward() and read parameter.grad; freeze (requires_grad) before parallelize what is to have none."
)
_MODELS: WeakSet[UnfinishedGradients] = WeakSet()


@cache
def _watch_passes() -> None:
    def check(inputs: Sequence[Any], accumulate: bool) -> None:
        for model in _MODELS:
            model.check_asked(inputs, accumulate)

    on_gradients_of(check)


def refuse_early_hooks(model: nn.Module) -> None:
    """Check that no parameter has gradient hooks yet, which stay with the tensors that sharding replaces.

    Raises:
        ValueError: One has.
    """
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter) or post_accumulate_hooks(parameter):
            raise ValueError(
                f"{name} has a gradient hook, which sharding would leave behind with the tensor that it replaces: "
                "register it after parallelize, by register_post_accumulate_grad_hook."
            )
