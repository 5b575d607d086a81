"""Train LoRA adapters under FSDP2 and tensor parallelism with a Lightning strategy, in Trainer and in Fabric.

    import lightning_lora
    Trainer(strategy="lora_fsdp2_tp", devices=4)
    Fabric(strategy="lora_fsdp2_tp", devices=4)

The import registers the names "lora_fsdp2" (tp 1), "lora_fsdp2_tp" and "lora_fsdp2_tp2" (tp 2), and so on to
"lora_fsdp2_tp16" with `lightning`, and with `pytorch_lightning` and `lightning_fabric` if these are installed
(`lightning_lora.legacy` has the strategy classes for them).

`trainer_strategy` and `fabric` save and load checkpoints; `single_file_checkpoint` those of
`save_distributed_checkpoint=False` only.
"""

from lightning_lora.loading import load_folders
from lightning_lora.registry import register_strategies
from lightning_lora.strategy import FabricLoRAParallelStrategy, LoRAParallelStrategy, MeshCallback
from lightning_lora.trainer_strategy import accept_compiled_modules
from lora_parallel import __version__

__all__ = ["FabricLoRAParallelStrategy", "LoRAParallelStrategy", "MeshCallback", "__version__"]

register_strategies()
load_folders()
accept_compiled_modules()
