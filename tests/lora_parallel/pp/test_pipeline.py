"""Pipeline parallelism: the same training in stages, its messages and memory, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import cases
from tests.lora_parallel.pp.runs import COMBINED, LOOPED, RUNS, Run
from tests.oracle import dp_of, ranks_of, relative_error
from tests.oracle.workers import Failure, attempt


def run_all(mesh: str, names: list[str], runs: dict[str, Run]) -> dict[str, Any]:
    return {name: attempt(runs[name].on, mesh) for name in names}


def held_against_one_process(pool: Any, mesh: str, runs: dict[str, Run]) -> list[str]:
    """Each run on a mesh and in one process; what differs."""
    answers = pool.try_run(ranks_of(mesh), run_all, mesh, list(runs), runs)
    problems = []
    for name, run in runs.items():
        shares = dp_of(mesh)
        want_loss, want = run.step(run.model())
        losses = []
        for rank, answer in enumerate(answers):
            found = answer if isinstance(answer, Failure) else answer[name]
            if isinstance(found, Failure):
                problems.append(f"{name}: {found.kind}: {found.message}\n{found.trace}")
                break
            loss, gradients = found
            losses.append(loss)
            error = relative_error(gradients, want)
            if error > run.tolerance:
                problems.append(f"{name}, rank {rank}: gradients {error:.1e}")
                break
        if len(losses) == len(answers) and abs(sum(losses) / len(losses) - want_loss) > 2e-6 * max(1, abs(want_loss)):
            problems.append(f"{name}: loss {losses} for {want_loss} in {shares} shares")
    return problems


ELSEWHERE = [
    *("1f1b", "one micro-batch", "two micro-batches", "tokens vary", "right padding"),
    *("a function of the loss", "gpipe, a function of the loss"),
    *("gpipe", "gpipe, a third of the loss, three times", "gpipe, labels shifted by hand"),
    *("gpipe, a saved block", "head, norm and embedding train", "gpt-2", "mixtral", "recomputed, a loss of logits"),
]
"""Runs whose mechanism another one has, here or on another mesh."""


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(
        ("1x1pp2", [name for name in RUNS if name not in ELSEWHERE]),
        matrix=[
            ("1x1pp2", ELSEWHERE),
            ("1x1pp4", [name for name, run in RUNS.items() if "pp_split" not in run.config]),
        ],
    ),
)
def test_gradients_equal_one_process(pool, mesh, names):
    problems = held_against_one_process(pool, mesh, {name: RUNS[name] for name in names})
    assert not problems, "\n".join(problems)


def test_several_stages_of_a_rank(pool):
    problems = held_against_one_process(pool, "1x1pp2", LOOPED)
    assert not problems, "\n".join(problems)


FEW = ["gpipe, a third of the loss, three times", "head, norm and embedding train", "sequence_parallel, interleaved"]
ALL = list(COMBINED)


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(
        ("1x2pp2", FEW[1:]),
        ("2x1pp2", FEW[:2]),
        matrix=[(mesh, ALL) for mesh in ("1x2pp2", "2x1pp2", "1x1cp2pp2", "2x2pp2", "2x1x1pp2", "1x2cp2pp2")],
    ),
)
def test_with_other_axes(pool, mesh, names):
    has_tp = mesh.startswith(("1x2", "2x2"))
    runs = {name: COMBINED[name] for name in names if has_tp or "sequence_parallel" not in COMBINED[name].config}
    problems = held_against_one_process(pool, mesh, runs)
    assert not problems, "\n".join(problems)
