"""Take `torch.compile` off models that were compiled as a whole, and refuse to compile a sharded one as a whole.

`torch.compile` cannot trace a sharded model: FSDP2 gathers weights in hooks, and parameters are DTensors. What it can
trace are the blocks (see `compiled_blocks`), which `compile=True` compiles one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from lora_parallel.distributed.rank_checks import is_rank_zero
from lora_parallel.distributed.torch_private import drop_compiled_call, has_compiled_call, without_compile

__all__ = ["refuse_whole_compile", "tell_unwrapped", "unwrap_compiled"]

log = logging.getLogger(__name__)


def unwrap_compiled(module: nn.Module) -> tuple[nn.Module, Mapping[str, Any] | None]:
    """Take `torch.compile` off a module and all modules in it, in place, and log what was compiled.

    Args:
        module: A module that may be compiled (by `torch.compile(module)` or `module.compile()`), or hold modules that
            are.

    Returns:
        The module without its wrapper; and the arguments of `torch.compile` for its blocks, None if nothing was
        compiled. The arguments are known where Lightning was imported before the call, which keeps them; else there are
        none.
    """
    found: list[tuple[str, Mapping[str, Any]]] = []

    def bare(name: str, each: nn.Module) -> nn.Module:
        if (inner := without_compile(each)) is not None:
            found.append((name, getattr(each, "_compile_kwargs", {})))
            each = inner
        if has_compiled_call(each):
            drop_compiled_call(each)
            found.append((name, {}))
        return each

    own = bare("", module)
    for prefix, parent in list(own.named_modules()):
        for key, child in list(parent._modules.items()):
            if child is not None:
                parent._modules[key] = bare(f"{prefix}.{key}".lstrip("."), child)
    if not found:
        return own, None
    tell_unwrapped([name or type(own).__name__ for name, _ in found])
    return own, next((arguments for _, arguments in found if arguments), {})


def tell_unwrapped(names: Sequence[str]) -> None:
    """Log, on rank 0, that `torch.compile` was taken off the modules of these names."""
    if is_rank_zero():
        which = ", ".join(names)
        log.warning("torch.compile is taken off %s: each block is compiled instead, as compile=True does.", which)


def refuse_whole_compile(model: nn.Module) -> None:
    """Make a sharded model raise an error with the remedy when it is compiled as a whole.

    Args:
        model: The model that `parallelize` has sharded.
    """
    model.__dict__["compile"] = _refuse

    def check(*_: Any) -> None:
        if torch.compiler.is_compiling():
            _refuse_tracing()

    model.register_forward_pre_hook(check, prepend=True)


@torch.compiler.assume_constant_result  # which is called, not traced: what it raises ends the compilation
def _refuse_tracing() -> None:
    _refuse()


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "torch.compile cannot trace a sharded model as a whole: leave model.compile() and torch.compile(model) out, "
        "and compile its blocks with compile=True (in ParallelConfig or the strategy), or torch_compile=True of "
        "TrainingArguments, or dynamo_backend of Accelerate."
    )
