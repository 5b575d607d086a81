"""Finish the gradients of a model's parameters as a backward pass ends, and clip them (`no_sync`: `state.py`).

Autograd does not compute with the parameters that `model.parameters()` gives: FSDP2 computes with gathered ones, and a
tensor parallel layer with this rank's plain tensors, the leaves of the graph (see `Gradients.leaf`). A gradient is on
its way from there to `.grad` until the backward pass ends, and `Gradients` says in which order it gets there. A hook of
`register_hook` or a call of `torch.autograd.grad` would see no gradient, and is refused here. Hooks of
`register_post_accumulate_grad_hook` are postponed until the gradient is finished.

The sums over dp and over tp commute. FSDP2 reduce-scatters an adapter gradient over dp while it is still a partial sum
over tp. The result has 1 / dp of the bytes, and one all-reduce over tp then finishes the gradients of all adapters
together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lora_parallel.distributed.collectives import all_reduce
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.torch_private import (
    gradient_hooks,
    local_tensor,
    on_gradients_of,
    placed_as,
    post_accumulate_hooks,
    queue_after_backward,
)


class PostponedHooks:
    """Postpone users' post-accumulate hooks while autograd accumulates gradients that are not finished yet."""

    def __init__(self) -> None:
        self._postponed: list[tuple[dict[int, Any], dict[int, Any]]] = []
        self._due: list[Tensor] = []

    def postpone(self, parameters: Collection[nn.Parameter]) -> bool:
        """Replace the hooks of `parameters`, for autograd and FSDP2 to call, until `restore`.

        Returns:
            True if there are any; False if not, or if they are replaced already.
        """
        if self._postponed:
            return False
        for parameter in parameters:
            if registered := post_accumulate_hooks(parameter):
                self._postponed.append((registered, dict(registered)))
                registered.update(dict.fromkeys(registered, self._due.append))
        return bool(self._postponed)

    def due(self) -> list[Tensor]:
        """Return the parameters whose hooks are due so far."""
        return [*self._due]

    def restore(self) -> list[Tensor]:
        """Put the hooks back that the user has not removed; return the parameters whose hooks are due, in order."""
        for registered, hooks in self._postponed:
            registered.update({number: hook for number, hook in hooks.items() if number in registered})
        self._postponed.clear()
        due, self._due = list(dict.fromkeys(self._due)), []
        return due

    @torch.no_grad()
    def call(self, parameters: Collection[Tensor]) -> None:
        """Call the hooks of `parameters`, whose gradients are finished now."""
        for parameter in parameters:
            for hook in list(post_accumulate_hooks(parameter).values()):
                hook(parameter)


