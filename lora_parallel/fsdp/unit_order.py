"""Compare the order in which FSDP2's units communicate, which has to be the same on every rank.

FSDP2 pairs the collectives of two ranks by their order alone. A rank that runs another block than its peers (LayerDrop,
a branch that the data decides) receives rows of the peers' block, of the same shape, and computes with them without an
error.

So every gather and every reduction of a unit is a step, and so is the beginning of a forward. In the first pass the
ranks compare each step before they take it. In later passes each rank compares its steps with those of the pass before,
by itself. It takes the usual step, which all ranks took in that pass, without asking, so that training costs nothing
more. A rank that is about to take another step asks all other ranks first, and goes on if they are about to take the
same step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lora_parallel.distributed.dtensors import class_of
from lora_parallel.distributed.gradients import Gradients
from lora_parallel.distributed.meetings import is_awaited_by, meet
from lora_parallel.distributed.mesh import shard_size
from lora_parallel.distributed.torch_private import all_gather_into, reduce_scatter_into

PATIENCE = 3.0  # seconds in a collective after which a rank checks if another rank asks about a step
_START = -1  # the place before every pass, from which its kind leads on


class UnitOrder:
    """Record the steps of this process's passes, and its place in the current pass.

    The record is equal on all ranks (of one pipeline stage), because each step was. One record serves all models: if
    two ranks ran two models in different orders, FSDP2 would pair the units of one model with those of the other.
    """

    def __init__(self, ranks: tuple[int, ...] | None = None) -> None:
        self._ranks = ranks
        self._places = count()  # numbers of the places in a tree of passes
        self._following: defaultdict[tuple[int, str], int] = defaultdict(self._places.__next__)  # where a step leads to
        self._expected: dict[int, str] = {}  # the usual step at a place
        self._place = next(self._places)
        self._accumulates = False
        self.models = 0

    def begin(self, kind: str, accumulates: bool) -> None:
        """Begin a forward; forwards whose steps differ have different kinds."""
        self.take(kind)
        # A forward that adds to the gradients of the last continues its pass, so that a fixed number has usual steps.
        if not self._accumulates:
            self._place = self._following[_START, kind]
        self._accumulates = accumulates

    def take(self, step: str) -> None:
        """Take a step, or raise RuntimeError on every rank if one takes another. Collective unless it is usual."""
        if self._expected.get(self._place) != step:
            meet(step, _REMEDY, self._ranks)
        self._expected[self._place] = step
        self._place = self._following[self._place, step]

    def wait(self, work: dist.Work, step: str, group: dist.ProcessGroup) -> None:
        """Wait for a step's collective; raise RuntimeError if it fails or a rank of `group` asks about another step."""
        awaited, failure = False, None
        while failure is None:
            start = time.monotonic()
            try:
                work.wait(timedelta(seconds=PATIENCE))
                return
            except RuntimeError as error:
                # What fails before the time is over has failed. Gloo's reduce-scatter knows no other timeout than that
                # of its group, and is never complete after it; but then the next wait for it fails at once.
                if work.is_completed() or time.monotonic() - start < PATIENCE:
                    failure = error
            # Two checks in a row must find such a rank: one that has taken this step, and asks about a later one, has
            # let this collective end by the second check.
            awaited, before = is_awaited_by(dist.get_process_group_ranks(group), self._ranks), awaited
            if awaited and (before or failure is not None):
                meet(step, _REMEDY, self._ranks)
        raise failure

    def forget_place(self) -> None:
        """Forget the place, after a pass that has ended early, so that ranks compare the next step."""
        self._place, self._accumulates = next(self._places), False


_REMEDY = (
    "Ranks with different batches must run the same blocks in the same order: turn LayerDrop off, and let no data "
    "decide which blocks run; or leave data parallelism off. Rows without an image do not run its tower: give each "
    "rank an image, a dummy at padded tokens if need be, or take shard_base=False, with which some ranks may leave "
    "a tower out. They must make as many forwards and backward passes, too: a batch that one rank leaves out (a "
    "loss that is not finite, a shorter dataloader) is left out by all."
)


