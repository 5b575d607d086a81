"""Give an optimizer plain tensors to step with in place of sharded parameters.

A hook of torch before every step (`register_optimizer_step_pre_hook`) may replace the arguments of `step`, of which the
optimizer itself is the first. The hook puts a stand-in in its place: an object of the same class with the same
settings, whose parameters, gradients and states are plain tensors. After the step a second hook takes the results over.
An error within the step leaves the optimizer as it was.

Between steps a state that has the shape of its parameter is sharded as the parameter is, so that it takes as much
memory as a shard and is saved and resumed on any mesh.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lora_parallel.distributed.gather import local, region_of, sharded_as
from lora_parallel.optimizers.draws import SharedDraws
from lora_parallel.optimizers.kinds import StepsOn, steps_on

__all__ = ["let_optimizers_step"]

log = logging.getLogger(__name__)

_STEP = "_lora_parallel_step"


@cache
def let_optimizers_step() -> None:
    """Let every optimizer in this process step on sharded parameters as it does in one process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kind = steps_on(optimizer)
    if kind is StepsOn.DTENSORS:
        return None
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return None
    step = (_FullStep if kind is StepsOn.FULL else _ShardStep)(optimizer, parameters)
    given = args[1:]
    if given and callable(given[0]):
        given = (step.closure(given[0]), *given[1:])
    elif kwargs.get("closure") is not None:
        kwargs = {**kwargs, "closure": step.closure(kwargs["closure"])}
    else:
        step.take_gradients()
    return (step.stand_in, *given), kwargs


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
        flat = [
            (owner, key, value)
            for owner, states in self._optimizer.state.items()
            if isinstance(owner, Tensor)
            for key, value in states.items()
        ]
        plain = self._plain([value for *_, value in flat])
        found: defaultdict[Any, Any] = defaultdict(dict)
        for owner, states in self._optimizer.state.items():
            if not isinstance(owner, Tensor):
                found[owner] = states
        for (owner, key, _), value in zip(flat, plain, strict=True):
            found[self._of.get(owner, owner)][key] = value
        return found

    def take_gradients(self) -> None:
        """Give the stand-ins the gradients of the parameters."""
        held = [parameter for parameter in self._parameters if parameter.grad is not None]
        gradients = self._plain([parameter.grad for parameter in held])
        for parameter in self._parameters:
            self._of[parameter].grad = None
        for parameter, gradient in zip(held, gradients, strict=True):
            self._of[parameter].grad = gradient

    def closure(self, own: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that computes with the parameters as the step has changed them so far."""

        def computed() -> Any:
            self.put()
            loss = own()
            self.take_gradients()
            return self._joined(loss)

        return computed

    def finish(self) -> None:
        """Give the optimizer what the step has made."""
        self.put()
        own, made = self._optimizer, self.stand_in
        for group, stepped in zip(own.param_groups, made.param_groups, strict=True):
            group.update({key: value for key, value in stepped.items() if key != "params"})
        states: dict[Any, Any] = {}
        for owner, value in made.state.items():
            parameter = self._back.get(owner)
            if parameter is not None:
                value = {key: self._sharded(each, parameter) for key, each in value.items()}
            states[owner if parameter is None else parameter] = value
        own.state.clear()
        own.state.update(states)
        own.__dict__.update({key: value for key, value in made.__dict__.items() if key not in self._replaced})

    def put(self) -> None:
        """Give the parameters the values of their stand-ins."""

    def _joined(self, loss: Any) -> Any:
        """Return the loss of all ranks."""
        return loss

    def _plain(self, tensors: Sequence[Any]) -> list[Any]:
        """Return plain tensors in place of DTensors; other values stay."""
        return [local(each) if isinstance(each, DTensor) else each for each in tensors]

    def _sharded(self, value: Any, parameter: Tensor) -> Any:
        """Return a state as it is kept between steps."""
        if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == local(parameter).shape:
            return sharded_as(value, parameter)
        return value


class _FullStep(_ShardStep):
    """Hold one step of an optimizer on full tensors, which every rank computes alike."""

    def __init__(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(optimizer, parameters)
        _tell(type(optimizer), sum(mine.nbytes for mine in self._back))
        self._draws = [SharedDraws(device) for device in {p.device.type: p.device for p in parameters}.values()]

    def finish(self) -> None:
        super().finish()
        for each in self._draws:
            each.end()

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
        return [each.full_tensor() if isinstance(each, DTensor) else each for each in tensors]

    def _sharded(self, value: Any, parameter: Tensor) -> Any:
        if isinstance(parameter, DTensor) and type(value) is Tensor and value.shape == parameter.shape:
            return sharded_as(value[region_of(parameter)].clone(), parameter)
        return value


_told: set[type[Optimizer]] = set()


def _tell(kind: type[Optimizer], size: int) -> None:
    if kind in _told or dist.get_rank() != 0:
        return
    _told.add(kind)
    log.info(
        "%s steps on full tensors, as in one process: each step gathers the trained parameters (%.1f MiB), their "
        "gradients and the optimizer's states on every rank. AdamW and other optimizers that treat each element by "
        "itself step on shards.",
        kind.__name__,
        size / 2**20,
    )
