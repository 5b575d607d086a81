"""Make `model.generate` work on a sharded model."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lora_parallel.distributed.gather import reshard
from lora_parallel.distributed.mesh import dp_size
from lora_parallel.distributed.random_state import share_random_state
from lora_parallel.distributed.rendezvous import collective_call

__all__ = ["allow_generate", "refuse_generate"]


def allow_generate(model: nn.Module, base: nn.Module, mesh: DeviceMesh) -> None:
    """Make `generate` of transformers and PEFT, which bypasses the model's own forward, gather the root unit's weights.

    Data-parallel ranks finish their texts at different steps, and a rank that stopped would leave the others waiting
    for its weights. With more than one such rank `synced_gpus=True` is the default, which keeps all ranks running to
    the last step. The ranks of one batch draw the same tokens: they begin with the random state of the first of them.

    Args:
        model: A sharded model.
        base: The model inside of a `PeftModel`, whose `generate` may be called too; or `model` itself.
        mesh: The mesh of `model`.
    """
    if not isinstance(model, FSDPModule) and mesh.size() == 1:
        return
    if hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")  # does nothing if FSDP2 does not shard the model
    for holder in {model, base}:
        if hasattr(holder, "generate"):
            _complete(holder, model, mesh)


def refuse_generate(model: nn.Module, base: nn.Module) -> None:
    """Make `generate` an error with the remedy, for a model of which each rank has a pipeline stage.

    Args:
        model: A sharded model.
        base: The model inside of a `PeftModel`; or `model` itself.
    """
    for holder in {model, base}:
        if hasattr(holder, "generate"):
            holder.__dict__["generate"] = _refuse


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ValueError(
        "generate does not work under pipeline parallelism (pp > 1), where each rank has some of the blocks: save the "
        "adapter and generate on a mesh without pp, or with vLLM; or leave it out (predict_with_generate=False)."
    )


def _complete(holder: Any, root: nn.Module, mesh: DeviceMesh) -> None:
    own: Any = holder.generate
    replicated = mesh["dp_replicate"].size() > 1

    def generate(*args: Any, **kwargs: Any) -> Any:
        if dp_size(mesh) > 1:
            kwargs.setdefault("synced_gpus", True)
        try:
            if replicated and not kwargs["synced_gpus"]:  # a replica needs no weights of other replicas
                share_random_state(mesh)
                return own(*args, **kwargs)
            with collective_call("generate"):
                share_random_state(mesh)
                return own(*args, **kwargs)
        finally:
            reshard(root)  # as after any forward that no backward follows

    holder.__dict__["generate"] = generate
