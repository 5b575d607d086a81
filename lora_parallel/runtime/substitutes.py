"""Refuse what was put in the place of a sharded model's parameters and layers after it was sharded.

`torch.func.functional_call` and assignments put other tensors there, and an assignment of a layer (a new head) puts
parameters there that nothing shards or reduces.
"""

from __future__ import annotations

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lora_parallel.distributed.fsdp_private import gathered_parameters

__all__ = ["Substitutes"]


class Substitutes:
    """Find substitutes: tensors in the place of a model's parameter that are not what FSDP2 gathers of the parameter.

    FSDP2 would compute with the parameters instead, or take the substitutes for its own shards. A tensor parallel layer
    would take a full tensor for its slice, and would never finish the gradient of a replicated tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self._places = [
            (module._parameters, key, parameter, f"{name}.{key}" if name else key)
            for name, module in model.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None and sharded
        ]
        self._modules = [
            (module, len(module._parameters), dict(module._modules)) for module in model.modules() if sharded
        ]

    def refuse(self, model: nn.Module) -> None:
        """Check, as a forward begins, that no parameter of `model` has a substitute, and that no new one trains.

        Raises:
            RuntimeError: A parameter has a substitute, or the model has a parameter that trains and was not sharded.
        """
        if any(len(module._parameters) != count or module._modules != held for module, count, held in self._modules):
            self._refuse_new(model)
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

    def _refuse_new(self, model: nn.Module) -> None:
        """Check that modules which have come since do not train. Adapters that a TenantPool adds are the pool's."""
        known = {id(held): {*held} for held, *_ in self._places}
        sharded = {module for module, *_ in self._modules}
        layers = (each for each in model.modules() if isinstance(each, BaseTunerLayer))
        of_pool = {inner for layer in layers if layer.get_base_layer() in sharded for inner in layer.modules()}
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():
                before = known.get(id(module._parameters), ())
                if parameter is not None and parameter.requires_grad and key not in before and module not in of_pool:
                    raise RuntimeError(
                        f"{f'{name}.{key}' if name else key} trains, and was put into the model after parallelize: its "
                        "gradient would not be reduced, so that ranks part. Put the layer in place (a new head, a "
                        "resized embedding) before the model is sharded."
                    )
