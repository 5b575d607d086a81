"""Divide the inputs of a model into micro-batches by rows, join their outputs, and give them to every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten
from transformers import Cache

from lora_parallel.distributed.dtensors import tensor_on, tensors_in
from lora_parallel.pp.links import Links
from lora_parallel.pp.stage_model import LastStageTensor

_LABELS = ("labels", "shift_labels")
# Arguments of transformers' models that have no rows, whatever their shape.
_WHOLE = ("logits_to_keep", "num_items_in_batch")
IGNORED = -100  # Label that transformers' losses ignore


class Microbatches:
    """Divide the arguments of a forward: tensors whose first dim is the number of rows; others stay whole."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int, pads: bool) -> None:
        # `pads`: repeat the last row where `count` does not divide the rows, without gradients, with ignored labels.
        self.count = count
        self.rows = _rows(args, kwargs)  # The number of rows of the batch
        if not self.rows:
            raise ValueError(
                "a batch has 0 rows: leave it out on all ranks (a dataloader with drop_last=True gives none)."
            )
        if self.rows % count and not pads:
            raise ValueError(
                f"a batch has {self.rows} rows, which pp_microbatches={count} does not divide: give each "
                f"data-parallel rank a multiple of {count} rows (drop_last=True leaves out a smaller last batch), or "
                "use fewer micro-batches."
            )
        self.part_rows = -(-self.rows // count)  # The number of rows of a micro-batch
        self._args, self._kwargs = args, dict(kwargs)
        ignored = kwargs.get("ignore_index")
        self._ignored = IGNORED if ignored is None else ignored

    def part(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of one micro-batch."""
        args = tuple(self._cut("", value, index) for value in self._args)
        return args, {name: self._cut(name, value, index) for name, value in self._kwargs.items()}

    def _cut(self, name: str, value: Any, index: int) -> Any:
        if name in _WHOLE:
            return value

        def cut(x: Tensor) -> Tensor:
            # Of multimodal rotary positions [3, rows, tokens] the rows are in the second dim.
            dim = 1 if name == "position_ids" and x.dim() == 3 else 0
            if x.dim() <= dim or x.shape[dim] != self.rows:
                return x
            start, end = index * self.part_rows, (index + 1) * self.part_rows
            real = x.narrow(dim, min(start, self.rows), max(min(end, self.rows) - start, 0))
            missing = self.part_rows - real.shape[dim]
            if not missing:
                return real
            last = x.narrow(dim, self.rows - 1, 1)
            more = torch.full_like(last, self._ignored) if name in _LABELS else last
            return torch.cat([real, *[more] * missing], dim)

        return tree_map_only(Tensor, cut, value)


def _rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    named = [kwargs[name] for name in ("input_ids", "inputs_embeds") if isinstance(kwargs.get(name), Tensor)]
    for tensor in (*named, *tensors_in([args, kwargs])):
        if tensor.dim():
            return tensor.shape[0]
    raise ValueError("no argument of the model is a tensor with rows, which micro-batches divide: use pp=1.")


@dataclass(frozen=True)
class Leaf:
    """Describe one value in what a model returns."""

    kind: Literal["rows", "loss", "constant"]
    constant: Any = None
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    requires_grad: bool = False


@dataclass(frozen=True)
class Joined:
    """Describe what a model returns for a whole batch, without the tensors."""

    containers: Any  # What the model returns, with the place of each leaf in `leaves` instead of the leaf
    leaves: list[Leaf]

    @classmethod
    def of(
        cls, outputs: Sequence[Any], losses: Sequence[Any], total: Tensor | None, batch: Microbatches
    ) -> tuple[Joined, list[list[Any]]]:
        """Return the description of the outputs of all micro-batches, and their values by leaf."""
        flat = [tree_flatten(output, is_leaf=lambda part: isinstance(part, Cache)) for output in outputs]
        structure = flat[0][1]
        if any(other != structure for _, other in flat):
            raise ValueError("pp: the model returns something else for one micro-batch than for another: use pp=1.")
        values = [list(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
        leaves = [
            Leaf("loss", None, (), total.dtype, torch.is_grad_enabled())
            if total is not None and all(part is loss for part, loss in zip(parts, losses, strict=True))
            else _leaf(parts, batch)
            for parts in values
        ]
        return cls(tree_unflatten(range(len(leaves)), structure), leaves), values


def _leaf(parts: Sequence[Any], batch: Microbatches) -> Leaf:
    first = parts[0]
    if isinstance(first, Cache):  # each stage has a part of it
        return Leaf("constant")
    if not isinstance(first, Tensor):
        is_plain = first is None or isinstance(first, (bool, int, float, str))
        if not is_plain or any(type(part) is not type(first) or part != first for part in parts):
            raise ValueError(
                f"pp: the model returns a {type(first).__name__}, which cannot be given to all pipeline stages: return "
                "tensors in a ModelOutput, dict, list or tuple, or use pp=1."
            )
        return Leaf("constant", first)
    if batch.count == 1:
        return Leaf("rows", None, tuple(first.shape), first.dtype, first.requires_grad)
    if first.dim() and all(part.shape == first.shape and part.shape[0] == batch.part_rows for part in parts):
        shape = (batch.rows, *first.shape[1:])
        return Leaf("rows", None, shape, first.dtype, any(part.requires_grad for part in parts))
    raise ValueError(
        f"pp: the model returns a tensor of shape {tuple(first.shape)} for a micro-batch of {batch.part_rows} rows. "
        "What has no rows cannot be joined: let the loss be made by the model's own loss_function, or by your code "
        "from what the model returns for each row (call it without labels); or use pp_microbatches=1, or pp=1."
    )


def joined_arguments(calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]], batch: Microbatches) -> Any:
    """Return the arguments of a loss function for the whole batch, from those of its calls for each micro-batch."""
    flat = [tree_flatten(call) for call in calls]
    joined: list[Any] = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        first = parts[0]
        if not isinstance(first, Tensor) or all(part is first for part in parts):
            joined.append(first)
        elif first.dim() and first.shape[0] % batch.part_rows == 0:
            joined.append(torch.cat(parts)[: batch.rows * (first.shape[0] // batch.part_rows)])
        else:
            raise ValueError(
                f"pp: the model's loss function is given a tensor of shape {tuple(first.shape)} for a micro-batch of "
                f"{batch.part_rows} rows, which cannot be joined with those of others: call the model without labels, "
                "or use pp=1."
            )
    return tree_unflatten(joined, flat[0][1])


_SIZES = 62  # Number of sizes that fit into the message about outputs


class SharedOutputs:
    """Send descriptions of outputs from the last stage to the others; one that is not new as a number and sizes."""

    def __init__(self, links: Links, device: str) -> None:
        self._links, self._device = links, device
        self._known: list[Joined] = []  # Descriptions so far, in the same order on all ranks

    def describe(self, mine: Joined | None) -> Joined:
        """Return the last stage's description on every rank. Collective over the pipeline."""
        numbers = [-1, 0]  # of the description, and of sizes
        if mine is not None:
            sizes = [size for leaf in mine.leaves for size in leaf.shape]
            if len(sizes) <= _SIZES:
                alike = [_without_sizes(known) for known in self._known]
                bare = _without_sizes(mine)
                numbers = [alike.index(bare) if bare in alike else -1, len(sizes), *sizes]
        padding = [-1] * (2 + _SIZES - len(numbers))
        header = self._links.broadcast(tensor_on(self._device, [*numbers, *padding], torch.int64))
        if mine is None:  # the last stage knows what it has sent, and does not wait for its device
            numbers = header.tolist()
        number, count = numbers[:2]
        if number < 0:
            self._known.append(self._links.broadcast_object(mine))
            return self._known[-1]
        if mine is not None:
            return mine
        remaining = iter(numbers[2 : 2 + count])
        known = self._known[number]
        leaves = [replace(leaf, shape=tuple(next(remaining) for _ in leaf.shape)) for leaf in known.leaves]
        return Joined(known.containers, leaves)


def _without_sizes(joined: Joined) -> Joined:
    return Joined(joined.containers, [replace(leaf, shape=(len(leaf.shape),)) for leaf in joined.leaves])


class Outputs:
    """Hold what the model returns for one batch."""

    def __init__(
        self,
        links: Links,
        device: str,
        described: Joined,
        parts: list[list[Any]] | None,
        loss: Tensor | None,
        fetches: bool,
    ) -> None:
        # `parts` and `loss` are on the last stage's rank. `fetches`: leave other outputs there until they are read.
        self._links, self._device = links, torch.device(device)
        if device != "cpu":
            self._device = torch.device(device, torch.accelerator.current_device_index())
        self.described = described
        # The values of leaves, which autograd does not see.
        self.values = [
            self._value(leaf, None if parts is None else parts[at], loss, fetches)
            for at, leaf in enumerate(described.leaves)
        ]

    @property
    def differentiable(self) -> list[int]:
        """Return the places of the leaves that have gradients."""
        return [at for at, leaf in enumerate(self.described.leaves) if leaf.requires_grad]

    def _value(self, leaf: Leaf, parts: list[Any] | None, loss: Tensor | None, fetches: bool) -> Any:
        if leaf.kind == "constant":
            return leaf.constant
        assert leaf.dtype is not None
        values = None if parts is None or leaf.kind == "loss" else [part.detach() for part in parts]
        links, device = self._links, self._device  # not self, whose values hold `get`: a cycle would outlive the step

        def get() -> Tensor:
            whole = loss if leaf.kind == "loss" else None
            if values is not None:  # without the rows that pad the micro-batches
                whole = values[0].clone() if len(values) == 1 else torch.cat(values)[: leaf.shape[0]]
            if whole is None:
                whole = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            return links.broadcast(whole.contiguous())

        if fetches and leaf.kind == "rows":
            return LastStageTensor(get, leaf.shape, leaf.dtype, device)
        return get()

    def build(self, instead: dict[int, Tensor]) -> Any:
        """Return what the model returns, with other tensors in the place of some leaves."""
        return tree_map(lambda at: instead.get(at, self.values[at]), self.described.containers)
