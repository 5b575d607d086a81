"""Replace operators that torch computes from one rank's part of a DTensor alone: refuse them, or make ranks agree.

`.item()` of a value that is spread over the ranks (a norm of a sharded gradient) returns the part of the calling rank.
`GradScaler` looks for infs in the parts of one rank, and then asks other ranks only over the mesh axes that the *first*
gradient is sharded over. If the first gradient is that of a `lora_A`, which tp replicates, a rank whose `lora_B`
overflowed skips the step alone.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lora_parallel.distributed.gather import local
from lora_parallel.distributed.torch_private import compute_for_dtensors

__all__ = ["guard_dtensor_operators"]

log = logging.getLogger(__name__)


def guard_dtensor_operators() -> None:
    """Replace torch's `item` and the operators of `GradScaler.unscale_` and `detect_anomaly`, for DTensors.

    They are replaced in this process. Results that torch computes correctly stay the same.
    """
    aten = torch.ops.aten
    replaced = {
        aten._local_scalar_dense: _item,
        aten._amp_foreach_non_finite_check_and_unscale_: _unscale,
        aten._is_any_true: _is_any_true,
    }
    if not all(compute_for_dtensors(operator.default, function) for operator, function in replaced.items()):
        log.warning(
            "torch %s does not let the operators of DTensors be replaced: .item() of a sharded value gives this rank's "
            "part, and ranks may part under torch.amp.GradScaler: use ShardedGradScaler.",
            torch.__version__,
        )


def _item(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `tensor.item()`, `float(tensor)`, `int(tensor)` or `bool(tensor)`; refuse a value spread over the ranks.

    A reduction would give the right value, and would hang if one rank logs the value alone.
    """
    tensor: DTensor = args[0]
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate() and mesh.size(axis) > 1:
            over = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
            raise RuntimeError(
                f"item() of a DTensor that is {placement!r} over the mesh axis {over}: each rank has a part of the "
                "value, and would return that (as float(), int() and bool() do). Call .full_tensor().item() on every "
                "rank; to clip gradients, lora_parallel.clip_grad_norm_."
            )
    return operator(local(tensor))


def _is_any_true(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Say whether this rank's part holds a True, for `torch.autograd.detect_anomaly`, which looks for NaN by it.

    torch has no sharding rule for it. The rank whose part holds the NaN raises the error, as for a plain tensor.
    """
    return operator(local(args[0]))


def _unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Divide gradients by the scale, and note whether one is not finite, for `GradScaler.unscale_` and `step`.

    Every rank of every mesh that a gradient is on learns if a gradient is not finite, by one all-reduce of a number for
    each mesh axis; a run without a scaler has none of them. All ranks then step or skip together, and change the scale
    alike.
    """
    gradients: list[Tensor] = args[0]
    found_inf: Tensor = args[1]
    operator([local(gradient) for gradient in gradients], *args[1:], **kwargs)
    groups: dict[str, ProcessGroup] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            for axis in range(gradient.device_mesh.ndim):
                group = gradient.device_mesh.get_group(axis)
                if group.size() > 1:
                    groups[group.group_name] = group
    for group in groups.values():
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
