"""`model.generate` on a sharded model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lora_parallel.gather import reshard

__all__ = ["allow_generate"]


def allow_generate(model: nn.Module, dp_size: int) -> None:
    """Let transformers' and PEFT's `generate`, which goes around the model's own forward, gather the root's weights.

    Data-parallel ranks finish their texts at different steps, and one that stopped would leave the others waiting for
    its weights: with more than one, `synced_gpus=True` is the default, which keeps all of them going to the last step.
    """
    if not isinstance(model, FSDPModule) or not hasattr(model, "generate"):
        return
    register_fsdp_forward_method(model, "generate")
    own: Any = model.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if dp_size > 1:
            kwargs.setdefault("synced_gpus", True)
        try:
            return own(*args, **kwargs)
        finally:
            reshard(model)  # as after any forward that no backward follows

    model.__dict__["generate"] = generate
