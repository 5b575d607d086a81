"""Compute what a step costs on a mesh, in bytes and in seconds, from the cost of one micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lora_parallel.cost.simulated_step import PHASES, Numbers, StepCost
from lora_parallel.distributed.mesh import communicators
from lora_parallel.metrics import PEAKS


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


def _crossing(sizes: Mapping[str, int], hardware: Hardware) -> dict[str, bool]:
    """Return whether the messages of each axis go between machines, which tp is the last to cross and pp the first."""
    crossing, span = {}, 1  # `span`: consecutive ranks that hold a group of the axis
    for axis in ("tp", "cp", "dp_shard", "dp_replicate", "pp"):
        span *= sizes.get(axis, 1)
        crossing[axis] = span > hardware.gpus_per_node
    return crossing


def predicted_seconds(
    hardware: Hardware,
    sizes: Mapping[str, int],
    flops: float,
    sent: Mapping[str, float],
    messages: Mapping[str, float],
    microbatches: int,
) -> float:
    """Return the seconds of a step, from a rank's operations, and its bytes and messages for each axis.

    Messages over tp and cp are waited for; those over dp are hidden behind compute as far as it lasts. A pipeline's
    ranks wait for (pp - 1) of (microbatches + pp - 1) slots (Narayanan et al. 2021, Megatron-LM, section 2.2.1).
    """
    pp = sizes.get("pp", 1)
    seconds: dict[str, float] = {}
    for axis, crosses in _crossing(sizes, hardware).items():
        bandwidth = hardware.network_gbs if crosses else hardware.link_gbs
        seconds[axis] = sent.get(axis, 0) / (bandwidth * 1e9) + messages.get(axis, 0) * hardware.latency
    compute = flops / (hardware.tflops * 1e12 * hardware.efficiency)
    step = max(compute + seconds["tp"] + seconds["cp"], seconds["dp_shard"] + seconds["dp_replicate"])
    return step * (microbatches + pp - 1) / microbatches + seconds["pp"]


_RESERVED = 0.08  # of a GPU's memory, for CUDA's context, NCCL's buffers and what the allocator cannot use
_COMMUNICATOR = 0.7  # GiB, of a group of GPUs with NVLink: https://github.com/NVIDIA/nccl/issues/964 measured 688 MiB


@dataclass(frozen=True)
class MeshCost:
    """Say what a step costs a rank of a mesh: the rank that holds most."""

    sizes: dict[str, int]
    """Size of each mesh axis."""

    options: dict[str, Any]
    """Fields of `ParallelConfig` besides those sizes."""

    rows: int
    """Rows of a micro-batch, on each data-parallel rank."""

    microbatches: int
    """Micro-batches of a step, on each data-parallel rank: of a pipeline, or forwards that accumulate gradients."""

    weights: int = 0
    """Bytes of frozen parameters and buffers."""

    trained: int = 0
    """Bytes of the parameters that train: of the adapters, or of all."""

    gradients: int = 0
    """Bytes of gradients as the optimizer steps."""

    states: int = 0
    """Bytes of the optimizer's states."""

    activations: int = 0
    """Most bytes that forward and backward of the blocks add: activations, gathered weights, gradients so far."""

    logits: int = 0
    """Bytes by which logits and loss exceed `activations`."""

    total: int = 0
    """Most bytes that a rank holds at a time."""

    messages: dict[str, int] = field(default_factory=dict)
    """Messages of a step, for each axis."""

    sent: dict[str, int] = field(default_factory=dict)
    """Bytes that the rank sends in a step, for each axis."""

    between_machines: int = 0
    """Bytes that the rank sends in a step on the axes that go from machine to machine; a part of `sent`."""

    communicators: int = 0
    """Communicators that NCCL keeps buffers for, besides those of a pipeline's neighbours."""

    seconds: float = 0.0
    """Predicted seconds of a step."""

    fits: bool = False
    """True if `total` fits the GPU's memory, of which `fits` leaves a part free."""

    refused: str = ""
    """The error with which `parallelize` refuses this mesh; empty if it does not."""


def preference(cost: MeshCost) -> tuple[Any, ...]:
    """Return what meshes are sorted by: those that fit first, by their seconds, and the others by their bytes.

    Seconds are a guide of two digits: of meshes with the same two the one that sends less between machines is first.
    """
    if not cost.fits:
        return bool(cost.refused), True, cost.total
    return False, False, float(f"{cost.seconds:.2g}"), cost.between_machines, cost.seconds


def fits(total: float, sizes: Mapping[str, int], hardware: Hardware) -> bool:
    """Return True if so many bytes fit the memory of a GPU of this mesh.

    8 % of the memory are left free, or 0.7 GiB for each communicator if that is more.
    """
    free = max(_RESERVED * hardware.gpu_memory, _COMMUNICATOR * communicators(sizes))
    return total <= (hardware.gpu_memory - free) * 2**30


