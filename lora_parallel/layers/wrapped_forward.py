"""Wrap the forward of one module, in place: for what must run inside of `module.forward`, where hooks do not reach."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature, signature
from types import MethodType
from typing import Any

from torch import nn

Around = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Function to run in place of a forward: (module, compute, args, kwargs). `compute` is the forward that there was."""


def wrap_forward(module: nn.Module, around: Around) -> Callable[[], None]:
    """Make `around` run in place of a module's forward, and return a function that puts back what was there.

    A forward may be wrapped several times: the last `around` is the outermost. `inspect.signature(module.forward)`
    stays as it is, because Trainer reads it. A copy of the module (`copy.deepcopy`) computes with its own parameters.
    """
    # Hooks would not do: activation checkpointing recomputes the forward, and must recompute these changes with it.
    instance_forward: Any = module.__dict__.get("forward")
    is_method = getattr(instance_forward, "__self__", None) is module

    # The wrapper is a method, not a `partial`: torch.compile then shares the graph of one block with all others.
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compute = instance_forward
        if is_method:
            compute = partial(instance_forward.__func__, self)
        elif instance_forward is None:
            # FSDP2 gives the module another class later, and transformers' GradientCheckpointingLayer recomputes in the
            # forward of the last class only. So each call asks the class: what is recomputed gets what `around` passes.
            compute = partial(type(self).forward, self)
        return around(self, compute, args, kwargs)

    def undo() -> None:
        del module.__dict__["forward"]
        if instance_forward is not None:
            module.forward = instance_forward

    parameters = [Parameter("self", Parameter.POSITIONAL_ONLY), *signature(module.forward).parameters.values()]
    forward.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    module.forward = MethodType(forward, module)
    return undo
