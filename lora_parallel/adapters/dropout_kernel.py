"""Drop the elements that `dropout.py` drops, on a GPU in one kernel, which reads the activations once and writes once.

It is written in Triton (https://triton-lang.org). The functions of `dropout.py` say which elements these are, for any
device; the kernel computes with the same 32-bit numbers, so that both drop the same. Backward runs it again on the
gradient: between the two nothing is kept but the keys, and of chunks of tokens the places of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

TOKENS, FEATURES = 16, 256
"""Elements [tokens, features] that one program of the kernel computes."""

# Those of `dropout.py`, as signed numbers.
_GOLDEN = tl.constexpr(0x9E3779B1 - 2**32)
_FIRST, _SECOND = tl.constexpr(0x85EBCA6B - 2**32), tl.constexpr(0xC2B2AE35 - 2**32)
_MIX = tl.constexpr(0x846CA68B - 2**32)


@triton.jit
def _shift(x, bits: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x >> bits) & ((1 << (32 - bits)) - 1)


@triton.jit
def _hash(x, key):  # type: ignore[no-untyped-def]
    x = x * _GOLDEN + key
    x = (x ^ _shift(x, 16)) * _FIRST
    x = (x ^ _shift(x, 13)) * _SECOND
    return x ^ _shift(x, 16)


@triton.jit(do_not_specialize=["row_key", "token_key", "feature_key", "first_row", "tokens", "first_feature"])
def _kernel(  # type: ignore[no-untyped-def]
    x,
    y,
    rows,
    places,
    row_key,
    token_key,
    feature_key,
    first_row,
    tokens,
    first_feature,
    total,
    features,
    threshold: tl.constexpr,
    scale: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)  # [TOKENS]
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)  # [FEATURES]
    if rows is None:
        row = first_row + index // tokens
        token = index % tokens
    else:
        row = tl.load(rows + index, mask=index < total, other=0)
        token = tl.load(places + index, mask=index < total, other=0)
    position = _hash(_hash(row, row_key) ^ _hash(token, token_key), token_key)
    bits = (position | 1)[:, None] * (_hash(first_feature + feature, feature_key) | 1)[None, :]
    bits = (bits ^ _shift(bits, 15)) * _MIX
    inside = (index < total)[:, None] & (feature < features)[None, :]
    place = index.to(tl.int64)[:, None] * features + feature[None, :]
    value = tl.load(x + place, mask=inside, other=0.0)
    # torch computes in float32 what is narrower
    wide = value if value.dtype == tl.float64 else value.to(tl.float32)
    kept = tl.where(bits < threshold, 0.0, wide) * tl.full((), scale, wide.dtype)
    tl.store(y + place, kept.to(value.dtype), mask=inside)


@dataclass(frozen=True, eq=False)
class Dropped:
    """Say which elements of activations [tokens, features] are dropped.

    Without `rows` the activations have `tokens` tokens a row, of the rows from `first_row` on. With them, `rows` and
    `places` are the global row and token of each, int32 [tokens].
    """

    keys: tuple[int, int, int]
    threshold: int
    scale: float
    first_feature: int
    first_row: int = 0
    tokens: int = 1
    rows: Tensor | None = None
    places: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return `x` [..., features] with zeros for what is dropped, and the rest scaled."""
        x = x.contiguous()
        y = torch.empty_like(x)
        if x.numel() == 0:
            return y
        features = x.shape[-1]
        total = x.numel() // features
        grid = triton.cdiv(total, TOKENS), triton.cdiv(features, FEATURES)
        with torch.cuda.device_of(x):
            _kernel[grid](
                x,
                y,
                self.rows,
                self.places,
                *self.keys,
                self.first_row,
                self.tokens,
                self.first_feature,
                total,
                features,
                threshold=self.threshold,
                scale=self.scale,
                TOKENS=TOKENS,
                FEATURES=FEATURES,
            )
        return y


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Dropped) -> Tensor:
        ctx.dropped = dropped
        return dropped(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return drop(grad, ctx.dropped), None


def drop(x: Tensor, dropped: Dropped) -> Tensor:
    """Return `x` [..., features] with zeros for what is dropped, and the rest scaled; differentiable."""
    return _Drop.apply(x, dropped)
