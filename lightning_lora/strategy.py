"""Define the strategies for `lightning`, one for Trainer and one for Fabric, and Trainer's callback."""

from __future__ import annotations

from lightning.fabric.strategies import ParallelStrategy as FabricParallelStrategy
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ParallelStrategy

from lightning_lora.callbacks import MeshCallbackLogic
from lightning_lora.fabric import FabricLogic
from lightning_lora.namespace import fabric_namespace, trainer_namespace
from lightning_lora.trainer_strategy import TrainerStrategyLogic

__all__ = ["FabricLoRAParallelStrategy", "LoRAParallelStrategy", "MeshCallback"]


class LoRAParallelStrategy(TrainerStrategyLogic, ParallelStrategy):  # noqa: D101  its docstring is the logic's
    __doc__ = TrainerStrategyLogic.__doc__

    lightning = trainer_namespace("lightning.pytorch", "lightning.fabric")


class FabricLoRAParallelStrategy(FabricLogic, FabricParallelStrategy):  # noqa: D101
    __doc__ = FabricLogic.__doc__

    lightning = fabric_namespace("lightning.fabric")


class MeshCallback(MeshCallbackLogic, Callback):  # noqa: D101
    __doc__ = MeshCallbackLogic.__doc__
