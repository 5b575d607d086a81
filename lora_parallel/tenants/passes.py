"""Which forward a layer takes part in: the one that is computed, or the one that a backward recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.nests import tensors_in
from lora_parallel.tenants.route import Forward, Route
from lora_parallel.upstream import backward_pass, in_backward, queue_after_backward

__all__ = ["Passes"]


class Passes:
    """Hooks on a model, which tell its layers the route that they are in.

    Where a gradient comes to the output of a module, what is recomputed from there on is of the forward that made this
    output. Hooks are on all modules, since a loss may be of a hidden state.

    Args:
        model: Whose forwards and backwards these are.
        device: The type of device that messages go by.
        count: Counts a training forward in a route; gives its number for each tenant.
    """

    def __init__(self, model: nn.Module, device: str, count: Callable[[Route], dict[str, int]]) -> None:
        self._device, self._count = device, count
        self.route: Route | None = None
        """Of the context that we are in."""

        self._forward: Forward | None = None
        self._begun: dict[int, list[Forward | None]] = {}
        """The forwards whose backward has begun, by the pass: of those that are computed now (one inside of another, if
        a hook calls one), and of those that died."""

        self.trained: set[str] = set()
        """The tenants of forwards whose backward has begun, until their gradients are summed or dropped: the same on
        all ranks, also where a tenant's layers were reached on some only."""

        model.register_forward_pre_hook(self._forward_begins, with_kwargs=True)
        model.register_forward_hook(self._forward_ends)
        for module in list(model.modules()):
            module.register_forward_hook(self._made)

    @contextmanager
    def within(self, route: Route) -> Iterator[None]:
        """Within, forwards are in a route."""
        self.route, self._forward = route, Forward(route, {})
        try:
            yield
        finally:
            self.route = self._forward = None

    def current(self, layer: str) -> Forward | None:
        """The forward that is computed, or recomputed; None outside of any route.

        Args:
            layer: The name of the layer that asks, for messages.

        Raises:
            RuntimeError: A reentrant checkpoint recomputes one, of which a backward does not tell which it is; or it
                has a tenant that is gone.
        """
        if not in_backward():
            if self._forward is not None and self._forward.trains and not torch.is_grad_enabled():
                raise RuntimeError(f"{layer} is computed without gradients in a training forward. {_REENTRANT}")
            return self._forward
        if backward_pass() not in self._begun:
            raise RuntimeError(f"{layer} is recomputed, and it cannot be told in which forward it was. {_REENTRANT}")
        forward = self._begun[backward_pass()][-1]
        gone = [] if forward is None else forward.route.gone()
        if gone:
            raise RuntimeError(
                f"{layer} is recomputed for the tenants {gone}, which were removed after the forward: remove a tenant "
                "when the backwards of its forwards are over."
            )
        return forward

    def died(self) -> set[str]:
        """The tenants that took part in backwards that died on their way, which are forgotten with this."""
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
        fed = [x for x in tensors_in([args, kwargs]) if x.dim() in (2, 3) and x.shape[0] == rows]  # no images
        counts = self._count(self.route) if model.training else {}
        widths = {x.shape[1] for x in fed}
        self._forward = Forward(self.route, counts, torch.is_grad_enabled(), widths, self.route.names is not None)

    def _forward_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        if not in_backward() and self._forward is not None:
            self._forward.end(self._device)

    def _made(self, module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
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