@contextmanager
def held_apart(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Put the gradients of backward passes within the context into the list that it gives, at its end, not in `.grad`.

    Users' hooks are not called.
    """
    held: list[Tensor | None] = []
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    hooks = PostponedHooks()
    hooks.postpone(parameters)
    try:
        yield held
        held += [parameter.grad for parameter in parameters]
    finally:
        hooks.restore()
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


class ParametersNotInGraph:
    """Watch the trained parameters of one model to which autograd gives no gradient: they are not in the graph."""

    # `why`: who computes with other tensors. `leaves_of`: returns those that are in the graph for a parameter, if they
    # are there from one pass to the next; None if they are not.
    def __init__(
        self, model: nn.Module, why: str, leaves_of: Callable[[Tensor], Sequence[Tensor]] | None = None
    ) -> None:
        self._trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
        if leaves_of is not None:  # tensor parallelism alone: what no layer cuts is in the graph itself
            self._trained = {p: name for p, name in self._trained.items() if isinstance(p, DTensor)}
        self._why, self._leaves_of = why, leaves_of
        self._own = {p: gradient_hooks(p) for p in self._trained}  # those of `Gradients`
        if self._trained:
            _MODELS.add(self)
            _watch_passes()

    def begin_schedule(self) -> None:
        """Raise RuntimeError if a parameter has a hook of `register_hook`, before a pipeline runs backward passes."""
        self.begin_backward()

    def begin_backward(self) -> None:
        """Raise RuntimeError, as a backward pass begins, if a parameter has a hook of `register_hook`."""
        for parameter, name in self._trained.items():
            if gradient_hooks(parameter) > self._own[parameter]:
                raise RuntimeError(
                    f"{name} has a hook of register_hook (or register_multi_grad_hook), which would not be called "
                    f"with its gradient: {self._why}. Use parameter.register_post_accumulate_grad_hook, which is "
                    "called when parameter.grad is finished, or look at .grad after backward()."
                )

    def asked(self, inputs: Sequence[Any], accumulate: bool) -> Sequence[Any]:
        """Return the tensors of the graph for those whose gradients a pass is asked for; RuntimeError if none are."""
        reached: list[Any] = []
        for tensor in inputs:
            reached.append(tensor)
            if not isinstance(tensor, nn.Parameter) or tensor not in self._trained:
                continue
            if self._leaves_of is None or not accumulate:
                raise RuntimeError(
                    f"{'backward(inputs=...)' if accumulate else 'torch.autograd.grad'} is asked for the gradient of "
                    f"{self._trained[tensor]}, and would give none: {self._why}. {_REMEDY}"
                )
            reached += self._leaves_of(tensor)
        return reached


_REMEDY = (
    "Call loss.backward() and read parameter.grad; freeze (requires_grad) before parallelize what is to have none."
)
_MODELS: WeakSet[ParametersNotInGraph] = WeakSet()


@cache
def _watch_passes() -> None:
    def asked(inputs: Sequence[Any], accumulate: bool) -> Sequence[Any]:
        for model in _MODELS:
            inputs = model.asked(inputs, accumulate)
        return inputs

    on_gradients_of(asked)


def refuse_early_hooks(model: nn.Module) -> None:
    """Raise ValueError if a parameter has a gradient hook, which stays with the tensor that sharding replaces."""
    for name, parameter in model.named_parameters():
        if gradient_hooks(parameter) or post_accumulate_hooks(parameter):
            raise ValueError(
                f"{name} has a gradient hook, which sharding would leave behind with the tensor that it replaces: "
                "register it after parallelize, by register_post_accumulate_grad_hook."
            )


_ELSEWHERE = "_lora_parallel_gradient"

# the pp axis of each model that has pipeline stages; an attribute of parameters would be lost in `model.to`
_staged: WeakKeyDictionary[nn.Module, DeviceMesh] = WeakKeyDictionary()


def refuse_clipping_if(parameter: nn.Parameter, waits: Callable[[], str | None]) -> None:
    """Make clipping raise the error that `waits` returns, if gradients wait elsewhere than in `.grad`."""
    setattr(parameter, _ELSEWHERE, waits)


def clip_over_stages(model: nn.Module, stages: DeviceMesh) -> None:
    """Make clipping count the other stages' gradients (axis `stages`) where it is given a parameter of `model`."""
    _staged[model] = stages


def _to_clip(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """List parameters; raise ValueError if gradients wait elsewhere than in `.grad` (see `refuse_clipping_if`)."""
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for owner in owners:
        if (instead := getattr(owner, _ELSEWHERE, lambda: None)()) is not None:
            raise ValueError(instead)
    return owners


class GradientFinisher(Protocol):
    """Define what `Gradients` asks of a mechanism that finishes gradients."""

    @property
    def unfinished(self) -> Collection[nn.Parameter]:
        """Return the parameters whose `.grad` is not finished until `finish`."""

    def prepare(self) -> None:
        """Prepare for a backward pass, before a layer's gradient is accumulated; a term of a parameter's own may be."""

    def finish(self) -> Collection[nn.Parameter]:
        """Finish gradients at the end of a pass; return the parameters whose gradients are finished now. Collective."""

    def drop(self) -> None:
        """Forget the gradients collected so far, after an error has ended a backward pass early."""


class Gradients:
    """Finish the gradients of one model, in this order:

    1. A leaf of the graph gives its gradient to its parameter, as autograd finishes it (`leaf`).
    2. FSDP2 reduces the gradients of a unit over dp, as the unit's backward ends.
    3. As the pass ends, `finishers` finish them, one after the other: first parameters that no rank has reached lose
       the zeros that FSDP2 was given for them, then partial sums are added up over tp.
    4. Hooks of the user's see the gradients that are finished, once in a pass.
    """

    def __init__(self, ranks: int) -> None:
        self.synchronise = True  # True if the next backward pass finishes sums over ranks; `no_sync` sets it to False
        self.ranks = ranks  # of tp
        self.finishers: Sequence[GradientFinisher] = ()
        # Called as a gradient reaches a leaf or an FSDP unit, which may be the first of the model in a backward pass:
        # nobody sees outputs that a forward returns in an object of its own, or keeps. Begins the pass.
        self.reached: Callable[[], None] = lambda: None
        self._trained: Sequence[nn.Parameter] = ()
        self._unfinished: set[Tensor] = set()  # of all finishers
        self._runs = False
        self._hooks = PostponedHooks()
        self._met: list[Tensor] = []  # parameters that loss terms of theirs alone have reached before the layers
        # the local tensor that each leaf was made of, and the leaf, by the parameter and whether it is a partial sum's
        self._leaves: dict[tuple[Tensor, bool], tuple[Tensor, Tensor]] = {}

    def finish_by(
        self, finishers: Sequence[GradientFinisher], trained: Sequence[nn.Parameter], meets_terms: bool
    ) -> None:
        """Finish gradients by `finishers`, in their order, and call hooks of the parameters `trained` after that.

        `meets_terms` is True if autograd itself accumulates in these parameters loss terms of theirs alone, in the same
        pass as the others and perhaps before them.
        """
        self.finishers, self._trained = finishers, trained if finishers else ()
        self._unfinished = {parameter for finisher in finishers for parameter in finisher.unfinished}
        if meets_terms:
            for parameter in self._trained:
                parameter.register_hook(self._meet_term)

    def _meet_term(self, grad: Tensor) -> None:
        if not self._runs and self._hooks.postpone(self._trained):
            queue_after_backward(self._end_terms)

    def _end_terms(self) -> None:
        if not self._runs:  # else the pass has reached the model since, and `end_backward` comes behind this
            self._hooks.call(self._hooks.restore())

    def begin_backward(self) -> None:
        """Begin a backward pass: set aside what is in `.grad`, before any gradient of this pass gets there."""
        self._runs = True
        self._hooks.postpone(self._trained)
        self._met = self._hooks.due()
        for finisher in self.finishers:
            finisher.prepare()

    def end_backward(self) -> None:
        """Finish the gradients of a backward pass, all of which FSDP2 has reduced. Collective."""
        self._runs = False
        due = self._hooks.restore()
        finished: dict[Tensor, None] = {}
        for finisher in self.finishers:
            finished |= dict.fromkeys(finisher.finish())
        if self.synchronise:  # what only a term of its own has reached, before the layers, no finisher has collected
            finished |= dict.fromkeys(p for p in self._met if p in self._unfinished)
        self._hooks.call([*(parameter for parameter in due if parameter not in self._unfinished), *finished])

    def recover(self) -> None:
        """Forget all gradients collected so far, after an error has ended a backward pass early."""
        self._runs = False
        self._hooks.restore()
        for finisher in self.finishers:
            finisher.drop()

    def leaf(self, parameter: DTensor, is_partial: bool) -> Tensor:
        """Return a plain leaf with the memory of this rank's part of `parameter`, which it gives its gradients to.

        Layers that share a parameter share its leaf. If the gradients are partial sums over tp (`is_partial`), they are
        multiplied by the number of tp ranks: see `PartialSums`.
        """
        own = local_tensor(parameter)
        known, leaf = self._leaves.get((parameter, is_partial), (None, own))
        if known is not own:
            with torch.inference_mode(False):  # a leaf that is made in inference mode could never train
                leaf = own.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(self._give, parameter, placed_as(parameter), is_partial))
            self._leaves[parameter, is_partial] = own, leaf
        return leaf

    def leaves_of(self, parameter: Tensor) -> list[Tensor]:
        """Return the leaves that give their gradients to a parameter."""
        return [leaf for (owner, _), (_, leaf) in self._leaves.items() if owner is parameter]

    def _give(self, parameter: DTensor, place: Callable[[Tensor], DTensor], is_partial: bool, leaf: Tensor) -> None:
        """Accumulate the gradient of a leaf in its parameter, as autograd would have done, hooks included."""
        gradient, leaf.grad = leaf.grad, None
        if gradient is None:  # an input of a compiled graph that uses it without gradients alone
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True): gradients of parameters that tensor parallelism cuts have no graph, and "
                "a loss of them would train nothing. Leave create_graph out, or use tp=1."
            )
        self.reached()
        if is_partial and self.ranks > 1:
            gradient.mul_(self.ranks)
        if parameter.grad is None:
            parameter.grad = place(gradient)
        else:
            local_tensor(parameter.grad).add_(gradient)
        for hook in list(post_accumulate_hooks(parameter).values()):
            hook(parameter)


