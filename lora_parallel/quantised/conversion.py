"""Find the quantised layers of a model, check that they can be sharded, and let them hold their weights as bytes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from lora_parallel.adapters.injection import has_adapters
from lora_parallel.adapters.peft_private import refuse_merge
from lora_parallel.layers.linear_classes import QuantisedLayer
from lora_parallel.lazy.graph import Node
from lora_parallel.lazy.lazy_tensor import LazyParameter
from lora_parallel.lazy.tracking import without_values
from lora_parallel.quantised.packed_weight import Packed
from lora_parallel.state import Setup

_Format = tuple[Callable[[Any], None], Callable[[Any], "str | None"]]
"""Two functions: one changes a layer in place, one returns the reason why it cannot."""


def _format_of(module: nn.Module) -> _Format | None:
    """Return the functions of a layer's format, or None if the layer is not quantised in a format known here."""
    if isinstance(module, QuantisedLayer):
        return None
    weight = module._parameters.get("weight")
    if isinstance(weight, LazyParameter) and isinstance(weight.node, Packed):
        return _hold_waiting, lambda _: None
    if "bitsandbytes" in sys.modules:
        import bitsandbytes

        from lora_parallel.quantised import bnb

        if isinstance(module, bitsandbytes.nn.Linear4bit):
            return bnb.Linear4bit.take, bnb.problem_4bit
        if isinstance(module, bitsandbytes.nn.Linear8bitLt):
            return bnb.Linear8bit.take, bnb.problem_8bit
    if type(module) is nn.Linear and type(weight).__module__.startswith("torchao."):
        from lora_parallel.quantised import ao

        return ao.LinearAO.take, ao.problem_ao
    return None


def _hold_waiting(layer: Any) -> None:
    """Let a layer whose quantised weight is still on disk hold one `LazyParameter` for each part of the weight."""
    packed = layer.weight.node
    packed.hold(layer, {name: LazyParameter.of(node, parameter=True) for name, node in packed.parts.items()})


def check_quantised(model: nn.Module) -> None:
    """Check that every quantised layer can be sharded, and that adapters were added after the base was quantised."""
    names = {module: name for name, module in model.named_modules()}
    inside = {inner: layer for layer in model.modules() if isinstance(layer, LoraLayer) for inner in own_modules(layer)}
    known: set[Tensor] = set()
    for module, name in names.items():
        if (layer_format := _format_of(module)) is None:
            continue
        if module in inside:
            raise ValueError(
                f"{name} is a factor of an adapter, and quantised: the adapter was there before the base was "
                "quantised. Quantise first (from_pretrained with a quantization_config), then add the adapter."
            )
        if (problem := layer_format[1](module)) is not None:
            raise ValueError(f"{name} ({type(module).__name__}) is quantised and cannot be sharded: {problem}.")
        known.update(p for p in module._parameters.values() if p is not None)
    for module, name in names.items():
        if isinstance(module, BaseTunerLayer):
            _check_adapter(module, name)
    for name, parameter in model.named_parameters():
        node = parameter.node if isinstance(parameter, LazyParameter) else None
        if node is not None and not isinstance(node, Packed) and _is_of_packed(node):
            raise ValueError(
                f"{name} is quantised, and was cast or changed in shape before it was read: leave quantised weights as "
                "from_pretrained gives them."
            )
        if parameter not in known and (not parameter.is_floating_point() or _is_torchao(parameter)):
            raise ValueError(
                f"{name} is quantised ({type(parameter).__name__}, {parameter.dtype}) in a way that cannot be sharded. "
                "What can: linear layers of bitsandbytes (4-bit, int8) and of torchao (int8, float8, intx weight-only)."
            )


def _is_of_packed(node: Node) -> bool:
    return isinstance(node, Packed) or any(map(_is_of_packed, node.inputs))


def _is_torchao(parameter: object) -> bool:
    return type(parameter).__module__.startswith("torchao.")


def own_modules(layer: Any) -> Iterator[nn.Module]:
    """Yield the modules of a PEFT layer that do not belong to its base layer: mainly the factors of its adapters."""
    base = set(layer.get_base_layer().modules())
    return (module for module in layer.modules() if module not in base)


def _check_adapter(layer: Any, name: str) -> None:
    if _format_of(layer.get_base_layer()) is None:
        return
    weight = layer.get_base_layer().weight
    if type(layer) is LoraLinear and not (_is_torchao(weight) or isinstance(weight, LazyParameter)):
        raise ValueError(
            f"{name} is an adapter of a plain linear layer around a quantised one: it was there before the base was "
            "quantised. Quantise first (from_pretrained with a quantization_config), then add the adapter."
        )
    if variants := getattr(layer, "lora_variant", None):
        variant = type(next(iter(variants.values()))).__name__
        raise ValueError(f"{name} is a LoRA variant ({variant}) on a quantised layer: plain LoRA only is supported.")


def bare_states(model: nn.Module) -> dict[int, Any]:
    """Map the ids of bitsandbytes' states to their replacements in a copy without values, for `without_values`."""
    replacements: dict[int, Any] = {}
    for module in model.modules():
        if module.__dict__.get("quant_state") is not None:
            replacements[id(module.quant_state)] = None
        state = module.__dict__.get("state")
        if hasattr(state, "has_fp16_weights"):
            bare: Any = copy.copy(state)
            bare.CB = bare.SCB = None
            replacements[id(state)] = bare
    return replacements


def hold_as_bytes(model: nn.Module) -> None:
    """Let every quantised layer hold its tensors as bytes that can be sharded, in place.

    Call it after adapters were added, because PEFT knows only the quantisers' own layers.
    """
    for module in list(model.modules()):
        if (layer_format := _format_of(module)) is not None:
            layer_format[0](module)
    for module in model.modules():
        if isinstance(module, LoraLayer) and isinstance(module.get_base_layer(), QuantisedLayer):
            refuse_merge(module, "an adapter of a quantised layer", "on a mesh")
        if isinstance(module, PreTrainedModel) and any(isinstance(part, QuantisedLayer) for part in module.modules()):
            module.__dict__["num_parameters"] = MethodType(_num_parameters, module)


def _num_parameters(model: PreTrainedModel, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """Count parameters as transformers does: a quantised weight as the dense one. Trainer computes FLOPs from it."""
    quantised = {module for module in model.modules() if isinstance(module, QuantisedLayer)}
    embeddings = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)} if exclude_embeddings else set()
    apart = embeddings | {layer._parameters[key] for layer in quantised for key in ("weight", *layer.scales)}
    counted = (
        parameter.numel()
        for parameter in model.parameters()
        if parameter not in apart and (parameter.requires_grad or not only_trainable)
    )
    return sum(counted) + (0 if only_trainable else sum(layer.in_features * layer.out_features for layer in quantised))


def hold_quantised(setup: Setup) -> None:
    """Let quantised layers hold bytes that can be sharded, after a copy of a base that tenants may come to was made."""
    check_quantised(setup.model)
    if not (setup.config.require_adapters or has_adapters(setup.model)) and setup.config.pp == 1:
        # PEFT makes adapters of tenants on the copy later, and knows only the quantisers' own layers. The error is not
        # raised here, because tenants may never be added.
        try:
            setup.bare = without_values(setup.model, bare_states(setup.model))
        except Exception as error:  # whatever a module makes of being copied
            setup.bare = error
    hold_as_bytes(setup.model)
