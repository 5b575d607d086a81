"""Compare the inputs of every forward between the ranks of one batch.

Each peer computes a slice of every layer: with different batches their sums are of neither batch, and no error says so.
So these ranks compare the inputs of every forward by one message of two numbers. The first batch for training and the
first for evaluation are compared before anything is computed, and so is every batch on a CPU. On an accelerator a later
batch is compared as the next forward begins, so that no rank waits for its device.

Before the first forward of all they meet, so that a rank that comes alone soon says whom it waits for. A later forward
has no meeting, not even the first for evaluation: a peer that trains on in the meantime would not come, and its message
says at once that ranks make different forwards.
"""

from __future__ import annotations

import zlib
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils._pytree import tree_flatten

from lora_parallel.distributed.collectives import named
from lora_parallel.distributed.dtensors import fingerprint_on_device, tensors_in
from lora_parallel.distributed.meetings import meet
from lora_parallel.distributed.mesh import axis_size, dp_rank, same_batch_groups, same_batch_mesh, stage_mesh
from lora_parallel.distributed.rank_checks import agreed


class SameBatch:
    """Compare the inputs of each forward of one model between the ranks of one batch."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._device = mesh.device_type
        self._groups = same_batch_groups(mesh)
        together, stages = same_batch_mesh(mesh).size(), axis_size(mesh, "pp")
        first = dp_rank(mesh) * together
        self._ranks = [r for stage in mesh.mesh.reshape(stages, -1).tolist() for r in stage[first : first + together]]
        kinds = {"pp": "pipeline", "cp": "context", "tp": "tensor"}
        self._kinds = [kind for axis, kind in kinds.items() if axis_size(mesh, axis) > 1]
        of_stage = f"rank % {stage_mesh(mesh).size()}" if stages > 1 else "rank"
        self._formula = f"{of_stage} // {together}" if together > 1 else of_stage
        self._unchecked, self._forwards = {True, False}, 0
        # number of the last forward, and its message, which holds once the device's event is over
        self._sent: tuple[int, Tensor, Any] | None = None

    def begin_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise RuntimeError if peers were fed other batches. Collective; over all ranks in the first to train."""
        inputs, training = [args, kwargs], model.training
        if self._sent is not None:
            (number, last, event), self._sent = self._sent, None
            event.synchronize()
            self._compare(number, last)
        if not self._forwards:
            meet("the model's first forward", ranks=self._ranks)
        self._forwards += 1
        first = training in self._unchecked
        self._unchecked.discard(training)
        both = self._message(inputs, training)
        for group in self._groups:
            with named("inputs", f"the model's forward for {'training' if training else 'evaluation'}", group):
                dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        if first or self._device == "cpu":
            with agreed() if first and training else nullcontext():
                self._compare(self._forwards, both)
            return
        on_cpu = torch.empty(2, dtype=both.dtype, pin_memory=True)
        on_cpu.copy_(both, non_blocking=True)
        event = torch.get_device_module(self._device).Event()
        event.record()
        self._sent = self._forwards, on_cpu, event

    def _message(self, inputs: Any, training: bool) -> Tensor:
        """Return a number of the inputs, and one that falls as the first rises: int64 [2]."""
        leaves, _ = tree_flatten(dict(enumerate(inputs)))
        names = sorted(key for group in inputs if isinstance(group, dict) for key in group)
        plain = [leaf if isinstance(leaf, bool | int | float | str) else type(leaf).__name__ for leaf in leaves]
        described = zlib.crc32(repr((training, torch.is_grad_enabled(), names, plain)).encode())
        total = torch.full((), described, device=self._device)  # written by the device: the host does not wait
        for tensor in tensors_in(inputs):
            total = total * 1000003 + fingerprint_on_device(tensor).to(total.device)
        return torch.stack([total, ~total])

    def _compare(self, number: int, both: Tensor) -> None:
        highest, lowest = int(both[0]), ~int(both[1])
        if highest != lowest:
            raise RuntimeError(
                f"ranks {self._ranks} are {' and '.join(self._kinds)} parallel peers and were fed different batches in "
                f"forward {number}, or one of them makes forwards that the others do not: what they compute is of "
                f"neither batch. Shard the data by data-parallel rank ({self._formula}), not by process; give each "
                "process the same dataset (random data needs one seed); and call the model on all of these ranks, in "
                "evaluation too."
            )
