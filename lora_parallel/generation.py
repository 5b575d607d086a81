"""`model.generate` on a sharded model."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lora_parallel.gather import reshard

__all__ = ["allow_generate"]


def allow_generate(model: nn.Module, base: nn.Module, dp_size: int) -> None:
    """Let transformers' and PEFT's `generate`, which goes around the model's own forward, gather the root's weights.

    Data-parallel ranks finish their texts at different steps, and one that stopped would leave the others waiting for
    its weights: with more than one, `synced_gpus=True` is the default, which keeps all of them going to the last step.

    Args:
        model: The root unit of FSDP2, or a model that FSDP2 does not shard, which is left as it is.
        base: The model inside of a `PeftModel`, or `model` itself.
        dp_size: How many data-parallel ranks there are.
    """
    if not isinstance(model, FSDPModule) or not hasattr(model, "generate"):
        return
    register_fsdp_forward_method(model, "generate")
    _complete(model, model, dp_size)
    if base is not model and hasattr(base, "generate"):
        # Called by the model's own, or by the user; then nothing has begun, and a pass without it is as good.
        _complete(base, model, dp_size)


def _complete(holder: Any, root: nn.Module, dp_size: int) -> None:
    own: Any = holder.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        if dp_size > 1:
            kwargs.setdefault("synced_gpus", True)
        try:
            return own(*args, **kwargs)
        finally:
            reshard(root)  # as after any forward that no backward follows

    holder.__dict__["generate"] = generate