class PartialSums:
    """Collect gradients that are partial sums over tp, and add them up at the end of a synchronised backward pass.

    The gradient of such a parameter is declared `Replicate` over tp where a leaf gives it, although each rank's values
    are partial, so that neither DTensor nor FSDP2 reduces it. At the end of each backward pass the gradient accumulated
    in `.grad` is taken out. If the pass is a synchronised one (outside of `no_sync`), all gradients taken out so far
    are summed over tp in one flat message per dtype, and added to those that were finished before. So no gradient is
    reduced twice, however many backward passes add to it.

    `.grad` may have another part, which every rank has in full: the gradient of a loss term of the parameter itself.
    The partial part is therefore multiplied by the number of tp ranks where it is computed, and the mean over tp is
    taken. So is that of gradients which every rank has in full alone: they differ by what kernels round otherwise, and
    with their mean the parameters of all ranks stay equal.
    """

    def __init__(
        self, gradients: Gradients, parameters: Iterable[nn.Parameter], group: ProcessGroup, device_type: str
    ) -> None:
        self.unfinished = list(parameters)  # the sharded ones that the optimizer sees
        self._gradients, self._group, self._device = gradients, group, device_type
        self._finished: list[Tensor | None] = []
        self._pending: dict[int, Tensor] = {}

    def prepare(self) -> None:
        """Set the finished gradients in `.grad` aside."""
        self._finished = [parameter.grad for parameter in self.unfinished]
        for parameter in self.unfinished:
            parameter.grad = None

    def finish(self) -> list[nn.Parameter]:
        """Add up what this pass has collected, and passes in `no_sync` before it; return the parameters. Collective."""
        for index, parameter in enumerate(self.unfinished):
            partial, parameter.grad = parameter.grad, self._finished[index]
            if partial is not None:
                known = self._pending.get(index)
                self._pending[index] = partial if known is None else known + partial
        self._finished = []
        if not self._gradients.synchronise:
            return []
        summed = [self.unfinished[index] for index in sorted(self._pending)]
        self._reduce()
        return summed

    def drop(self) -> None:
        self._finished = []
        self._pending.clear()

    @torch.no_grad()
    def _reduce(self) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index in sorted(self._pending):
            by_dtype.setdefault(self._pending[index].dtype, []).append(index)
        for indices in by_dtype.values():
            shards = [local(self._pending[index]) for index in indices]
            # Offloaded gradients are in the CPU's memory, and the group may have no backend for it.
            flat = torch.cat([shard.reshape(-1) for shard in shards]).to(self._device)
            flat = all_reduce(flat, self._group, "adapter gradients", "all partial factors") / self._group.size()
            parts = flat.split([shard.numel() for shard in shards])
            torch._foreach_copy_(shards, [part.view_as(shard) for part, shard in zip(parts, shards, strict=True)])
            for index in indices:
                parameter = self.unfinished[index]
                parameter.grad = (
                    self._pending[index] if parameter.grad is None else parameter.grad.add_(self._pending[index])
                )
        self._pending.clear()


