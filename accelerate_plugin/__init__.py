"""Train LoRA under FSDP2 and tensor parallelism with Accelerate, transformers' Trainer and TRL.

    accelerator = Accelerator(fsdp_plugin=LoRAParallelPlugin(tp_size=2))

or, with no line of a script changed,

    accelerate launch --config_file fsdp2_tp.yaml -m accelerate_plugin.launch train.py

After this package has been imported, every Accelerator that is asked for FSDP2 or tensor parallelism, by an argument or
by the environment, trains with `lora_parallel`. Other Accelerators stay as they are.
"""

from accelerate_plugin.patches import activate
from accelerate_plugin.plugin import LoRAParallelPlugin
from accelerate_plugin.trainer import MeshCallback
from lora_parallel import __version__

__all__ = ["LoRAParallelPlugin", "MeshCallback", "__version__"]

activate()
