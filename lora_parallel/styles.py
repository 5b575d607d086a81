"""What each tensor parallel style means for each tensor of a layer: data, applied by `units.py`.

The names are those of Hugging Face's `tp_plan`, so a plan from any transformers config works as it is. A layer and its
LoRA factors are one unit: with W = base weight [out, in], A = lora_A [r, in], B = lora_B [out, r], input x [..., in],

- colwise: W and B are split by rows, A is whole. x W^T + s (x A^T) B^T is then a slice of the output on each rank, and
  the LoRA branch needs no collective. A's gradient is a partial sum over tp.
- rowwise: W and A are split by columns, B is whole. Each rank's W- and LoRA-output are partial sums of the same output:
  added first, reduced once. B's gradient is a partial sum over tp.
- DoRA's magnitude [out] goes with the output features: rows of it, or whole with a partial gradient.

This is the layout of InfiniTrain and of torchtitan's LoRA; PEFT and Megatron-Bridge pay extra collectives for theirs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

__all__ = ["STYLES", "WAYS_OF_EXPERTS", "Style", "fed_all", "fed_tokens", "giving_tokens", "style_named"]

Enter = Literal["keep", "copy", "split", "mask", "tokens", "experts"]
Leave = Literal["keep", "reduce", "gather", "tokens"]


@dataclass(frozen=True)
class Style:
    """Placement of each tensor of a layer on the tp axis, and the layout of its input and output."""

    weight: Placement
    """Base weight: [out, in], or [vocabulary, hidden] of an embedding."""

    bias: Placement
    """Base bias [out]; added after the output is whole where the output is a partial sum."""

    lora_A: Placement
    """[r, in]; of an embedding, `lora_embedding_A` [r, vocabulary]."""

    lora_B: Placement
    """[out, r]; of an embedding, `lora_embedding_B` [hidden, r]."""

    enter: Enter
    """Input: used as it is; whole, and its gradient summed over tp; whole, and sliced; token ids of which each rank
    looks up those it holds; a chunk of the tokens, gathered; activations, routing weights and indices of experts."""

    leave: Leave
    """Output: used as it is; summed over tp; slices put together; summed, for this rank's chunk of the tokens."""

    partial: frozenset[str]
    """Tensors whose gradients on one rank are a partial sum over tp."""

    even: bool
    """Whether the split width must be a multiple of tp, because code outside the layer computes on the slices."""

    name: str = ""

    @property
    def magnitude(self) -> Placement:
        """DoRA's [out], a factor of the output."""
        return self.bias

    @property
    def output(self) -> Placement:
        """What else acts on each output feature, in a subclass of `nn.Linear`; placed along its own dim."""
        return self.bias

    @property
    def addend(self) -> Placement:
        """What is added to the output inside of the layer: of partial sums, to the first rank's alone."""
        return self.bias

    @property
    def input(self) -> Placement:
        """What acts on each input feature, in a subclass of `nn.Linear`; placed along its own dim."""
        return _ROWS if self.lora_A == _COLUMNS and self.enter != "mask" else _WHOLE

    @property
    def other(self) -> Placement:
        """What is no function of a feature."""
        return _WHOLE

    @property
    def empty(self) -> Placement:
        """A parameter without elements."""
        return _WHOLE


_ROWS, _COLUMNS, _WHOLE = Shard(0), Shard(1), Replicate()
_OF_OUTPUT_SLICES = frozenset({"lora_A", "input", "other"})
_OF_PARTIAL_SUMS = frozenset({"lora_B", "magnitude", "output", "addend", "other"})
_OF_EXPERTS = frozenset({"lora_A", "lora_B", "addend", "other"})

STYLES: dict[str, Style] = {
    "colwise": Style(_ROWS, _ROWS, _WHOLE, _ROWS, enter="copy", leave="keep", partial=_OF_OUTPUT_SLICES, even=True),
    # Two matrices in one, gate and up.
    "packed_colwise": Style(
        _ROWS, _ROWS, _WHOLE, _ROWS, enter="copy", leave="keep", partial=_OF_OUTPUT_SLICES, even=True
    ),
    "colwise_gather_output": Style(
        _ROWS, _ROWS, _WHOLE, _ROWS, enter="copy", leave="gather", partial=_OF_OUTPUT_SLICES, even=False
    ),
    "rowwise": Style(
        _COLUMNS, _WHOLE, _COLUMNS, _WHOLE, enter="keep", leave="reduce", partial=_OF_PARTIAL_SUMS, even=True
    ),
    "rowwise_split_input": Style(
        _COLUMNS, _WHOLE, _COLUMNS, _WHOLE, enter="split", leave="reduce", partial=_OF_PARTIAL_SUMS, even=False
    ),
    "embedding_rowwise": Style(
        _ROWS, _WHOLE, _COLUMNS, _WHOLE, enter="mask", leave="reduce", partial=_OF_PARTIAL_SUMS, even=False
    ),
    # A table of something of each head (T5's relative positions): each rank looks up its heads' columns.
    "embedding_colwise": Style(
        _COLUMNS, _WHOLE, _WHOLE, _ROWS, enter="keep", leave="keep", partial=_OF_OUTPUT_SLICES, even=True
    ),
    # A layer that sits between slices (Qwen3's q_norm on this rank's heads): whole weights, partial gradients.
    "replicated_with_grad_allreduce": Style(
        _WHOLE,
        _WHOLE,
        _WHOLE,
        _WHOLE,
        enter="keep",
        leave="keep",
        partial=frozenset({"weight", "bias"}) | _OF_OUTPUT_SLICES | _OF_PARTIAL_SUMS,
        even=False,
    ),
    # A module of experts (see `experts`): slices of all of them on each rank, or some of them.
    "moe_tp_experts": Style(
        _ROWS, _WHOLE, _WHOLE, _WHOLE, enter="experts", leave="reduce", partial=_OF_EXPERTS, even=False
    ),
    "ep_dispatch_experts": Style(
        _ROWS, _WHOLE, _WHOLE, _WHOLE, enter="experts", leave="reduce", partial=_OF_EXPERTS, even=False
    ),
    "replicate": Style(_WHOLE, _WHOLE, _WHOLE, _WHOLE, enter="keep", leave="keep", partial=frozenset(), even=False),
}


STYLES = {name: replace(style, name=name) for name, style in STYLES.items()}

WAYS_OF_EXPERTS = {"moe_tp_experts": "features", "ep_dispatch_experts": "experts"}
"""What each tp rank has of the experts: slices of all of them, or some."""


def fed_tokens(style: Style) -> Style:
    """The style of a colwise layer that is fed a chunk of the tokens (sequence parallelism)."""
    return replace(style, enter="tokens")


def fed_all(style: Style) -> Style:
    """The style of a colwise layer in a module that is fed all tokens."""
    return replace(style, enter="keep")


def giving_tokens(style: Style) -> Style:
    """The style of a rowwise layer that gives a chunk of the tokens; its bias is added to those."""
    return replace(style, leave="tokens", partial=style.partial | {"bias"})


def style_named(name: str, where: str) -> Style:
    """The style `name`.

    Raises:
        ValueError: There is none; `where` tells the reader which plan entry asked for it.
    """
    try:
        return STYLES[name]
    except (KeyError, TypeError):
        known = ", ".join(sorted(STYLES))
        raise ValueError(f"tp_plan: {where} asks for the style {name!r}, which is not one of: {known}.") from None
