"""List the parameters of a layer and of its adapters, and name modules as the model's author would."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from peft import PeftModel
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import Cache
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput

from lora_parallel.layers.linear_classes import QuantisedLayer, has_adapters_inside, is_linear, own_roles
from lora_parallel.layers.styles import Style


def lora_layers(model: nn.Module) -> set[nn.Module]:
    """Return the LoRA layers of a model. A hook on what is in one would leave its calls to PEFT's forward."""
    return {module for module in model.modules() if isinstance(module, LoraLayer)}


def base_of(module: Any) -> nn.Module:
    """Return the layer under a PEFT layer, or `module` itself if it is no PEFT layer."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


@dataclass(frozen=True)
class LayerTensor:
    """Describe one parameter of a layer or of its adapters: who holds it, and its role in a style."""

    owner: nn.Module  # the module (or `nn.ParameterDict`) that holds the parameter
    key: str  # name of the parameter in `owner`
    role: str
    """Name of the attribute of `Style` that places the parameter: "weight", "bias", "lora_A", "magnitude", ..."""

    dim: int | None = None  # dim of the parameter that has the features; None if the role determines it

    @property
    def parameter(self) -> nn.Parameter:
        """Return the parameter that is registered in `owner`."""
        parameter = self.owner._parameters[self.key]
        assert parameter is not None
        return parameter

    def put(self, parameter: nn.Parameter) -> None:
        """Register `parameter` in `owner` under the same name."""
        self.owner._parameters[self.key] = parameter


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
    return {parameter: modules for parameter, modules in places.items() if len(modules) > 1}


def clean_names(model: nn.Module) -> dict[nn.Module, str]:
    """Map each module to its name as the model's author would write it, without modules that PEFT put into a layer.

    A PEFT layer and its base layer are one layer, and the PEFT layer is the key. The modules inside a
    `ModulesToSaveWrapper` (the original and the trained copies) all have the wrapper's name.
    """
    names: dict[nn.Module, str] = {}

    def walk(module: nn.Module, name: str) -> None:
        wrapped: list[nn.Module] = []
        if isinstance(module, PeftModel):
            wrapped = [module.get_base_model()]
        elif isinstance(module, ModulesToSaveWrapper):
            wrapped = [module.original_module, *module.modules_to_save.values()]
        elif isinstance(module, TrainableTokensWrapper):
            wrapped = [module.token_adapter]
        elif module not in names:
            names[module] = name
            if not isinstance(module, BaseTunerLayer) and (not is_linear(module) or has_adapters_inside(module)):
                for key, child in module.named_children():
                    walk(child, f"{name}.{key}" if name else key)
        for inner in wrapped:
            walk(inner, name)

    walk(model, "")
    return names


def name_of_block(block: nn.Module, names: Mapping[nn.Module, str]) -> str:
    """Return the clean name of a block; one in `modules_to_save` is a wrapper, and what is in it has the name."""
    return next(names[module] for module in block.modules() if module in names)


def clean_parameter_name(name: str) -> str:
    """Return a parameter's name without the components that PEFT's layers add: `base_layer`, `original_module`."""
    return ".".join(part for part in name.split(".") if part not in ("base_layer", "original_module"))


def block_of(name: str) -> str:
    """Return the name of the block that a module is in, the outermost numbered one, or "" if it is in none."""
    match = re.match(r"(?:.*?\.)??\d+(?=\.|$)", name)
    return match[0] if match else ""


def without_block_numbers(name: str) -> str:
    """Return a module's name as a glob that matches the same module of all blocks."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


def count_kinds(texts: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Count layers by their name without block numbers and by the text about them; `texts` has one for each name."""
    return dict(Counter((without_block_numbers(name), text) for name, text in texts.items()))


def innermost(model: nn.Module) -> nn.Module:
    """Return the model that PEFT wraps, or `model` itself if PEFT does not wrap it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def embeddings_of(model: Any, side: Literal["input", "output"]) -> nn.Module | None:
    """Return the input or output embeddings that a transformers model names, or None if it names none."""
    try:
        return getattr(model, f"get_{side}_embeddings", lambda: None)()
    except NotImplementedError:
        return None


def asks_for(name: str, kwargs: Mapping[str, Any], model: nn.Module) -> bool:
    """Return True if an output (`output_attentions`, for example) is asked for, by the forward or else the config."""
    value = kwargs.get(name)
    return bool(value if value is not None else getattr(getattr(model, "config", None), name, False))


def asks_for_cache(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a model's forward is given a cache, or `use_cache=True`."""
    return bool(kwargs.get("use_cache")) or any(isinstance(value, Cache) for value in (*args, *kwargs.values()))


def check_between_blocks(kwargs: Mapping[str, Any], option: str, remedy: str) -> None:
    """Refuse a forward that adds features of images (Qwen3-VL) between blocks, where `option` gives ranks chunks."""
    if kwargs.get("deepstack_visual_embeds") is not None:
        raise ValueError(
            f"deepstack_visual_embeds: features of images are added to the tokens between blocks, where {option} each "
            f"rank has a chunk of the tokens. Leave images out, or {remedy}."
        )


def without_caches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a block with None in the place of caches."""
    return (
        tuple(None if isinstance(value, Cache) else value for value in args),
        {key: None if isinstance(value, Cache) else value for key, value in kwargs.items()},
    )


def without_cache(output: Any) -> Any:
    """Return what a model returns without its cache, or None, as a hook does, if there is none in it."""
    # By its class: transformers 5.24 calls it `cache`, and `past_key_values` before.
    if isinstance(output, ModelOutput) and any(isinstance(value, Cache) for value in output.values()):
        return type(output)(**{key: value for key, value in output.items() if not isinstance(value, Cache)})
    return None
