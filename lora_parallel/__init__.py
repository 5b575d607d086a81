"""LoRA training under FSDP2 and tensor parallelism: the engine.

    mesh = build_mesh(config)
    model = parallelize(model, mesh, config, lora_config=LoraConfig(...))

Plain torch, PEFT and safetensors; usable by itself in a loop started by torchrun. `lightning_lora` puts it behind one
flag of Lightning's Trainer.
"""

from typing import TYPE_CHECKING, Any

from lora_parallel.adapters.adapter_folder import load_adapter, save_adapter
from lora_parallel.checkpoint.files import latest_checkpoint, wait_for_save
from lora_parallel.checkpoint.save_load import load_checkpoint, save_checkpoint
from lora_parallel.config import ParallelConfig
from lora_parallel.cost.memory_plan import MemoryPlan, plan_memory
from lora_parallel.cost.mesh_cost import MeshCost
from lora_parallel.distributed.gradients import clip_grad_norm_
from lora_parallel.distributed.mesh import build_mesh
from lora_parallel.export.export_merged import export_merged
from lora_parallel.lazy.materialize import Read, read_plan
from lora_parallel.loading.meta_init import attach_checkpoint, meta_init
from lora_parallel.parallelize import parallelize
from lora_parallel.runtime.stop_signal import StopSignal
from lora_parallel.state import no_sync

if TYPE_CHECKING:
    from lora_parallel.tenants.pool import TenantPool

__version__ = "0.3.0.dev0"

__all__ = [
    "MemoryPlan",
    "MeshCost",
    "ParallelConfig",
    "Read",
    "StopSignal",
    "TenantPool",
    "__version__",
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
    "plan_memory",
    "read_plan",
    "save_adapter",
    "save_checkpoint",
    "wait_for_save",
]


def __getattr__(name: str) -> Any:
    """Import `TenantPool` when it is asked for: the engine runs without the folder `tenants`."""
    if name == "TenantPool":
        from lora_parallel.tenants.pool import TenantPool

        return TenantPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
