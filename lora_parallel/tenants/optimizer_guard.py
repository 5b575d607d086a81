"""Check that a pool can drive a tenant's optimizer, and that nobody else steps it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lora_parallel.distributed.gradients import clip_grad_norm_, refuse_clipping_if
from lora_parallel.optimizers.kinds import StepsOn, steps_on

__all__ = ["OptimizerGuard", "settings_of"]


class OptimizerGuard:
    """Step a tenant's optimizer with the gradients that a pool has finished, and refuse steps by anybody else.

    While gradients wait in the pool, clipping the tenant's parameters from outside is refused as well, since it would
    miss these gradients.

    Args:
        tenant: The name of the tenant.
        made: The object that the user's function made of the parameters, which should be an optimizer.
        parameters: The parameters of the tenant.
        waits: A method that returns True if gradients wait for the tenant's step.

    Raises:
        ValueError: `made` is no optimizer of these parameters, or its step computes the loss anew.
    """

    def __init__(self, tenant: str, made: Any, parameters: Sequence[nn.Parameter], waits: Callable[[], bool]) -> None:
        _check_made(made, parameters)
        self.optimizer: Optimizer = made
        self._tenant, self._parameters, self._steps = tenant, parameters, False
        self._waits, this = weakref.WeakMethod(waits), weakref.ref(self)  # no reference cycle: removal frees at once

        def check_driven(*_: Any) -> None:
            if (guard := this()) is not None:
                guard._check_driven()

        made.register_step_pre_hook(check_driven)
        for parameter in parameters:
            refuse_clipping_if(parameter, lambda: None if (guard := this()) is None else guard._not_clipped())

    @property
    def gathers(self) -> bool:
        """Return True if a step of the optimizer gathers parameters, so that all ranks step it at the same time."""
        sharded = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        return sharded and steps_on(self.optimizer) is StepsOn.FULL

    def step(self, gradients: Sequence[Tensor | None], max_norm: float | None) -> Tensor | None:
        """Step the optimizer with `gradients`; without any gradient it takes no step.

        Args:
            gradients: The gradient of each parameter, or None. They are not changed, so that a failed step can be
                tried again.
            max_norm: Clip the gradients to this norm first; None: do not clip.

        Returns:
            The norm of the gradients before clipping; None without `max_norm`.
        """
        self._steps = True
        try:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient if gradient is None or max_norm is None else gradient.clone()
            norm = None if max_norm is None else clip_grad_norm_(self._parameters, max_norm)
            if any(gradient is not None for gradient in gradients):
                self.optimizer.step()
        finally:
            self._steps = False
            for parameter in self._parameters:
                parameter.grad = None  # the caller still has the gradients if the step failed
        return norm

    def _check_driven(self) -> None:
        if not self._steps:
            raise RuntimeError(
                f"the optimizer of the tenant {self._tenant!r} was told to step, but gradients are in the pool: call "
                f"pool.step({self._tenant!r})."
            )

    def _not_clipped(self) -> str | None:
        waits = self._waits()
        if self._steps or waits is None or not waits():
            return None
        return f"gradients of {self._tenant!r} wait in the pool: clip with pool.step({self._tenant!r}, max_norm=...)."


def _check_made(made: Any, parameters: Sequence[nn.Parameter]) -> None:
    if not isinstance(made, Optimizer):
        raise ValueError(f"optimizer(...) gave a {type(made).__name__}: let it return a torch.optim.Optimizer.")
    held = {parameter for group in made.param_groups for parameter in group["params"]}
    if not held or not held <= set(parameters):
        raise ValueError(
            f"optimizer(...) gave a {type(made).__name__} of other parameters than it was given: let it make a new one "
            "of these, or of some of them, each time that it is called (with a budget that is twice)."
        )
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer(...) gave a {type(made).__name__}, whose step computes the loss anew: a pool's step does not. "
            "Give one that steps with the gradients."
        )


def settings_of(optimizer: Optimizer) -> str:
    """Describe the class and the plain settings of an optimizer as text, which must be the same on every rank."""
    plain = (bool, int, float, str, Tensor, type(None))
    groups = [
        {key: each for key, each in group.items() if all(isinstance(leaf, plain) for leaf in tree_leaves(each))}
        for group in [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    ]
    return f"{type(optimizer).__name__}({groups})"