@contextmanager
def backward_sync(model: nn.Module, gradients: Gradients | None, enabled: bool) -> Iterator[None]:
    """Make backward passes of `model` within the context reduce gradients over every mesh axis, or over none."""

    def set_sync(value: bool) -> None:
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_requires_gradient_sync(value, recurse=False)
        if gradients is not None:
            gradients.synchronise = value

    set_sync(enabled)
    try:
        yield
    finally:
        set_sync(True)


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip gradients by their norm as `torch.nn.utils.clip_grad_norm_`, for parameters on any mix of meshes.

    Every element of every gradient counts once, whichever mesh axes its tensor is sharded or replicated over, on all
    pipeline stages. Clipping costs one all-reduce of a few numbers for each process group that any gradient is sharded
    over, and one of a number for the stages.

    Args:
        parameters: Tensors or DTensors with finished gradients, the same on all ranks, or on all ranks of a pipeline
            stage, of which each must give one parameter at least; those without a gradient are skipped.
        max_norm: The largest norm that the gradients may have afterwards.
        norm_type: The p of the p-norm; `inf` for the largest absolute value.

    Returns:
        The norm before clipping: a plain scalar tensor, equal on all ranks.

    Raises:
        ValueError: A gradient is still a partial sum; gradients of a pool's tenant wait for the step of its optimizer;
            or `norm_type` is not positive.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: give a positive number or inf.")
    owners = _to_clip(parameters)
    known: dict[Tensor, DeviceMesh] = {p: mesh for model, mesh in _staged.items() for p in model.parameters()}
    stages = {owner: known[owner] for owner in owners if owner in known}
    counted = [owner for owner in owners if owner.grad is not None or owner in stages]
    if not counted:
        return torch.zeros(())
    infinite = norm_type == float("inf")
    # Each gradient with this rank's part of it.
    parts = [(owner, owner.grad, local(owner.grad)) for owner in counted if owner.grad is not None]
    first = parts[0][2] if parts else local(counted[0])
    dtype = torch.promote_types(first.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=first.device)
    for mesh in (None, *dict.fromkeys(stages.values())):
        of_mesh = [(grad, shard) for owner, grad, shard in parts if stages.get(owner) == mesh]
        part = _total(of_mesh, norm_type, dtype, first.device)
        if mesh is not None:
            # The first gradients of two stages may have different dtypes.
            message = part.to(mesh.device_type, torch.float64)
            dist.all_reduce(message, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=mesh.get_group())
            part = message.to(first.device, dtype)
        total = torch.maximum(total, part) if infinite else total + part
    norm = total if infinite else total ** (1 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}  # some may be offloaded
    for _, _, shard in parts:
        by_device.setdefault(shard.device, []).append(shard)
    for device, shards in by_device.items():
        torch._foreach_mul_(shards, scale.to(device))
    return norm


