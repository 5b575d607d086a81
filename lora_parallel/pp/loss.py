"""Compute the loss of a whole batch by the model's own loss function, which is called for each micro-batch.

Transformers' models make their loss by `self.loss_function`. That of causal language models is a sum over tokens,
divided by their number: here each micro-batch is told the number of the whole batch (or Trainer's), so that the losses
of micro-batches add up. Any other loss function is called once, with the arguments of all micro-batches joined.

Under "1f1b" gradients are summed over data-parallel ranks inside of the forward, and `loss.backward()` multiplies the
sum by the gradient of the loss. In one process each rank's part would be multiplied before the sum. Both are the same
if the factor is: a weight for each rank's batch, or a batch whose loss one rank leaves out, would be wrong without an
error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.utils import find_labels

from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.distributed.mesh import axis_size
from lora_parallel.fsdp.unit_order import ModelOrder
from lora_parallel.pp.links import Links
from lora_parallel.pp.microbatches import IGNORED, Microbatches, joined_arguments
from lora_parallel.replaced import replaced_entries


class OwnLoss:
    """Know whether a model makes its loss by its own loss function."""

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
        self._is_replaced = self._model is not None and "forward" in self._model.__dict__  # by TRL, for example
        code = None if self._model is None else getattr(inspect.unwrap(type(self._model).forward), "__code__", None)
        self._calls_it = code is not None and "loss_function" in code.co_names
        self._labels = () if self._model is None else tuple(find_labels(type(self._model)))

    def check(self, kwargs: Mapping[str, Any], microbatches: int) -> None:
        """Check that a loss that is asked for can be computed from micro-batches."""
        if self._model is None or self._is_replaced or self._calls_it or not self._asked(kwargs) or microbatches == 1:
            return
        raise ValueError(
            f"{type(self._model).__name__} computes its loss in its forward, without loss_function, so that those of "
            "micro-batches cannot be joined: call it without labels, and compute the loss from what it returns; or use "
            "pp_microbatches=1."
        )

    def _asked(self, kwargs: Mapping[str, Any]) -> bool:
        return any(kwargs.get(name) is not None for name in self._labels)

    def begin(self, kwargs: Mapping[str, Any], batch: Microbatches) -> LossCalls:
        """Begin a forward with these arguments."""
        is_own = self._asked(kwargs) and self._calls_it and not self._is_replaced
        return LossCalls(self._model if is_own else None, kwargs, batch)


class LossCalls:
    """Hold the calls of a model's own loss function in one forward."""

    def __init__(self, model: Any, kwargs: Mapping[str, Any], batch: Microbatches) -> None:
        self._model, self._batch = model, batch
        self.is_own = model is not None  # True if the model's own loss function makes the loss
        self._loss_function: Any = model.loss_function if self.is_own else None
        # True if the losses of micro-batches add up to that of the batch.
        self.adds_up = self.is_own and self._loss_function is LOSS_MAPPING["ForCausalLM"]
        self._number = _number_of_labels(kwargs) if self.adds_up else None
        # Losses of the micro-batches; zeros where the loss of the batch is computed from all of them at the end.
        self.losses: list[Tensor] = []
        self._arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._leaves: list[list[Tensor]] = []
        self._exposed: list[list[Tensor]] = []
        self._whole: Tensor | None = None

    @contextmanager
    def during(self) -> Iterator[None]:
        """Compute the loss of micro-batches here within the context, on the last stage."""
        if not self.is_own:
            yield
            return
        calls, compute = len(self.losses), self._add if self.adds_up else self._keep
        with replaced_entries([(self._model.__dict__, "_loss_function", compute)]):
            yield
        if len(self.losses) != calls + 1:
            raise ValueError(
                f"{type(self._model).__name__} was given labels and called its loss_function "
                f"{len(self.losses) - calls} times: call it without labels, or use pp=1."
            )

    def _add(self, *args: Any, **kwargs: Any) -> Tensor:
        self.losses.append(self._loss_function(*args, **{**kwargs, "num_items_in_batch": self._number}))
        return self.losses[-1]

    def _keep(self, *args: Any, **kwargs: Any) -> Tensor:
        exposed = [tensor for tensor in tensors_in([args, kwargs]) if tensor.requires_grad]
        leaves = {id(tensor): tensor.detach().requires_grad_() for tensor in exposed}
        self._exposed.append(exposed)
        self._leaves.append(list(leaves.values()))
        self._arguments.append(tree_map_only(Tensor, lambda tensor: leaves.get(id(tensor), tensor), (args, kwargs)))
        self.losses.append(torch.zeros((), device=next(tensors_in([args, kwargs])).device))
        return self.losses[-1]

    def finish(self) -> None:
        """Compute the loss of the batch from the arguments of all micro-batches, if the losses do not add up."""
        if self._arguments:
            args, kwargs = joined_arguments(self._arguments, self._batch)
            self._whole = self._loss_function(*args, **kwargs)

    def total(self) -> Tensor:
        """Return the loss of the batch; autograd does not see it."""
        return self._whole.detach() if self._whole is not None else torch.stack(self.losses).detach().sum()

    def started(self, grad: Tensor) -> list[tuple[list[Tensor], list[Tensor | None]]]:
        """Return the tensors of each micro-batch that backward begins at, and their gradients."""
        if self._whole is None:
            return [([loss], [grad.to(loss.dtype)]) for loss in self.losses]
        leaves = [leaf for leaves_of_call in self._leaves for leaf in leaves_of_call]
        with torch.enable_grad():
            grads = iter(torch.autograd.grad(self._whole, leaves, grad.to(self._whole.dtype), allow_unused=True))
        return [(exposed, [next(grads) for _ in exposed]) for exposed in self._exposed]


def _number_of_labels(kwargs: Mapping[str, Any]) -> Any:
    """Return the number that the sum of the losses of all tokens is divided by, as `ForCausalLMLoss` counts it."""
    if kwargs.get("num_items_in_batch") is not None:
        return kwargs["num_items_in_batch"]
    shifted = kwargs.get("shift_labels")
    labels = kwargs["labels"][..., 1:] if shifted is None else shifted
    return (labels != kwargs.get("ignore_index", IGNORED)).sum()


class LossFactors:
    """Compare the factors of one model's losses."""

    def __init__(self, mesh: DeviceMesh, links: Links, order: ModelOrder | None) -> None:
        axes = [axis for axis in ("dp_replicate", "dp_shard") if axis_size(mesh, axis) > 1]
        self._links, self._order = links, order if axes else None
        self._groups = [mesh.get_group(axis) for axis in axes]

    def check(self, factor: Tensor) -> None:
        """Check the gradient of a loss. Collective over the ranks of a pipeline, and its data-parallel peers."""
        bits = torch.where(factor.isnan(), torch.nan, factor.double() + 0.0).view(torch.int64)
        both = torch.stack([bits, ~bits])
        if self._order is not None:
            self._order.all_reduce("factor of the loss", both, dist.ReduceOp.MAX, self._groups)
        self._links.all_reduce_max(both)
        highest, lowest = both[0], ~both[1]
        if int(highest) != int(lowest):
            raise RuntimeError(
                f"the gradient of the loss is {factor.item()} on rank {dist.get_rank()}, and another one on other "
                'ranks. Under pp_schedule="1f1b" and "interleaved" the gradients of a batch are summed over ranks '
                'before they are multiplied by it: let all ranks use the same one, or use pp_schedule="gpipe", under '
                "which data-parallel ranks may weigh their losses."
            )
