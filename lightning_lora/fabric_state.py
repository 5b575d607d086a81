"""Divide the dictionary that a user of Fabric saves or loads into sharded objects and others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lora_parallel.integration import check_not_stale, parallelized

__all__ = ["FabricState", "divide", "kinds"]


@dataclass
class FabricState:
    """Hold the entries of the user's dictionary by their kind."""

    models: nn.Module = field(default_factory=nn.Module)
    """Module with the sharded models as children, so that each parameter has one name: key, dot, name in the model."""

    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    """Optimizers of the sharded models, by key."""

    rest: dict[str, Any] = field(default_factory=dict)
    """All other entries by key, schedulers and unsharded modules included."""

    @property
    def roots(self) -> dict[str, nn.Module]:
        """Return the parallelized models by their names in `models`."""
        return parallelized(self.models)

    def rest_values(self) -> dict[str, Any]:
        """Return `rest` as it is stored: the state dict of each `Stateful` object, and other values as they are."""
        return {key: each.state_dict() if isinstance(each, Stateful) else each for key, each in self.rest.items()}


def divide(state: Mapping[str, Any]) -> FabricState:
    """Divide a dictionary whose models and optimizers were taken out of Fabric's wrappers.

    Raises:
        ValueError: The dictionary holds no sharded model, holds a model twice or under a key that cannot be its name,
            has an optimizer of parameters that are not in its models, or has models, optimizers or DTensors inside
            containers.
    """
    found = FabricState()
    holders: dict[nn.Module, str] = {}
    for key, value in state.items():
        if isinstance(value, nn.Module) and parallelized(value):
            _check_name(key)
            for model in parallelized(value).values():
                if holders.setdefault(model, key) != key:
                    raise ValueError(
                        f"state[{holders[model]!r}] and state[{key!r}] are the same model, or hold it: put it in the "
                        "state once."
                    )
            found.models.add_module(key, value)
        elif isinstance(value, Optimizer):
            found.optimizers[key] = value
        else:
            found.rest[key] = value
    if not found.roots:
        raise ValueError(
            f"the state ({', '.join(map(str, state)) or 'empty'}) holds no model that Fabric has set up: put the model "
            'that fabric.setup returned in it, for example {"model": model, "optimizer": optimizer, "step": step}.'
        )
    check_not_stale(
        found.optimizers.values(),
        set(found.models.parameters()),
        "Put all models whose parameters it holds in the state too.",
    )
    for key, value in found.rest.items():
        for each in tree_leaves(value):
            if isinstance(each, (nn.Module, Optimizer, DTensor)) and each is not value:
                raise ValueError(
                    f"state[{key!r}] has a {type(each).__name__} inside: put models and optimizers in the state "
                    "directly, under keys of their own."
                )
    return found


def kinds(state: Mapping[str, Any]) -> dict[str, str]:
    """Map each key to the kind of its value, on which all ranks must agree: "model", "optimizer" or "value"."""
    return {
        key: "model" if isinstance(value, nn.Module) else "optimizer" if isinstance(value, Optimizer) else "value"
        for key, value in state.items()
    }


def _check_name(key: Any) -> None:
    """Check that a model's key can be its name.

    The model's parameters are stored by names that begin with the key, and its adapters in a folder of that name.
    """
    if not isinstance(key, str) or not key or "." in key or "/" in key or hasattr(nn.Module(), key):
        raise ValueError(
            f"state[{key!r}] is a model, and no model can have that name: give it a key like 'model', without dots and "
            "slashes, that is no attribute of a module."
        )
