"""A quantised linear layer whose tensors FSDP2 and tensor parallelism can shard.

Quantisers keep a weight as a tensor subclass with scales in its attributes, of which sharding knows nothing. Here each
of its tensors is a frozen parameter of bytes, uint8 [out, .], that belongs to the same rows; in forward the quantiser's
own object is made of views of them, and its own kernel is called. Nothing is quantised again, and FSDP2's param_dtype,
which casts floating-point parameters, leaves them alone. The layer stays an instance of the quantiser's class.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

__all__ = ["Quantised", "bytes_of", "frozen"]


class Quantised(nn.Linear):
    """What formats have in common. `weight` is uint8 [out, bytes of a row]."""

    scales: dict[str, bool]
    """Its other parameters of bytes, [out, .]: whether each is of whole rows, or of blocks of input features."""

    block: int
    """How many input features share a scale."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The weight that it stands for: [out, in] of the rows and columns that are here."""

    def dense_of(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight that other bytes of its kind stand for: `weight` and its scales, of some rows."""
        like: Any = object.__new__(type(self))
        like.__dict__.update(self.__dict__)
        like.__dict__["_parameters"] = dict(parts)
        return like.dense()

    def roles(self) -> dict[str, tuple[str, int | None]]:
        """Of its parameters beside weight and bias, as in `subclasses`: those of blocks are cut as the weight is."""
        return {name: ("output", 0) if of_rows else ("weight", None) for name, of_rows in self.scales.items()}

    def cut_problem(self, style: Any, tp: int) -> str | None:
        """Why tp ranks cannot have parts of it as `style` says, or None if they can."""
        if style.weight != Shard(1) or self.block >= self.in_features or self.in_features % (self.block * tp) == 0:
            return None
        blocks = self.in_features // self.block
        possible = ", ".join(str(n) for n in range(1, blocks + 1) if blocks % n == 0)
        return (
            f"its {self.in_features} input features are quantised in {blocks} blocks of {self.block}, and tp={tp} "
            f"would cut one in two: tp can be {possible}"
        )


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that does not train."""
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def bytes_of(tensor: Tensor, rows: int) -> nn.Parameter:
    """Of any dtype, as uint8 [rows, .]."""
    return frozen(tensor.detach().contiguous().view(rows, -1).view(torch.uint8))
