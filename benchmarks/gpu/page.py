"""Write what the steps came to as a page, and draw the speeds."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.gpu.records import Record
from benchmarks.gpu.steps import Step

MARK = "<!-- make gpu replaces what follows -->"
CPU_WARNING = (
    "**These steps ran on a CPU, with tiny shapes, to prove the script that runs them. They say nothing about GPUs.**"
)
FLOPS = 4
"""A frozen weight and token: two for the forward, two for the gradient of the input. There is none of the weight."""


@dataclass(frozen=True)
class Timed:
    """One side of one speed step."""

    step: str
    side: str
    ours_here: list[float]
    """Whole steps of ours in the same rounds."""

    seconds: list[float]
    tokens: int
    share: float | None
    """Share of the LoRA roofline that a step reaches."""

    llama_flops: float
    """FLOPs of a step on each GPU, as NeMo Automodel counts them."""

    peak: int | None
    kernels: Mapping[str, Any] | None
    layers: str
    sequence: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def to_ours(self) -> float:
        """The side's time divided by ours, the median over rounds."""
        return statistics.median(a / b for a, b in zip(self.seconds, self.ours_here, strict=True))


def write_page(page: Path, planned: Sequence[Step], rows: Sequence[Record], about: Mapping[str, str]) -> None:
    """Write the page, or replace what follows the mark in it, and draw the plot beside it.

    Args:
        page: Where it is.
        planned: All steps.
        rows: A record of each, in the same order.
        about: Device, versions and code.
    """
    head = page.read_text().partition(MARK)[0] if page.exists() else "# A run of `make gpu`\n\n"
    timings = timed(planned, rows)
    assets = page.parents[1] / "assets" if page.parent.name == "results" else page.parent
    picture = assets / "gpu.png"
    drawn = draw(timings, picture) if timings else False
    text = "\n".join(_lines(planned, rows, about, timings, os.path.relpath(picture, page.parent) if drawn else None))
    page.parent.mkdir(parents=True, exist_ok=True)
    written = page.with_suffix(".tmp")
    written.write_text(f"{head}{MARK}\n\n{text}\n")
    os.replace(written, page)


def timed(planned: Sequence[Step], rows: Sequence[Record]) -> list[Timed]:
    """The sides of all speed steps that have figures."""
    rate = next(
        (row.figures.get("tflops") for step, row in zip(planned, rows, strict=True) if step.kind == "rate"), None
    )
    found = []
    for step, row in zip(planned, rows, strict=True):
        if step.kind != "speed" or "sides" not in row.figures:
            continue
        figures = row.figures
        ours = [whole for _, whole in figures["sides"]["ours"]["seconds"]]
        for side, measured in figures["sides"].items():
            seconds = [whole for _, whole in measured["seconds"]]
            share = None
            if rate is not None:
                flops = FLOPS * figures["linear weights"] * figures["tokens"]
                share = flops / (statistics.median(seconds) * figures["world size"] * rate * 1e12)
            layers = f"{figures['layers']} of {figures['of layers']}"
            found.append(
                Timed(
                    step.name,
                    side,
                    ours,
                    seconds,
                    figures["tokens"],
                    share,
                    figures["llama flops"] * figures["tokens"] / figures["world size"],
                    measured["peak bytes"],
                    measured["kernels"],
                    layers,
                    figures["sequence"],
                )
            )
    return found


