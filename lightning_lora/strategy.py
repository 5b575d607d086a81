"""`LoRAParallelStrategy` for `lightning`."""

from __future__ import annotations

from lightning.pytorch.strategies import ParallelStrategy

from lightning_lora.logic import StrategyLogic
from lightning_lora.namespace import namespace

__all__ = ["LoRAParallelStrategy"]


class LoRAParallelStrategy(StrategyLogic, ParallelStrategy):  # noqa: D101  its docstring is the logic's
    __doc__ = StrategyLogic.__doc__

    lightning = namespace("lightning.pytorch", "lightning.fabric")
