"""`LoRAParallelStrategy` for `pytorch_lightning`, the same but for the namespace."""

from __future__ import annotations

from pytorch_lightning.strategies import ParallelStrategy

from lightning_lora.logic import StrategyLogic
from lightning_lora.namespace import namespace

__all__ = ["LoRAParallelStrategy"]


class LoRAParallelStrategy(StrategyLogic, ParallelStrategy):  # noqa: D101  its docstring is the logic's
    __doc__ = StrategyLogic.__doc__

    lightning = namespace("pytorch_lightning", "lightning_fabric")
