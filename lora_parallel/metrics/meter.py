"""Measure the steps of a training run, and bring the numbers of all ranks together."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _profiler_enabled

from lora_parallel.distributed.mesh import axis_rank
from lora_parallel.distributed.pytree import tensors_in
from lora_parallel.distributed.rank_checks import gather_numbers
from lora_parallel.distributed.torch_private import in_backward
from lora_parallel.metrics.communication import ProfiledStep
from lora_parallel.metrics.device_peaks import device_peak
from lora_parallel.metrics.flops import token_flops
from lora_parallel.state import state_of

__all__ = ["MeshMeter", "tokens_of"]

_PARTS = 1_000_000
"""Parts into which a second, or the whole of a share, is divided: ranks send integers."""

_KILO = 1000
"""Unit of the operations that ranks send: an integer of 64 bits holds those of any number of steps between reads."""


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
        ranks = gather_numbers([*numbers, _memory(self._device_type), share], self._device_type, "MeshMeter.read")
        self._clear()
        if self._since is not None:
            self._since = time.perf_counter()
        tokens, operations, _, _, _ = ranks.sum(0).tolist()
        seconds, memory, share = ranks.amax(0).tolist()[2:]
        found = {"mesh/memory_max_bytes": float(memory), "mesh/memory_min_bytes": float(ranks[:, 3].min())}
        if seconds:
            found["mesh/tokens_per_second"] = tokens / seconds * _PARTS
            if self._peak is not None:
                found["mesh/mfu"] = operations * _KILO / (seconds / _PARTS) / (self._peak * len(ranks))
        if share >= 0:
            found["mesh/communication_share"] = float(ranks[:, 4].double().mean()) / _PARTS
        return found

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
