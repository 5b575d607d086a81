"""Find out whether an Accelerator trains with `lora_parallel`, and adapt its process group, state and class.

`patches.py` replaces methods of Accelerate by these functions; their argument `original` is the replaced method.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from accelerate_plugin import detect
from accelerate_plugin.accelerator import AcceleratorOverrides
from accelerate_plugin.data import check_dispatch
from accelerate_plugin.parallelism import (
    LoRAParallelism,
    current_parallelism,
    parallelism_of,
    parallelism_within_batch,
    world_size,
)
from accelerate_plugin.plugin import LoRAParallelPlugin

__all__ = ["accelerator_init", "prepare_backend", "split_between_processes", "state_init"]

Original = Callable[..., Any]


def prepare_backend(original: Original, self: PartialState, *args: Any, **kwargs: Any) -> Any:
    """Choose the backend gloo for several processes on a machine without accelerators; Accelerate chooses none."""
    backend, distributed_type = original(self, *args, **kwargs)
    if distributed_type is DistributedType.NO and world_size() > 1 and _asked() and not detect.has_accelerator():
        return "gloo", DistributedType.MULTI_CPU
    return backend, distributed_type


_choosing = False
"""True while an Accelerator that trains with `lora_parallel` is being made."""


def _asked() -> bool:
    return _choosing or detect.asked_by_environment()


def accelerator_init(original: Original, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    """Make an Accelerator train with `lora_parallel` if its arguments or the environment ask for it.

    Raises:
        TypeError, ValueError: The arguments or the environment ask for something that is not supported, or for other
            settings than an earlier Accelerator of this process.
    """
    global _choosing
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    if current_parallelism() is not None and not isinstance(bound.arguments.get("fsdp_plugin"), LoRAParallelPlugin):
        _make_ours(self)
        bound.arguments.pop("fsdp_plugin", None)  # a later Accelerator shares the first one's state
        original(*bound.args, **bound.kwargs)
        check_dispatch(self)
        return
    chosen = detect.requested_parallelism({name: value for name, value in bound.arguments.items() if name != "self"})
    if chosen is None:
        original(self, *args, **kwargs)
        return
    _make_ours(self)
    bound.arguments.pop("torch_tp_plugin", None)
    bound.arguments.update(fsdp_plugin=chosen.plugin, parallelism_config=chosen)
    _choosing = True
    try:
        original(*bound.args, **bound.kwargs)
    finally:
        _choosing = False
    present = parallelism_of(self)
    if present is None or present.config != chosen.config or present.plugin.lora_config != chosen.plugin.lora_config:
        raise ValueError(
            "an Accelerator was made before with other settings, and all of a process share one state: give the first "
            "one the LoRAParallelPlugin, and later ones the same or none."
        )
    AcceleratorState()  # now that there is a mesh, state_init can tell the data-parallel rank
    check_dispatch(self)


def _make_ours(accelerator: Accelerator) -> None:
    """Change the class of an Accelerator to a subclass with `AcceleratorOverrides` between it and Accelerator itself.

    The class may be a subclass of Accelerator that the user wrote. Its methods come first, and what they call by
    `super()` is ours.
    """
    kind = type(accelerator)
    if not issubclass(kind, AcceleratorOverrides):
        bases = (AcceleratorOverrides,) if kind is Accelerator else (kind, AcceleratorOverrides)
        # Every class has a `__getstate__` from Python 3.11 on; the user's own may leave out what cannot be pickled.
        state = getattr(kind, "__getstate__", vars)
        reduced = {"__reduce__": lambda self: (_unpickled, (kind,), state(self))}
        accelerator.__class__ = type(f"LoRAParallel{kind.__name__}", bases, reduced)


def _unpickled(kind: type[Accelerator]) -> Accelerator:
    """Return an Accelerator without attributes, whose class `_make_ours` has changed: pickle fills it."""
    accelerator = object.__new__(kind)
    _make_ours(accelerator)
    return accelerator


def state_init(original: Original, self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """Make Accelerate's state, then adapt it if it has a `LoRAParallelism`.

    The state's type is then FSDP, also on a CPU and in a single process. `num_processes` counts data-parallel
    processes, and `process_index` numbers them: peers of one batch have the same, and draw from the same seed.
    """
    original(self, *args, **kwargs)
    parallelism = self.__dict__.get("parallelism_config")
    if not isinstance(parallelism, LoRAParallelism):
        return
    if self.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        self.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.fsdp_plugin = parallelism.plugin
    self.num_processes = parallelism.data_parallel_size
    if parallelism.device_mesh is not None:
        self.process_index = parallelism.dp_rank


def split_between_processes(
    original: Original, self: PartialState, inputs: Any, apply_padding: bool = False
) -> AbstractContextManager[Any]:
    """Split inputs between data-parallel processes: peers of one batch get the same ones."""
    parallelism = parallelism_within_batch()
    place: Any = self
    if parallelism is not None:
        place = SimpleNamespace(
            num_processes=parallelism.dp_size, process_index=parallelism.dp_rank, device=self.device
        )
    return original(place, inputs, apply_padding)
