"""Finish saves in the background, before anything destroys the process group.

torch has no hook that runs before `destroy_process_group`, and its groups take no attribute that could wait: while a
save is in flight the function itself is replaced, in torch and in modules that import it by name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lora_parallel.distributed.rank_checks import agreed
from lora_parallel.distributed.rendezvous import collective_call

__all__ = ["background_group", "finish_in_background", "wait_for_save"]

_pending: Future[None] | None = None
_own_destroy = dist.destroy_process_group
_groups: dict[Any, Any] = {}
"""Process group of background saves, by the default process group that existed when it was made."""


def wait_for_save() -> None:
    """Wait until the save in flight, if there is one, is complete on disk. Collective.

    The end of a process and `torch.distributed.destroy_process_group` also wait for the save, but do not raise its
    errors.

    Raises:
        OSError: The checkpoint could not be written; raised on every rank.
    """
    global _pending
    pending, _pending = _pending, None
    if pending is not None:
        _replace_everywhere(_destroy_afterwards, _own_destroy)
        with collective_call("wait_for_save"), agreed():
            pending.result()


def finish_in_background(finish: Callable[[], None]) -> None:
    """Let a thread finish a save; `wait_for_save` and the end of the process group wait for it.

    Args:
        finish: Function that waits for the values to be on disk and puts the checkpoint in place.
    """
    global _pending
    thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    _pending = thread.submit(finish)
    thread.shutdown(wait=False)
    _replace_everywhere(_own_destroy, _destroy_afterwards)


def _replace_everywhere(one: Any, other: Any) -> None:
    """Replace `destroy_process_group`, where it is `one`, by `other` in torch and in modules that import it by name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if names.get("destroy_process_group") is one:
            names["destroy_process_group"] = other


def _destroy_afterwards(*args: Any, **kwargs: Any) -> None:
    """Wait for the save in flight, then destroy the process group.

    While a save is in flight, this function stands in place of torch's `destroy_process_group`, with which scripts end
    and which would destroy the process group of the save.
    """
    _replace_everywhere(_destroy_afterwards, _own_destroy)
    if _pending is not None:
        futures.wait([_pending])
    _own_destroy(*args, **kwargs)


def background_group(seconds: float) -> Any:
    """Return the process group of background saves, with this timeout. Collective at the first call."""
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()
        _groups[world] = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return _groups[world]
