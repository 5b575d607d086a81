"""Drop the same elements in LoRA dropout on any mesh.

torch's dropout draws from one generator a rank, so its mask depends on how the batch and the layer are cut. Here a hash
of (seed, module name, forward count, global row, token, feature) decides about each element, and none of these depends
on the mesh. The hash is counter based, in the spirit of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3"
(SC 2011).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.state import ForwardCount

log = logging.getLogger(__name__)

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
        return bits < self._threshold

    @property
    def drops(self) -> bool:
        """Return True if the next forward may zero elements: in training, with a probability above 0."""
        return self.training and self.p > 0

    def forward(self, x: Tensor, is_scaled: bool = True) -> Tensor:
        """Zero a fraction `p` of the elements of `x` in training, and scale the rest by 1 / (1 - p) if `is_scaled`."""
        if not self.drops:
            return x
        keys = self.prepared.unbind() if torch.compiler.is_compiling() and self.prepared is not None else None
        if keys is None:
            self.check_counted()
        return self.drop(x, keys, is_scaled)

    def drop(self, x: Tensor, keys: Keys | None = None, is_scaled: bool = True) -> Tensor:
        """Return `x` [rows, ..., features] with zeros for the elements that `keys` drop, and the rest scaled or not."""
        keys = self.keys() if keys is None else keys
        if not self._in_one_kernel(x):
            return self.without(x, self.dropped(x.shape, x.device, keys), is_scaled)
        rows, tokens = x.shape[:-1][:1].numel(), x.shape[1:-1].numel()
        places = self.chunk.places(rows, tokens, x.device, keys[3]) if self.chunk is not None else None
        if places is not None:
            return self.drop_at(x, *places, keys, is_scaled)
        return self._kernel(x, keys, is_scaled, first_row=keys[3] * rows, tokens=tokens)

    def drop_at(self, x: Tensor, row: Tensor, token: Tensor, keys: Keys, is_scaled: bool = True) -> Tensor:
        """Drop as `drop` in activations [..., features] of tokens with the global `row` and `token`, int32 [...]."""
        if not self._in_one_kernel(x):
            return self.without(x, self.dropped_at(row, token, x.shape[-1], keys).view(x.shape), is_scaled)
        return self._kernel(x, keys, is_scaled, rows=row.contiguous(), places=token.contiguous())

    def _in_one_kernel(self, x: Tensor) -> bool:
        # A compiler makes one kernel of the operators by itself; a subclass of Tensor has no memory of its own.
        here = x.is_cuda and type(x) is Tensor and not torch.compiler.is_compiling() and self.p < 1
        return here and kernel(x.device) is not None

    def _kernel(self, x: Tensor, keys: Keys, is_scaled: bool, **where: Any) -> Tensor:
        module: Any = kernel(x.device)
        threshold, scale = self._threshold, self.scale if is_scaled else 1.0
        return module.drop(x, module.Dropped(tuple(keys[:3]), threshold, scale, self.feature_offset, **where))

    @property
    def _threshold(self) -> int:
        """Return the signed 32-bit number below which a random one is with probability `p`."""
        return min(round(self.p * 2**32), 2**32 - 1) - 2**31

    def check_counted(self) -> None:
        """Raise a RuntimeError in training if the forward of the parallelized model, which counts, is not running."""
        if torch.is_grad_enabled() and not self.count.running and not in_backward():
            raise RuntimeError(
                f"the LoRA layer {self.name} was called in training, but not by the model's own forward, which counts "
                "the steps that its dropout depends on: call the parallelized model, not a module inside it."
            )

    @property
    def scale(self) -> float:
        """Return the factor of what is not dropped, 1 / (1 - p); 0 if everything is dropped."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def without(self, x: Tensor, dropped: Tensor, is_scaled: bool = True) -> Tensor:
        """Return `x` with zeros where the mask `dropped` is True, and the rest scaled, if `is_scaled`."""
        if self.p == 1:
            return x * 0
        kept = x.masked_fill(dropped, 0)
        return kept * self.scale if is_scaled else kept


@cache
def kernel(device: torch.device) -> Any:
    """Return the module of the kernel that drops elements on this GPU; None, with a warning, where Triton does not run.

    The operators of torch drop the same, in some sixty kernels.
    """
    try:
        from lora_parallel.adapters import dropout_kernel

        dropout_kernel.drop(torch.ones(1, 1, device=device), dropout_kernel.Dropped((0, 0, 0), 0, 1.0, 0))
    except torch.OutOfMemoryError:  # which passes
        raise
    except Exception as error:  # no Triton, none for this device, or no compiler: each says so in its own way
        log.warning(
            "LoRA dropout runs in many kernels, as Triton does not run here: %s: %s", type(error).__name__, error
        )
        return None
    return dropout_kernel
