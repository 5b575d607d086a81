"""The rows of the table: what a library is asked for, and how its answer becomes a cell."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from benchmarks.peer.jobs import DTYPE, MODELS, Job, Mesh, Run, one_process, prepare
from benchmarks.peer.launch import Failure, run_ranks

EXACT, ROUTED = 1e-12, 1e-6
"""Bounds of a relative error: float64's rounding, and that of a router, which computes in float32 in every model."""


@dataclass
class Cell:
    """What a library came to: one of the three."""

    error: float | None = None
    """The largest relative error."""

    good: bool = True
    """It is within the row's bound, or what the words say is what one process does."""

    words: str = ""
    failure: str = ""
    """Type and first line of an error."""

    refused: bool = False
    """The error says that the library does not do this."""

    trace: str = ""

    def text(self) -> str:
        """Return what is printed."""
        if self.failure:
            return f"{'refused: ' if self.refused else ''}{self.failure}"
        return self.words or f"{self.error:.0e}{'' if self.good else ' WRONG'}"


@dataclass(frozen=True)
class Peer:
    """A library."""

    name: str
    module: str
    """Its `train` runs on every rank."""

    lacks: dict[str, str] = field(default_factory=dict)
    """What it does not have by its own documentation or source, by row."""

    def load(self) -> Any:
        """Return the library's module, and what it needs."""
        return import_module(f"benchmarks.peer.{self.module}")

    def train(self, job: Job, mesh: Mesh, folder: Path) -> Run:
        """Run on this rank."""
        return self.load().train(job, mesh, folder)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("ours", "ours"),
        Peer("transformers", "hugging_face"),
        Peer("accelerate", "accelerated"),
        Peer("lightning", "lightning_strategy"),
    )
}


class References:
    """What one process computes, once a job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[Job, Run] = {}

    def model(self, name: str) -> Path:
        """Return the folder of a base and of the values that its adapters begin with."""
        folder = self.folder / name
        if not folder.exists():
            _in_fork(prepare, (Job(name), folder), folder)
        return folder

    def run(self, job: Job) -> Run:
        """Return what one process computes."""
        if job not in self.runs:
            folder = self.model(job.model)
            [self.runs[job]] = _in_fork(one_process, (job, folder), folder)
        return self.runs[job]


def _in_fork(function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> list[Any]:
    """Run in a fork: a process that has computed is not to be forked."""
    answer = run_ranks(function, args, 1, folder)
    if isinstance(answer, Failure):
        raise RuntimeError(f"one process: {answer.trace or answer.message}")
    return answer


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    job: Job
    judge: Callable[[Row, Mesh, list[Run], References, Path], Cell]
    bound: float = EXACT
    about: str = ""

    def cell(self, peer: Peer, mesh: Mesh, references: References, folder: Path) -> Cell:
        """Run a library on a mesh."""
        if self.name in peer.lacks:
            return Cell(failure=peer.lacks[self.name], refused=True)
        job = replace(self.job, rows=mesh.dp) if self.judge is masks else self.job
        source = references.model(job.model)
        shutil.copytree(source / "base", folder / "base")
        shutil.copy(source / "values.pt", folder)
        runs = run_ranks(peer.train, (job, mesh, folder), mesh.ranks, folder)
        if not isinstance(runs, Failure) and job.checkpoint_at:
            kept = runs
            runs = run_ranks(peer.train, (replace(job, resumes=True), mesh, folder), mesh.ranks, folder)
            if not isinstance(runs, Failure):
                runs = [*kept, *runs]
        if isinstance(runs, Failure):
            return failed(runs)
        try:
            return self.judge(self, mesh, runs, references, folder)
        except Exception as error:  # what plain PEFT says to a folder that it cannot read
            return failed(Failure(type(error).__name__, str(error), ""))


REFUSING = re.compile(
    r"not (yet |currently )?support|unsupported|only support|not implemented|we support", re.IGNORECASE
)


def failed(failure: Failure) -> Cell:
    """Return the cell of an error: its type and first line."""
    lines = [line for line in failure.message.splitlines() if line.strip()] or [""]
    text = re.sub(r"/\S*/(?=\S)", "", " ".join(lines[0].split()))
    ours = "lora_parallel" in failure.trace.rsplit("File ", 1)[-1] and failure.kind in ("TypeError", "ValueError")
    return Cell(
        failure=f"{failure.kind}: {text[:160]}",
        refused=ours or (failure.kind in ("ValueError", "NotImplementedError") and bool(REFUSING.search(text))),
        trace=failure.trace,
    )


def largest_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the largest relative error of a tensor, by norm."""
    errors = [0.0]
    for name, tensor in want.items():
        error = (got[name].to(DTYPE) - tensor).norm() / tensor.norm()
        errors.append(error.item() if error == error else float("inf"))
    return max(errors)


def compared(row: Row, sides: list[dict[str, Tensor]], want: dict[str, Tensor]) -> Cell:
    """Hold what all ranks have against what they should have."""
    for side in sides:
        if missing := want.keys() - side.keys():
            return Cell(words=f"{len(missing)} of {len(want)} missing", good=False)
        wrong = [name for name in want if side[name].shape != want[name].shape]
        if wrong:
            name = wrong[0]
            return Cell(
                words=f"shape {tuple(side[name].shape)}, not {tuple(want[name].shape)}, of {len(wrong)} of {len(want)}",
                good=False,
            )
    error = max(largest_error(side, want) for side in sides)
    return Cell(error=error, good=error <= row.bound)


def gradients(row: Row, mesh: Mesh, runs: list[Run], references: References, folder: Path) -> Cell:
    """Compare the gradients of one step."""
    return compared(row, [run.gradients for run in runs], references.run(row.job).gradients)


