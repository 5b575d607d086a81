"""`meta_init`: models that are built without weights and remember where those are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

from torch import nn

from lora_parallel.deferred import defer
from lora_parallel.peft_hooks import adapters_off_meta, suspend_during_injection
from lora_parallel.stored import StoredTensor

__all__ = ["defer_from_pretrained", "meta_init"]


@contextmanager
def meta_init() -> Iterator[None]:
    """Within, every model is built on meta: no memory, no file read, a second or two at any size.

    - `AutoModelForX.from_pretrained(path, dtype=..., ...)` returns the model with its checkpoint remembered;
      `parallelize` reads it, each rank the bytes of its own shard. What no file holds is as in a normal load: buffers
      are computed, weights tied, a new head drawn from the random state.
    - `from_config` and constructors of any `nn.Module` give parameters on meta; say where their weights are with
      `attach_checkpoint`. Buffers are computed.
    - `get_peft_model`, `PeftModel.from_pretrained(model, directory)` and `model.add_adapter` draw or load adapters as
      ever, in memory; also after the context, for a model that was built within.

    Raises:
        ValueError: An argument of `from_pretrained` that has no meaning here. What is wrong with a checkpoint is an
            error of `parallelize`, on every rank.
    """
    with defer_from_pretrained(), _constructors_on_meta():
        yield


@contextmanager
def defer_from_pretrained() -> Iterator[None]:
    """As `meta_init` for transformers' `from_pretrained`; other models are built in memory as usual."""
    from lora_parallel.transformers_hooks import deferred_loading

    adapters_off_meta()
    with deferred_loading(_constructors_in_memory):
        yield


_own_register = nn.Module.register_parameter


@contextmanager
def _constructors_on_meta() -> Iterator[None]:
    """A parameter goes to meta as its module takes it; so buffers, which no checkpoint may hold, are computed."""

    @wraps(_own_register)
    def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        _own_register(module, name, param)
        if param is not None and not param.is_meta and not isinstance(param, StoredTensor):
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
