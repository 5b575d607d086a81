"""Refuse or postpone the ways to read a gradient other than `.grad` after `backward()`, where it is finished.

FSDP2 computes with gathered parameters of its own; the sharded ones, which `model.parameters()` gives, are in no
autograd graph. Over tp the gradients of replicated LoRA factors are partial sums until the backward pass ends (see
`gradients`). A hook of `register_hook` or a call of `torch.autograd.grad` would therefore see no gradient, or one
rank's part of it, and is refused here. Hooks of `register_post_accumulate_grad_hook` are postponed until the gradient
is finished.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lora_parallel.distributed.torch_private import gradient_hooks, on_gradients_of, post_accumulate_hooks

__all__ = ["PostponedHooks", "UnfinishedGradients", "refuse_early_hooks"]


class PostponedHooks:
    """Postpone users' post-accumulate hooks while autograd accumulates gradients that are not finished yet."""

    def __init__(self) -> None:
        self._postponed: list[tuple[dict[int, Any], dict[int, Any]]] = []

    def postpone(self, parameters: Collection[nn.Parameter]) -> None:
        """Replace the hooks of `parameters` by functions that do nothing, for autograd and FSDP2 to call."""
        for parameter in parameters:
            if registered := post_accumulate_hooks(parameter):
                self._postponed.append((registered, dict(registered)))
                registered.update(dict.fromkeys(registered, _do_nothing))

    def restore(self) -> None:
        """Put the postponed hooks back, except those that the user has removed meanwhile."""
        for registered, hooks in self._postponed:
            registered.update({number: hook for number, hook in hooks.items() if number in registered})
        self._postponed.clear()

    @torch.no_grad()
    def call(self, parameters: Collection[nn.Parameter]) -> None:
        """Call the hooks of `parameters`, whose gradients are finished now."""
        for parameter in parameters:
            for hook in list(post_accumulate_hooks(parameter).values()):
                hook(parameter)


def _do_nothing(parameter: Tensor) -> None:
    pass


class UnfinishedGradients:
    """Watch the trained parameters of one model for which autograd has no gradient, or only a part of it.

    Args:
        model: The sharded model.
        partial: The parameters of `model` whose gradients are partial sums over tp until a backward pass ends.
        is_pipeline: True if the backwards of `model` are those of micro-batches in pipeline stages.
    """

    def __init__(self, model: nn.Module, partial: Collection[nn.Parameter], is_pipeline: bool) -> None:
        trained = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._elsewhere = trained if is_pipeline or isinstance(model, FSDPModule) else {}
        """Parameters to which a backward pass of the user's does not lead."""

        self._is_pipeline = is_pipeline
        self._partial = {parameter: trained[parameter] for parameter in partial if parameter in trained}
        self._watched = list((self._elsewhere or self._partial).items())
        if self._watched:
            _MODELS.add(self)
            _watch_passes()

    def check_hooks(self) -> None:
        """Check, as a backward pass begins, that no watched parameter has a hook of `register_hook`.

        Raises:
            RuntimeError: A watched parameter has such a hook.
        """
        for parameter, name in self._watched:
            if gradient_hooks(parameter):
                what = "would be given this rank's part of a sum over tp"
                if self._elsewhere:
                    what = "would be called for each micro-batch" if self._is_pipeline else "would never be called"
                raise RuntimeError(
                    f"{name} has a hook of register_hook (or register_multi_grad_hook), which {what}. Use "
                    "parameter.register_post_accumulate_grad_hook, which is called when parameter.grad is finished, or "
                    "look at .grad after backward()."
                )

    def check_asked(self, inputs: Sequence[Any], accumulate: bool) -> None:
        """Check, before a backward pass that computes the gradients of `inputs` only, that autograd can compute them.

        Args:
            inputs: The tensors whose gradients the pass is asked for.
            accumulate: True for `backward(inputs=...)`, False for `torch.autograd.grad`.

        Raises:
            RuntimeError: One of `inputs` is a parameter for which autograd would give no gradient, or one rank's part.
        """
        for each in inputs:
            if not isinstance(each, nn.Parameter):
                continue
            if each in self._elsewhere:
                why = (
                    "a pipeline runs the backwards of micro-batches by itself"
                    if self._is_pipeline
                    else "FSDP2 computes with gathered parameters"
                )
                raise RuntimeError(
                    f"{'backward(inputs=...)' if accumulate else 'torch.autograd.grad'} is asked for the gradient of "
                    f"{self._elsewhere[each]}, and would give none: {why}. {_REMEDY}"
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
    """Check that no parameter of `model` has a gradient hook yet: hooks stay with the tensors that sharding replaces.

    Raises:
        ValueError: A parameter has a gradient hook.
    """
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter) or post_accumulate_hooks(parameter):
            raise ValueError(
                f"{name} has a gradient hook, which sharding would leave behind with the tensor that it replaces: "
                "register it after parallelize, by register_post_accumulate_grad_hook."
            )