def _lines(
    planned: Sequence[Step],
    rows: Sequence[Record],
    about: Mapping[str, str],
    timings: Sequence[Timed],
    picture: str | None,
) -> Iterator[str]:
    if about["device"] == "CPU":
        yield CPU_WARNING
        yield ""
    dates = sorted(row.date for row in rows if row.date)
    counts = {status: sum(row.status == status for row in rows) for status in dict.fromkeys(row.status for row in rows)}
    yield f"{', '.join(f'{count} {status}' for status, count in counts.items())}; of {len(rows)} steps."
    yield ""
    yield from _table(["what", ""], [["date (UTC)", f"{dates[0]} to {dates[-1]}" if dates else ""], *about.items()])
    yield "## Checks"
    yield ""
    yield from _table(
        ["step", "result", "largest error", "bound", "plain PEFT's error", "seconds", ""],
        [_check_cells(row) for step, row in zip(planned, rows, strict=True) if step.kind == "check"],
    )
    yield from _waits(planned, rows)
    yield from _dropout(rows)
    yield "## Speed"
    yield ""
    for step, row in zip(planned, rows, strict=True):
        if step.kind == "rate":
            size = row.figures.get("size")
            told = f"{row.figures['tflops']:.3g} TFLOP/s ({size} x {size} x {size})" if size else row.status
            yield f"The bf16 matrix product of this device: {told}."
            yield ""
    yield from _table(
        [
            "step",
            "side",
            "layers, tokens a row",
            "ms a step (quartiles)",
            "tokens/s",
            "of the LoRA roofline",
            "TFLOP/s as Automodel counts",
            "its time / ours",
            "peak GiB",
            "exposed communication",
        ],
        [_timed_cells(each) for each in timings],
    )
    for step, row in zip(planned, rows, strict=True):
        if step.kind == "speed" and row.status != "passed":
            yield f"- {step.name}: {_plain(f'{row.status}: {row.detail}')}"
    refused = [why for row in rows for why in row.figures.get("refused", {}).items()]
    for side, why in dict.fromkeys(refused):  # once, though every step is refused it
        yield f"- {side}: {_plain(why)}"
    yield ""
    yield from _kinds(timings)
    if picture is not None:
        yield f"![Tokens per second and share of the LoRA roofline of each side]({picture})"
        yield ""
    if about["device"] != "CPU":
        yield from _goals(timings)


def _check_cells(row: Record) -> list[str]:
    errors = row.figures.get("errors", {})
    # The one that comes closest to its bound, or exceeds it most.
    worst = max(
        errors, key=lambda what: errors[what][0] / errors[what][1] if errors[what][1] else errors[what][0], default=None
    )
    own = row.figures.get("plain PEFT")
    return [
        row.step,
        row.status if row.status in ("passed", "not run") else f"**{row.status}**",
        f"{errors[worst][0]:.1e} ({worst})" if worst else "",
        f"{errors[worst][1]:.1e}" if worst else "",
        f"{own:.1e}" if own is not None else "",
        f"{row.seconds:.0f}" if row.seconds else "",
        _plain(row.detail),
    ]


def _waits(planned: Sequence[Step], rows: Sequence[Record]) -> Iterator[str]:
    """List the lines in which the host waits for the GPU in a step that is not the first."""
    found = [
        (step.options["mesh"], row.figures["waits"])
        for step, row in zip(planned, rows, strict=True)
        if "waits" in row.figures
    ]
    if not found:
        return
    yield "## Host waits in the third step"
    yield ""
    cells = [
        [mesh, trained, "<br>".join(f"`{line}` ({count})" for line, count in lines.items()) or "none"]
        for mesh, by_kind in found
        for trained, lines in by_kind.items()
    ]
    yield from _table(["mesh", "trained", "lines (times)"], cells)


def _dropout(rows: Sequence[Record]) -> Iterator[str]:
    for row in rows:
        if "dropout" not in row.figures:
            continue
        size = row.figures["size"]
        yield f"## LoRA dropout, forward and backward, [{size}, {size}] in bf16"
        yield ""
        cells = [[name, *(f"{took[what]:.3f}" for what in took)] for name, took in row.figures["dropout"].items()]
        yield from _table(["milliseconds", "in all", "host", "kernels"], cells)


