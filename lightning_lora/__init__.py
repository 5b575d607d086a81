"""LoRA training under FSDP2 and tensor parallelism as a Lightning strategy, for Trainer and for Fabric.

    import lightning_lora
    Trainer(strategy="lora_fsdp2_tp", devices=4)
    Fabric(strategy="lora_fsdp2_tp", devices=4)

Importing registers the names "lora_fsdp2" (tp 1), "lora_fsdp2_tp" (tp 2), "lora_fsdp2_tp4" and "lora_fsdp2_tp8" with
`lightning`, and with `pytorch_lightning` and `lightning_fabric` where these are installed (their classes are
`lightning_lora.legacy`'s).
"""

from lightning_lora.loading import load_folders
from lightning_lora.registry import register_strategies
from lightning_lora.strategy import FabricLoRAParallelStrategy, LoRAParallelStrategy

__all__ = ["FabricLoRAParallelStrategy", "LoRAParallelStrategy"]

register_strategies()
load_folders()