def with_cost(
    mesh: MeshCost,
    step: StepCost,
    step_shards: int,
    stages: list[tuple[int, int]],
    hidden_bytes: int,
    logits_bytes: int,
    hardware: Hardware,
) -> MeshCost:
    """Return `mesh` with its cost, from what one micro-batch takes on `step_shards` shards with the same tp and cp.

    `stages` are the first and last (left out) blocks of each pipeline stage; the last stage holds the logits of all
    micro-batches.
    """
    sizes, microbatches = mesh.sizes, mesh.microbatches
    pp, shards = sizes["pp"], sizes["dp_shard"] * sizes["cp"]
    whole_base = not mesh.options.get("shard_base", True)
    parts = []
    for index, bounds in enumerate(stages):
        ends = (index == 0, index == len(stages) - 1)
        in_flight, sent_bytes = 1, 0
        if pp > 1:
            in_flight = min(pp - index, microbatches)  # 1F1B
            sent_bytes = microbatches * (hidden_bytes * (1 if ends[0] else 2) + logits_bytes * ends[1])
        parts.append(_stage(step, bounds, ends, in_flight - 1, sent_bytes, shards, step_shards, whole_base))
    largest = max(parts, key=lambda part: part["total"])
    busiest = max(parts, key=lambda part: part["flops"])
    sent = {axis: microbatches * busiest.get(f"sent {axis}", 0.0) for axis in ("tp", "cp", "dp_shard")}
    messages = {axis: microbatches * busiest.get(f"messages {axis}", 0.0) for axis in ("tp", "cp", "dp_shard")}
    if (copies := sizes["dp_replicate"]) > 1:
        sent["dp_replicate"] = 2 * largest["trained"] * (copies - 1) / copies
        messages["dp_replicate"] = 1 if whole_base else len(step.blocks) / pp + 1
    if pp > 1:
        sent["pp"], messages["pp"] = 2.0 * microbatches * hidden_bytes, 2.0 * microbatches
    return replace(
        mesh,
        weights=round(largest["base"] + largest["buffers"]),
        trained=round(largest["trained"]),
        gradients=round(largest["trained"]),
        states=round(largest["states"]),
        activations=round(largest["activations"]),
        logits=round(max(0.0, largest["peak"] - largest["activations"])),
        total=round(largest["total"]),
        messages={axis: round(count) for axis, count in messages.items() if count},
        sent={axis: round(size) for axis, size in sent.items() if size},
        seconds=predicted_seconds(hardware, sizes, microbatches * busiest["flops"], sent, messages, microbatches),
        between_machines=round(sum(sent.get(axis, 0.0) for axis, does in _crossing(sizes, hardware).items() if does)),
        communicators=communicators(sizes),
        fits=fits(largest["total"], sizes, hardware),
    )


def _stage(
    step: StepCost,
    bounds: tuple[int, int],
    ends: tuple[bool, bool],
    more_in_flight: int,
    sent_bytes: int,
    shards: int,
    step_shards: int,
    whole_base: bool,
) -> Numbers:
    """Return what a stage takes, which keeps the activations of `more_in_flight` micro-batches besides those of one.

    `ends` say whether it is the first and the last stage. `sent_bytes` are kept until the end of the step: hidden
    states and gradients that are sent, and logits. (The peak of `step` is in the backward of the head, for which it
    holds no logits.) With `whole_base` no shard of the base is smaller for more shards, and nothing of it is gathered.
    """
    total = step.total(*bounds)
    is_first, is_last = ends
    elsewhere = (0.0 if is_first else total["embedding"]) + (0.0 if is_last else total["head"])
    gathered = elsewhere * (
        step_shards if step_shards > 1 and not whole_base else 0
    )  # the weights around the blocks, in every phase
    kept = more_in_flight * sum(block.get("peak head", 0.0) for block in step.blocks[slice(*bounds)]) + sent_bytes
    peaks = {phase: total[f"peak {phase}"] - gathered + kept for phase in PHASES if phase != "head" or is_last}
    ratio = step_shards / shards
    base_ratio = 1.0 if whole_base else ratio
    frozen = total["base"] / (total["base"] + total["trained"])
    stored = {"base": total["base"] * base_ratio - elsewhere * base_ratio * frozen}
    for name in ("trained", "states"):
        stored[name] = total[name] * ratio - elsewhere * ratio * (1 - frozen) * total[name] / total["trained"]
    peaks["optimizer"] = stored["trained"] * max(1.0, total["peak optimizer"] / max(1.0, total["trained"]))
    numbers = {name: value for name, value in total.items() if name.startswith(("sent", "messages", "flops"))}
    if "sent dp_shard" in numbers:
        numbers["sent dp_shard"] *= (1 - 1 / shards) / (1 - 1 / step_shards)
    most = max(peaks.values())
    return {
        **numbers,
        **stored,
        "buffers": total["buffers"],
        "activations": max(peak for phase, peak in peaks.items() if phase != "head"),
        "peak": most,
        "total": sum(stored.values()) + total["buffers"] + most,
    }


def possible_meshes(gpus: int, gpus_per_node: int, blocks: int, tokens: int, batch: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the axes of each mesh for `batch` rows of a step, of so many tokens each.

    - tp stays inside of a machine, as it sends the activations of every layer.
    - cp leaves each rank 4,096 tokens at least: shorter rows are better divided by other axes.
    - pp has a block at least for each stage, and a micro-batch at least for each stage.
    - dp_replicate is 1, or as many copies as let dp_shard, of 2 at least, stay inside of a machine: Accelerate refuses
      copies that nothing is sharded in.
    - The data-parallel ranks divide the batch.
    """
    for pp in _divisors(gpus):
        for cp in _divisors(gpus // pp):
            for tp in _divisors(gpus // (pp * cp)):
                dp = gpus // (pp * cp * tp)
                if pp > blocks or tp > gpus_per_node or (cp > 1 and tokens // cp < 4096):
                    continue
                if batch % dp or (pp > 1 and batch // dp < pp):
                    continue
                inside = max(1, gpus_per_node // (tp * cp))
                for copies in sorted({1, dp // inside if dp > inside > 1 and dp % inside == 0 else 1}):
                    yield {"pp": pp, "dp_replicate": copies, "dp_shard": dp // copies, "cp": cp, "tp": tp}


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
