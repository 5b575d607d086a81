"""Check arguments: suggest the one that was meant when a call is given an unknown one, and check numbers.

The front ends, and other libraries, name the same things differently.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, TypeVar

__all__ = ["check_positive", "suggest_arguments"]

T = TypeVar("T")

_SAME = (
    ("tp", "tensor_parallel_size", "tp_size", "tensor_parallel", "tensor_model_parallel_size", "tp_degree"),
    ("cp", "context_parallel_size", "cp_size", "context_parallel", "context_parallel_degree", "cp_degree"),
    ("cp_method", "context_parallel_method", "cp_comm_strategy"),
    ("pp", "pipeline_parallel_size", "pp_size", "pipeline_parallel", "pipeline_model_parallel_size", "pp_degree"),
    ("pp_microbatches", "pipeline_microbatches", "microbatches", "num_microbatches", "pp_num_microbatches"),
    ("pp_schedule", "pipeline_schedule", "schedule", "pipeline_parallel_schedule"),
    ("pp_stages_per_rank", "pipeline_stages_per_rank", "virtual_pipeline_parallel_size", "num_virtual_stages"),
    ("pp_split", "pipeline_split", "pipeline_parallel_split_points", "split_points"),
    ("dp_shard", "data_parallel_size", "dp_shard_size", "dp_size", "dp", "data_parallel", "fsdp", "fsdp_size"),
    ("dp_replicate", "replicate_size", "dp_replicate_size", "replicate", "replicas", "hsdp_size"),
    ("lora_config", "peft_config", "lora", "adapter_config"),
    ("activation_checkpointing", "gradient_checkpointing", "use_activation_checkpointing"),
    ("block_classes", "transformer_cls_names_to_wrap", "auto_wrap_policy", "wrap_policy"),
    ("timeout_seconds", "timeout"),
)
"""Groups of names for the same thing in the engine's config, the strategies, the plugin and other libraries."""


def suggest_arguments(kind: type[T]) -> type[T]:
    """Make a class suggest the argument that was meant when it is given one that it does not have.

    The signature of the class stays as it is. Arguments that subclasses add are suggested too.
    """
    own: Callable[..., None] = kind.__dict__["__init__"]
    known = inspect.signature(own).parameters

    @wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            if name not in known:
                taken = [each for each in _arguments(type(self), kind) if each not in kwargs]
                raise TypeError(
                    f"{type(self).__name__} has no argument {name}={value!r}: {_meant(name, taken)}It has "
                    f"{', '.join(_arguments(type(self), kind))}."
                )
        own(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def check_positive(name: str, value: object, also: str | None = None) -> None:
    """Check that an argument is a positive int.

    Args:
        name: The name of the argument.
        value: Its value.
        also: A word that it may be too.

    Raises:
        TypeError: It is no int.
        ValueError: It is less than 1.
    """
    if also is not None and value == also:
        return
    words = f"{name}={value!r}: give a positive int{f' or {also}' if also else ''}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(words)
    if value < 1:
        raise ValueError(words)


def _arguments(kind: type, last: type) -> list[str]:
    """List the arguments of `kind` that may be given by name, with those of its base classes up to `last`."""
    found: dict[str, None] = {}
    for each in kind.__mro__[: kind.__mro__.index(last) + 1]:
        if "__init__" in each.__dict__:
            parameters = list(inspect.signature(each.__dict__["__init__"]).parameters.values())[1:]
            found |= {p.name: None for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return list(found)


def _meant(name: str, taken: Iterable[str]) -> str:
    same = [each for names in _SAME if name in names for each in names if each in taken]
    near = same or get_close_matches(name, list(taken), 1)
    return f"did you mean {near[0]}? " if near else ""
