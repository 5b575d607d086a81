"""Drop the same elements in LoRA dropout on any mesh.

torch's dropout draws from one generator a rank, so its mask depends on how the batch and the layer are cut. Here a hash
of (seed, module name, forward count, global row, token, feature) decides about each element, and none of these depends
on the mesh. The hash is counter based, in the spirit of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
(SC 2011).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.state import ForwardCount

_GOLDEN, _MIX = 0x9E3779B1, 0x846CA68B


def _int32(value: int) -> int:
    """Return `value` modulo 2^32 as a signed 32-bit int."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift the bits of int32 numbers to the right and fill up with zeros (torch's shift fills up with the sign)."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _hash(x: Tensor, key: int | Tensor) -> Tensor:
    """Return a 32-bit hash of each int32 in `x`: the finaliser of MurmurHash3, after a step with the key."""
    if torch.compiler.is_compiling():
        # Else inductor multiplies an `arange` in its index arithmetic, by vectors of signed ints that overflow; what
        # g++ makes of that for AVX2 writes behind the end of the output (docs/upstream/inductor_arange.md).
        x = x & -1
    x = x * _int32(_GOLDEN) + key
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ _shift(x, bits)) * _int32(factor)
    return x ^ _shift(x, 16)


Keys = Sequence[int] | Sequence[Tensor]
"""Keys that decide which elements one module drops in one forward: ints, or int32 tensors without dims.

They are the three keys of the hash (row, token, feature), and the index of the rows among all shares as large.
"""


def keys_on_device(keys: Sequence[Sequence[int]], device: torch.device | str) -> Tensor:
    """Return the keys of several modules, int32 [modules, 4], without making the CPU wait for the device."""
    pinned = torch.device(device).type != "cpu"
    return torch.tensor(keys, dtype=torch.int32, device="cpu", pin_memory=pinned).to(device, non_blocking=True)


class Chunk(Protocol):
    """Say where the tokens are that a rank computes, which has a chunk of each row."""

    def places(self, rows: int, tokens: int, device: torch.device, share: int | Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the global row and token of each position of activations [rows, tokens, features], int32 both.

        The rows are number `share` of all shares as large. None: the activations are of all tokens.
        """


class TopologyInvariantDropout(nn.Module):
    """Replace the `nn.Dropout` of a LoRA layer; the input is [rows, ..., features].

    Row i of the batch of dp rank d is global row d * rows + i; of M micro-batches, row i of number m is global row
    (d * M + m) * rows + i. `feature_offset` is the global index of the first feature, if the input is a slice of them.
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
        self.chunk: Chunk | None = None
        """Where the tokens of the input are in the batch, if a rank may compute on a chunk of them."""

        self.prepared: Tensor | None = None
        """Keys of the current forward, int32 [4], for a compiled block: ints would be constants of its graph."""

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def keys(self, forward_number: int | None = None) -> tuple[int, int, int, int]:
        """Return what decides about the rows of one forward (see `Keys`), as signed ints; None: the present forward."""
        number = self.count.current if forward_number is None else forward_number
        digest = hashlib.blake2b(f"{self.seed}\0{self.name}\0{number}".encode(), digest_size=12).digest()
        row, token, feature = (int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4, 8))
        return row, token, feature, self.count.share_of(self.dp_rank)

    def dropped(self, shape: torch.Size, device: torch.device, keys: Keys | None = None) -> Tensor:
        """Return the mask of an input: bool [rows, ..., features], True for the elements that are dropped."""
        rows, tokens = shape[:-1][:1].numel(), shape[1:-1].numel()

        def index(size: int) -> Tensor:
            return torch.arange(size, dtype=torch.int32, device=device)

        keys = self.keys() if keys is None else keys
        share = keys[3]
        places = self.chunk.places(rows, tokens, device, share) if self.chunk is not None else None
        if places is None:
            row = (index(rows) + share * rows)[:, None].expand(rows, tokens)
            token = index(tokens).expand(rows, tokens)
        else:
            row, token = places
        return self.dropped_at(row, token, shape[-1], keys).view(shape)

    def dropped_at(self, row: Tensor, token: Tensor, features: int, keys: Keys) -> Tensor:
        """Return the mask of tokens with the global indices `row` and `token`, int32 [...]: bool [tokens, features]."""
        row_key, token_key, feature_key = keys[:3]
        position = _hash(_hash(row, row_key) ^ _hash(token, token_key), token_key)
        index = torch.arange(self.feature_offset, self.feature_offset + features, dtype=torch.int32, device=row.device)
        feature = _hash(index, feature_key)
        # Only this is computed for each element: a product of odd numbers, mixed once and compared with a threshold.
        bits = (position | 1).view(-1, 1) * (feature | 1)
        bits.bitwise_xor_(_shift(bits, 15)).mul_(_int32(_MIX))
        threshold = round(self.p * 2**32) - 2**31
        return bits < threshold

    def forward(self, x: Tensor) -> Tensor:
        """Zero a fraction `p` of the elements of `x` and scale the rest by 1 / (1 - p), while training."""
        if not self.training or self.p == 0:
            return x
        keys = self.prepared.unbind() if torch.compiler.is_compiling() and self.prepared is not None else None
        if keys is None:
            self.check_counted()
        return self.without(x, self.dropped(x.shape, x.device, keys))

    def check_counted(self) -> None:
        """Raise a RuntimeError in training if the forward of the parallelized model, which counts, is not running."""
        if torch.is_grad_enabled() and not self.count.running and not in_backward():
            raise RuntimeError(
                f"the LoRA layer {self.name} was called in training, but not by the model's own forward, which counts "
                "the steps that its dropout depends on: call the parallelized model, not a module inside it."
            )

    def without(self, x: Tensor, dropped: Tensor) -> Tensor:
        """Return `x` with zeros where the mask `dropped` is True, and the rest scaled by 1 / (1 - p)."""
        return x.masked_fill(dropped, 0) * (1 / (1 - self.p)) if self.p < 1 else x * 0
