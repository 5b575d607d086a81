"""LoRA training under FSDP2 and tensor parallelism: the engine.

    mesh = build_mesh(config)
    model = parallelize(model, mesh, config, lora_config=LoraConfig(...))

Plain torch, PEFT and safetensors; usable by itself in a loop started by torchrun. `lightning_lora` puts it behind one
flag of Lightning's Trainer.
"""

from lora_parallel.adapter_folder import load_adapter, save_adapter
from lora_parallel.checkpoint import load_checkpoint, save_checkpoint
from lora_parallel.checkpoint_writer import wait_for_save
from lora_parallel.config import ParallelConfig
from lora_parallel.deferred import attach_checkpoint
from lora_parallel.export import export_merged
from lora_parallel.grads import clip_grad_norm_
from lora_parallel.mesh import build_mesh
from lora_parallel.meta import meta_init
from lora_parallel.retention import latest_checkpoint
from lora_parallel.shard import parallelize
from lora_parallel.state import no_sync
from lora_parallel.tenants import TenantPool
from lora_parallel.weights import Read, read_plan

__all__ = [
    "ParallelConfig",
    "Read",
    "TenantPool",
    "attach_checkpoint",
    "build_mesh",
    "clip_grad_norm_",
    "export_merged",
    "latest_checkpoint",
    "load_adapter",
    "load_checkpoint",
    "meta_init",
    "no_sync",
    "parallelize",
    "read_plan",
    "save_adapter",
    "save_checkpoint",
    "wait_for_save",
]
