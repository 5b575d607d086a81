"""Shard the reference models of TRL's trainers.

A trainer with a reference model of its own wraps it by `trl.models.utils.prepare_fsdp`, which calls `fully_shard` by
itself: it knows no tensor parallelism, and its names of the mesh's axes are Accelerate's. Each module of TRL has
imported that function by name, so it is replaced in the modules of the trainer's classes, as the trainer is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from accelerate_plugin.arguments import adopt_output_dir
from accelerate_plugin.parallelism import parallelism_of

__all__ = ["create_accelerator"]

_HOME, _NAME = "trl.models.utils", "prepare_fsdp"


def create_accelerator(original: Callable[..., Any], self: Any) -> None:
    """Make the Accelerator of a Trainer, which then prepares the reference model too, if TRL's trainer has one.

    All processes then have the same `output_dir`. Collective.
    """
    original(self)
    if parallelism_of(self.accelerator) is None:
        return
    adopt_output_dir(self.args)
    for kind in type(self).__mro__:
        module = sys.modules[kind.__module__]
        own = vars(module).get(_NAME)
        if callable(own) and own.__module__ == _HOME and not hasattr(own, "__wrapped__"):
            setattr(module, _NAME, _by_accelerator(own))


def _by_accelerator(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def prepare_fsdp(model: nn.Module, accelerator: Any) -> Any:
        if parallelism_of(accelerator) is None:
            return own(model, accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True).eval()

    return prepare_fsdp
