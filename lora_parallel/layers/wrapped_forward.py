"""Wrap the forward of one module, in place: for what must run inside of `module.forward`, where hooks do not reach."""

from __future__ import annotations

from collections.abc import Callable
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
    function: Any = type(module).forward
    if getattr(instance_forward, "__self__", None) is module:
        function = instance_forward.__func__
    elif instance_forward is not None:
        function = _with_self(instance_forward)

    # A method, not a `partial`: torch.compile then shares the graph of one block with all others.
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # FSDP2 gives the module another class later, and transformers' GradientCheckpointingLayer recomputes in the
        # forward of the last class only. So each call asks the class: what is recomputed is given what `around` passes.
        compute = (type(self).forward if instance_forward is None else function).__get__(self)
        return around(self, compute, args, kwargs)

    def undo() -> None:
        if instance_forward is None:
            del module.__dict__["forward"]
        else:
            module.forward = instance_forward

    forward.__wrapped__ = function  # type: ignore[attr-defined]  # for the signature
    module.forward = MethodType(forward, module)
    return undo


def _with_self(bare_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with `self` in front of the arguments of a forward that is no method of its module."""

    def function(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return bare_forward(*args, **kwargs)

    parameters = signature(bare_forward).parameters.values()
    function.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_ONLY), *parameters])  # type: ignore[attr-defined]
    return function
