"""A layer and its adapters: what is under a PEFT layer, its parameters, and the role that each plays in a style."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lora_parallel.quantised.layer import Quantised
from lora_parallel.styles import Style
from lora_parallel.subclasses import features_dim, is_linear, own_roles

__all__ = ["UnitTensor", "base_of", "features_dim", "is_linear", "shared_parameters", "unit_tensors"]


def base_of(module: Any) -> nn.Module:
    """The layer under a PEFT layer, or the layer itself."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


@dataclass(frozen=True)
class UnitTensor:
    """One parameter of a unit."""

    owner: nn.Module
    """The module (or `nn.ParameterDict`) that holds it."""

    key: str
    """Its name there."""

    role: str
    """"weight", "bias", "lora_A", "magnitude", ...: the attribute of `Style` that places it."""

    dim: int | None = None
    """Which dim of it has the features, where the role does not say."""

    @property
    def parameter(self) -> nn.Parameter:
        """It, as it is registered."""
        parameter = self.owner._parameters[self.key]
        assert parameter is not None
        return parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Register `parameter` in its place."""
        self.owner._parameters[self.key] = parameter

    def shadow(self, local: Tensor | None) -> None:
        """Have its owner compute with `local`: attribute lookup finds the instance dictionary before `_parameters`, so
        names and registration stay.
        """
        self.owner.__dict__[self.key] = local

    def unshadow(self) -> None:
        """Have its owner compute with the parameter again."""
        self.owner.__dict__.pop(self.key, None)


def unit_tensors(module: nn.Module, style: Style | None = None) -> list[UnitTensor]:
    """The parameters of a layer and of its adapters, with the role that each plays in a style.

    A parameter of a layer that is no linear layer and no embedding has the role of a bias: one element for each output
    feature. What a subclass of `nn.Linear` adds has the role that `subclasses` finds for `style`.
    """
    base = base_of(module)
    known = own_roles(base, style) if style is not None and is_linear(base) else {}
    whole = is_linear(base) or isinstance(module, BaseTunerLayer)  # all that is inside; of others, children are layers
    tensors = []
    for inner in base.modules() if whole else [base]:
        for key, parameter in inner._parameters.items():
            if parameter is None:
                continue
            role, dim = known.get((inner, key)) or (_base_role(base, inner, key), None)
            tensors.append(UnitTensor(inner, key, role if parameter.numel() else "empty", dim))
    if isinstance(module, BaseTunerLayer):
        own = set(base.modules())
        for name, inner in cast(nn.Module, module).named_modules():
            for key, parameter in inner._parameters.items():
                if inner not in own and parameter is not None:
                    role = _adapter_role(module, name.split(".")[0], key)
                    tensors.append(UnitTensor(inner, key, role if parameter.numel() else "empty"))
    return tensors


def _base_role(base: nn.Module, owner: nn.Module, key: str) -> str:
    if owner is base and key == "weight":
        return "weight"
    plain = isinstance(base, (nn.Linear, Conv1D, nn.Embedding))
    return "bias" if owner is base and (key == "bias" or not plain) else "other"


def _adapter_role(module: nn.Module, container: str, key: str) -> str:
    if isinstance(module, LoraEmbedding):
        return {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}.get(container, "other")
    if not isinstance(module, LoraLinear) and not isinstance(base_of(module), Quantised):
        return "other"
    roles = {"lora_A": "lora_A", "lora_B": "lora_B", "lora_magnitude_vector": "magnitude"}
    return "addend" if (container, key) == ("lora_B", "bias") else roles.get(container, "other")


def shared_parameters(model: nn.Module) -> dict[nn.Parameter, list[nn.Module]]:
    """The parameters that more than one module holds (tied weights), with their holders."""
    holders: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, []).append(module)
    return {parameter: modules for parameter, modules in holders.items() if len(modules) > 1}
