"""Gather sharded tensors, and replace operators that torch computes from one rank's part of a DTensor alone.

`.item()` of a value that is spread over the ranks (a norm of a sharded gradient) returns the part of the calling rank.
`GradScaler` looks for infs in the parts of one rank, and then asks other ranks only over the mesh axes that the *first*
gradient is sharded over. If the first gradient is that of a `lora_A`, which tp replicates, a rank whose `lora_B`
overflowed skips the step alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lora_parallel.distributed.rank_checks import gather_objects
from lora_parallel.distributed.torch_private import compute_for_dtensors, local_region, local_tensor
from lora_parallel.storage import saving_bar

_BUCKET_BYTES = 64 * 2**20
_PIECE = 2**16  # words of 8 bytes that are mixed at a time, in temporary copies of 512 KiB
log = logging.getLogger(__name__)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in a nest of mappings (such as transformers' model outputs), lists, tuples and dataclasses."""
    inner: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    elif is_dataclass(value) and not isinstance(value, type):
        inner = (getattr(value, field.name) for field in fields(value))
    for item in inner:
        yield from tensors_in(item)


def tensor_on(device: torch.device | str, data: Any, dtype: torch.dtype) -> Tensor:
    """Return a tensor of Python numbers on a device, without making the CPU wait for the device."""
    pinned = torch.device(device).type not in ("cpu", "meta")  # torch waits for copies from memory that is not
    return torch.tensor(data, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=True)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast computes in on a type of device, or None if it is off or there is none."""
    available = torch.amp.is_autocast_available(device_type)
    return torch.get_autocast_dtype(device_type) if available and torch.is_autocast_enabled(device_type) else None


def fingerprint(tensor: Tensor) -> int:
    """Return a 64-bit number of a tensor's bytes and their order. Unlike tensors share one by a chance of about 2**-64.

    It is no guard against bytes that are chosen to collide.
    """
    return int(fingerprint_on_device(tensor))


def fingerprint_on_device(tensor: Tensor) -> Tensor:
    """Return `fingerprint` as an int64 tensor without dims, without waiting for the tensor's device."""
    data = tensor.detach().contiguous().view(-1)
    if data.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=data.device)
    raw = data.view(torch.uint8)
    total = torch.full((), raw.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, raw.numel(), 8 * _PIECE):
        piece = raw[start : start + 8 * _PIECE]
        words = F.pad(piece, (0, -len(piece) % 8)).view(torch.int64)  # [words], a copy
        # Each word is mixed with its place, as SplitMix64 does it (https://doi.org/10.1145/2660193.2660195).
        words += torch.arange(start // 8, start // 8 + len(words), device=words.device) * -0x61C8864680B583EB
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
            words ^= (words >> shift) & (2 ** (64 - shift) - 1)  # the sign, which `>>` repeats, is masked
            words *= factor
        total += words.sum()
    return total


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, detached from autograd; it shares the memory of `tensor`."""
    return (local_tensor(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def sharded_as(part: Tensor, tensor: DTensor) -> DTensor:
    """Return a DTensor with the shape and layout of `tensor`, of which this rank holds `part`, without a copy."""
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def reshard(model: nn.Module) -> None:
    """Put every FSDP unit's sharded parameters back in place, if a forward has left gathered ones there."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def region_of(tensor: Tensor) -> tuple[slice, ...]:
    """Return the region of the full tensor that this rank's part of `tensor` covers, one slice a dim."""
    data = tensor.detach()
    return local_region(data) if isinstance(data, DTensor) else tuple(slice(0, size) for size in data.shape)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Map the name of each buffer that a state dict of `module` contains to the buffer."""
    return {
        f"{prefix}.{key}" if prefix else key: buffer
        for prefix, inner in module.named_modules()
        for key, buffer in inner._buffers.items()
        if buffer is not None and key not in inner._non_persistent_buffers_set
    }


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the module's class before `fully_shard`, which puts a subclass of its own in the place of the class."""
    kind = type(module)
    return kind.__mro__[2] if isinstance(module, FSDPModule) else kind


@dataclass(frozen=True)
class _LocalRegion:
    """Describe a tensor, and the region of it that one rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str  # type of the device that its bytes are sent from
    region: tuple[slice, ...]

    @property
    def whole_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Return the number of bytes that the rank holds."""
        return prod(part.stop - part.start for part in self.region) * self.dtype.itemsize


def gather_on_rank_zero(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full copies of `tensors` on the CPU of rank 0, and an empty dict on other ranks. Collective.

    Each rank announces which region of each tensor it holds; the first rank that holds a region sends it, and rank 0
    puts it in place. So any placement of FSDP2 and tensor parallelism is gathered in one message per bucket of
    tensors, where `DTensor.full_tensor` takes one message per mesh axis and leaves the result on every rank. A tensor
    may be on some of the ranks only, as those of a pipeline stage are: the others send nothing of it.

    Args:
        tensors: The tensors that this rank holds a part of, by name.
    """
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {name: local(tensor).to("cpu", copy=True) for name, tensor in detached.items()}
    everyone = _of_first_holders(gather_objects({name: _local_region(tensor) for name, tensor in detached.items()}))
    mine = everyone[dist.get_rank()]
    union = {name: region for regions in everyone for name, region in regions.items()}
    gathered: dict[str, Tensor] = {}
    sizes = {name: region.whole_bytes for name, region in union.items()}
    progress = saving_bar("Saving", sum(sizes.values()))
    for bucket in _buckets(sizes):
        parts = [_bytes_to_send(detached[name]) for name in bucket if name in mine]
        sent = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=union[bucket[0]].device)
        counts = [sum(regions[name].bytes for name in bucket if name in regions) for regions in everyone]
        padded = torch.nn.functional.pad(sent, (0, max(counts) - sent.numel()))
        received = [torch.empty_like(padded) for _ in everyone] if dist.get_rank() == 0 else None
        dist.gather(padded, received, dst=0)
        if received is None:
            continue
        gathered |= {name: torch.empty(union[name].shape, dtype=union[name].dtype) for name in bucket}
        for part, regions in zip(received, everyone, strict=True):
            start, flat = 0, part.cpu()
            for name in (name for name in bucket if name in regions):
                end = start + regions[name].bytes
                target = gathered[name][regions[name].region]
                target.copy_(flat[start:end].clone().view(target.dtype).view(target.shape))
                start = end
        progress.update(sum(sizes[name] for name in bucket))
    progress.close()
    return gathered


def _of_first_holders(everyone: list[dict[str, _LocalRegion]]) -> list[dict[str, _LocalRegion]]:
    """Return the regions of each rank that no rank before it holds too."""
    held: set[tuple[str, tuple[tuple[int, int], ...]]] = set()
    first = []
    for regions in everyone:
        keys = {name: (name, tuple((part.start, part.stop) for part in each.region)) for name, each in regions.items()}
        first.append({name: each for name, each in regions.items() if keys[name] not in held})
        held.update(keys.values())
    return first


def _local_region(tensor: Tensor) -> _LocalRegion:
    device = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else tensor.device.type
    return _LocalRegion(tuple(tensor.shape), tensor.dtype, device, region_of(tensor))


def _bytes_to_send(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor` as bytes, on the device of its mesh."""
    # An offloaded part is in the CPU's memory, for which the process group may have no backend.
    raw = local(tensor).reshape(-1).view(torch.uint8)
    return raw.to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else raw


def _buckets(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield names of tensors that are gathered together, by the bytes of whole tensors: ranks agree on the buckets."""
    bucket: list[str] = []
    for name, size in sizes.items():
        if bucket and sum(sizes[other] for other in bucket) + size > _BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(name)
    if bucket:
        yield bucket


def guard_dtensor_operators() -> None:
    """Replace `item`, and what `GradScaler.unscale_` and `detect_anomaly` call, for DTensors in this process."""
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


def axis_of_parts(tensor: DTensor) -> tuple[str, Placement] | None:
    """Return the first mesh axis whose ranks each have a part of a tensor, and its placement; None if there is none."""
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate() and mesh.size(axis) > 1:
            return mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis), placement
    return None


def _item(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute `.item()`, `float(tensor)`, `int(tensor)` or `bool(tensor)`; refuse a value spread over the ranks."""
    if (parts := axis_of_parts(args[0])) is not None:
        # A reduction would give the right value, and would hang if one rank logs the value alone.
        raise RuntimeError(
            f"item() of a DTensor that is {parts[1]!r} over the mesh axis {parts[0]}: each rank has a part of the "
            "value, and would return that (as float(), int() and bool() do). Call .full_tensor().item() on every "
            "rank; to clip gradients, lora_parallel.clip_grad_norm_."
        )
    return operator(local(args[0]))


def _is_any_true(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return True if this rank's part holds a True, by which `torch.autograd.detect_anomaly` looks for NaN."""
    # torch has no sharding rule for it. The rank whose part holds the NaN raises the error, as for a plain tensor.
    return operator(local(args[0]))


def _unscale(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Divide gradients by the scale, and note whether one is not finite, for `GradScaler.unscale_` and `step`."""
    gradients: list[Tensor] = args[0]
    found_inf: Tensor = args[1]
    operator([local(gradient) for gradient in gradients], *args[1:], **kwargs)
    # Every rank of every mesh that a gradient is on learns of it, so that all ranks step or skip together.
    meshes = [gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)]
    groups = {group.group_name: group for mesh in meshes for group in mesh.get_all_groups()}
    for group in groups.values():
        if group.size() > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
