"""Give every rank of a pipeline what the last stage returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lora_parallel.pp.last_stage_tensor import LastStageTensor
from lora_parallel.pp.links import Links
from lora_parallel.pp.microbatches import Joined, Leaf

__all__ = ["Outputs", "SharedOutputs"]

_SIZES = 62
"""Number of sizes that fit into the message about outputs."""


class SharedOutputs:
    """Send descriptions of outputs from the last stage to the others; one that is not new as a number and sizes.

    Args:
        links: Connects the ranks of the pipeline.
        device: The type of device that messages are sent from.
    """

    def __init__(self, links: Links, device: str) -> None:
        self._links, self._device = links, device
        self._known: list[Joined] = []
        """Descriptions so far, in the same order on all ranks."""

    def describe(self, mine: Joined | None) -> Joined:
        """Return the last stage's description on every rank. Collective over the pipeline.

        Args:
            mine: The description, on the last stage's rank.
        """
        header = torch.full((2 + _SIZES,), -1, dtype=torch.int64)
        if mine is not None:
            sizes = [size for leaf in mine.leaves for size in leaf.shape]
            if len(sizes) <= _SIZES:
                alike = [_without_sizes(each) for each in self._known]
                bare = _without_sizes(mine)
                header[0], header[1] = alike.index(bare) if bare in alike else -1, len(sizes)
                header[2 : 2 + len(sizes)] = torch.tensor(sizes, dtype=torch.int64)
        header = self._links.broadcast(header.to(self._device)).cpu()
        number, count = int(header[0]), int(header[1])
        if number < 0:
            found: Joined = self._links.broadcast_object(mine)
            self._known.append(found)
            return found
        if mine is not None:
            return mine
        remaining = iter(header[2 : 2 + count].tolist())
        known = self._known[number]
        leaves = [replace(leaf, shape=tuple(next(remaining) for _ in leaf.shape)) for leaf in known.leaves]
        return Joined(known.nest, leaves)


def _without_sizes(joined: Joined) -> Joined:
    return Joined(joined.nest, [replace(leaf, shape=(len(leaf.shape),)) for leaf in joined.leaves])


class Outputs:
    """Hold what the model returns for one batch.

    Args:
        links: Connects the ranks of the pipeline.
        device: The type of device that the model is on.
        described: Describes the outputs.
        parts: The values of each leaf for each micro-batch, on the last stage's rank.
        loss: The loss of the batch, on the last stage's rank, if there is one.
        fetches: Leave outputs other than the loss on the last stage until they are read.
    """

    def __init__(
        self,
        links: Links,
        device: str,
        described: Joined,
        parts: list[list[Any]] | None,
        loss: Tensor | None,
        fetches: bool,
    ) -> None:
        at = torch.accelerator.current_device_index() if device != "cpu" else None
        self._links, self._device = links, torch.device(device) if at is None else torch.device(device, at)
        self._described = described
        self.values = [
            self._value(leaf, None if parts is None else parts[at], loss, fetches)
            for at, leaf in enumerate(described.leaves)
        ]
        """The values of leaves, which autograd does not see."""

    @property
    def differentiable(self) -> list[int]:
        """Return the places of the leaves that have gradients."""
        return [at for at, leaf in enumerate(self._described.leaves) if leaf.requires_grad]

    def _value(self, leaf: Leaf, parts: list[Any] | None, loss: Tensor | None, fetches: bool) -> Any:
        if leaf.kind == "constant":
            return leaf.constant
        assert leaf.dtype is not None
        held = None if parts is None or leaf.kind == "loss" else [each.detach() for each in parts]
        links, device = self._links, self._device  # not self, whose values hold `get`: a cycle would outlive the step

        def get() -> Tensor:
            if leaf.kind == "loss":
                whole = loss
            else:
                whole = None if held is None else _joined(held, leaf)
            if whole is None:
                whole = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            return links.broadcast(whole.contiguous())

        if fetches and leaf.kind == "rows":
            return LastStageTensor(get, leaf.shape, leaf.dtype, device)
        return get()

    def build(self, instead: dict[int, Tensor]) -> Any:
        """Return what the model returns, with other tensors in the place of some leaves."""
        return self._described.build([instead.get(at, value) for at, value in enumerate(self.values)])


def _joined(parts: Sequence[Tensor], leaf: Leaf) -> Tensor:
    """Return the rows of all micro-batches, without those that pad them."""
    return parts[0].clone() if len(parts) == 1 else torch.cat(list(parts))[: leaf.shape[0]]
