"""Predict the time of a step from few numbers of the hardware: a rough guide to which mesh is faster, not a measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_parallel.metrics.device_peaks import PEAKS

__all__ = ["GPUS", "Hardware", "predicted_seconds"]


@dataclass(frozen=True)
class Hardware:
    """Describe the GPUs of a cluster and what connects them."""

    gpu_memory: float
    """GiB of a GPU's memory."""

    tflops: float
    """Dense bfloat16 operations of a GPU, in 10^12 a second."""

    link_gbs: float
    """Bandwidth between GPUs of one machine, in 10^9 bytes a second, of a GPU in one direction."""

    network_gbs: float = 50.0
    """Bandwidth between machines for each GPU, in 10^9 bytes a second, in one direction: 50 is 400 Gbit/s."""

    gpus_per_node: int = 8
    """GPUs of a machine."""

    efficiency: float = 0.5
    """Share of `tflops` that matrix products reach."""

    latency: float = 20e-6
    """Seconds that each message takes besides its bytes."""


GPUS = {
    "A100-40": Hardware(40, PEAKS["A100"] / 1e12, 300),
    "A100": Hardware(80, PEAKS["A100"] / 1e12, 300),
    "H100": Hardware(80, PEAKS["H100"] / 1e12, 450),
    "H200": Hardware(141, PEAKS["H200"] / 1e12, 450),
    "B200": Hardware(180, PEAKS["B200"] / 1e12, 900),
}
"""GPUs by name, as SXM modules with NVLink. Source: NVIDIA's data sheets; without sparsity."""


def predicted_seconds(
    hardware: Hardware,
    sizes: Mapping[str, int],
    flops: float,
    sent: Mapping[str, float],
    messages: Mapping[str, float],
    microbatches: int,
) -> float:
    """Return the seconds of a step.

    Messages over tp and cp are waited for; those over dp are hidden behind compute as far as it lasts. A pipeline's
    ranks wait for (pp - 1) of (microbatches + pp - 1) slots (Narayanan et al. 2021, Megatron-LM, section 2.2.1).

    Args:
        hardware: The cluster.
        sizes: Size of each mesh axis.
        flops: Operations of a rank's step.
        sent: Bytes that a rank sends in a step, for each axis.
        messages: Messages of a rank's step, for each axis.
        microbatches: Number of micro-batches of a step.
    """
    seconds: dict[str, float] = {}
    span = 1  # ranks that are nearer than those of the axis
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        span *= sizes.get(axis, 1)
        bandwidth = hardware.link_gbs if span <= hardware.gpus_per_node else hardware.network_gbs
        seconds[axis] = sent.get(axis, 0) / (bandwidth * 1e9) + messages.get(axis, 0) * hardware.latency
    compute = flops / (hardware.tflops * 1e12 * hardware.efficiency)
    waited = compute + seconds["tp"] + seconds["cp"]
    step = max(waited, seconds["dp_shard"] + seconds["dp_replicate"])
    pp = sizes.get("pp", 1)
    return step * (microbatches + pp - 1) / microbatches + seconds["pp"]
