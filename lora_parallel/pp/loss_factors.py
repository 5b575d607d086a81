"""Compare the factors by which ranks multiply gradients that they have computed together.

Under "1f1b" gradients are summed over data-parallel ranks inside of the forward, and `loss.backward()` multiplies the
sum by the gradient of the loss. In one process each rank's part would be multiplied before the sum. Both are the same
if the factor is: a weight for each rank's batch, or a batch whose loss one rank leaves out, would be wrong without an
error.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from lora_parallel.distributed.mesh import axis_size
from lora_parallel.fsdp.unit_order import ModelOrder
from lora_parallel.pp.links import Links

__all__ = ["LossFactors"]


class LossFactors:
    """Compare the factors of one model's losses.

    Args:
        mesh: The mesh of the model.
        links: Connects the ranks of a pipeline.
        order: The order of the model's FSDP units, in which ranks learn that one leaves a backward out; None if it has
            none.
    """

    def __init__(self, mesh: DeviceMesh, links: Links, order: ModelOrder | None) -> None:
        axes = [axis for axis in ("dp_replicate", "dp_shard") if axis_size(mesh, axis) > 1]
        self._links, self._order = links, order if axes else None
        self._groups = [mesh.get_group(axis) for axis in axes]

    def check(self, factor: Tensor) -> None:
        """Check the gradient of a loss. Collective over the ranks of a pipeline, and its data-parallel peers.

        Args:
            factor: The gradient of the loss, without dims.

        Raises:
            RuntimeError: It differs between ranks, or one of them does not call backward; raised on all of them.
        """
        bits = torch.where(factor.isnan(), torch.nan, factor.double() + 0.0).view(torch.int64)
        both = torch.stack([bits, ~bits])
        if self._order is not None:
            self._order.all_reduce("factor of the loss", both, dist.ReduceOp.MAX, self._groups)
        self._links.all_reduce_max(both)
        highest, lowest = both[0], ~both[1]
        if int(highest) != int(lowest):
            raise RuntimeError(
                f"the gradient of the loss is {factor.item()} on rank {dist.get_rank()}, and another one on other "
                'ranks. Under pp_schedule="1f1b" and "interleaved" the gradients of a batch are summed over ranks '
                'before they are multiplied by it: let all ranks use the same one, or use pp_schedule="gpipe", under '
                "which data-parallel ranks may weigh their losses."
            )
