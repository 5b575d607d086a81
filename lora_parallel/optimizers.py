"""Let any optimizer step on sharded parameters as it does in one process.

An optimizer that treats each element by itself steps on sharded parameters as they are (DTensors), or on this rank's
shards. Any other optimizer (Adafactor takes means over rows and columns, Muon multiplies matrices, LBFGS takes inner
products over all parameters) steps on full tensors, as it does in one process. What is not known here is of the last
kind, which is right for every optimizer, and costs an all-gather of parameters, gradients and states a step.

A hook of torch before every step (`register_optimizer_step_pre_hook`) may replace the arguments of `step`, of which the
optimizer itself is the first. The hook puts a stand-in in its place: an object of the same class with the same
settings, whose parameters, gradients and states are plain tensors. After the step a second hook takes the results over.
An error within the step leaves the optimizer as it was.

Between steps a state that has the shape of its parameter is sharded as the parameter is, so that it takes as much
memory as a shard and is saved and resumed on any mesh.

In: an optimizer of the user's, at its step. Out: its step, on the tensors that it can compute with.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache, partial
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lora_parallel.distributed.dtensors import local, region_of, sharded_as


class SharedDraws:
    """Give this rank the random state of rank 0 until `end`. Collective over all ranks.

    Ranks that compute the same step on full tensors would part if they drew other numbers: their copies of what is
    replicated, and their slices of what is not. A rank whose state is that of rank 0 keeps what it draws, so that ranks
    with one seed go on together.
    """

    def __init__(self, device: torch.device) -> None:
        self._random: Any = torch if device.type == "cpu" else torch.get_device_module(device)
        before = self._random.get_rng_state()
        shared = before.clone() if device.type == "cpu" else before.to(device)
        dist.broadcast(shared, 0)
        self._before = None if torch.equal(shared.cpu(), before) else before
        if self._before is not None:
            self._random.set_rng_state(shared.cpu())

    def end(self) -> None:
        """Give the rank its own random state back."""
        if self._before is not None:
            self._random.set_rng_state(self._before)


class StepsOn(Enum):
    """Name the tensors that an optimizer steps with."""

    DTENSORS = "sharded parameters"
    SHARDS = "this rank's shards, as plain tensors"
    FULL = "full tensors"


_BY_ELEMENT = {
    *(
        f"torch.optim.{name.lower()}.{name}.step"
        for name in "Adam AdamW SGD RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD".split()
    ),
    "lion_pytorch.lion_pytorch.Lion.step",
    "schedulefree.adamw_schedulefree.AdamWScheduleFree.step",
    "schedulefree.radam_schedulefree.RAdamScheduleFree.step",
    "schedulefree.sgd_schedulefree.SGDScheduleFree.step",
}
"""Names of the methods `step` that treat each element by itself, in operations that DTensors have."""

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
    step = _name(type(optimizer).step)
    is_fused = step in _FUSED_OF_PLAIN_TENSORS and any(group.get("fused") for group in optimizer.param_groups)
    if step in _BY_ELEMENT:
        return StepsOn.SHARDS if is_fused else StepsOn.DTENSORS
    if step == "torch.optim.rprop.Rprop.step" or (step == _BITSANDBYTES and _is_by_element(optimizer)):
        return StepsOn.SHARDS  # DTensors lack their operations
    return StepsOn.FULL


def joins_parameters(optimizer: Optimizer) -> bool:
    """Return True if a step computes with all parameters together, as inner products over all of them."""
    steps = (_name(kind.step) for kind in type(optimizer).__mro__ if issubclass(kind, Optimizer))
    return any(step.startswith(_JOINS) for step in steps)


def _name(step: Callable[..., object]) -> str:
    """Return the name of the method, which torch's wrapper for hooks keeps."""
    return f"{step.__module__}.{step.__qualname__}"


def _is_by_element(optimizer: Optimizer) -> bool:
    """Return True for an optimizer of bitsandbytes with states in 32 bits and without norms of parameters."""
    # States in 8 bits have a scale for each 256 elements in the order of the full tensor.
    settings = getattr(optimizer, "args", None)
    return (
        getattr(optimizer, "optimizer_name", None) in _BITSANDBYTES_BY_ELEMENT
        and getattr(settings, "optim_bits", None) == 32
        and getattr(settings, "max_unorm", None) == 0
    )


log = logging.getLogger(__name__)

_STEP = "_lora_parallel_step"


_checks: dict[Callable[[Optimizer], None], int] = {}  # with the number of each call of `check_optimizers`
_numbers = count()
# the last of these numbers, and the number of parameters in each group, when an optimizer was checked last
_checked: WeakKeyDictionary[Optimizer, tuple[int, ...]] = WeakKeyDictionary()


