"""Hold what the parts of one model share under context parallelism: who has which tokens, and what is running."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """

    def __init__(self, chunks: TokenChunks, tokens: Tokens, method: Literal["ulysses", "all_gather"]) -> None:
        self.chunks, self.tokens, self.method = chunks, tokens, method
        self.cuts = False
        """True while a forward runs whose tokens are cut."""

        self.has_labels = False
        """True if the forward that runs was given labels."""

        self.running = False
        """True while a block, or a layer after the blocks, computes on a chunk."""

        self.sums_gradients = False
        """True if something trains outside of the blocks, on all tokens: what enters the blocks gets the gradients of
        all ranks there."""

        self._cut: dict[int, tuple[Tensor, int, Tensor]] = {}
        """Tensors that blocks share (rotary tables), their versions and this rank's part of them, by `id`."""

        self.recomputes = False
        """True if the block that runs is recomputed in backward, attention included."""

    @property
    def active(self) -> bool:
        """Return True if what is being computed is a forward whose tokens are cut, or is recomputed for one."""
        return self.cuts or in_backward()

    @property
    def on_chunk(self) -> bool:
        """Return True if a chunk is being computed, or computed again in backward."""
        return self.running or (not torch.compiler.is_compiling() and in_backward())

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's tokens of `x` [rows, tokens, ...], in memory of their own.

        A view's whole memory would be kept until backward.
        """
        sums = x.requires_grad and self.sums_gradients
        return self.chunks.cut(x, "the blocks") if sums else self.chunks.mine(x).clone()

    def part(self, x: Tensor) -> Tensor:
        """Return what `cut` does, the same for all blocks that are given `x`: it is kept until the forward ends."""
        found = self._cut.get(id(x))
        if found is None or found[0] is not x or found[1] != x._version:
            found = x, x._version, self.cut(x)
            if self.cuts:
                self._cut[id(x)] = found
        return found[2]

    def on_all_tokens(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a forward without cutting the tokens."""
        self.cuts = False
        try:
            return forward(*args, **kwargs)
        finally:
            self.cuts = True

    def end_forward(self) -> None:
        """Note that no forward runs any more."""
        self.cuts = self.running = False
        self._cut.clear()

    @contextmanager
    def kept_for_graph(self) -> Iterator[None]:
        """Note within the context what a graph cannot ask: whether it is run again in a backward pass."""
        before = self.running, self.recomputes
        self.running, self.recomputes = self.on_chunk, self.recomputes or in_backward()
        try:
            yield
        finally:
            self.running, self.recomputes = before

    def places(self, rows: int, tokens: int, device: torch.device, share: int | Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the global row and token of each position of activations [rows, tokens, features].

        Args:
            rows: The number of rows; of activations that are flattened, the number of rows and tokens in one.
            tokens: The number of tokens, 1 of activations that are flattened.
            device: The device of the result.
            share: Index of the rows among all shares as large of the global batch.

        Returns:
            Two int32 tensors [rows, tokens]; or None if no chunk is being computed, or the activations are not those
            of all tokens of this rank.
        """
        if not self.on_chunk:
            return None
        count = self.tokens.count
        mine = self.chunks.count(count)
        is_flat = tokens != mine and tokens == 1 and mine and rows % mine == 0
        if tokens != mine and not is_flat:
            return None
        each = rows // mine if is_flat else rows
        token = self.chunks.positions(count, device).expand(each, mine)
        row = (torch.arange(each, dtype=torch.int32, device=device) + share * each)[:, None].expand(each, mine)
        if not is_flat:
            return row, token
        flat = (row * count + token).view(-1, 1)  # in one process, each token of flattened rows counts as a row
        return flat, torch.zeros_like(flat)
