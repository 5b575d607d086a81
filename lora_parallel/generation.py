"""`model.generate` on a sharded model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lora_parallel.gather import reshard
from lora_parallel.mesh import dp_size
from lora_parallel.rendezvous import collective_call

__all__ = ["allow_generate"]


def allow_generate(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let transformers' and PEFT's `generate`, which goes around the model's own forward, gather the root's weights.

    Data-parallel ranks finish their texts at different steps, and one that stopped would leave the others waiting for
    its weights: with more than one, `synced_gpus=True` is the default, which keeps all of them going to the last step.
    """
    if not hasattr(model, "generate") or not (isinstance(model, FSDPModule) or mesh.size() > 1):
        return
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, "generate")
    own: Any = model.generate
    replicated = mesh["dp_replicate"].size() > 1

    def generate(*args: Any, **kwargs: Any) -> Any:
        if dp_size(mesh) > 1:
            kwargs.setdefault("synced_gpus", True)
        try:
            if replicated and not kwargs["synced_gpus"]:  # a replica has all that it needs
                return own(*args, **kwargs)
            with collective_call("generate"):
                return own(*args, **kwargs)
        finally:
            reshard(model)  # as after any forward that no backward follows

    model.__dict__["generate"] = generate