def change(row: Row, mesh: Mesh, runs: list[Run], references: References, folder: Path) -> Cell:
    """Compare what some steps changed."""
    before = torch.load(folder / "values.pt")
    want = references.run(row.job).adapters
    moved = [{name: value - before[name] for name, value in run.adapters.items()} for run in runs]
    return compared(row, moved, {name: value - before[name] for name, value in want.items()})


def resumed(row: Row, mesh: Mesh, runs: list[Run], references: References, folder: Path) -> Cell:
    """Compare a run that was resumed with the same one, which went on: errors of its gradients are in both."""
    before = torch.load(folder / "values.pt")
    moved = [{name: value - before[name] for name, value in run.adapters.items()} for run in runs]
    return compared(row, moved[mesh.ranks :], moved[0])


def saved(row: Row, mesh: Mesh, runs: list[Run], references: References, folder: Path) -> Cell:
    """Load the adapter with plain PEFT, and compare it with what the ranks held."""
    answer = run_ranks(loaded, (row.job.model, folder), 1, folder)
    if isinstance(answer, Failure):
        return failed(answer)
    return compared(row, answer, runs[0].adapters)


def loaded(model: str, folder: Path) -> dict[str, Tensor]:
    """Return the values of an adapter that plain PEFT has loaded."""
    base = MODELS[model].load_base(folder / "base")
    found = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    return {name: p.detach().clone() for name, p in found.named_parameters() if p.requires_grad}


def evaluated(row: Row, mesh: Mesh, runs: list[Run], references: References, folder: Path) -> Cell:
    """Compare the loss in evaluation mode."""
    want = references.run(row.job).evaluation
    error = max(abs((run.evaluation or 0.0) - want) / want for run in runs)
    return Cell(error=error, good=error <= row.bound)


def masks(row: Row, mesh: Mesh, runs: list[Run], references: References, folder: Path) -> Cell:
    """Read dropout's masks from gradients: one row of two tokens a rank, of which the first alone has a loss.

    Then lora_A's gradient is an outer product with the dropped input: the columns of dropped features are zero. Where
    ranks drew other masks, their sum has fewer zero columns: a quarter in place of half.
    """
    words = []
    zeros: dict[str, list[Tensor]] = {"colwise": [], "rowwise": []}
    same = True
    for name, gradient in runs[0].gradients.items():
        if "lora_A" in name:
            style = "rowwise" if "o_proj" in name or "down_proj" in name else "colwise"
            zeros[style].append((gradient == 0).all(0))
            # A factor that every tp rank holds whole has a gradient on each, of that rank's mask.
            others = [(run.gradients[name] == 0).all(0) for run in runs[1:]]
            same &= all(torch.equal(zeros[style][-1], other) for other in others)
    shares = {style: torch.cat(found).double().mean().item() for style, found in zeros.items()}
    good = True
    # With two data-parallel ranks a column is zero where both have dropped it. Each tp rank has its own features of the
    # input of a rowwise layer, so the share there is that of one tp rank.
    if mesh.dp > 1:
        differ = shares["rowwise"] < 0.375
        words.append(f"dp {'differ' if differ else 'same'}")
        good &= differ
    if mesh.tp > 1:
        same &= abs(shares["colwise"] - shares["rowwise"]) < shares["rowwise"] / 4
        words.append(f"tp {'same' if same else 'differ'}")
        halves = [torch.equal(*found.chunk(2)) for found in zeros["rowwise"]]
        words.append(f"slices {'repeated' if any(halves) else 'differ'}")
        good &= same and not any(halves)
    return Cell(words=", ".join(words), good=good)


def _gradient(name: str, model: str, about: str, bound: float = EXACT) -> Row:
    return Row(name, Job(model), gradients, bound, about)


ROWS = {
    row.name: row
    for row in (
        _gradient("gradients", "llama", "Llama, an adapter on every linear layer of the blocks"),
        _gradient("gradients, colwise", "colwise", "the same without `o_proj` and `down_proj`"),
        Row(
            "two steps",
            Job(steps=2, accumulate=2, clip=0.05, rows=16),
            change,
            about="what two optimizer steps (SGD) changed, each of two micro-batches, with the gradients' norm clipped",
        ),
        Row("saving", Job(steps=1, saves=True), saved, 0.0, "plain PEFT loads the saved adapter, and it is equal"),
        Row(
            "resume",
            Job(steps=4, optimizer="adamw", checkpoint_at=2),
            resumed,
            about="four steps of AdamW, against the same with a checkpoint in their middle that new processes resume",
        ),
        Row("evaluation loss", Job(evaluates=True), evaluated, about="the loss of another batch, in evaluation mode"),
        Row(
            "dropout",
            Job("dropout", tokens=2),
            masks,
            about="which features LoRA dropout drops: dp ranks should differ, tp ranks should drop the same of a whole "
            "input, and each its own of a sharded input",
        ),
        _gradient("embeddings", "embeddings", "an adapter on the embeddings too"),
        _gradient("head", "head", "an adapter on the output head too"),
        _gradient("tied head", "tied", "the head is tied to the embeddings, which have an adapter"),
        _gradient("DoRA", "dora", "`use_dora=True`"),
        _gradient("modules_to_save", "modules_to_save", "the output head trains as a whole"),
        _gradient("Mixtral, attention", "mixtral attention", "adapters on the attention only", ROUTED),
        _gradient("Mixtral, experts", "mixtral", "adapters on attention and experts (`target_parameters`)", ROUTED),
        _gradient("Qwen3-MoE, experts", "qwen3-moe", "adapters on attention and experts", ROUTED),
        _gradient("DeepSeek-V3", "mla", "latent attention (MLA) and an adapter on each of its layers", ROUTED),
    )
}
