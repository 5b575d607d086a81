"""Say which slice of logits, or of other activations, a rank has: features over tp, tokens over cp."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lora_parallel.distributed.collectives import chunk_bounds, chunks_over_tp
from lora_parallel.distributed.token_chunks import TokenChunks

__all__ = ["Slicing"]

log = logging.getLogger(__name__)


class Slicing:
    """Say which slice of a tensor [rows, tokens, features] this rank has.

    Args:
        features: The number of all features of a token: of logits, the size of the vocabulary.
        group: The process group of the tp axis, whose ranks have slices of the features; None if this rank has all.
        name: The name of the layer that computed the slice, for messages.
        chunks: The chunks of the tokens that cp ranks have; None if this rank has all tokens.
        tokens: The number of all tokens of a row, if there are chunks.
        plain_loss: Compute the cross entropy of a chunk by torch's own function, to which it equals bit by bit.
    """

    def __init__(
        self,
        features: int,
        group: ProcessGroup | None,
        name: str,
        chunks: TokenChunks | None = None,
        tokens: int = 0,
        plain_loss: bool = False,
    ) -> None:
        self.features, self.group, self.name, self.chunks, self.tokens = features, group, name, chunks, tokens
        self.plain_loss = plain_loss
        self.start, self.end = (0, features) if group is None else chunk_bounds(features, group.size(), group.rank())
        self._told: set[str] = set()

    def over_tokens(self, chunks: TokenChunks, tokens: int) -> Slicing:
        """Return the same slicing of a chunk of the tokens."""
        found = Slicing(self.features, self.group, self.name, chunks, tokens, self.plain_loss)
        found._told = self._told  # once, for all forwards
        return found

    def equals(self, other: Slicing) -> bool:
        """Return True if the slices of two tensors are of the same features and tokens."""
        mine, theirs = ((each.features, each.start, each.end, each.tokens) for each in (self, other))
        return mine == theirs

    def shape(self, part: Tensor) -> tuple[int, ...]:
        """Return the shape of the whole tensor that `part` is a slice of."""
        lead = part.shape[:-1] if self.chunks is None else (part.shape[0], self.tokens)
        return (*lead, self.features)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a whole tensor."""
        if self.chunks is not None:
            whole = self.chunks.mine(whole.reshape(-1, self.tokens, whole.shape[-1]))
        return whole[..., self.start : self.end]

    def gathered(self, part: Tensor, function: Any) -> Tensor:
        """Return the whole tensor, of which each rank has `part`; tell the user once which operation asked for it."""
        if self.group is not None:
            if not self._told and dist.get_rank() == 0:
                self._told.add(self.name)
                log.warning(
                    "loss_parallel=True: %s reads the logits of %s in training, so that they are gathered as without "
                    "loss_parallel. The result is right, if all tp ranks do the same.",
                    function,
                    self.name,
                )
            part = chunks_over_tp(part, self.features, self.group, self.name)
        if self.chunks is not None:
            return self.chunks.whole(part, self.tokens, self.name)
        # A copy: an operation may change it in place, and other logits may hold the slice.
        return part if self.group is not None else part.clone()