def _total(grads: list[tuple[Tensor, Tensor]], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the sum of |x|^p over all elements, or the largest |x|. Collective over groups that shard gradients.

    Each of `grads` is a gradient and this rank's part of it.
    """
    if not grads:
        return torch.zeros((), dtype=dtype, device=device)
    alike: dict[tuple[DeviceMesh | None, tuple[Placement, ...]], list[Tensor]] = {}
    for grad, shard in grads:
        key = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else (None, ())
        alike.setdefault(key, []).append(shard)
    by_groups: dict[tuple[str, ...], list[Tensor]] = {}
    groups: dict[str, tuple[ProcessGroup, str]] = {}
    for (mesh, placements), shards in alike.items():
        names = []
        for axis, placement in enumerate(placements):
            assert mesh is not None
            if placement.is_partial():
                raise ValueError(
                    f"a gradient whose part here has shape {tuple(shards[0].shape)} is a partial sum ({placement}): "
                    "call backward outside no_sync before clipping."
                )
            if not placement.is_replicate() and mesh.size(axis) > 1:
                group = mesh.get_group(axis)
                groups[group.group_name] = group, mesh.device_type
                names.append(group.group_name)
        by_groups.setdefault(tuple(names), []).extend(shards)
    infinite = norm_type == float("inf")
    # In the parameters' order, which is the same on all ranks; that of the groups' names is not.
    totals = {key: _power_sum(shards, norm_type, dtype, device) for key, shards in by_groups.items()}
    for name, (group, device_type) in groups.items():
        keys = [key for key in totals if name in key]
        # Offloaded gradients are in the CPU's memory, and the group may have no backend for it.
        part = torch.stack([totals[key] for key in keys]).to(device_type)
        dist.all_reduce(part, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        totals.update(zip(keys, part.to(device).unbind(), strict=True))
    total = torch.stack(list(totals.values()))
    return total.max() if infinite else total.sum()


def _power_sum(tensors: list[Tensor], norm_type: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the sum of |x|^p over all elements of this rank's `tensors`, or the largest |x| if p is infinite."""
    filled = [tensor.to(dtype) for tensor in tensors if tensor.numel() > 0]
    if not filled:
        return torch.zeros((), dtype=dtype, device=device)
    norm = torch.nn.utils.get_total_norm(filled, norm_type).to(device)
    return norm if norm_type == float("inf") else norm**norm_type


@torch.no_grad()
def clip_grad_value_(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clamp gradients as `torch.nn.utils.clip_grad_value_`, for parameters on any mix of meshes.

    Clamping works on each element by itself, and therefore needs no communication.
    """
    for owner in _to_clip(parameters):
        if owner.grad is not None:
            local(owner.grad).clamp_(-clip_value, clip_value)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x` unchanged; backward multiplies its gradient by `factor`."""
    return _Scaled.apply(x, factor)
