"""What loading cost: the worst rank of each measurement, medians and ranges over rounds; a table, goals and bars."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import safetensors
from loaders import LOADERS
from matplotlib import pyplot as plt
from report import COLOURS, environment, range_text, write_files

MIB = 2**20
MEMORY_ALLOWANCE = 64 * MIB  # beside the largest slice
BYTES_GOAL = 1.01
BROADCAST_GOAL = 5.0


@dataclass
class RankResult:
    """One rank of one measurement; sizes in bytes."""

    seconds: float
    parts: dict[str, float]
    asked: int
    owned: int
    """What the rank holds of the base at the end."""

    shard: int
    """With adapters and buffers."""

    largest_slice: int
    anonymous: int
    file: int


@dataclass
class Measurement:
    """One way to load, once."""

    way: str
    round: int
    ranks: list[RankResult]
    failure: str = ""


@dataclass
class Summary:
    """One way to load; a list has one figure a round, that of its worst rank."""

    seconds: list[float]
    parts: dict[str, float]
    """Seconds of each part on the slowest rank, median over rounds."""

    ratio: list[float]
    """Bytes asked of the files / bytes of the base that the rank owns."""

    anonymous: list[float]
    """Peak of anonymous memory above the shard, in MiB. Negative where the shard is pages of the file."""

    file: list[float]
    """Peak of mapped file pages, in MiB."""

    largest_slice: float
    """In MiB."""


@dataclass(frozen=True)
class Goal:
    """One aim of ours, and what was found."""

    what: str
    aim: str
    found: str
    met: bool


def summarise(measurements: Sequence[Measurement]) -> Summary:
    rounds = [each.ranks for each in sorted(measurements, key=lambda each: each.round)]
    slowest = [max(ranks, key=lambda rank: rank.seconds) for ranks in rounds]
    return Summary(
        seconds=[rank.seconds for rank in slowest],
        parts={name: float(np.median([rank.parts[name] for rank in slowest])) for name in slowest[0].parts},
        ratio=[max(rank.asked / rank.owned for rank in ranks) for ranks in rounds],
        anonymous=[max(rank.anonymous - rank.shard for rank in ranks) / MIB for ranks in rounds],
        file=[max(rank.file for rank in ranks) / MIB for ranks in rounds],
        largest_slice=max(rank.largest_slice for ranks in rounds for rank in ranks) / MIB,
    )


def goals(summaries: Mapping[str, Summary]) -> list[Goal]:
    """What ours aims for, over medians; the two about time by round, as both sides of a round see the same machine."""
    if "ours" not in summaries:
        return []
    mine = summaries["ours"]
    ratio, memory = float(np.median(mine.ratio)), float(np.median(mine.anonymous))
    allowed = mine.largest_slice + MEMORY_ALLOWANCE / MIB
    found = [
        Goal("bytes asked / owned", f"<= {BYTES_GOAL}", f"{ratio:.4f}", ratio <= BYTES_GOAL),
        Goal(
            "anonymous peak above the shard",
            f"<= largest slice + {MEMORY_ALLOWANCE // MIB} = {allowed:.0f} MiB",
            f"{memory:.0f} MiB",
            memory <= allowed,
        ),
    ]
    for way, letter, aim in (("accelerate", "(b)", BROADCAST_GOAL), ("in-memory", "(a)", 1.0)):
        if way in summaries:
            speed = np.asarray(summaries[way].seconds) / np.asarray(mine.seconds)
            faster = float(np.median(speed))
            text = f"{faster:.2f} ({range_text((speed.min(), speed.max()), 2)})"
            found.append(Goal(f"seconds of {letter} / ours, by round", f">= {aim:g}", text, faster >= aim))
    return found


def write_load_report(
    measurements: Sequence[Measurement], options: Mapping[str, Any], checkpoint_bytes: int, output: Path
) -> str:
    """Write `load.json`, `load.md` and `load.png` to `output`; returns the tables."""
    ways = list(
        dict.fromkeys(each.way for each in sorted(measurements, key=lambda each: list(LOADERS).index(each.way)))
    )
    failures = {each.way: each.failure for each in measurements if each.failure}
    summaries = {
        way: summarise([each for each in measurements if each.way == way]) for way in ways if way not in failures
    }
    found = goals(summaries)
    record: dict[str, Any] = {
        "environment": {
            **environment(),
            "accelerate": accelerate.__version__,
            "safetensors": safetensors.__version__,
            "cores": str(os.cpu_count()),
            "backend": "gloo",
        },
        "options": dict(options) | {"checkpoint_bytes": checkpoint_bytes},
        "measurements": [asdict(each) for each in measurements],
        "summary": {way: asdict(summary) for way, summary in summaries.items()},
        "goals": [asdict(each) for each in found],
    }
    tables = f"{ways_table(ways, summaries, failures)}\n\n{goals_table(found)}"
    write_files(output, "load", tables, record)
    if summaries:
        draw(summaries, output / "load.png")
    return f"{tables}\n\nwritten to {output}"


def ways_table(ways: Sequence[str], summaries: Mapping[str, Summary], failures: Mapping[str, str]) -> str:
    lines = [
        "| way to load | mesh | seconds (range) | of which | asked / owned | largest slice MiB "
        "| anonymous peak above shard MiB (range) | file pages MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for way in ways:
        loader = LOADERS[way]
        if way in failures:
            lines.append(f"| {loader.title} | {loader.mesh} | failed | {failures[way]} | | | | |")
            continue
        s = summaries[way]
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in s.parts.items())
        lines.append(
            f"| {loader.title} | {loader.mesh} | {_median(s.seconds, 2)} | {parts} | {np.median(s.ratio):.3f} "
            f"| {s.largest_slice:.0f} | {_median(s.anonymous, 0)} | {np.median(s.file):.0f} |"
        )
    return "\n".join(lines)


def goals_table(found: Sequence[Goal]) -> str:
    lines = ["| ours | goal | found | |", "|---|---|---|---|"]
    lines += [f"| {each.what} | {each.aim} | {each.found} | {'met' if each.met else 'missed'} |" for each in found]
    return "\n".join(lines)


def draw(summaries: Mapping[str, Summary], path: Path) -> None:
    """Medians as bars, every round as a dot, the goals of ours as lines."""
    figure, panels = plt.subplots(1, 3, figsize=(14, 1.4 + 0.7 * len(summaries)), layout="constrained", sharey=True)
    mine = summaries.get("ours")
    rows = np.arange(len(summaries))
    shown = (
        ("seconds", "seconds, slowest rank", None),
        ("ratio", "bytes asked / bytes owned", BYTES_GOAL),
        (
            "anonymous",
            "anonymous peak above shard, MiB",
            mine.largest_slice + MEMORY_ALLOWANCE / MIB if mine else None,
        ),
    )
    for axes, (name, title, aim) in zip(panels, shown, strict=True):
        values = [getattr(summary, name) for summary in summaries.values()]
        colours = [COLOURS["ours" if way == "ours" else "peer"] for way in summaries]
        bars = axes.barh(rows, [float(np.median(each)) for each in values], 0.6, color=colours)
        axes.bar_label(bars, fmt="%.2f" if name != "anonymous" else "%.0f", padding=6)
        for row, each in zip(rows, values, strict=True):
            axes.plot(each, np.full(len(each), row), "o", color="black", markersize=3)
        if aim is not None:
            axes.axvline(aim, color="tab:green", label="goal of ours")
            axes.legend(loc="lower right", fontsize="small")
        axes.margins(x=0.18)
        axes.axvline(0, color="grey", linewidth=1)
        axes.set(title=title)
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(rows, [LOADERS[way].title for way in summaries])
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _median(values: Sequence[float], digits: int) -> str:
    return f"{np.median(values):.{digits}f} ({range_text((min(values), max(values)), digits)})"
