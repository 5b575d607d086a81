"""Collectives on values that the user logs or gathers: over data-parallel ranks, since tp peers hold the same ones."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lora_parallel.mesh import dp_size
from lora_parallel.rendezvous import collective_call

__all__ = ["Communication"]


class _Gather(torch.autograd.Function):
    """Every rank's tensor along a new first dim; torch.distributed.nn's does not know gloo sub-groups in backward."""

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
    """The communication that Lightning asks of a strategy.

    A group of all processes stands for none given: Fabric and `LightningModule.all_gather` pass it where nobody asked
    for a group.
    """

    device_mesh: Any
    root_device: Any

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
        """Reduce over data-parallel ranks: tp peers hold the same value, which must not count twice."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        name = "sum" if reduce_op is None else str(reduce_op).rsplit(".", 1)[-1].lower()
        mean = name in ("mean", "avg")
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        operation = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name.upper())
        if group is not None and group is not dist.group.WORLD:
            dist.all_reduce(tensor, operation, group=group)
            return tensor / dist.get_world_size(group) if mean else tensor
        for axis in ("dp_replicate", "dp_shard"):
            if self.device_mesh[axis].size() > 1:
                dist.all_reduce(tensor, operation, group=self.device_mesh.get_group(axis))
        return tensor / dp_size(self.device_mesh) if mean else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """A decision of all ranks, tp peers included."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather over data-parallel ranks, in their order: [data-parallel size, ...]. With `group`, over that."""
        with nullcontext() if sync_grads else torch.no_grad():
            if group is not None and group is not dist.group.WORLD:
                return _Gather.apply(tensor, group)
            for axis in ("dp_shard", "dp_replicate"):
                tensor = _Gather.apply(tensor, self.device_mesh.get_group(axis))
            return tensor.flatten(0, 1)
