"""LoRA under FSDP2 and tensor parallelism in Accelerate, transformers' Trainer and TRL.

    accelerator = Accelerator(fsdp_plugin=LoRAParallelPlugin(tp_size=2))

or, with no line of a script changed,

    accelerate launch --config_file fsdp2_tp.yaml -m accelerate_plugin.launch train.py

Importing this package makes Accelerators that are asked for FSDP2, by an argument or by the environment, train by
`lora_parallel`. Others stay as they are.
"""

from accelerate_plugin.patches import activate
from accelerate_plugin.plugin import LoRAParallelPlugin

__all__ = ["LoRAParallelPlugin"]

activate()
