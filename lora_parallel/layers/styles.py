"""Define the tensor parallel styles: the placement of each tensor of a layer, which `tp/apply_style.py` applies.

The names are those of Hugging Face's `tp_plan`, so a plan from any transformers config works as it is. A layer and its
LoRA factors are one tensor parallel layer: with W = base weight [out, in], A = lora_A [r, in], B = lora_B [out, r],
input x [..., in], s = the LoRA scale,

- colwise: W and B are split by rows, A is whole. x W^T + s (x A^T) B^T is then a slice of the output on each rank, and
  the LoRA branch needs no collective. The gradient of A is a partial sum over tp.
- rowwise: W and A are split by columns, B is whole. The base output and the LoRA output of a rank are partial sums of
  the same output: they are added first and reduced once. The gradient of B is a partial sum over tp.
- DoRA's magnitude [out] is split by rows if the output features are split, else whole with a partial gradient.

InfiniTrain and torchtitan's LoRA have the same layout; the layouts of PEFT and Megatron-Bridge cost extra collectives.

A fused projection holds several matrices, and each of them must be cut by itself. A key or value projection may have
fewer heads than there are tp ranks, and several ranks need the same head. In both cases a row partition says which rows
each rank computes. A frozen weight is stored as these rows, one rank's rows after another's; a parameter that trains is
stored whole, and each rank computes with its rows of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from lora_parallel.distributed.collectives import chunk_bounds

Enter = Literal["keep", "copy", "split", "mask", "tokens", "experts"]
Leave = Literal["keep", "reduce", "gather", "tokens"]


@dataclass(frozen=True)
class Style:
    """Define the placement of each tensor of a layer on the tp axis, and the layout of the layer's input and output."""

    weight: Placement
    """Placement of the base weight: [out, in], or [vocabulary, hidden] of an embedding."""

    bias: Placement
    """Placement of the base bias [out]. If a rank's output is a partial sum, the bias is added after the reduction."""

    lora_A: Placement
    """Placement of `lora_A` [r, in], or of an embedding's `lora_embedding_A` [r, vocabulary]."""

    lora_B: Placement
    """Placement of `lora_B` [out, r], or of an embedding's `lora_embedding_B` [hidden, r]."""

    enter: Enter
    """Layout of the input, and what is done to it before the layer's own forward.

    - "keep": the input is used as it is.
    - "copy": the input is whole; its gradient is summed over tp.
    - "split": the input is whole; each rank takes a slice of its features.
    - "mask": the input is token ids; each rank looks up the ids whose rows it holds.
    - "tokens": the input is a chunk of the tokens; all chunks are gathered.
    - "experts": the inputs are activations, routing weights and indices of experts (see `tp/experts.py`).
    """

    leave: Leave
    """Layout of the output, and what is done to it after the layer's own forward.

    - "keep": the output is used as it is.
    - "reduce": the output is a partial sum; it is summed over tp.
    - "gather": the output is a slice; the slices of all ranks are gathered.
    - "tokens": the output is a partial sum; each rank gets the sum for its chunk of the tokens.
    """

    partial_roles: frozenset[str]
    """Roles of the tensors whose gradient on one rank is a partial sum over tp."""

    requires_even_split: bool
    """True if the split width must be a multiple of tp, because code outside of the layer computes on the slices."""

    name: str = ""

    @property
    def magnitude(self) -> Placement:
        """Return the placement of DoRA's magnitude [out], a factor of the output."""
        return self.bias

    per_output = magnitude
    """Placement of a subclass's parameter for each output feature; `Shard` cuts `LayerTensor.dim`."""

    addend = magnitude
    """Placement of a tensor that the layer's own forward adds to the output: to a partial sum on one tp rank."""

    @property
    def per_input(self) -> Placement:
        """Return the placement of a subclass's parameter for each input feature; `Shard` cuts `LayerTensor.dim`."""
        return _ROWS if self.lora_A == _COLUMNS and self.enter != "mask" else _WHOLE

    @property
    def other(self) -> Placement:
        """Return the placement of a parameter without a dim of features, or without elements: whole on every rank."""
        return _WHOLE

    empty = other


