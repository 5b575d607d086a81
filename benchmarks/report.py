"""Medians, spread and ratios of interleaved samples; a table, a picture and the raw numbers."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import peft
import torch
import transformers

matplotlib.use("Agg")  # no display is needed to write a file
from matplotlib import pyplot as plt

PHASES = {"forward_backward": "forward + backward", "step": "whole step"}
COLOURS = {"ours": "tab:blue", "peer": "tab:orange", "forward_backward": "tab:purple", "step": "black"}


@dataclass
class Samples:
    """Seconds of each timed step of one side, in the order they ran."""

    forward_backward: list[float]
    step: list[float]


@dataclass
class CaseResult:
    """Everything measured in one case at one size; `ours` and `peer` map a phase to its samples."""

    case: str
    hidden: int
    peer_name: str
    device: str
    loss: float
    gradient_norm: float
    ours: dict[str, list[float]]
    peer: dict[str, list[float]]


@dataclass
class Comparison:
    """One phase of one case: medians and quartiles in milliseconds, and ours / peer with 95% intervals.

    `ratio` divides the medians. `paired_ratio` is the median over rounds of that round's ratio: it stays put when the
    whole machine gets slower or faster halfway, because both steps of a round see the same machine.
    """

    ours_ms: float
    ours_iqr_ms: tuple[float, float]
    peer_ms: float
    peer_iqr_ms: tuple[float, float]
    ratio: float
    ratio_interval: tuple[float, float]
    paired_ratio: float
    paired_ratio_interval: tuple[float, float]


def compare(ours: Sequence[float], peer: Sequence[float], resamples: int = 10_000) -> Comparison:
    """Compare samples in seconds; the intervals are bootstrapped over whole rounds, not single steps."""
    a, b = np.asarray(ours) * 1e3, np.asarray(peer) * 1e3
    rounds = np.random.default_rng(0).integers(len(a), size=(resamples, len(a)))
    return Comparison(
        ours_ms=float(np.median(a)),
        ours_iqr_ms=_percentiles(a, 25, 75),
        peer_ms=float(np.median(b)),
        peer_iqr_ms=_percentiles(b, 25, 75),
        ratio=float(np.median(a) / np.median(b)),
        ratio_interval=_percentiles(np.median(a[rounds], axis=1) / np.median(b[rounds], axis=1), 2.5, 97.5),
        paired_ratio=float(np.median(a / b)),
        paired_ratio_interval=_percentiles(np.median((a / b)[rounds], axis=1), 2.5, 97.5),
    )


def goal(case: str, hidden: int) -> float:
    """The largest ours / peer of a whole step that we aim for."""
    if case == "1x1":
        return 1.25 if hidden < 1024 else 1.05  # small layers cannot hide a fixed cost per layer
    return {"1x2": 1 / 1.5, "2x1": 1.0}[case]


def write_report(results: Sequence[CaseResult], options: Mapping[str, Any], output: Path) -> str:
    """Write `step.json`, `step.md` and `step.png` to `output`; returns the table."""
    comparisons = [{phase: compare(r.ours[phase], r.peer[phase]) for phase in PHASES} for r in results]
    record: dict[str, Any] = {
        "environment": environment(),
        "options": dict(options),
        "results": [
            asdict(r) | {"summary": {phase: asdict(c) for phase, c in phases.items()}}
            for r, phases in zip(results, comparisons, strict=True)
        ],
    }
    table = markdown_table(results, comparisons)
    write_files(output, "step", table, record)
    draw(results, comparisons, output / "step.png")
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


def markdown_table(results: Sequence[CaseResult], comparisons: Sequence[Mapping[str, Comparison]]) -> str:
    lines = [
        "| mesh | hidden | peer | phase | ours ms (IQR) | peer ms (IQR) | ours / peer (95%) | by round (95%) | goal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result, phases in zip(results, comparisons, strict=True):
        for phase, title in PHASES.items():
            c = phases[phase]
            aim = f"<= {goal(result.case, result.hidden):.2f}" if phase == "step" else ""
            lines.append(
                f"| {result.case} | {result.hidden} | {result.peer_name} | {title} "
                f"| {c.ours_ms:.1f} ({range_text(c.ours_iqr_ms, 1)}) "
                f"| {c.peer_ms:.1f} ({range_text(c.peer_iqr_ms, 1)}) "
                f"| {c.ratio:.2f} ({range_text(c.ratio_interval, 2)}) "
                f"| {c.paired_ratio:.2f} ({range_text(c.paired_ratio_interval, 2)}) | {aim} |"
            )
    return "\n".join(lines)


def draw(results: Sequence[CaseResult], comparisons: Sequence[Mapping[str, Comparison]], path: Path) -> None:
    """Left: every whole step. Right: the ratio of both phases with its interval, and the goal."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 1.8 + 0.8 * len(results)), layout="constrained")
    rows = np.arange(len(results))
    steps = [phases["step"] for phases in comparisons]
    for offset, side in ((-0.2, "ours"), (0.2, "peer")):
        left.boxplot(
            # Cases differ by two orders of magnitude: each is drawn in units of its peer's median.
            [np.asarray(getattr(r, side)["step"]) * 1e3 / c.peer_ms for r, c in zip(results, steps, strict=True)],
            positions=rows + offset,
            widths=0.3,
            orientation="horizontal",
            patch_artist=True,
            boxprops={"facecolor": COLOURS[side]},
            medianprops={"color": "black"},
            flierprops={"markersize": 3},
            manage_ticks=False,
            label=side,
        )
    left.set_yticks(
        rows,
        [
            f"{r.case}, hidden {r.hidden}\nours {c.ours_ms:.0f} ms\n{r.peer_name} {c.peer_ms:.0f} ms"
            for r, c in zip(results, steps, strict=True)
        ],
    )
    left.set(xlabel="whole step / median of the peer's", title="every timed step")

    for offset, phase, marker in ((-0.15, "forward_backward", "o"), (0.15, "step", "s")):
        found = [phases[phase] for phases in comparisons]
        ratio = np.array([c.paired_ratio for c in found])
        low, high = np.array([c.paired_ratio_interval for c in found]).T
        error = np.clip([ratio - low, high - ratio], 0, None)  # matplotlib refuses a negative bar
        right.errorbar(
            ratio, rows + offset, xerr=error, fmt=marker, capsize=3, color=COLOURS[phase], label=PHASES[phase]
        )
    goals = [goal(r.case, r.hidden) for r in results]
    right.vlines(goals, rows - 0.35, rows + 0.35, color="tab:green", label="goal, whole step")
    right.set_yticks(rows, [""] * len(rows))
    right.set(xlabel="ours / peer by round, 95% interval", title="ratio, smaller is faster")

    for axes in (left, right):
        axes.axvline(1, color="grey", linewidth=1, zorder=0)
        axes.set_ylim(len(results) - 0.5, -0.5)
        axes.grid(axis="x", alpha=0.3)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.8 / len(results)), ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _percentiles(values: np.ndarray, low: float, high: float) -> tuple[float, float]:
    found = np.percentile(values, [low, high])
    return float(found[0]), float(found[1])


def range_text(bounds: tuple[float, float], digits: int) -> str:
    return f"{bounds[0]:.{digits}f} to {bounds[1]:.{digits}f}"
