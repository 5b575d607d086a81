"""Say which tensors an optimizer steps with where its parameters are sharded.

An optimizer that treats each element by itself steps on sharded parameters as they are (DTensors), or on this rank's
shards. Any other optimizer (Adafactor takes means over rows and columns, Muon multiplies matrices, LBFGS takes inner
products over all parameters) steps on full tensors, as it does in one process. What is not known here is of the last
kind, which is right for every optimizer, and costs an all-gather of parameters, gradients and states a step.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from torch.optim import Optimizer

__all__ = ["StepsOn", "joins_parameters", "steps_on"]


class StepsOn(Enum):
    """Name the tensors that an optimizer steps with."""

    DTENSORS = "sharded parameters"
    SHARDS = "this rank's shards, as plain tensors"
    FULL = "full tensors"


_BY_ELEMENT = {
    f"torch.optim.{module}.{name}.step"
    for module, name in (
        ("adam", "Adam"),
        ("adamw", "AdamW"),
        ("sgd", "SGD"),
        ("rmsprop", "RMSprop"),
        ("adagrad", "Adagrad"),
        ("adadelta", "Adadelta"),
        ("adamax", "Adamax"),
        ("nadam", "NAdam"),
        ("radam", "RAdam"),
        ("asgd", "ASGD"),
    )
} | {
    "lion_pytorch.lion_pytorch.Lion.step",
    "schedulefree.adamw_schedulefree.AdamWScheduleFree.step",
    "schedulefree.radam_schedulefree.RAdamScheduleFree.step",
    "schedulefree.sgd_schedulefree.SGDScheduleFree.step",
}
"""Names of the methods `step` that treat each element by itself, in operations that DTensors have."""

_BY_ELEMENT_OF_PLAIN_TENSORS = {"torch.optim.rprop.Rprop.step"}
"""The same, in operations that DTensors lack."""

_FUSED_OF_PLAIN_TENSORS = {"torch.optim.sgd.SGD.step", "torch.optim.adagrad.Adagrad.step"}
"""Those whose kernel for `fused=True` DTensors lack."""

_BITSANDBYTES = "bitsandbytes.optim.optimizer.Optimizer8bit.step"
_BITSANDBYTES_BY_ELEMENT = ("adam", "lion", "momentum", "rmsprop", "adagrad")

_JOINS = ("torch.optim.lbfgs.LBFGS", "prodigyopt.", "dadaptation.")
"""Beginnings of the names of the methods `step` that compute with all parameters together."""


def steps_on(optimizer: Optimizer) -> StepsOn:
    """Return the tensors that an optimizer steps with where its parameters are sharded.

    The class that defines `step` decides: a subclass that steps in another way is another optimizer.
    """
    step = _step_of(optimizer)
    if step in _FUSED_OF_PLAIN_TENSORS and any(group.get("fused") for group in optimizer.param_groups):
        return StepsOn.SHARDS
    if step in _BY_ELEMENT:
        return StepsOn.DTENSORS
    if step in _BY_ELEMENT_OF_PLAIN_TENSORS:
        return StepsOn.SHARDS
    if step == _BITSANDBYTES and _is_by_element(optimizer):
        return StepsOn.SHARDS
    return StepsOn.FULL


def joins_parameters(optimizer: Optimizer) -> bool:
    """Return True if a step computes with all parameters together, as inner products over all of them."""
    steps = (_name(kind.step) for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer))
    return any(step.startswith(_JOINS) for step in steps)


def _step_of(optimizer: Optimizer) -> str:
    return _name(type(optimizer).step)


def _name(step: Callable[..., object]) -> str:
    """Return the name of the method, which torch's wrapper for hooks keeps."""
    return f"{step.__module__}.{step.__qualname__}"


def _is_by_element(optimizer: Optimizer) -> bool:
    """Return True for an optimizer of bitsandbytes with states in 32 bits and without norms of parameters.

    States in 8 bits have a scale for each 256 elements in the order of the full tensor.
    """
    settings = getattr(optimizer, "args", None)
    return (
        getattr(optimizer, "optimizer_name", None) in _BITSANDBYTES_BY_ELEMENT
        and getattr(settings, "optim_bits", None) == 32
        and getattr(settings, "max_unorm", None) == 0
    )
