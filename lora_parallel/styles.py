"""What each tensor parallel style means for each tensor of a layer: data, applied by `layers.py`.

The names are those of Hugging Face's `tp_plan`, so a plan from any transformers config works as it is. A layer and its
LoRA factors are one unit: with W = base weight [out, in], A = lora_A [r, in], B = lora_B [out, r], input x [..., in],

- colwise: W and B are split by rows, A is whole. x W^T + s (x A^T) B^T is then a slice of the output on each rank, and
  the LoRA branch needs no collective. A's gradient is a partial sum over tp.
- rowwise: W and A are split by columns, B is whole. Each rank's W- and LoRA-output are partial sums of the same output:
  added first, reduced once. B's gradient is a partial sum over tp.

This is the layout of InfiniTrain and of torchtitan's LoRA; PEFT and Megatron-Bridge pay extra collectives for theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

__all__ = ["STYLES", "Style", "style_named"]

Enter = Literal["keep", "copy", "split", "mask"]
Leave = Literal["keep", "reduce", "gather"]


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
    looks up those it holds."""

    leave: Leave
    """Output: used as it is; summed over tp; slices put together."""

    partial: frozenset[str]
    """Tensors whose gradients on one rank are a partial sum over tp."""

    even: bool
    """Whether the split width must be a multiple of tp, because code outside the layer computes on the slices."""


_ROWS, _COLUMNS, _WHOLE = Shard(0), Shard(1), Replicate()
_LORA_A, _LORA_B = frozenset({"lora_A"}), frozenset({"lora_B"})

STYLES: dict[str, Style] = {
    "colwise": Style(_ROWS, _ROWS, _WHOLE, _ROWS, enter="copy", leave="keep", partial=_LORA_A, even=True),
    "colwise_gather_output": Style(
        _ROWS, _ROWS, _WHOLE, _ROWS, enter="copy", leave="gather", partial=_LORA_A, even=False
    ),
    "rowwise": Style(_COLUMNS, _WHOLE, _COLUMNS, _WHOLE, enter="keep", leave="reduce", partial=_LORA_B, even=True),
    "rowwise_split_input": Style(
        _COLUMNS, _WHOLE, _COLUMNS, _WHOLE, enter="split", leave="reduce", partial=_LORA_B, even=False
    ),
    "embedding_rowwise": Style(
        _ROWS, _WHOLE, _COLUMNS, _WHOLE, enter="mask", leave="reduce", partial=_LORA_B, even=False
    ),
    # A layer that sits between slices (Qwen3's q_norm on this rank's heads): whole weights, partial gradients.
    "replicated_with_grad_allreduce": Style(
        _WHOLE,
        _WHOLE,
        _WHOLE,
        _WHOLE,
        enter="keep",
        leave="keep",
        partial=frozenset({"weight", "bias", "lora_A", "lora_B"}),
        even=False,
    ),
    "replicate": Style(_WHOLE, _WHOLE, _WHOLE, _WHOLE, enter="keep", leave="keep", partial=frozenset(), even=False),
}


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