_ROWS, _COLUMNS, _WHOLE = Shard(0), Shard(1), Replicate()
_OF_OUTPUT_SLICES = frozenset({"lora_A", "per_input", "other"})
_OF_PARTIAL_SUMS = frozenset({"lora_B", "magnitude", "per_output", "addend", "other"})
_OF_EXPERTS = frozenset({"lora_A", "lora_B", "addend", "other"})

_REPLICATE = Style(_WHOLE, _WHOLE, _WHOLE, _WHOLE, "keep", "keep", partial_roles=frozenset(), requires_even_split=False)
_COLWISE = replace(
    _REPLICATE,
    weight=_ROWS,
    bias=_ROWS,
    lora_B=_ROWS,
    enter="copy",
    partial_roles=_OF_OUTPUT_SLICES,
    requires_even_split=True,
)
_ROWWISE = replace(
    _REPLICATE,
    weight=_COLUMNS,
    lora_A=_COLUMNS,
    leave="reduce",
    partial_roles=_OF_PARTIAL_SUMS,
    requires_even_split=True,
)
# A module of experts (see `tp/experts.py`): each rank holds a slice of every expert, or some whole experts.
_EXPERTS = replace(_REPLICATE, weight=_ROWS, enter="experts", leave="reduce", partial_roles=_OF_EXPERTS)
# A layer whose input and output are slices (Qwen3's q_norm on this rank's heads): whole weights, partial gradients.
_PARTIAL_GRADIENTS = frozenset({"weight", "bias"}) | _OF_OUTPUT_SLICES | _OF_PARTIAL_SUMS

STYLES: dict[str, Style] = {
    name: replace(style, name=name)
    for name, style in {
        "colwise": _COLWISE,
        "packed_colwise": _COLWISE,  # one weight that holds two matrices, gate and up: the plan cuts each of them
        "colwise_gather_output": replace(_COLWISE, leave="gather", requires_even_split=False),
        "rowwise": _ROWWISE,
        "rowwise_split_input": replace(_ROWWISE, enter="split", requires_even_split=False),
        "embedding_rowwise": replace(_ROWWISE, weight=_ROWS, enter="mask", requires_even_split=False),
        # A table with one column for each head (T5's relative positions): each rank looks up its heads' columns.
        "embedding_colwise": replace(_COLWISE, weight=_COLUMNS, bias=_WHOLE, enter="keep"),
        "replicated_with_grad_allreduce": replace(_REPLICATE, partial_roles=_PARTIAL_GRADIENTS),
        "moe_tp_experts": _EXPERTS,
        "ep_dispatch_experts": _EXPERTS,
        "replicate": _REPLICATE,
    }.items()
}
"""Each style by its name in a plan. `planning/plan_checks.py` names those that only linear layers can have."""

EXPERT_SPLITS = {"moe_tp_experts": "features", "ep_dispatch_experts": "experts"}
"""Kind of share that each tp rank has, by style: "features" for a slice of every expert, "experts" for some experts."""


def with_token_input(style: Style) -> Style:
    """Return the style of a colwise layer whose input is a chunk of the tokens (sequence parallelism)."""
    return replace(style, enter="tokens")


def with_gathered_input(style: Style) -> Style:
    """Return the style of a colwise layer in a module whose input is already all tokens."""
    return replace(style, enter="keep")


def with_token_output(style: Style) -> Style:
    """Return the style of a rowwise layer whose output is a chunk of the tokens; its bias is added to that chunk."""
    return replace(style, leave="tokens", partial_roles=style.partial_roles | {"bias"})


def style_named(name: str, where: str) -> Style:
    """Return the style called `name`; `where` tells which plan entry asked for it, if no style has this name."""
    try:
        return STYLES[name]
    except (KeyError, TypeError):
        known = ", ".join(sorted(STYLES))
        raise ValueError(f"tp_plan: {where} asks for the style {name!r}, which is not one of: {known}.") from None


