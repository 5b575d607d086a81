"""The page docs/comparison.md, and the results that it is written from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

from benchmarks.peer.jobs import Mesh
from benchmarks.peer.launch import SECONDS
from benchmarks.peer.notes import NOTES, Note
from benchmarks.peer.rows import PEERS, ROWS, Cell

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"
RESULTS = ROOT / "benchmarks" / "out" / "peer.json"
MESHES = [Mesh(2, 1), Mesh(1, 2), Mesh(2, 2)]
TITLES = {
    Mesh(2, 1): "2x1: FSDP2 over two ranks",
    Mesh(1, 2): "1x2: tensor parallelism over two ranks",
    Mesh(2, 2): "2x2: both",
}
INTRODUCTION = """# Compared with others

What other libraries compute on the same meshes, against one process of plain PEFT with the same global batch. It is
written by

```
make table NAME=peer
```

Each library is used as its own documentation says:

- **ours**: `parallelize` with its defaults ([Engine](engine.md));
- **transformers**: `from_pretrained` with a `DistributedConfig`, `get_peft_model` and `Trainer`, as its pages
  [DistributedConfig](https://huggingface.co/docs/transformers/distributed_config) and
  [Tensor parallelism](https://huggingface.co/docs/transformers/tensor_parallelism) say;
- **accelerate**: `FullyShardedDataParallelPlugin(fsdp_version=2)` with `fsdp_auto_wrap_policy`, as
  [PEFT's page on FSDP](https://huggingface.co/docs/peft/accelerate/fsdp), and `ParallelismConfig(tp_size=2)`, as
  Accelerate's [example](https://github.com/huggingface/accelerate/blob/main/examples/torch_native_parallelism/nd_parallel.py);
- **lightning**: `ModelParallelStrategy`, with torch's styles and `fully_shard` in `configure_model`, as its page on
  [2D parallelism](https://lightning.ai/docs/pytorch/stable/advanced/model_parallel/tp_fsdp.html), which does not speak
  of adapters: the styles are those of the base's layer and of the factor that has its sharded features, by hand. What
  has no such rule (experts, latent attention, embeddings and head with an adapter) stays whole. An adapter is saved by
  PEFT from Lightning's full checkpoint.

Models are tiny, with random weights and adapters that are zero nowhere, in float64, and all of their sizes are even:
what a library does not do for uneven shards is not what is compared. All sides, and the one process too, compute their
loss without transformers' cast to float32. It runs over gloo on CPUs. Where a library asks for accelerators, and
nothing but that check keeps it from gloo, the check is passed by; an average over gloo, which has none, is a sum,
divided.

torchtitan 0.3.0 is not in the table: it did not run on CPUs. It installs from the package index. Its language models
take flex or varlen attention only (`ValueError: sdpa is no longer supported for language models`), and torch's flex
attention has no backward on a CPU (`torch/nn/attention/flex_attention.py:2083`). With the attention replaced, it
reduces gradients in a way that gloo lacks (`Cannot use ReduceOp.PREMUL_SUM with Gloo`).

A cell is one of

- **a number**: the largest relative error, by norm, of any tensor that trains, on any rank. Bold: it is above the row's
  bound, which is {exact:.0e}, and {routed:.0e} for mixtures of experts, whose routers compute in float32;
- **words**, where it is not a number that is asked for;
- **refused**: the library says that it does not do this;
- **error**: it raises something else, or its processes do not end in {seconds} seconds.

Numbers in parentheses are those of the [notes](#notes).

"""


def read_results() -> dict[str, Cell]:
    """Return the cells that have run, by row, library and mesh."""
    if not RESULTS.exists():
        return {}
    return {key: Cell(**cell) for key, cell in json.loads(RESULTS.read_text()).items()}


def write_results(results: dict[str, Cell]) -> None:
    """Keep the cells."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps({key: asdict(cell) for key, cell in results.items()}, indent=1))
    part.rename(RESULTS)  # at once: another run may read it


class Numbers:
    """Numbers of notes, in the order in which cells need them."""

    def __init__(self, notes: Iterable[Note]) -> None:
        self.notes = list(notes)
        self.texts: dict[str, int] = {}

    def of(self, row: str, peer: str, mesh: str, cell: Cell) -> int:
        """Return the number of the note for a cell that is not good."""
        said = f"`{cell.failure.replace('`', '')}`" if cell.failure else ""
        for note in self.notes:
            if note.fits(row, peer, mesh, cell):
                said = note.text
                break
        return self.texts.setdefault(said, len(self.texts) + 1) if said else 0


def cell_text(cell: Cell | None, number: int) -> str:
    """Return what stands in the table."""
    if cell is None:
        return ""
    note = f" ({number})" if number else ""
    if cell.failure:
        return f"{'refused' if cell.refused else '**error**'}{note}"
    text = cell.words or f"{cell.error:.0e}"
    return (text if cell.good else f"**{text}**") + note


def table(results: dict[str, Cell], mesh: Mesh, numbers: Numbers) -> str:
    """Return one mesh's table."""
    lines = [f"## {TITLES[mesh]}", "", f"| | {' | '.join(PEERS)} |", "|---" * (len(PEERS) + 1) + "|"]
    for row in ROWS.values():
        cells = []
        for peer in PEERS:
            cell = results.get(f"{row.name} | {peer} | {mesh}")
            wanting = cell is not None and (cell.failure or not cell.good)
            cells.append(cell_text(cell, numbers.of(row.name, peer, str(mesh), cell) if cell and wanting else 0))
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(results: dict[str, Cell], exact: float, routed: float, versions: str) -> str:
    """Return the page."""
    numbers = Numbers(NOTES)
    tables = [table(results, mesh, numbers) for mesh in MESHES]
    rows = [f"- **{row.name}**: {row.about};" for row in ROWS.values()]
    rows[-1] = rows[-1].rstrip(";") + "."
    notes = [f"{number}. {text}" for text, number in numbers.texts.items()]
    parts = [
        INTRODUCTION.format(exact=exact, routed=routed, seconds=SECONDS) + "The rows:\n\n" + "\n".join(rows),
        *tables,
        "## Notes\n\n" + "\n".join(notes),
        versions,
    ]
    return "\n\n".join(parts) + "\n"


def write_page(results: dict[str, Cell]) -> None:
    """Write the page, with today's date and the versions that are installed."""
    from benchmarks.peer.rows import EXACT, ROUTED

    names = ("torch", "transformers", "peft", "accelerate", "lightning")
    versions = ", ".join(f"{name} {re.sub('[+].*', '', version(name))}" for name in names)
    PAGE.write_text(page(results, EXACT, ROUTED, f"With {versions}, on {date.today().isoformat()}."))
