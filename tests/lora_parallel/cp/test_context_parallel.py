"""Context parallelism: the same training on chunks of the tokens, its collectives, and what is refused."""

from __future__ import annotations

import pytest

from tests.cases import cases
from tests.lora_parallel.cp.runs import RUNS
from tests.oracle import ranks_of, relative_error
from tests.workers import Failure, attempt


def run_all(mesh: str):
    return {name: attempt(run.on, mesh) for name, run in RUNS.items()}


@pytest.mark.parametrize("mesh", cases("1x1cp2", "1x2cp2", matrix=["1x1cp4", "1x2cp4"]))
def test_gradients_equal_one_process(pool, mesh):
    answers = pool.run(ranks_of(mesh), run_all, mesh)
    problems = []
    for name, run in RUNS.items():
        want_loss, want = run.step(run.model())
        for rank, answer in enumerate(answers):
            found = answer[name]
            if isinstance(found, Failure):
                problems.append(f"{name}: {found.kind}: {found.message}")
                break
            loss, gradients = found
            error = relative_error(gradients, want)
            if error > 1e-12 or abs(loss - want_loss) > 1e-6:
                problems.append(f"{name}, rank {rank}: gradients {error:.1e}, loss {loss} for {want_loss}")
                break
    assert not problems, "\n".join(problems)
