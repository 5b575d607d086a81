"""Counts collectives as they are issued, c10d's and functional ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter", "barrier", "alltoall")


class Traffic(TorchDispatchMode):
    """While active, `calls` grows by (kind, ranks of the group) for each collective that this rank issues."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith(("wait", "_wrap")):
            self.calls.append((_kind(name), _ranks([*args, *(kwargs or {}).values()])))
        return func(*args, **(kwargs or {}))

    def count(self, kind: str, group: dist.ProcessGroup | None = None) -> int:
        """How many collectives of this kind, over this group or any."""
        ranks = None if group is None else tuple(dist.get_process_group_ranks(group))
        return sum(call[0] == kind and ranks in (None, call[1]) for call in self.calls)


def _kind(name: str) -> str:
    plain = name.replace("allreduce", "all_reduce").replace("allgather", "all_gather").replace("all_to_all", "alltoall")
    return next((kind for kind in _KINDS if kind in plain), name)


def _ranks(arguments: list[Any]) -> tuple[int, ...]:
    """The group is an object in c10d's operators and a name in the functional ones."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(argument)
            except RuntimeError:  # another object: the reduction's kind
                continue
            return tuple(dist.get_process_group_ranks(group))
        if isinstance(argument, str):
            try:
                return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(argument)))
            except (ValueError, RuntimeError):  # "sum"
                continue
    return ()
