"""Define the strategies and the callback for `pytorch_lightning` and `lightning_fabric`.

They differ from those in `lightning_lora.strategy` in the namespace only.
"""

from __future__ import annotations

from lightning_fabric.strategies import ParallelStrategy as FabricParallelStrategy
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ParallelStrategy

from lightning_lora.callbacks import MeshCallbackLogic
from lightning_lora.fabric import FabricLogic
from lightning_lora.namespace import fabric_namespace, trainer_namespace
from lightning_lora.trainer_strategy import TrainerStrategyLogic

__all__ = ["FabricLoRAParallelStrategy", "LoRAParallelStrategy", "MeshCallback"]


class LoRAParallelStrategy(TrainerStrategyLogic, ParallelStrategy):  # noqa: D101  its docstring is the logic's
    __doc__ = TrainerStrategyLogic.__doc__

    lightning = trainer_namespace("pytorch_lightning", "lightning_fabric")


class FabricLoRAParallelStrategy(FabricLogic, FabricParallelStrategy):  # type: ignore[misc]  # noqa: D101
    __doc__ = FabricLogic.__doc__

    lightning = fabric_namespace("lightning_fabric")


class MeshCallback(MeshCallbackLogic, Callback):  # noqa: D101
    __doc__ = MeshCallbackLogic.__doc__
