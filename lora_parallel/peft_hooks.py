"""PEFT layers on a base that is on meta: PEFT's private API, in one place.

PEFT moves an adapter to its base layer's device as soon as it has drawn it. With a base that waits on meta for its
weights that would lose the values, so there an adapter stays where it was drawn; in the base's dtype, as always.
Nothing changes for a base that is not ours. `tests/lora_parallel/test_peft_hooks.py` holds what is used to its meaning.

PEFT has no option for it (https://github.com/huggingface/peft/issues/2834 is about the same lines):
low_cpu_mem_usage=True leaves adapters on meta, uninitialised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

import torch
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import nn
from transformers.integrations import PeftAdapterMixin

from lora_parallel.deferred import is_deferred

__all__ = ["adapters_off_meta", "observe_layers", "suspend_during_injection"]

_observers: list[Callable[[nn.Module], None]] = []
_suspensions: list[Callable[[], AbstractContextManager[Any]]] = []
_installed = False


def adapters_off_meta() -> None:
    """Let adapters stay off meta where their base is a deferred one. Done once; for good, as PEFT may wrap a model at
    any time after it was built.
    """
    global _installed
    if _installed:
        return
    _installed = True
    own_move = BaseTunerLayer._move_adapter_to_device_of_base_layer
    own_move_parameter = ParamWrapper._move_adapter_to_device_of_base_layer
    own_replace = LoraModel._replace_module
    own_inject = BaseTuner.inject_adapter
    own_cast = BaseTuner._cast_adapter_dtype
    own_load = PeftAdapterMixin.load_adapter

    @wraps(own_move)
    def move(self: Any, adapter_name: str, device: torch.device | None = None) -> None:
        stay = device is None and _waits(self.get_base_layer())
        own_move(self, adapter_name, torch.device("cpu") if stay else device)

    @wraps(own_move_parameter)
    def move_parameter(self: Any, adapter_name: str, device: torch.device | None = None) -> None:
        if not _waits(self.get_base_layer()):
            own_move_parameter(self, adapter_name, device)
            return
        stand_in = torch.empty(0, dtype=self.get_param().dtype)
        self.__dict__["get_param"] = lambda: stand_in  # it asks nothing of it but device and dtype
        try:
            own_move_parameter(self, adapter_name, device)
        finally:
            del self.__dict__["get_param"]

    @wraps(own_replace)
    def replace(self: Any, parent: nn.Module, child_name: str, new_module: nn.Module, child: Any) -> None:
        base = child.get_base_layer() if isinstance(child, BaseTunerLayer) else child
        if _observers:
            _observers[-1](new_module)
        elif _waits(base):
            setattr(parent, child_name, new_module)
            return
        own_replace(self, parent, child_name, new_module, child)

    @wraps(own_load)
    def load(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _waits(self):
            return own_load(self, *args, **kwargs)
        self.hf_device_map = {"": "cpu"}  # where it puts what it reads; without one, where the base is
        try:
            with _all(_suspensions):
                return own_load(self, *args, **kwargs)
        finally:
            del self.hf_device_map

    @wraps(own_inject)
    def inject(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _all(_suspensions):
            return own_inject(self, *args, **kwargs)

    @wraps(own_cast)
    def cast(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _all(_suspensions):
            return own_cast(self, *args, **kwargs)

    BaseTunerLayer._move_adapter_to_device_of_base_layer = move  # type: ignore[method-assign]
    ParamWrapper._move_adapter_to_device_of_base_layer = move_parameter  # type: ignore[method-assign]
    LoraModel._replace_module = replace  # type: ignore[method-assign]
    BaseTuner.inject_adapter = inject  # type: ignore[method-assign]
    BaseTuner._cast_adapter_dtype = cast  # type: ignore[method-assign]
    PeftAdapterMixin.load_adapter = load  # type: ignore[method-assign]


def _waits(base: nn.Module) -> bool:
    return bool(_observers) or any(is_deferred(parameter) for parameter in base.parameters())


@contextmanager
def _all(contexts: list[Callable[[], AbstractContextManager[Any]]]) -> Iterator[None]:
    if not contexts:
        yield
        return
    with contexts[-1]():
        yield


@contextmanager
def observe_layers(observer: Callable[[nn.Module], None]) -> Iterator[None]:
    """Within, call `observer` with each LoRA layer as PEFT puts it in place, its adapter drawn and still in memory."""
    adapters_off_meta()
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.pop()


@contextmanager
def suspend_during_injection(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Within, PEFT builds its layers inside `context()`."""
    adapters_off_meta()
    _suspensions.append(context)
    try:
        yield
    finally:
        _suspensions.pop()
