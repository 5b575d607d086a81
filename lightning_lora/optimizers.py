"""Which parameters an optimizer holds: sharding replaces them, and an optimizer with the old ones trains nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.optim import Optimizer

__all__ = ["HeldByName", "refuse_stale"]


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


class HeldByName:
    """An optimizer's parameters, remembered by name while those of its model are replaced by sharded ones.

    Args:
        optimizer: One that has not stepped.
        module: The model before it is sharded.
        sharded: Parameters of models that are sharded already, which the optimizer may hold too.

    Raises:
        ValueError: The optimizer has state, or holds parameters that are neither the module's nor in `sharded`.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, sharded: Collection[nn.Parameter]) -> None:
        kind = type(optimizer).__name__
        if optimizer.state:
            raise ValueError(
                f"{kind} has state for {len(optimizer.state)} parameters already, which would stay with the unsharded "
                "ones: set the model up first (model = fabric.setup_module(model)) and make the optimizer from its "
                "parameters afterwards."
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
