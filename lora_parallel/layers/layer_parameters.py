"""List the parameters of a layer and of its adapters, each with the role that it plays in a style."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lora_parallel.layers.linear_classes import features_dim, is_linear, own_roles
from lora_parallel.layers.quantised_layer import QuantisedLayer
from lora_parallel.layers.styles import Style

__all__ = ["LayerTensor", "base_of", "features_dim", "is_linear", "layer_tensors", "shared_parameters"]


def base_of(module: Any) -> nn.Module:
    """Return the layer under a PEFT layer, or `module` itself if it is no PEFT layer."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


@dataclass(frozen=True)
class LayerTensor:
    """Describe one parameter of a layer or of its adapters: who holds it, and its role in a style."""

    owner: nn.Module
    """The module (or `nn.ParameterDict`) that holds the parameter."""

    key: str
    """Name of the parameter in `owner`."""

    role: str
    """Name of the attribute of `Style` that places the parameter: "weight", "bias", "lora_A", "magnitude", ..."""

    dim: int | None = None
    """Dim of the parameter that has the features; None if the role determines it."""

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter that is registered in `owner`."""
        parameter = self.owner._parameters[self.key]
        assert parameter is not None
        return parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Register `parameter` in `owner` under the same name."""
        self.owner._parameters[self.key] = parameter

    def shadow(self, local: Tensor | None) -> None:
        """Let the owner compute with `local` in place of the parameter.

        Attribute lookup finds the instance dictionary before `_parameters`, so names and registration stay.
        """
        self.owner.__dict__[self.key] = local

    def unshadow(self) -> None:
        """Let the owner compute with the parameter again."""
        self.owner.__dict__.pop(self.key, None)


def layer_tensors(module: nn.Module, style: Style | None = None) -> list[LayerTensor]:
    """Return the parameters of a layer and of its adapters, with the role that each plays in a style.

    A parameter of a layer that is no linear layer and no embedding has the role of a bias: one element for each output
    feature. A parameter that a subclass of `nn.Linear` adds has the role that `linear_classes.own_roles` finds for
    `style`.
    """
    base = base_of(module)
    known = own_roles(base, style) if style is not None and is_linear(base) else {}
    whole = is_linear(base) or isinstance(module, BaseTunerLayer)  # if not whole, the children are layers
    tensors = []
    for inner in base.modules() if whole else [base]:
        for key, parameter in inner._parameters.items():
            if parameter is None:
                continue
            role, dim = known.get((inner, key)) or (_base_role(base, inner, key), None)
            tensors.append(LayerTensor(inner, key, role if parameter.numel() else "empty", dim))
    if isinstance(module, BaseTunerLayer):
        own = set(base.modules())
        for name, inner in cast(nn.Module, module).named_modules():
            for key, parameter in inner._parameters.items():
                if inner not in own and parameter is not None:
                    role = _adapter_role(module, name.split(".")[0], key)
                    tensors.append(LayerTensor(inner, key, role if parameter.numel() else "empty"))
    return tensors


def _base_role(base: nn.Module, owner: nn.Module, key: str) -> str:
    if owner is base and key == "weight":
        return "weight"
    plain = isinstance(base, (nn.Linear, Conv1D, nn.Embedding))
    return "bias" if owner is base and (key == "bias" or not plain) else "other"


def _adapter_role(module: nn.Module, container: str, key: str) -> str:
    if isinstance(module, LoraEmbedding):
        return {"lora_embedding_A": "lora_A", "lora_embedding_B": "lora_B"}.get(container, "other")
    if not isinstance(module, LoraLinear) and not isinstance(base_of(module), QuantisedLayer):
        return "other"
    roles = {"lora_A": "lora_A", "lora_B": "lora_B", "lora_magnitude_vector": "magnitude"}
    return "addend" if (container, key) == ("lora_B", "bias") else roles.get(container, "other")


def shared_parameters(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Map each parameter that is held in more than one place (a tied weight) to these modules, with its key in each."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, key))
    return {parameter: held for parameter, held in places.items() if len(held) > 1}
