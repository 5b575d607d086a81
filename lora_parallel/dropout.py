"""LoRA dropout that drops the same elements on any mesh.

torch's dropout draws from one generator a rank, so the mask depends on how the batch and the layer are cut. Here an
element's fate is a hash of (seed, module name, forward count, global row, token, feature): nothing of the mesh is in
it. The hash is counter based, in the spirit of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lora_parallel.upstream import in_backward

__all__ = ["ForwardCount", "TopologyInvariantDropout"]

_GOLDEN, _MIX = 0x9E3779B1, 0x846CA68B


def _int32(value: int) -> int:
    """`value` modulo 2^32 as a signed 32-bit int."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32 (torch's is arithmetic)."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _hash(x: Tensor, key: int) -> Tensor:
    """A 32-bit hash of each int32 in `x` (the finaliser of MurmurHash3 after a keyed start)."""
    x = x * _int32(_GOLDEN) + _int32(key)
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ _shift(x, bits)) * _int32(factor)
    return x ^ _shift(x, 16)


def _keys(seed: int, name: str, count: int) -> tuple[int, int, int]:
    """Three independent 32-bit keys of one call of one module."""
    digest = hashlib.blake2b(f"{seed}\0{name}\0{count}".encode(), digest_size=12).digest()
    row, token, feature = (int.from_bytes(digest[i : i + 4], "little") for i in (0, 4, 8))
    return row, token, feature


@dataclass
class ForwardCount:
    """How many training forwards the model has run, and which of them is being computed now.

    The two differ while backward recomputes an earlier forward (activation checkpointing): a hook on the model's
    outputs sets `current` back to the forward that made them, before any of it is recomputed.
    """

    done: int = 0
    """Training forwards started so far; part of a checkpoint."""

    current: int = field(default=0, repr=False)
    """The forward whose masks are wanted."""

    running: bool = field(default=False, repr=False)
    """Whether the model's forward is in progress."""

    def advance(self, training: bool) -> None:
        """Called as the model's forward starts, though not when it is recomputed. Evaluation does not count."""
        if training:
            self.done += 1
            self.current = self.done


class TopologyInvariantDropout(nn.Module):
    """Drop-in for the `nn.Dropout` of a LoRA layer; input [rows, ..., features].

    Args:
        p: Probability of dropping an element.
        name: Name of the LoRA layer in PEFT's own terms, part of the key.
        seed: Part of the key.
        count: The model's forward count.
        dp_rank: Which of the batches this rank sees: row i of it is global row dp_rank * rows + i.
        feature_offset: Global index of this rank's first feature, where the input is a slice.
    """

    def __init__(
        self, p: float, name: str, seed: int, count: ForwardCount, dp_rank: int, feature_offset: int = 0
    ) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.seed = seed
        self.count = count
        self.dp_rank = dp_rank
        self.feature_offset = feature_offset

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def dropped(self, shape: torch.Size, device: torch.device, count: int | None = None) -> Tensor:
        """Which elements of an input of this shape are dropped now, or in the forward of a number: bool, same shape."""
        rows, tokens = shape[:-1][:1].numel(), shape[1:-1].numel()

        def index(start: int, size: int) -> Tensor:
            return torch.arange(start, start + size, dtype=torch.int32, device=device)

        row = index(self.dp_rank * rows, rows)[:, None].expand(rows, tokens)
        return self.dropped_at(
            row, index(0, tokens).expand(rows, tokens), shape[-1], self.count.current if count is None else count
        ).view(shape)

    def dropped_at(self, row: Tensor, token: Tensor, features: int, count: int) -> Tensor:
        """Which elements are dropped of tokens in these global rows, in the training forward of this number.

        Args:
            row: int32 [...].
            token: Which of its row's tokens each is, int32 [...].
            features: How many follow on `feature_offset`.
            count: The number of the forward.

        Returns:
            bool [number of tokens, features].
        """
        row_key, token_key, feature_key = _keys(self.seed, self.name, count)
        position = _hash(_hash(row, row_key) ^ _hash(token, token_key), token_key)
        index = torch.arange(self.feature_offset, self.feature_offset + features, dtype=torch.int32, device=row.device)
        feature = _hash(index, feature_key)
        # The only work a whole element: products of odd numbers, mixed once, compared with the probability.
        bits = (position | 1).view(-1, 1) * (feature | 1)
        bits.bitwise_xor_(_shift(bits, 15)).mul_(_int32(_MIX))
        threshold = round(self.p * 2**32) - 2**31
        return bits < threshold

    def forward(self, x: Tensor) -> Tensor:
        """`x` with a fraction `p` of its elements zeroed and the rest scaled by 1 / (1 - p), while training."""
        if not self.training or self.p == 0:
            return x
        if torch.is_grad_enabled() and not self.count.running and not in_backward():
            raise RuntimeError(
                f"the LoRA layer {self.name} was called in training, but not by the model's own forward, which counts "
                "the steps that its dropout depends on: call the parallelized model, not a module inside it."
            )
        if self.p >= 1:
            return x * 0
        return x.masked_fill(self.dropped(x.shape, x.device), 0) * (1 / (1 - self.p))
