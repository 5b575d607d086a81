"""Which parameters an optimizer holds: sharding replaces them, and an optimizer with the old ones trains nothing."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lora_parallel.rendezvous import place_of_call

__all__ = ["HeldByName", "described", "refuse_stale", "refuse_steps_of"]

_REPLACED = "_lora_parallel_replaced"


def refuse_steps_of(before: Mapping[str, ref[nn.Parameter]], model: nn.Module) -> None:
    """Have every optimizer that holds a parameter which sharding has replaced raise an error when it steps.

    Nothing else tells such an optimizer from one that works: the old parameters get no gradients, and optimizers skip
    what has none. A model may well be sharded before there is an optimizer, so that it is no error before that step.

    Args:
        before: The parameters of the model before it was sharded, by name; those that something still holds count.
        model: The model after that.
    """
    held = set(model.parameters())
    replaced = {name: p for name, each in before.items() if (p := each()) is not None and p not in held}
    if replaced:
        _watch_steps()
    where = place_of_call()
    for name, parameter in replaced.items():
        setattr(parameter, _REPLACED, (name, where))


@cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [p for p in parameters if _REPLACED in p.__dict__]
    # Another model that shares a weight with the one that was sharded goes on with the old one, and trains.
    if held and (any(p.requires_grad and p.grad is None for p in held) or all(p.grad is None for p in parameters)):
        name, where = getattr(max(held, key=lambda parameter: parameter.requires_grad), _REPLACED)
        more = f" and {len(held) - 1} more" if len(held) > 1 else ""
        raise RuntimeError(
            f"this {type(optimizer).__name__} optimizer holds {name}{more} as before the model was sharded (at "
            f"{where}), which put sharded parameters in their place: it would train nothing. Make the optimizer "
            "afterwards, from the sharded model's parameters; or prepare both at once, accelerator.prepare(model, "
            "optimizer); or return it from configure_optimizers."
        )


def refuse_stale(optimizers: Iterable[Optimizer], known: Collection[nn.Parameter], remedy: str) -> None:
    """Check that optimizers hold parameters of sharded models only.

    Args:
        optimizers: The optimizers.
        known: All parameters of all sharded models.
        remedy: A sentence for the error.

    Raises:
        ValueError: One holds others.
    """
    for optimizer in optimizers:
        stale = sum(parameter not in known for group in optimizer.param_groups for parameter in group["params"])
        if stale:
            raise ValueError(
                f"{type(optimizer).__name__} holds {stale} parameters that are not the sharded model's: it was made "
                f"before the model was sharded. {remedy}"
            )


def described(optimizer: Optimizer, module: nn.Module) -> str:
    """An optimizer's class, settings and parameters in words, to be compared between ranks: replicated parameters that
    ranks update otherwise drift apart.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        held = " ".join(names.get(parameter, "?") for parameter in group["params"])
        settings = {key: value for key, value in sorted(group.items()) if key != "params"}
        groups.append(f"{len(group['params'])} parameters ({zlib.crc32(held.encode()):08x}) with {settings}")
    return f"{type(optimizer).__name__} of {'; '.join(groups)}"


class HeldByName:
    """An optimizer's parameters, remembered by name while those of its model are replaced by sharded ones.

    Args:
        optimizer: One that has not stepped.
        module: The model before it is sharded.
        sharded: Parameters of models that are sharded already, which the optimizer may hold too.
        remedy: A sentence for the error that it has state.

    Raises:
        ValueError: The optimizer has state, or holds parameters that are neither the module's nor in `sharded`.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, sharded: Collection[nn.Parameter], remedy: str) -> None:
        kind = type(optimizer).__name__
        if optimizer.state:
            raise ValueError(
                f"{kind} has state for {len(optimizer.state)} parameters already, which would stay with the unsharded "
                f"ones: {remedy}"
            )
        names = {parameter: name for name, parameter in module.named_parameters()}
        foreign = sum(p not in names and p not in sharded for group in optimizer.param_groups for p in group["params"])
        if foreign:
            raise ValueError(
                f"{kind} holds {foreign} parameters that are not those of the {type(module).__name__} it is set up "
                "with: make it from this model's parameters, or set its other models up before."
            )
        self._optimizer = optimizer
        self._held = [[names.get(p, p) for p in group["params"]] for group in optimizer.param_groups]

    def restore(self, module: nn.Module) -> None:
        """Put the parameters that bear the names now in place of the old ones."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            # In place: an optimizer may keep the list itself elsewhere too.
            group["params"][:] = [parameters[each] if isinstance(each, str) else each for each in held]

    def restore_adapted(self, module: nn.Module) -> None:
        """As `restore`, where adapters were injected meanwhile: a group that held a layer's parameters gets what trains
        in the layer now, and loses what is frozen.

        Raises:
            ValueError: Something trains in a layer that no group held.
        """
        layers = [{each.rpartition(".")[0] for each in held if isinstance(each, str)} for held in self._held]
        taken: list[list[nn.Parameter]] = [[] for _ in layers]
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            parts = name.split(".")[:-1]
            within = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
            found = next((index for layer in within for index, held in enumerate(layers) if layer in held), None)
            if found is None:
                raise ValueError(
                    f"{name}, of the injected adapter, is in a layer that {type(self._optimizer).__name__} held no "
                    "parameter of: make the optimizer from all of the model's parameters."
                )
            taken[found].append(parameter)
        for group, held, new in zip(self._optimizer.param_groups, self._held, taken, strict=True):
            group["params"][:] = [*new, *(each for each in held if not isinstance(each, str))]