def _timed_cells(each: Timed) -> list[str]:
    low, _, high = statistics.quantiles(each.seconds, n=4) if len(each.seconds) > 1 else (each.median,) * 3
    kernels = each.kernels
    return [
        each.step.removeprefix("speed "),
        each.side,
        f"{each.layers}, {each.sequence}",
        f"{1e3 * each.median:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})",
        f"{each.tokens / each.median:,.0f}",
        f"{each.share:.1%}" if each.share is not None else "",
        f"{each.llama_flops / each.median / 1e12:.3g}",
        f"{each.to_ours:.2f}",
        f"{each.peak / 2**30:.1f}" if each.peak is not None else "",
        f"{kernels['exposed']:.1f} of {kernels['communication']:.1f} ms" if kernels else "",
    ]


def _kinds(timings: Sequence[Timed]) -> Iterator[str]:
    """Tabulate the kernels of one step of each side by their kinds."""
    traced = [(each, each.kernels["kinds"]) for each in timings if each.kernels]
    if not traced:
        return
    yield "## Kernels of one step by kind, in milliseconds (number of kernels)"
    yield ""
    kinds = dict.fromkeys(kind for _, found in traced for kind in found)
    cells = [
        [
            each.step.removeprefix("speed "),
            each.side,
            *(f"{found[kind][0]:.1f} ({found[kind][1]})" if kind in found else "" for kind in kinds),
        ]
        for each, found in traced
    ]
    yield from _table(["step", "side", *kinds], cells)


def _goals(timings: Sequence[Timed]) -> Iterator[str]:
    """List the goals on one GPU, at the full shape."""
    alone = [each for each in timings if each.step.startswith("speed 1x1")]
    ours = [each for each in alone if each.side.startswith("ours")]
    peers = [each for each in alone if not each.side.startswith("ours")]
    if not ours or not peers:
        return
    best = min(ours, key=lambda each: each.median / each.tokens)
    plain = next((each for each in peers if each.side == "PEFT"), None)
    yield "| goal, one GPU | aim | found |"
    yield "|---|---|---|"
    if best.share is not None:
        yield f"| share of the LoRA roofline ({best.side}) | >= 65 % | {best.share:.1%} |"
    if plain is not None:
        # Within the step that has both.
        quickest = min((each for each in ours if each.step == plain.step), key=lambda each: each.median)
        yield f"| speed to plain PEFT's ({quickest.side}) | >= 1.3 | {plain.median / quickest.median:.2f} |"
    pairs = [
        (peer, min((each for each in ours if each.step == peer.step), key=lambda each: each.median)) for peer in peers
    ]
    peer, quickest = min(pairs, key=lambda pair: pair[0].median / pair[1].median)
    yield (
        f"| speed to the best peer's ({quickest.side}; {peer.side}) | >= 1.0 | {peer.median / quickest.median:.2f} |"
    )
    yield ""


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    for line in lines:
        yield f"| {' | '.join(line)} |"
    yield ""


def _plain(text: str, most: int = 300) -> str:
    """One line without markup, which a message may hold."""
    line = " ".join(text.split())
    cut = line if len(line) <= most else f"{line[:most]}..."
    return escape(cut, quote=False).replace("|", "&#124;").replace("*", "&#42;")


def draw(timings: Sequence[Timed], path: Path) -> bool:
    """Draw tokens per second of each side, with its share of the roofline; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")  # no display is needed to write a file
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.35 * len(timings)), layout="constrained")
    speeds = [each.tokens / each.median for each in timings]
    colours = ["tab:blue" if each.side.startswith("ours") else "tab:orange" for each in timings]
    bars = axes.barh(range(len(timings)), speeds, color=colours)
    axes.bar_label(bars, [f"{each.share:.0%}" if each.share is not None else "" for each in timings], padding=3)
    axes.set_yticks(range(len(timings)), [f"{each.step}: {each.side}" for each in timings])
    axes.invert_yaxis()
    axes.set(xlabel="tokens per second; at the bar, the share of the LoRA roofline")
    axes.margins(x=0.12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return True
