"""Gather the weights of modules that are called by themselves, while FSDP2 holds these weights in shards.

FSDP2 gathers a unit's weights when the unit itself is called. The root unit holds the modules that are in no block:
embeddings, the last norm, the head. Code for soft prompts or images calls the embedding before the model. Calls of
`model.forward(...)`, of the base model inside of a `PeftModel` or of the trunk alone bypass the root unit altogether. A
layer that tensor parallelism splits would then compute with a shard of its shard, without an error. The hooks of this
file gather the weights for such a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lora_parallel.distributed.fsdp_private import make_root
from lora_parallel.distributed.pytree import tensors_in
from lora_parallel.distributed.torch_private import in_backward

__all__ = ["gather_for_calls", "is_at_rest", "leave_inference_mode"]


def is_at_rest(tensor: Tensor) -> bool:
    """Return True if `tensor` is a parameter that FSDP2 holds as shards over dp, which no layer can compute with."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.mesh_dim_names != ("tp",)


def gather_for_calls(model: nn.Module, tied: Sequence[nn.Module]) -> None:
    """Register hooks that gather the root unit's weights for a module in it that is called by itself.

    The weights are sharded again after the call.

    Args:
        model: The root unit of FSDP2.
        tied: Layers of `model` that share an FSDP unit with layers of another block. FSDP2 gathers and shards the
            weights of such a unit for one forward of all its layers, so that a call of one of them by itself is
            refused.
    """
    root = _Root(model)
    names = {module: name for name, module in model.named_modules()}
    for layer in tied:
        layer.register_forward_pre_hook(partial(root.refuse, names[layer]), prepend=True)
    for name, module in _below(model, ""):
        if module in tied:
            continue
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(root.begin, prepend=True)
        elif (first := _first_at_rest(module)) is not None:
            call = _Call(root, name, *first)
            module.register_forward_pre_hook(call.before, with_kwargs=True, prepend=True)
            module.register_forward_hook(call.after, always_call=True)


def _below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules below `module` down to the FSDP units, whose own submodules are left out."""
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        yield name, child
        if not isinstance(child, FSDPModule):
            yield from _below(child, f"{name}.")


def _first_at_rest(module: nn.Module) -> tuple[nn.Module, str] | None:
    """Return a submodule of `module` and the key of a parameter in it that a call of `module` needs gathered.

    The result is None if there is no such parameter. The parameter is given by its key, because gathering puts another
    tensor in its place. If `module` contains FSDP units, only its own parameters are looked at: it calls its submodules
    in turn, and these have hooks of their own.
    """
    whole = not any(isinstance(each, FSDPModule) for each in module.modules())
    held = ((m, key, p) for m in (module.modules() if whole else [module]) for key, p in m._parameters.items())
    return next(((m, key) for m, key, p in held if p is not None and is_at_rest(p)), None)


def leave_inference_mode(model: nn.Module) -> None:
    """Register hooks that run a model, and each FSDP unit of it, under `no_grad` where it is called in inference mode.

    What a first forward makes, FSDP2's buffers above all, could never be trained with otherwise. To be called after the
    other hooks of the forward are registered.
    """
    for module in [model, *(each for each in model.modules() if isinstance(each, FSDPModule) and each is not model)]:
        left = ExitStack()
        module.register_forward_pre_hook(partial(_leave, left), prepend=True)
        module.register_forward_hook(partial(_return, left), always_call=True)


def _leave(left: ExitStack, *_: Any) -> None:
    if torch.is_inference_mode_enabled():
        left.enter_context(torch.inference_mode(False))
        left.enter_context(torch.no_grad())


def _return(left: ExitStack, *_: Any) -> None:
    left.close()


class _Root:
    """Gather and shard the root unit's weights outside of its forward.

    FSDP2 takes the unit that is called first for the root, so `begin` makes the model the root before any other unit is
    called.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._begun = self._runs = False
        model.register_forward_pre_hook(self._begins, prepend=True)
        model.register_forward_hook(self._ends, always_call=True)

    def _begins(self, *_: Any) -> None:
        self._begun = self._runs = True

    def _ends(self, *_: Any) -> None:
        self._runs = False

    def refuse(self, name: str, *_: Any) -> None:
        """Raise an error if the tied layer `name` is called outside of the model's forward and of a backward pass."""
        if not self._runs and not in_backward():
            raise RuntimeError(
                f"{name} was called outside of the model's forward, and shares a weight with a layer of another block, "
                "so that FSDP2 runs both or none: call the model that was parallelized, not a part of it."
            )

    def begin(self, *_: Any) -> None:
        """Make FSDP2 take the model for the root unit, if the model has not been called yet. Collective."""
        if not self._begun:
            self._begun = True
            make_root(self._model)

    @torch.inference_mode(False)
    def unshard(self) -> None:
        self.begin()
        self._model.unshard()

    def reshard(self) -> None:
        self._model.reshard()


class _Call:
    """Gather the root unit's weights for calls of one of its modules by itself."""

    def __init__(self, root: _Root, name: str, holder: nn.Module, key: str) -> None:
        self._root, self._name, self._holder, self._key = root, name, holder, key
        self._gathered = False

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_at_rest(self._holder._parameters[self._key]):  # type: ignore[arg-type]
            return
        needed = [*module.parameters(), *tensors_in([args, kwargs])]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in needed):
            raise RuntimeError(
                f"{self._name} was called by itself in training, while FSDP2 holds its weights in shards, and its "
                "backward would want them: call the model that was parallelized, not model.forward, the model inside "
                "of it (get_base_model()) or a part of that; outside of training call it under torch.no_grad()."
            )
        self._root.unshard()
        self._gathered = True

    def after(self, *_: Any) -> None:
        if self._gathered:
            self._gathered = False
            self._root.reshard()