Range = tuple[int, int]
"""First index, and the index after the last one."""

_ATTRIBUTE = "_lora_parallel_row_partition"


@dataclass(frozen=True)
class RowPartition:
    """Hold the rows that each tp rank computes, equally many and perhaps shared, as ascending ranges (start, stop)."""

    ranks: tuple[tuple[Range, ...], ...]
    size: int
    """Number of rows of the whole tensor."""

    @classmethod
    def of(cls, rows: Iterable[Tensor | Sequence[int]], size: int) -> RowPartition:
        """Return the partition in which rank i computes the rows with the indices `rows[i]`."""
        return cls(tuple(tuple(_ranges(torch.as_tensor(indices))) for indices in rows), size)

    @classmethod
    def packed(cls, parts: Sequence[int], tp: int) -> RowPartition:
        """Return the partition of a tensor made of several matrices, in which each matrix is cut into one chunk a rank.

        `parts` are the numbers of rows of the matrices, in their order, each a multiple of tp.
        """
        ranks = []
        for rank in range(tp):
            start, chosen = 0, []
            for part in parts:
                low, high = chunk_bounds(part, tp, rank)
                chosen += list(range(start + low, start + high))
                start += part
            ranks.append(chosen)
        return cls.of(ranks, sum(parts))

    @property
    def is_chunked(self) -> bool:
        """Return True if each rank has one chunk, in the order of the ranks, as `colwise` cuts without a partition."""
        tp = len(self.ranks)
        return all(ranges == (chunk_bounds(self.size, tp, rank),) for rank, ranges in enumerate(self.ranks))

    @property
    def width(self) -> int:
        """Return the number of rows that each rank computes."""
        return sum(stop - start for start, stop in self.ranks[0])

    @cached_property
    def order(self) -> Tensor:
        """Return the indices of all ranks' rows, rank after rank, int64 [tp * width]."""
        return torch.cat([torch.arange(*each) for ranges in self.ranks for each in ranges])

    @cached_property
    def inverse(self) -> Tensor:
        """Return the first position of each row in `order`, int64 [size]."""
        last = len(self.order)
        places = torch.full((self.size,), last).scatter_reduce(0, self.order, torch.arange(last), "amin")
        return places.masked_fill(places == last, -1)

    def rows(self, rank: int) -> Tensor:
        """Return the indices of the rows that one rank computes, int64 [width]."""
        return torch.cat([torch.arange(*each) for each in self.ranks[rank]])

    def arranged(self, tensor: Tensor, dim: int) -> Tensor:
        """Return `tensor` with its rows along `dim` in the order of `order`: rank 0's, then rank 1's, ..."""
        # The result is a concatenation of slices, so a lazy tensor stays one.
        return torch.cat([tensor.narrow(dim, a, b - a) for ranges in self.ranks for a, b in ranges], dim)

    def restored(self, tensor: Tensor, dim: int) -> Tensor:
        """Return the tensor that `arranged` turned into `tensor`."""
        return torch.cat([tensor.narrow(dim, a, b - a) for a, b in _ranges(self.inverse)], dim)


def _ranges(indices: Tensor) -> Iterator[Range]:
    """Yield the runs of consecutive numbers in `indices`, int64 [rows], in order."""
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    for run in indices.tensor_split(breaks.tolist()):
        if len(run):
            yield int(run[0]), int(run[-1]) + 1


def set_partition(module: nn.Module, key: str, partition: RowPartition, dim: int) -> None:
    """Note on `module` that its parameter `key` is stored as `partition.arranged(..., dim)`."""
    module.__dict__.setdefault(_ATTRIBUTE, {})[key] = partition, dim


def partition_of(module: nn.Module, key: str) -> tuple[RowPartition, int] | None:
    """Return the partition and the dim by which a parameter is stored rearranged, or None if it is stored as it is."""
    return module.__dict__.get(_ATTRIBUTE, {}).get(key)
