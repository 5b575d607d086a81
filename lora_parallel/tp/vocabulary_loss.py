"""Compute the cross entropy of tokens from slices of their logits, of which each tp rank has one over the vocabulary.

With x the logits of a token and t its label, the loss is log(sum(exp(x))) - x[t]. Each rank computes both terms for its
slice of the vocabulary. One all-gather of these two numbers a token gives all ranks the terms of all slices, and hence
the loss; an all-reduce for the maximum and another for the sums (Megatron-LM, https://arxiv.org/abs/1909.08053, section
3) would take two messages for the same. Backward needs no message: the gradient of a slice is softmax(x), from the sum
over all slices, minus one at the label.

Tokens are computed in chunks, in forward and in backward, so that logits of a wider dtype than the model's never exist
for all tokens at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from lora_parallel.distributed.collectives import stacked_over

__all__ = ["check_labels", "cross_entropy_of_slices"]

CHUNK_ELEMENTS = 2**22
"""Number of logits that are computed at a time: 16 MiB in float32."""


def _chunks(part: Tensor) -> Iterator[slice]:
    """Yield slices of the tokens of `part` [tokens, features], as many at a time as make `CHUNK_ELEMENTS` logits."""
    step = max(CHUNK_ELEMENTS // max(part.shape[1], 1), 1)
    yield from (slice(start, start + step) for start in range(0, part.shape[0], step))


class _CrossEntropyOfSlices(torch.autograd.Function):
    """Return the loss of each token; its backward is that of the slice of one rank."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        labels: Tensor,
        ignored: Tensor,
        start: int,
        dtype: torch.dtype,
        group: ProcessGroup | None,
        where: str,
    ) -> Tensor:
        tokens, width = part.shape
        places = labels - start
        outside = (places < 0) | (places >= width) | ignored
        places = places.masked_fill(outside, 0)
        terms = torch.full((2, tokens), -torch.inf, dtype=dtype, device=part.device)  # log of the sum; the label's
        terms[1] = 0
        if width:
            for chunk in _chunks(part):
                x = part[chunk].to(dtype)
                terms[0, chunk] = x.logsumexp(-1)
                terms[1, chunk] = x.gather(-1, places[chunk, None]).squeeze(-1)
            terms[1] = terms[1].masked_fill(outside, 0)
        if group is not None:
            stacked = stacked_over(terms, group, "sums of exponentials and logits of labels", where)
            terms = torch.stack([stacked[:, 0].logsumexp(0), stacked[:, 1].sum(0)])
        ctx.save_for_backward(part, places, outside, ignored, terms[0])
        return (terms[0] - terms[1]).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        part, places, outside, ignored, log_sums = ctx.saved_tensors
        losses = grads[0].masked_fill(ignored, 0)
        at_labels = losses.masked_fill(outside, 0)
        grad = torch.empty_like(part)
        for chunk in _chunks(part) if part.shape[1] else ():
            p = (part[chunk].to(log_sums.dtype) - log_sums[chunk, None]).exp_()
            p *= losses[chunk, None]
            p.scatter_add_(-1, places[chunk, None], -at_labels[chunk, None])
            grad[chunk] = p
        return grad, None, None, None, None, None, None


def cross_entropy_of_slices(
    part: Tensor,
    labels: Tensor,
    ignore_index: int,
    vocabulary: int,
    start: int,
    dtype: torch.dtype,
    group: ProcessGroup | None,
    where: str,
) -> Tensor:
    """Return the cross entropy of each token, [tokens], 0 for ignored ones. Collective over tp.

    Args:
        part: This rank's slice of the logits, [tokens, features of this rank].
        labels: Index of each token's label in the whole vocabulary, int64 [tokens], the same on every rank.
        ignore_index: Label of the tokens that have no loss.
        vocabulary: Number of logits of a token on all ranks together.
        start: Index of this rank's first logit in the vocabulary.
        dtype: Dtype that the logits are cast to. The loss is computed, and returned, in float32 at least.
        group: The process group of the tp axis; None if this rank has all logits.
        where: The layer's name, for error messages.

    Raises:
        IndexError: A label that is not ignored is outside of the vocabulary. On an accelerator it is an assertion of
            the device, as in torch's `cross_entropy`.
        RuntimeError: The collective failed.
    """
    ignored = check_labels(labels, ignore_index, vocabulary, where)
    dtype = torch.promote_types(dtype, torch.float32)
    return _CrossEntropyOfSlices.apply(part, labels, ignored, start, dtype, group, where)


def check_labels(labels: Tensor, ignore_index: int, vocabulary: int, where: str) -> Tensor:
    """Check that every label that is not ignored is in the vocabulary, and return which labels are ignored.

    Raises:
        IndexError: One is not. On an accelerator it is an assertion of the device, as in torch's `cross_entropy`.
    """
    ignored = labels == ignore_index
    valid = (ignored | ((labels >= 0) & (labels < vocabulary))).all()
    if labels.device.type != "cpu":
        torch._assert_async(valid)  # the CPU need not wait
    elif not valid:
        raise IndexError(
            f"the labels of {where} go from {int(labels.min())} to {int(labels.max())}, outside of its vocabulary of "
            f"{vocabulary} and other than ignore_index={ignore_index}."
        )
    return ignored
