"""Hold what the parts of one model share under context parallelism: who has which tokens, and what is running."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lora_parallel.distributed.token_chunks import TokenChunks
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.tp.context import Tokens

__all__ = ["CPContext"]


class CPContext:
    """Hold the chunks of one model's tokens.

    Args:
        chunks: The chunks of the tokens that the ranks of the cp axis have.
        tokens: Holds the number of all tokens of each forward.
        method: How attention gets all tokens (see `ParallelConfig.cp_method`).
        dp_rank: Index of the batch that this rank sees, with its cp and tp peers.
    """

    def __init__(
        self, chunks: TokenChunks, tokens: Tokens, method: Literal["ulysses", "all_gather"], dp_rank: int
    ) -> None:
        self.chunks, self.tokens, self.method, self.dp_rank = chunks, tokens, method, dp_rank
        self.cuts = False
        """True while a forward runs whose tokens are cut."""

        self.has_labels = False
        """True if the forward that runs was given labels."""

        self.running = False
        """True while a block, or a layer after the blocks, computes on a chunk."""

        self.recomputes = False
        """True if the block that runs is recomputed in backward, attention included."""

        self.rows = 0
        """Number of rows of the batch."""

        self.whole: dict[str, Any] = {}
        """Arguments of the block that runs, by name, that were cut: attention is given them as they were."""

    @property
    def active(self) -> bool:
        """Return True if what is being computed is a forward whose tokens are cut, or is recomputed for one."""
        return self.cuts or in_backward()

    def places(self, shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the global row and token of each position of activations, both int32 of the given shape.

        Args:
            shape: The shape of activations without their last dim: [rows, tokens of this rank] or both in one.
            device: The device of the result.

        Returns:
            None if no chunk is being computed, or the activations are none of all tokens of this rank.
        """
        if not self.running:
            return None
        tokens = self.tokens.count
        mine = self.chunks.count(tokens)
        if tuple(shape) not in ((self.rows, mine), (self.rows * mine,)):
            return None
        token = self.chunks.positions(tokens, device).expand(self.rows, mine)
        row = torch.arange(self.rows, dtype=torch.int32, device=device)[:, None].expand(self.rows, mine)
        if len(shape) == 2:
            return row + self.dp_rank * self.rows, token
        # In one process, each token of rows that are flattened counts as a row.
        flat = (row + self.dp_rank * self.rows) * tokens + token
        return flat.flatten(), torch.zeros_like(flat).flatten()