@dataclass(slots=True)
class ModelOrder:
    """Enter the steps of one model in the order of all models."""

    order: UnitOrder
    called: str
    gathers: bool  # parameters are sharded; whole replicas do not communicate without gradients
    gradients: Gradients
    _has_trained: bool = False

    def begin_forward(self, model: nn.Module, *call: Any) -> None:
        """Begin a forward of the model (see `UnitOrder.begin`), unless the units do not communicate in it."""
        if model.training and not self._has_trained:
            refuse_layer_drop(model)
            self._has_trained = True
        if self.gathers or torch.is_grad_enabled():
            accumulates = torch.is_grad_enabled() and not self.gradients.synchronise
            mode = "training" if model.training else "evaluation"
            kind = f"forward of {self.called} for {mode}{' in no_sync' if accumulates else ''}"
            self.order.begin(kind, accumulates)

    def recover(self) -> None:
        """Forget the place in the pass that has ended early."""
        self.order.forget_place()

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


class _Step:
    """Gather a unit's parameters, or reduce its gradients, as a step of the order: FSDP2 calls this for its own."""

    def __init__(self, order: UnitOrder, step: str, reduces: bool) -> None:
        self._order, self._step, self._reduces = order, step, reduces
        self._allocated = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        # FSDP2 calls this twice per reduction, for its input and its output. No other function of this class is always
        # called before the reduction, which is over replicas alone if no mesh axis shards the unit.
        if self._reduces and not self._allocated:
            self._order.take(self._step)
        self._allocated = not self._allocated
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False, **op: Any
    ) -> dist.Work | None:
        if not self._reduces and group.size() > 1:
            self._order.take(self._step)
        collective: Any = reduce_scatter_into if self._reduces else all_gather_into
        blocks = not async_op and output_tensor.device.type == "cpu"  # FSDP2 would wait: the order waits in its place
        work = collective(output_tensor, input_tensor, group=group, async_op=async_op or blocks, **op)
        if not blocks:
            return cast("dist.Work | None", work)
        self._order.wait(work, self._step, group)
        return None


# orders of the units of each default process group, by the ranks that compare their steps
_orders: WeakKeyDictionary[Any, dict[tuple[int, ...] | None, UnitOrder]] = WeakKeyDictionary()


def install_order_check(model: nn.Module, mesh: DeviceMesh, gradients: Gradients) -> ModelOrder:
    """Make the FSDP units of a model compare their order between the ranks of a mesh without a pp axis."""
    every = mesh.size() == dist.get_world_size()
    ranks = None if every else tuple(mesh.mesh.flatten().tolist())
    order = _orders.setdefault(dist.group.WORLD, {}).setdefault(ranks, UnitOrder(ranks))
    order.models += 1
    called = class_of(model).__name__ + (f" (model {order.models})" if order.models > 1 else "")
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit, comm = f"{name} of {called}" if name else called, cast(Any, module)  # its types are not exported
            comm.set_custom_all_gather(_Step(order, f"gather of {unit}", reduces=False))
            comm.set_custom_reduce_scatter(_Step(order, f"reduction of {unit}", reduces=True))
    return ModelOrder(order, called, shard_size(mesh) > 1, gradients)


def refuse_layer_drop(model: nn.Module) -> None:
    """Raise ValueError if a model drops layers at random in training, others on each data-parallel rank."""
    modules = {name: m for name, m in model.named_modules() if isinstance(getattr(m, "layerdrop", None), float | int)}
    drops = {f"{name}.layerdrop" if name else "layerdrop": m.layerdrop for name, m in modules.items() if m.training}
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
    for config in configs.values():
        for key, value in getattr(config, "__dict__", {}).items():
            # Modules that have the attribute took it from these keys, and may have been given another value since.
            copied = bool(modules) and key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
            if key.endswith("layerdrop") and isinstance(value, float | int) and not copied:
                drops[f"config.{key}"] = value
    for name, value in drops.items():
        if value > 0:
            raise ValueError(
                f"{name} is {value}: LayerDrop skips layers at random in training, others on every data-parallel rank, "
                f"and FSDP2 would give each rank the rows of the layers of others. Set {name} to 0.0, or leave data "
                "parallelism off (dp_shard=1, dp_replicate=1)."
            )
