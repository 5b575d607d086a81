"""Medians, spread and ratios of interleaved samples; a table, a picture and the raw numbers."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import peft
import torch
import transformers

matplotlib.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt

OURS = ("ours", "ours, compiled")
ALONE = ("ours, alone", "ours, alone, compiled")
"""Ours in processes of its own, as another commit's is: what that commit is compared with."""

COLOURS = {"ours": "tab:blue", "peer": "tab:orange"}

Bounds = tuple[float, float]


@dataclass
class SideResult:
    """What was measured of one side, or the first line of the error that it ended with."""

    name: str
    error: str = ""
    forward_backward: list[float] = field(default_factory=list)
    """Seconds of each timed step, in the order they ran; those of the slowest process."""

    step: list[float] = field(default_factory=list)
    cost: dict[str, Any] = field(default_factory=dict)
    """`Cost` of the process that needs the most memory."""

    @property
    def compiled(self) -> bool:
        return self.name.endswith(", compiled")


@dataclass
class CaseResult:
    """Everything measured in one case at one size; the first side is ours."""

    case: str
    hidden: int
    device: str
    loss: float
    gradient_norm: float
    sides: list[SideResult]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> CaseResult:
        return cls(**{**record, "sides": [SideResult(**side) for side in record["sides"]]})

    def side(self, name: str) -> SideResult | None:
        """The side of that name, if it was timed."""
        return next((side for side in self.sides if side.name == name and not side.error), None)


def ratio_by_round(ours: Sequence[float], other: Sequence[float], resamples: int = 10_000) -> tuple[float, Bounds]:
    """Return the median over rounds of ours / other, with its 95% interval, bootstrapped over whole rounds.

    It stays put when the whole machine gets slower or faster halfway: both steps of a round see the same machine.
    """
    ratios = np.asarray(ours) / np.asarray(other)
    rounds = np.random.default_rng(0).integers(len(ratios), size=(resamples, len(ratios)))
    return float(np.median(ratios)), _percentiles(np.median(ratios[rounds], axis=1), 2.5, 97.5)


def goal(case: str, hidden: int, ours: str, side: SideResult) -> float | None:
    """The largest ours / other side of a whole step that we aim for; None if there is no goal for the pair."""
    if side.name in ALONE:
        return None
    if " at " in side.name:  # of another commit
        if side.compiled is (ours == OURS[1]):
            return 1.0
        return {"1x1": 0.95, "1x2": 0.85, "2x2": 0.85}.get(case) if hidden == 256 and not side.compiled else None
    if side.compiled:
        return {"1x1": 1.0, "2x1": 1.0, "1x2": 0.75}.get(case) if ours == OURS[1] else None
    if ours == OURS[1]:
        return None
    if case == "1x1":
        return 1.25 if hidden < 1024 else 1.05  # small layers cannot hide a fixed cost per layer
    return {"1x2": 1 / 1.5, "2x1": 1.0}.get(case)


def write_report(results: Sequence[CaseResult], options: Mapping[str, Any], output: Path) -> str:
    """Write `step.json`, `step.md` and `step.png` to `output`; returns the table."""
    record: dict[str, Any] = {
        "environment": environment(),
        "options": dict(options),
        "results": [asdict(result) for result in results],
    }
    table = markdown_table(results)
    write_files(output, "step", table, record)
    draw(results, output / "step.png")
    return f"{table}\n\nwritten to {output}"


def write_files(output: Path, name: str, table: str, record: Mapping[str, Any]) -> None:
    """Write `<name>.json`, the record, and `<name>.md`, the table with the record's environment and options."""
    output.mkdir(parents=True, exist_ok=True)
    (output / f"{name}.json").write_text(json.dumps(record, indent=1))
    settings = ", ".join(f"{key} {value}" for key, value in (record["environment"] | record["options"]).items())
    (output / f"{name}.md").write_text(f"{table}\n\n{settings}\n")


def environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "peft": peft.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }


def markdown_table(results: Sequence[CaseResult]) -> str:
    lines = [
        "| mesh | hidden | side | whole step ms (IQR) | forward + backward ms | ours / it, by round (95%) "
        "| ours compiled / it | peak MiB a rank | collectives a step | their MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        for side in result.sides:
            head = f"| {result.case} | {result.hidden} | {side.name} "
            if side.error:
                lines.append(f"{head}| {side.error.replace('|', '/')} | | | | | | |")
                continue
            step = np.asarray(side.step) * 1e3
            collectives = ", ".join(f"{count} {kind}" for kind, count in side.cost["collectives"].items())
            lines.append(
                f"{head}| {np.median(step):.1f} ({range_text(_percentiles(step, 25, 75), 1)}) "
                f"| {np.median(side.forward_backward) * 1e3:.1f} "
                f"| {_ratio_text(result, OURS[0], side)} | {_ratio_text(result, OURS[1], side)} "
                f"| {side.cost['memory'] / 2**20:.1f} | {collectives or 'none'} | {side.cost['sent'] / 2**20:.2f} |"
            )
    return "\n".join(lines)


def _ratio_text(result: CaseResult, name: str, side: SideResult) -> str:
    ours = result.side(ALONE[OURS.index(name)] if " at " in side.name else name)
    if ours is None or ours is side:
        return ""
    ratio, interval = ratio_by_round(ours.step, side.step)
    aim = goal(result.case, result.hidden, name, side)
    text = f"{ratio:.2f} ({range_text(interval, 2)})"
    return text if aim is None else f"{text}, goal <= {aim:.2f}"


def draw(results: Sequence[CaseResult], path: Path) -> None:
    """Every whole step of every side, one panel a case and size."""
    timed = [[side for side in result.sides if not side.error] for result in results]
    heights = [0.6 + 0.35 * len(sides) for sides in timed]
    figure, axes = plt.subplots(
        len(results), 1, figsize=(9, sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    for axis, result, sides in zip(axes[:, 0], results, timed, strict=True):
        boxes = axis.boxplot(
            [np.asarray(side.step) * 1e3 for side in sides],
            orientation="horizontal",
            patch_artist=True,
            medianprops={"color": "black"},
            flierprops={"markersize": 3},
            tick_labels=[side.name for side in sides],
        )
        for box, side in zip(boxes["boxes"], sides, strict=True):
            box.set_facecolor(COLOURS["ours" if side.name in (*OURS, *ALONE) else "peer"])
        axis.invert_yaxis()
        axis.set_xlim(left=0)
        axis.set_title(f"mesh {result.case}, hidden {result.hidden}: whole step, ms", fontsize=9)
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _percentiles(values: np.ndarray, low: float, high: float) -> Bounds:
    found = np.percentile(values, [low, high])
    return float(found[0]), float(found[1])


def range_text(bounds: Bounds, digits: int) -> str:
    return f"{bounds[0]:.{digits}f} to {bounds[1]:.{digits}f}"
