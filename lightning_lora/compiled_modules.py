"""Accept a LightningModule that `torch.compile` has wrapped: the wrapper is taken off, and blocks are compiled.

Lightning refuses such a module for all strategies but its own, and has no hook for that. So two private functions of
Lightning's trainer, `_maybe_unwrap_optimized` and `_verify_strategy_supports_compile`, are wrapped here and nowhere
else. For other strategies they do what they did before; `tests/lightning_lora/test_compile.py` checks that they do what
is assumed here.
"""

from __future__ import annotations

from functools import wraps
from importlib import import_module
from typing import Any

from lightning_lora.namespace import installed_trainers
from lightning_lora.trainer_strategy import TrainerStrategyLogic

__all__ = ["accept_compiled_modules"]

_ARGUMENTS = "_lora_parallel_compile"


def accept_compiled_modules() -> None:
    """Let Trainer take a compiled LightningModule with this library's strategy, in every installed namespace.

    A second call changes nothing.
    """
    for package in installed_trainers():
        trainer: Any = import_module(f"{package}.trainer.trainer")
        if not hasattr(trainer._verify_strategy_supports_compile, "__wrapped__"):
            to_uncompiled = import_module(f"{package}.utilities.compile").to_uncompiled
            trainer._maybe_unwrap_optimized = _unwrapping(trainer._maybe_unwrap_optimized)
            trainer._verify_strategy_supports_compile = _accepting(
                trainer._verify_strategy_supports_compile, to_uncompiled
            )


def _unwrapping(own: Any) -> Any:
    @wraps(own)
    def unwrap(model: Any) -> Any:
        module = own(model)
        if module is not model:
            module.__dict__[_ARGUMENTS] = getattr(model, "_compile_kwargs", {})  # Lightning keeps them there
        return module

    return unwrap


def _accepting(own: Any, to_uncompiled: Any) -> Any:
    @wraps(own)
    def verify(model: Any, strategy: Any) -> None:
        arguments = model.__dict__.pop(_ARGUMENTS, {})
        if not isinstance(strategy, TrainerStrategyLogic):
            own(model, strategy)
        elif model._compiler_ctx is not None:
            strategy.compile_blocks(to_uncompiled(model), arguments)

    return verify