@cache
def let_optimizers_step() -> None:
    """Let every optimizer in this process step on sharded parameters as it does in one process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def check_optimizers(check: Callable[[Optimizer], None]) -> Callable[[], object]:
    """Call `check` before the next step of each optimizer, and again when its parameters or the checks have changed.

    Return a function that ends this.
    """
    let_optimizers_step()
    _checks[check] = next(_numbers)
    return partial(_checks.pop, check, None)


def _check(optimizer: Optimizer) -> None:
    now = (max(_checks.values(), default=-1), *(len(group["params"]) for group in optimizer.param_groups))
    if _checked.get(optimizer) != now:
        for check in list(_checks):
            check(optimizer)
        _checked[optimizer] = now


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _check(optimizer)
    kind = steps_on(optimizer)
    if kind is StepsOn.DTENSORS:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return None
    step = (_FullStep if kind is StepsOn.FULL else _ShardStep)(optimizer, parameters)
    arguments = args[1:]
    if arguments and callable(arguments[0]):
        arguments = (step.closure(arguments[0]), *arguments[1:])
    elif kwargs.get("closure") is not None:
        kwargs = {**kwargs, "closure": step.closure(kwargs["closure"])}
    else:
        step.take_gradients()
    return (step.stand_in, *arguments), kwargs


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args[0] is not optimizer:  # they are the same where the step of a stand-in calls that of its base class
        step: _ShardStep = args[0].__dict__[_STEP]
        step.finish()


class _ShardStep:
    """Hold one step of an optimizer on this rank's shards, as plain tensors that share their memory."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        plain = self._plain([parameter.detach() for parameter in parameters])
        self._of: dict[Tensor, nn.Parameter] = {
            p: nn.Parameter(tensor, requires_grad=p.requires_grad) for p, tensor in zip(parameters, plain, strict=True)
        }
        self._back: dict[Tensor, Tensor] = {mine: parameter for parameter, mine in self._of.items()}
        groups = [{**group, "params": [self._of[p] for p in group["params"]]} for group in optimizer.param_groups]
        self._replaced: dict[str, Any] = {"param_groups": groups, "state": self._plain_states(), _STEP: self}
        for key, value in optimizer.__dict__.items():
            for group, mine in zip(optimizer.param_groups, groups, strict=True):
                if value is group["params"]:  # LBFGS keeps the list of its only group
                    self._replaced[key] = mine["params"]
        self.stand_in: Optimizer = object.__new__(type(optimizer))
        self.stand_in.__dict__.update(optimizer.__dict__ | self._replaced)

    def _plain_states(self) -> defaultdict[Tensor, Any]:
        """Return the states with plain tensors, by the stand-ins of their parameters."""
        states = self._optimizer.state
        flat = [
            (owner, key, value)
            for owner, values in states.items()
            if isinstance(owner, Tensor)
            for key, value in values.items()
        ]
        plain = self._plain([value for *_, value in flat])
        plain_states: defaultdict[Any, Any] = defaultdict(dict)
        plain_states.update({owner: values for owner, values in states.items() if not isinstance(owner, Tensor)})
        for (owner, key, _), value in zip(flat, plain, strict=True):
            plain_states[self._of.get(owner, owner)][key] = value
        return plain_states

    def take_gradients(self) -> None:
        """Give the stand-ins the gradients of the parameters."""
        trained = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = self._plain([parameter.grad for parameter in trained])
        for parameter in self._parameters:
            self._of[parameter].grad = None
        for parameter, gradient in zip(trained, gradients, strict=True):
            self._of[parameter].grad = gradient

    def closure(self, users: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that computes with the parameters as the step has changed them so far."""

        def computed() -> Any:
            self.put()
            loss = users()
            self.take_gradients()
            return self._joined(loss)

        return computed

    def finish(self) -> None:
        """Give the optimizer what the step has made."""
        self.put()
        optimizer, made = self._optimizer, self.stand_in
        for group, stepped in zip(optimizer.param_groups, made.param_groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        states: dict[Any, Any] = {}
        for owner, value in made.state.items():
            parameter = self._back.get(owner)
            if parameter is not None:
                value = {key: self._sharded(state, parameter) for key, state in value.items()}
            states[owner if parameter is None else parameter] = value
        optimizer.state.clear()
        optimizer.state.update(states)
        optimizer.__dict__.update({key: value for key, value in made.__dict__.items() if key not in self._replaced})

    def put(self) -> None:
        """Give the parameters the values of their stand-ins."""

    def _joined(self, loss: Any) -> Any:
        """Return the loss of all ranks."""
        return loss

    def _plain(self, tensors: Sequence[Any]) -> list[Any]:
        """Return plain tensors in place of DTensors; other values stay."""
        return [local(tensor) if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def _sharded(self, value: Any, parameter: Tensor) -> Any:
        """Return a state as it is kept between steps."""
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == local(parameter).shape:
            return sharded_as(value, parameter)
        return value


class _FullStep(_ShardStep):
    """Hold one step of an optimizer on full tensors, which every rank computes alike."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(optimizer, parameters)
        _log_once(type(optimizer), sum(mine.nbytes for mine in self._back))
        self._draws = [SharedDraws(device) for device in {p.device.type: p.device for p in parameters}.values()]

    def finish(self) -> None:
        super().finish()
        for draws in self._draws:
            draws.end()

    @torch.no_grad()
    def put(self) -> None:
        for parameter, mine in self._of.items():
            if isinstance(parameter, DTensor):
                local(parameter).copy_(mine[region_of(parameter)])

    def _joined(self, loss: Any) -> Any:
        """Return the mean over the ranks: if the step depends on it, ranks that saw other batches would part."""
        if not isinstance(loss, Tensor):
            return loss
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    @torch.no_grad()
    def _plain(self, tensors: Sequence[Any]) -> list[Any]:
        return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]

    def _sharded(self, value: Any, parameter: Tensor) -> Any:
        if isinstance(parameter, DTensor) and type(value) is Tensor and value.shape == parameter.shape:
            return sharded_as(value[region_of(parameter)].clone(), parameter)
        return value


_logged: set[type[Optimizer]] = set()


def _log_once(kind: type[Optimizer], size: int) -> None:
    if kind in _logged or dist.get_rank() != 0:
        return
    _logged.add(kind)
    log.info(
        "%s steps on full tensors, as in one process: each step gathers the trained parameters (%.1f MiB), their "
        "gradients and the optimizer's states on every rank. AdamW and other optimizers that treat each element by "
        "itself step on shards.",
        kind.__name__,
        size / 2**20,
    )
