"""Measure a training run on the whole mesh: tokens a second, MFU, memory, communication.

The numbers are for dense matrix products in bfloat16, from the vendors' data sheets. NVIDIA's sheets often print the
number with sparsity, which is twice that.

A product with a matrix of N elements costs 2 N operations a token in the forward (a multiplication and an addition for
each element), 2 N for the gradient of its input, and 2 N for the gradient of the matrix (Kaplan et al. 2020, "Scaling
Laws for Neural Language Models", section 2.1). A frozen matrix needs no gradient: 4 N. Adapters train: 6 N. Attention
costs 12 x layers x heads x head size x sequence length a token, the mask not considered (Chowdhery et al. 2022, "PaLM",
appendix B). What is computed a second time by activation checkpointing is not counted.

In: sharded models, and the beginnings and ends of steps. Out: numbers for a logger, the same on every rank.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _profiler_enabled
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.distributed.mesh import axis_rank, over_stages
from lora_parallel.distributed.rank_checks import gather_numbers
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.layers.layer_parameters import innermost
from lora_parallel.layers.linear_classes import matrices
from lora_parallel.state import state_of


class ProfiledStep:
    """Profile one step, from `__init__` to `share`.

    A collective counts from its beginning to its end on the device (kernels of NCCL and RCCL) or, for gloo, in the
    process group's thread: with the time that it waits for other ranks, and that in which other work overlaps it.
    Intervals that overlap each other count once.
    """

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device_type == "cuda" else [])
        self._profiler = profile(activities=activities)
        self._profiler.start()
        self._start = time.perf_counter()

    def share(self) -> float:
        """End the step and return the share of its time in which a collective ran."""
        if self._device_type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self._start
        self._profiler.stop()
        return min(1.0, covered(self._profiler.events() or ()) / 1e6 / seconds)


def covered(events: Iterable[FunctionEvent]) -> float:
    """Return the microseconds in which at least one of the collectives among some events ran."""
    intervals = sorted((event.time_range.start, event.time_range.end) for event in events if _is_collective(event))
    total = last = 0.0
    for start, end in intervals:
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def _is_collective(event: FunctionEvent) -> bool:
    return event.name.startswith("gloo:" if event.device_type == torch.autograd.DeviceType.CPU else "nccl")


PEAKS = {
    "B200": 2250e12,  # NVIDIA Blackwell architecture technical brief, HGX B200
    "H200": 989e12,  # NVIDIA H200 data sheet
    "H100 NVL": 835e12,  # NVIDIA H100 data sheet, as the next two
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,  # NVIDIA A100 data sheet
    "L40S": 362e12,  # NVIDIA L40S data sheet
    "L4": 121e12,  # NVIDIA L4 data sheet
    "A10G": 70e12,  # AWS, for the GPU of its g5 instances
    "A10": 125e12,  # NVIDIA A10 data sheet
    "MI325X": 1307e12,  # AMD Instinct data sheets, as the next two
    "MI300X": 1307e12,
    "MI250X": 191.5e12,  # of one of its two dies, each of which is a device
}
"""Operations a second by a word or words of the device's name; the first that is in a name counts."""


def device_peak(device_type: str, name: str | None = None) -> float | None:
    """Return the operations a second of this rank's device, by name (None asks the driver); None for an unknown one."""
    if device_type != "cuda":
        return None
    words = f" {name if name is not None else torch.cuda.get_device_name()} ".replace("-", " ")
    return next((peak for key, peak in PEAKS.items() if f" {key} " in words), None)


@dataclass(frozen=True)
class TokenFlops:
    """Hold what the operations for a token depend on."""

    frozen: float  # number of elements of the frozen matrices that a token is multiplied with
    trained: float  # number of elements of the matrices that train
    attention: float  # sum over the layers of heads times head size; 0 if the model's config does not say

    def training(self, length: int) -> float:
        """Return the operations of a training step for one token of a sequence of `length` tokens."""
        return 4 * self.frozen + 6 * self.trained + 12 * self.attention * length


def token_flops(models: Iterable[nn.Module]) -> TokenFlops:
    """Add up what a token costs in each model, in all stages of a pipeline. Collective if a mesh has a pp axis."""
    frozen = trained = attention = 0.0
    for model in models:
        state = state_of(model)
        inner = innermost(model)
        config = getattr(inner, "config", None)
        mine = [0.0, 0.0]
        for parameter_trains, products in matrices(inner, config):
            mine[parameter_trains] += products
        for other in over_stages(mine, None if state is None else state.mesh):
            frozen += other[0]
            trained += other[1]
        attention += _attention(config)
    return TokenFlops(frozen, trained, attention)


def _attention(config: Any) -> float:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    if not layers or not heads:
        return 0.0
    size = getattr(text, "head_dim", None) or text.hidden_size / heads
    return float(layers * heads * size)


_PARTS = 1_000_000  # of a second, or of the whole of a share: ranks send integers
_KILO = 1000  # unit of the operations that ranks send: 64 bits hold those of any number of steps between reads


