"""Run collectives on values that the user logs or gathers.

They run over data-parallel ranks, since pp, cp and tp peers hold the same values.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lora_parallel.integration import collective_call, dp_size


class _Gather(torch.autograd.Function):
    """Stack every rank's tensor along a new first dim, [ranks, ...], with gradients.

    The all-gather of torch.distributed.nn does not support sub-groups of gloo in backward.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


class Communication:
    """Communicate between ranks as Lightning requires of a strategy.

    Methods with a `group` treat the group of all processes as None, because Fabric and `LightningModule.all_gather`
    pass it if the user gave no group.
    """

    device_mesh: Any
    root_device: Any
    _mesh: Any

    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        with collective_call("barrier"):
            if dist.get_backend() == "nccl":
                dist.barrier(device_ids=[self.root_device.index])
            else:
                dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        holder = [obj]
        dist.broadcast_object_list(holder, src)
        return holder[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce a tensor over data-parallel ranks: their pp, cp and tp peers hold the same value, which counts once.

        Before this Trainer's processes have started there is nothing to reduce over, and the tensor is as it was.

        Args:
            tensor: The tensor; any other object is returned as it is.
            group: A process group to reduce over instead.
            reduce_op: The operation as Lightning names it; "mean" and "avg" average, None sums.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        name = "sum" if reduce_op is None else str(reduce_op).rsplit(".", 1)[-1].lower()
        mean = name in ("mean", "avg")
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        operation = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name.upper())
        if group is not None and group is not dist.group.WORLD:
            dist.all_reduce(tensor, operation, group=group)
            return tensor / dist.get_world_size(group) if mean else tensor
        if self._mesh is None:
            return tensor
        for axis in ("dp_replicate", "dp_shard"):
            if self.device_mesh[axis].size() > 1:
                dist.all_reduce(tensor, operation, group=self.device_mesh.get_group(axis))
        return tensor / dp_size(self.device_mesh) if mean else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together with all ranks, pp, cp and tp peers included.

        Args:
            decision: This rank's decision.
            all: Return True only if every rank's decision is True; False: if any rank's is.
        """
        flag = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from the data-parallel ranks, in their order: [data-parallel size, ...].

        Args:
            tensor: This rank's tensor.
            group: A process group to gather from instead: [group size, ...].
            sync_grads: Let gradients flow back to the ranks that the values came from.
        """
        with nullcontext() if sync_grads else torch.no_grad():
            if group is not None and group is not dist.group.WORLD:
                return _Gather.apply(tensor, group)
            for axis in ("dp_shard", "dp_replicate"):
                tensor = _Gather.apply(tensor, self.device_mesh.get_group(axis))
            return tensor.flatten(0, 1)
