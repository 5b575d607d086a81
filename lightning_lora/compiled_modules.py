"""Accept a LightningModule that `torch.compile` has wrapped: the wrapper is taken off, and blocks are compiled.

Lightning refuses such a module for all strategies but its own, in a function that it has no hook for. So that private
function, `_verify_strategy_supports_compile`, is wrapped here and nowhere else. For other strategies it does what it
did before; `tests/lightning_lora/test_compile.py` checks that it does what is assumed here.
"""

from __future__ import annotations

import importlib.util
from functools import wraps
from importlib import import_module
from typing import Any

from lightning_lora.trainer_strategy import TrainerStrategyLogic

__all__ = ["accept_compiled_modules"]


def accept_compiled_modules() -> None:
    """Let Trainer take a compiled LightningModule with this library's strategy, in every installed namespace.

    A second call changes nothing.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        if importlib.util.find_spec(package.split(".")[0]) is not None:
            trainer: Any = import_module(f"{package}.trainer.trainer")
            if not hasattr(trainer._verify_strategy_supports_compile, "__wrapped__"):
                trainer._verify_strategy_supports_compile = _accepting(
                    trainer._verify_strategy_supports_compile, package
                )


def _accepting(own: Any, package: str) -> Any:
    to_uncompiled = import_module(f"{package}.utilities.compile").to_uncompiled

    @wraps(own)
    def verify(model: Any, strategy: Any) -> None:
        if not isinstance(strategy, TrainerStrategyLogic):
            own(model, strategy)
        elif model._compiler_ctx is not None:
            strategy.compile_blocks(to_uncompiled(model))

    return verify
