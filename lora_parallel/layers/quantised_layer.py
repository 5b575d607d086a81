"""Define a quantised linear layer whose tensors FSDP2 and tensor parallelism can shard.

Quantisers keep a weight as a tensor subclass with scales in its attributes, which FSDP2 and DTensor do not shard. Here
each of these tensors is a frozen parameter of bytes, uint8 [out, .], with the same rows as the weight; in forward the
quantiser's own object is made of views of the parameters, and its own kernel is called. Nothing is quantised again, and
FSDP2's param_dtype, which casts floating-point parameters, does not change bytes. The layer stays an instance of the
class that the quantiser uses.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Shard

__all__ = ["QuantisedLayer", "bytes_of", "frozen"]


class QuantisedLayer(nn.Linear):
    """Hold a quantised weight as parameters of bytes, in any format; `weight` is uint8 [out, bytes of a row]."""

    scales: dict[str, bool]
    """The other parameters of bytes, [out, .], by name: True if a value belongs to a whole row, False if to a block."""

    block: int
    """Number of input features that share a scale."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Return the dequantised weight, [out, in], of the rows and columns that the parameters hold now."""

    def dense_of(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the dequantised weight of other bytes in this layer's format.

        Args:
            parts: `weight` and its scales by name, of any number of rows.
        """
        like: Any = object.__new__(type(self))
        like.__dict__.update(self.__dict__)
        like.__dict__["_parameters"] = dict(parts)
        return like.dense()

    def roles(self) -> dict[str, tuple[str, int | None]]:
        """Map the names of the scales to roles as in `LayerTensor`: scales of blocks are cut as the weight is."""
        return {name: ("per_output", 0) if of_rows else ("weight", None) for name, of_rows in self.scales.items()}

    def cut_problem(self, style: Any, tp: int) -> str | None:
        """Return the reason why tp ranks cannot each have a part of the layer as `style` says, or None if they can."""
        of_rows = all(self.scales.values())
        if style.weight != Shard(1) or of_rows or self.in_features % (self.block * tp) == 0:
            return None
        blocks = self.in_features // self.block
        possible = ", ".join(str(n) for n in range(1, blocks + 1) if blocks % n == 0)
        return (
            f"its {self.in_features} input features are quantised in {blocks} blocks of {self.block}, and tp={tp} "
            f"would cut one in two: tp can be {possible}"
        )


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return a parameter with the values of `tensor` that does not train."""
    return nn.Parameter(tensor.detach().contiguous(), requires_grad=False)


def bytes_of(tensor: Tensor, rows: int) -> nn.Parameter:
    """Return the bytes of `tensor`, which may have any dtype, as a frozen parameter, uint8 [rows, bytes of a row]."""
    return frozen(tensor.detach().contiguous().view(rows, -1).view(torch.uint8))
