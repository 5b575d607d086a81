"""Let all processes save together when Trainer saves on SIGTERM (`enable_jit_checkpoint=True`).

The signal sets a flag in a process some seconds later, by a timer, and Trainer's callback looks at the flag at four
places of a step. The flags of two processes may be set at different places, and a signal may reach one of them only. So
all processes ask each other as a step ends, and nowhere else.
"""

from __future__ import annotations

from typing import Any

from accelerate_plugin.accelerator_init import Original
from accelerate_plugin.parallelism import parallelism_of
from lora_parallel.integration import largest_numbers

__all__ = ["at_other_places", "on_step_end"]


def on_step_end(original: Original, self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Save and stop if any process has received SIGTERM. Collective."""
    if _works_alone(self):
        original(self, args, state, control, **kwargs)
        return
    manager = self.jit_manager
    asked = [manager.is_checkpoint_requested]
    manager.is_checkpoint_requested = bool(largest_numbers(asked, "Trainer's step with enable_jit_checkpoint")[0])
    original(self, args, state, control, **kwargs)


def at_other_places(original: Original, self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Do nothing in training on a mesh: another process may be at another place."""
    if _works_alone(self):
        original(self, args, state, control, **kwargs)


def _works_alone(callback: Any) -> bool:
    return callback.jit_manager is None or parallelism_of(callback.trainer.accelerator) is None
