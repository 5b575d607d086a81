"""The order in which FSDP2's units communicate, which has to be the same on every rank.

FSDP2 pairs the collectives of two ranks by their order alone. A rank that runs another block than its peers (LayerDrop,
a branch that the data decides) gets the rows of theirs, of the same shape, and computes with them in silence.

So every gather and every reduction of a unit is a step, and so is the beginning of a forward. In the first pass the
ranks compare each step before they take it. Later a rank compares with the pass before, by itself: the usual step,
which all took then, is taken without a word, so that training costs nothing more. A rank that is about to take another
one asks all others first, and goes on if they are about to take the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lora_parallel.gather import class_of
from lora_parallel.rendezvous import is_awaited_by, is_done, meet

__all__ = ["ModelOrder", "UnitOrder", "compare_order", "refuse_layer_drop"]

# torch 2.13 renames both.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

PATIENCE = 3.0
"""After how many seconds in a collective a rank looks whether another one asks."""


@dataclass(slots=True)
class _Place:
    """Where in a pass a rank is: the step that was taken from here last, and others that have been taken before."""

    usual: str | None = None
    following: _Place | None = None
    others: dict[str, _Place] | None = None

    def take(self, step: str) -> _Place:
        """Make `step` the usual one, and return the place it leads to."""
        if self.usual != step:
            others = self.others or {}
            if self.usual is not None and self.following is not None:
                others[self.usual] = self.following
            self.usual, self.following = step, others.pop(step, None) or _Place()
            self.others = others or None
        assert self.following is not None
        return self.following


class UnitOrder:
    """The steps of this process's passes, and where it is in them. Equal on all ranks, as each step was.

    One for all models: two ranks that run two models in another order each would pair the units of the one with those
    of the other.
    """

    def __init__(self) -> None:
        self._starts: dict[str, _Place] = {}
        self._place: _Place | None = None
        self._accumulates = False
        self._models = 0

    def number(self) -> int:
        """Return the number of a model that is new here."""
        self._models += 1
        return self._models

    def begin(self, kind: str, accumulates: bool) -> None:
        """Begin a forward.

        Args:
            kind: What tells forwards apart whose steps differ.
            accumulates: Whether the next forward adds to the same gradients. Its steps are those of its place among
                these forwards, so that a fixed number of them has usual steps throughout.
        """
        self.take(kind)
        if not self._accumulates:
            self._place = self._starts.setdefault(kind, _Place())
        self._accumulates = accumulates

    def take(self, step: str) -> None:
        """Take a step, once it is sure that every rank takes it. Collective, unless it is the usual one.

        Raises:
            RuntimeError: Other ranks take another one, on every rank.
        """
        place = self._place or _Place()
        if place.usual != step:
            meet(step, _REMEDY)
        self._place = place.take(step)

    def wait(self, work: dist.Work, step: str, group: dist.ProcessGroup) -> None:
        """Wait for the collective of a step that was taken, unless a rank that it is shared with asks for another one.

        Raises:
            RuntimeError: A rank of `group` takes another step, on every rank.
        """
        awaited = False
        while not is_done(work, "cpu", time.monotonic() + PATIENCE):
            # Seen twice: a rank that asks after it has taken this step lets the collective end meanwhile.
            awaited, before = is_awaited_by(dist.get_process_group_ranks(group)), awaited
            if awaited and before:
                meet(step, _REMEDY)

    def forget_place(self) -> None:
        """Be nowhere, after a pass that was left on its way: the next step is compared."""
        self._place, self._accumulates = None, False


_REMEDY = (
    "Ranks with different batches must run the same blocks in the same order: turn LayerDrop off, and let no data "
    "decide which blocks run; or leave data parallelism off."
)


@dataclass(slots=True)
class ModelOrder:
    """One model's part in the order."""

    order: UnitOrder
    called: str
    gathers: bool
    """True if its parameters are sharded. Replicas alone have nothing to do with each other without gradients."""

    def begin(self, kind: str, accumulates: bool) -> None:
        """Begin a forward of the model, as `UnitOrder.begin`."""
        if self.gathers or torch.is_grad_enabled():
            self.order.begin(f"forward of {self.called} {kind}", accumulates)

    def all_reduce(self, what: str, tensor: Tensor, op: Any, groups: Sequence[dist.ProcessGroup]) -> None:
        """Reduce a tensor in place, over one group after the other, as a step of its own."""
        step = f"{what} of {self.called}"
        self.order.take(step)
        for group in groups:
            work = dist.all_reduce(tensor, op, group=group, async_op=True)
            if tensor.device.type == "cpu":
                self.order.wait(work, step, group)
            else:
                work.wait()


class _Allocates:
    """The half of FSDP2's interface for communication that stays as it is."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocates):
    """The gather of a unit's parameters."""

    def __init__(self, order: UnitOrder, unit: str) -> None:
        self._order = order
        self._step = f"gather of {unit}"

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if group.size() > 1:
            self._order.take(self._step)
        blocks = not async_op and output_tensor.device.type == "cpu"
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op or blocks)
        if not blocks:
            return work
        self._order.wait(work, self._step, group)
        return None


class _Reduction(_Allocates):
    """The reduction of a unit's gradients, over replicas alone where no axis shards it."""

    def __init__(self, order: UnitOrder, unit: str) -> None:
        self._order = order
        self._step = f"reduction of {unit}"
        self._allocated = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Twice a reduction, for its input and its output, and the one thing that is always called ahead of it.
        if not self._allocated:
            self._order.take(self._step)
        self._allocated = not self._allocated
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


_orders: WeakKeyDictionary[Any, UnitOrder] = WeakKeyDictionary()
"""By the default process group."""


def compare_order(model: nn.Module, dp_shard: int) -> ModelOrder:
    """Have the units of a model that FSDP2 shards over so many ranks compare their order between ranks."""
    order = _orders.setdefault(dist.group.WORLD, UnitOrder())
    number = order.number()
    called = class_of(model).__name__ + (f" (model {number})" if number > 1 else "")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit, comm = f"{name} of {called}" if name else called, cast(Any, module)  # its types are not exported
            comm.set_custom_all_gather(_Gather(order, unit))
            comm.set_custom_reduce_scatter(_Reduction(order, unit))
    return ModelOrder(order, called, gathers=dp_shard > 1)


def refuse_layer_drop(model: nn.Module) -> None:
    """Check that no layers of a transformers model are dropped at random in training.

    Raises:
        ValueError: Some are; each data-parallel rank would drop others.
    """
    held = {
        f"{name}.layerdrop" if name else "layerdrop": module.layerdrop
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layerdrop", None), float | int)
    }
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    for config in configs.values():
        for key, value in getattr(config, "__dict__", {}).items():
            # Modules that have the attribute took it from these keys, and may have been given another value since.
            copied = bool(held) and key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
            if key.endswith("layerdrop") and isinstance(value, float | int) and not copied:
                held[f"config.{key}"] = value
    for name, value in held.items():
        if value > 0:
            raise ValueError(
                f"{name} is {value}: LayerDrop skips layers at random in training, others on every data-parallel rank, "
                f"and FSDP2 would give each rank the rows of the layers of others. Set {name} to 0.0, or leave data "
                "parallelism off (dp_shard=1, dp_replicate=1)."
            )
