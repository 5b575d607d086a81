"""Build models on meta, without weights, that remember which files hold the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

from torch import nn

from lora_parallel.adapters.peft_private import adapters_off_meta, suspend_during_injection
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.lazy.tracking import defer

__all__ = ["defer_from_pretrained", "meta_init"]


@contextmanager
def meta_init() -> Iterator[None]:
    """Build every model inside this context on meta: no memory, no file read, a second or two at any size.

    - `AutoModelForX.from_pretrained(path, dtype=..., ...)` returns a model that remembers its checkpoint; `parallelize`
      reads it, each rank the bytes of its own shard. Tensors that no file holds are made as in a normal load: buffers
      are computed, weights tied, a new head drawn from the random state.
    - `from_config` and constructors of any `nn.Module` make parameters on meta; name the checkpoint that holds their
      weights with `attach_checkpoint`. Buffers are computed.
    - `get_peft_model`, `PeftModel.from_pretrained(model, directory)` and `model.add_adapter` draw or load adapters as
      usual, in memory; also after the context has ended, for a model that was built inside of it.

    Raises:
        ValueError: `from_pretrained` gets an argument that has no meaning here. If a checkpoint is wrong, `parallelize`
            raises the error, on every rank.
    """
    with _deferred_from_pretrained(), _constructors_on_meta():
        yield


@contextmanager
def defer_from_pretrained() -> Iterator[None]:
    """Let transformers' `from_pretrained` build models as under `meta_init`; build other models in memory as usual.

    A model is not deferred if the environment variable LORA_PARALLEL_DEFER is 0 when it is loaded.
    """
    with _deferred_from_pretrained(unless_told=True):
        yield


@contextmanager
def _deferred_from_pretrained(unless_told: bool = False) -> Iterator[None]:
    from lora_parallel.loading.transformers_private import deferred_loading

    adapters_off_meta()
    with deferred_loading(_constructors_in_memory, unless_told):
        yield


_own_register = nn.Module.register_parameter


@contextmanager
def _constructors_on_meta() -> Iterator[None]:
    """Move each parameter to meta when its module registers it.

    Buffers stay in memory and are computed, because a checkpoint need not hold them.
    """

    @wraps(_own_register)
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        _own_register(module, name, param)
        if param is not None and not param.is_meta and not isinstance(param, LazyTensor):
            module._parameters[name] = defer(param)  # type: ignore[assignment]

    with _register_with(register_parameter), suspend_during_injection(_constructors_in_memory):
        yield


@contextmanager
def _constructors_in_memory() -> Iterator[None]:
    with _register_with(_own_register):
        yield


@contextmanager
def _register_with(function: object) -> Iterator[None]:
    before = nn.Module.register_parameter
    nn.Module.register_parameter = function  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = before  # type: ignore[method-assign]
