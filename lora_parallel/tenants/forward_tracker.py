"""Tell a layer which forward it takes part in: the one that is computed, or the one that a backward recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.distributed.pytree import tensors_in
from lora_parallel.distributed.torch_private import backward_pass, in_backward, queue_after_backward
from lora_parallel.tenants.batch_routing import Forward, Route

__all__ = ["ForwardTracker"]


class ForwardTracker:
    """Follow the forwards and backwards of a model by hooks, and tell its layers which forward they take part in.

    When a gradient reaches the output of a module, layers that are recomputed after it belong to the forward that made
    this output. All modules have a hook, since a loss may be computed from a hidden state.

    Args:
        model: The model.
        device: Type of the device that messages between ranks go by.
        count: Counts a training forward in a route, and returns its number for each tenant of the route.
    """

    def __init__(self, model: nn.Module, device: str, count: Callable[[Route], dict[str, int]]) -> None:
        self._device, self._count = device, count
        self.route: Route | None = None
        """Route of the context that is open; None outside of any."""

        self._forward: Forward | None = None
        self._begun: dict[int, list[Forward | None]] = {}
        """Forwards whose backward has begun, by the number of the backward pass.

        Holds the passes that are running (several, if a hook starts one inside another) and those that ended with an
        error.
        """

        self.trained: set[str] = set()
        """Tenants of forwards whose backward has begun, until their gradients are summed or dropped.

        The set is the same on all ranks, also if a backward reached a tenant's layers on some ranks only.
        """

        model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        model.register_forward_hook(self._forward_ends)
        for module in list(model.modules()):
            module.register_forward_hook(self._made)

    @contextmanager
    def within(self, route: Route) -> Iterator[None]:
        """Run the forwards of a block in a route."""
        self.route, self._forward = route, Forward(route, {})
        try:
            yield
        finally:
            self.route = self._forward = None

    def current(self, layer: str) -> Forward | None:
        """Return the forward that is computed, or that a backward recomputes; None outside of any route.

        Args:
            layer: The name of the layer that asks, for messages.

        Raises:
            RuntimeError: The layer runs in a reentrant checkpoint, so that its forward cannot be found out when it is
                recomputed; or a tenant of the recomputed forward has been removed.
        """
        if not in_backward():
            if self._forward is not None and self._forward.trains and not torch.is_grad_enabled():
                raise RuntimeError(f"{layer} is computed without gradients in a training forward. {_REENTRANT}")
            return self._forward
        if backward_pass() not in self._begun:
            raise RuntimeError(f"{layer} is recomputed, and it cannot be told in which forward it was. {_REENTRANT}")
        forward = self._begun[backward_pass()][-1]
        removed = [] if forward is None else forward.route.removed()
        if removed:
            raise RuntimeError(
                f"{layer} is recomputed for the tenants {removed}, which were removed after the forward: remove a "
                "tenant when the backwards of its forwards are over."
            )
        return forward

    def died(self) -> set[str]:
        """Return the tenants of backward passes that ended with an error, and forget these passes.

        Inside a backward the result is empty.
        """
        if in_backward():
            return set()
        forwards = [each for begun in self._begun.values() for each in begun if each is not None]
        names = {name for each in forwards for name in each.route.tenants}
        self._begun.clear()
        return names

    def _forward_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if in_backward() or self.route is None:
            return
        rows = len(self.route.names or ())
        fed = [x for x in tensors_in([args, kwargs]) if x.dim() in (2, 3) and x.shape[0] == rows]  # not images
        counts = self._count(self.route) if model.training else {}
        widths = {x.shape[1] for x in fed}
        self._forward = Forward(self.route, counts, torch.is_grad_enabled(), widths, self.route.names is not None)

    def _forward_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        if not in_backward() and self._forward is not None:
            self._forward.end(self._device)

    def _made(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or in_backward():  # what a graph returns is the output of a block
            return
        this = self._forward

        def backward_begins(grad: Tensor) -> None:
            this_pass = backward_pass()
            if this_pass not in self._begun:
                self._begun[this_pass] = []
                queue_after_backward(partial(self._ended, this_pass))
            begun = self._begun[this_pass]
            if not begun or begun[-1] is not this:
                begun.append(this)
                self.trained.update(() if this is None else this.route.tenants)

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(backward_begins)

    def _ended(self, this_pass: int) -> None:
        self._begun.pop(this_pass, None)


_REENTRANT = (
    "Under a TenantPool checkpoint activations with use_reentrant=False (activation_checkpointing=True does), and "
    "leave out of target_modules what the model computes under no_grad."
)
