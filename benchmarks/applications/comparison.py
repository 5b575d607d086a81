"""Read what training logged and saved, and compare it with the same of one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

__all__ = ["Differences", "Outcome", "compare", "logged", "read", "saved"]


@dataclass(frozen=True)
class Outcome:
    """Hold what a Trainer has logged at each step, and every adapter that it has saved, by file and name."""

    losses: list[float]
    norms: list[float]
    adapter: dict[str, Tensor]


@dataclass(frozen=True)
class Differences:
    """The largest absolute differences between two outcomes."""

    losses: float
    norms: float
    adapter: float


def read(folder: Path) -> Outcome:
    """Return what the Trainer whose output folder this is has logged and saved."""
    steps = logged(folder)
    adapter = {
        f"{path.relative_to(folder)} {name}": each for path in saved(folder) for name, each in load_file(path).items()
    }
    return Outcome([each["loss"] for each in steps], [each["grad_norm"] for each in steps], adapter)


def logged(folder: Path) -> list[dict[str, float]]:
    """Return what was logged at each step."""
    states = [json.loads(path.read_text())["log_history"] for path in folder.rglob("trainer_state.json")]
    return [each for each in max(states, key=len) if "loss" in each]


def saved(folder: Path) -> list[Path]:
    """Return the files of every adapter that was saved for PEFT; those for resuming are this library's own."""
    found = sorted(folder.rglob("adapter_model.safetensors"))
    return [path for path in found if "train_state" not in path.parts]


def compare(got: Outcome, want: Outcome) -> Differences:
    """Return the differences.

    Raises:
        ValueError: The outcomes have different steps, or different tensors.
    """
    if len(got.losses) != len(want.losses):
        raise ValueError(f"{len(got.losses)} steps in the place of {len(want.losses)}")
    shapes = [{name: each.shape for name, each in one.adapter.items()} for one in (got, want)]
    if shapes[0] != shapes[1] or not want.adapter:
        raise ValueError("other tensors were saved")
    return Differences(
        losses=max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)),
        norms=max(abs(a - b) for a, b in zip(got.norms, want.norms, strict=True)),
        adapter=max(float((got.adapter[name] - each).abs().max()) for name, each in want.adapter.items()),
    )
