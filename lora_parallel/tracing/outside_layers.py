"""Find the layers of a model outside of its blocks, which context parallelism treats otherwise than those in blocks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from lora_parallel.tracing.trace_errors import TraceError
from lora_parallel.tracing.tracer import Call, Tracer

__all__ = ["layers_after", "replicated_layers"]


def layers_after(tracer: Tracer, blocks: list[nn.Module], trunk: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the linear layers that are called after the trunk, and the modules called between blocks and its end.

    Args:
        tracer: Runs a copy of the model.
        blocks: The blocks of the copy.
        trunk: The module of the copy around the blocks and the last norm.

    Returns:
        Two lists of the model's own modules.
    """
    real_of = {twin: real for real, twin in tracer.twin_of.items()}
    inside = {module for block in blocks for module in block.modules()}
    ends: dict[nn.Module, None] = {}
    layers: dict[str, None] = {}
    place = {"blocks": True, "trunk": True}

    def returned(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is blocks[-1]:
            place["blocks"] = False
        elif module is trunk:
            place["trunk"] = False
        elif not place["blocks"] and place["trunk"] and module not in inside:
            ends[module] = None

    def stand_in(index: int, call: Call, fed: Tensor) -> Tensor:
        if not place["trunk"]:
            layers[call.layer] = None
        return call.output()

    hooks = [module.register_forward_hook(returned) for module in tracer.twin.modules()]
    try:
        tracer.run_again(stand_in)
    finally:
        for hook in hooks:
            hook.remove()
    return [real_of[tracer.modules[name]] for name in layers], [real_of[module] for module in ends]


def replicated_layers(tracer: Tracer, blocks: Collection[nn.Module], others: Collection[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules of a model, outside of blocks and of `others`, that hold a parameter that trains.

    A layer with adapters is one module, as its adapters are used in its own forward. A module that was not called in
    the run, such as a vision tower, is among them.

    Args:
        tracer: Has run a copy of the model.
        blocks: The model's blocks.
        others: Other modules that are not to be found.

    Raises:
        TraceError: A module around the blocks holds such a parameter itself, or it is used without its module.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module, name: str) -> None:
        if module in blocks or module in others:
            return
        around = any(inner in blocks for inner in module.modules())
        trained = [key for key, p in module._parameters.items() if p is not None and p.requires_grad]
        if trained and around:
            raise TraceError(f"{f'{name}.{trained[0]}'.lstrip('.')} trains, and is in no layer of its own")
        is_layer = isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        if is_layer and any(inner in others for inner in module.modules()):
            return
        if not around and (trained or (is_layer and any(p.requires_grad for p in module.parameters()))):
            found.append(module)
            twin = tracer.twin_of[module]
            if twin not in tracer.entered and any(p in tracer.used for p in twin.parameters()):
                raise TraceError(f"{name} trains, and is used without being called")
            return
        for key, child in module.named_children():
            visit(child, f"{name}.{key}".lstrip("."))

    visit(tracer.model, "")
    return found