class MeshMeter:
    """Measure a training run on the whole mesh. Collective.

    Tokens are counted at the models' forwards, with gradients only: those of this rank's batch, padding included. A
    batch that several ranks work on together (tp, cp and pp peers) counts once.

    Args:
        models: The models that train, sharded or not.
        peak_flops: Operations a second that a device could do at best; None to look its name up. Without an entry there
            is no MFU.
        profile_every: One step of so many is profiled, for the share of communication; None for no step.
    """

    def __init__(
        self, models: Sequence[nn.Module], peak_flops: float | None = None, profile_every: int | None = None
    ) -> None:
        states = [state for model in models if (state := state_of(model)) is not None]
        mesh = states[0].mesh if states else None
        self._flops = token_flops(models)
        self._counts_batch = mesh is None or all(axis_rank(mesh, axis) == 0 for axis in ("pp", "cp", "tp"))
        device = next((p.device.type for model in models for p in model.parameters()), "cpu")
        self._device_type = device if mesh is None else mesh.device_type
        self._peak = device_peak(self._device_type) if peak_flops is None else peak_flops
        self._profile_every = profile_every
        self._hooks = [model.register_forward_pre_hook(self._count, with_kwargs=True) for model in models]
        self._steps = 0
        self._profiled: ProfiledStep | None = None
        self._since: float | None = None
        self._share: float | None = None
        self._clear()

    def begin_step(self) -> None:
        """Note that an optimizer step begins, its forwards included."""
        self._steps += 1
        self._tokens = self._operations = 0.0
        every = self._profile_every
        if every is not None and self._steps % every == 0 and not _profiler_enabled():
            self._profiled = ProfiledStep(self._device_type)
        elif self._since is None:
            self._since = time.perf_counter()

    def end_step(self) -> None:
        """Note that an optimizer step has ended. A step that was profiled is left out of the speed."""
        if self._profiled is not None:
            self._share, self._profiled = self._profiled.share(), None
            self.pause()
            return
        self._all_tokens += self._tokens
        self._all_operations += self._operations
        if self._since is not None:
            now = time.perf_counter()
            self._seconds += now - self._since
            self._since = now

    def pause(self) -> None:
        """Leave the time from the end of the last step to the beginning of the next one out."""
        self._since = None

    def read(self) -> dict[str, float]:
        """Return what was measured since the last call, the same on every rank. Collective.

        Call it after a step.
        """
        if self._device_type != "cpu":
            torch.accelerator.synchronize()
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
        share = -1 if self._share is None else round(self._share * _PARTS)
        counted = (self._all_tokens, self._all_operations / _KILO) if self._counts_batch else (0.0, 0.0)
        numbers = [*map(round, counted), round(self._seconds * _PARTS)]
        ranks = gather_numbers([*numbers, _memory(self._device_type), share], "MeshMeter.read")
        self._clear()
        if self._since is not None:
            self._since = time.perf_counter()
        tokens, operations, _, _, _ = ranks.sum(0).tolist()
        seconds, memory, share = ranks.amax(0).tolist()[2:]
        measured = {"mesh/memory_max_bytes": float(memory), "mesh/memory_min_bytes": float(ranks[:, 3].min())}
        if seconds:
            measured["mesh/tokens_per_second"] = tokens / seconds * _PARTS
            if self._peak is not None:
                measured["mesh/mfu"] = operations * _KILO / (seconds / _PARTS) / (self._peak * len(ranks))
        if share >= 0:
            measured["mesh/communication_share"] = float(ranks[:, 4].double().mean()) / _PARTS
        return measured

    def close(self) -> None:
        """Remove the hooks from the models, and end a profile that still runs."""
        for hook in self._hooks:
            hook.remove()
        if self._profiled is not None:
            self._profiled.share()
            self._profiled = None

    def _clear(self) -> None:
        self._all_tokens = self._all_operations = self._seconds = 0.0
        self._share = None

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training and torch.is_grad_enabled() and not in_backward():
            tokens, length = tokens_of(args, kwargs)
            self._tokens += tokens
            self._operations += tokens * self._flops.training(length)


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the number of tokens that a model's forward gets, and the length of its sequences.

    They are those of `input_ids` or `inputs_embeds`, or of the first tensor otherwise: of token ids, all; of features
    [..., features], all but the last dim.
    """
    named = (kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None)
    first: Tensor | None = next(chain(named, tensors_in([args, kwargs])), None)
    if first is None or first.dim() == 0:
        return 0, 0
    shape = first.shape[:-1] if first.is_floating_point() else first.shape
    return prod(shape), shape[-1] if len(shape) > 1 else 1


def _memory(device_type: str) -> int:
    """Return the most bytes that this rank has used so far: of its accelerator, or of its process on a CPU."""
    if device_type != "cpu":
        return int(torch.get_device_module(device_type).max_memory_allocated())
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
