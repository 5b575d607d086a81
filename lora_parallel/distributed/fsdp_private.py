"""Wrap the private API of FSDP2, in one place, as `torch_private` does for the rest of torch.

Each function says why it uses the private API, and which public API is missing.
`tests/lora_parallel/distributed/test_torch_private.py` tests that each private API still means the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

__all__ = [
    "drop_gathered_gradients",
    "forward_by_method",
    "gathered_parameters",
    "last_backward",
    "make_root",
    "parameters_on_meta",
    "reduces_gradients",
]


def _groups_of(unit: FSDPModule) -> list[Any]:
    """Return the groups in which FSDP2 holds the parameters of `unit`; before torch 2.13 there is at most one."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def gathered_parameters(unit: FSDPModule) -> list[Tensor]:
    """Return the gathered parameters that FSDP2 puts in the place of the sharded parameters of `unit`.

    The public `module.parameters()` returns them only while they are in place.
    """
    held = (getattr(each, "_unsharded_param", None) for group in _groups_of(unit) for each in group.fsdp_params)
    return [parameter for parameter in held if parameter is not None]


def reduces_gradients(unit: FSDPModule) -> bool:
    """Return True if FSDP2 finishes the gradients of `unit` in a backward pass.

    `set_requires_gradient_sync` and `set_requires_all_reduce` set this; there is no public way to read it.
    """
    return all(group.reduce_grads and group.all_reduce_grads for group in _groups_of(unit))


def drop_gathered_gradients(unit: FSDPModule) -> None:
    """Drop the gradients that backward passes without a reduction have left on the gathered parameters of `unit`.

    The documentation of `reset_iter_state` says that it drops them, but it does not.
    """
    for group in _groups_of(unit):
        for each in group.fsdp_params:
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None


def forward_by_method(model: torch.nn.Module, name: str) -> None:
    """Let FSDP2 gather the root unit's weights around a method of `model`, and not around its `forward` any more.

    `register_fsdp_forward_method` does the first. There is no public way to remove the hooks on `forward`, which must
    not run around a forward that calls the method many times.
    """
    register_fsdp_forward_method(model, name)
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def make_root(model: torch.nn.Module) -> None:
    """Let FSDP2 find all units inside of `model`, and take the model for the root. Collective.

    It does so in the first forward otherwise, and takes the unit that is called first for the root.
    """
    root: Any = model
    root.__dict__["_nothing"] = lambda: None
    register_fsdp_forward_method(root, "_nothing")
    root._nothing()
    del root.__dict__["_nothing"]
    root.reshard()


@contextmanager
def last_backward(model: torch.nn.Module, is_last: bool, keeps_gathered: bool) -> Iterator[None]:
    """Tell FSDP2 if other backward passes of forwards that have run already follow those within the context.

    If others follow, the root unit's weights stay gathered for them.

    Args:
        model: The root unit; nothing is done if it is none.
        is_last: True if no other passes follow.
        keeps_gathered: True if the weights of all units stay gathered until the last pass.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.set_is_last_backward(is_last)
    model.set_reshard_after_backward(is_last, recurse=keeps_gathered)
    try:
        yield
    finally:
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the context, let FSDP2 run with parameters on meta, which it refuses: a simulated rank has no values."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    own = FSDPParamGroup._validate_no_meta_params
    FSDPParamGroup._validate_no_meta_params = lambda group: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParamGroup._validate_no_meta_params = own  # type: ignore[method-assign]
