"""Tensors in the place of a sharded model's parameters, as `torch.func.functional_call` puts them there."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lora_parallel.upstream import gathered_parameters

__all__ = ["Substitutes"]


class Substitutes:
    """Finds what is in the place of a parameter of one model and is neither it nor what FSDP2 gathers of it.

    FSDP2 would compute with the parameters instead, or take the substitutes for its own shards; a tensor parallel layer
    would take a full tensor for its slice, and never finish the gradient of a replicated one.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._places = [
            (module._parameters, key, parameter, f"{name}.{key}" if name else key)
            for name, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and sharded
        ]

    def refuse(self, model: nn.Module) -> None:
        """Called as a forward begins.

        Raises:
            RuntimeError: A parameter has a substitute.
        """
        odd = [(held.get(key), name) for held, key, parameter, name in self._places if held.get(key) is not parameter]
        if not odd:
            return
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        gathered = {id(parameter) for unit in units for parameter in gathered_parameters(unit)}
        for held, name in odd:
            if held is not None and id(held) not in gathered:
                raise RuntimeError(
                    f"another tensor is in the place of {name} than parallelize left there (torch.func.functional_call "
                    "does so, load_state_dict(assign=True) and assignments): each rank would compute with what it "
                    "takes for its shard. Change the parameter in place, or load_adapter; for several adapters on one "
                    "base, TenantPool."
                )
