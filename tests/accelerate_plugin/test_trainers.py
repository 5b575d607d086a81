"""TRL's trainers on a mesh: the same training as stock TRL and plain PEFT in one process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")  # and `datasets`, which it needs

from tests.cases import cases
from tests.oracle import ranks_of
from tests.oracle.trainer_rows import ROWS, errors, tuned, write_base
from tests.oracle.workers import Failure

FAST = ["DPO, a reference model", "KTO, a trained adapter", "Reward", "GRPO"]
SAMPLED = [name for name, row in ROWS.items() if row.mesh == "1x2"]
REST = [name for name in ROWS if name not in (*FAST, *SAMPLED)]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("mesh", "names"), cases(("2x2", FAST[:1]), matrix=[("2x2", FAST[1:]), ("2x2", REST), ("1x2", SAMPLED)])
)
def test_trainers_train_as_one_process(pool, base, tmp_path, mesh, names):
    wanted = tuned(names, base, tmp_path / "one", "")
    for rank, answers in enumerate(pool.run(ranks_of(mesh), tuned, names, base, tmp_path / "mesh", mesh)):
        for name in names:
            got, want = answers[name], wanted[name]
            assert not isinstance(want, Failure), f"{name} in one process: {want.trace}"
            assert not isinstance(got, Failure), f"{name} on rank {rank}: {got.trace}"
            found = errors(name, got, want)
            assert found.good, f"{name} on rank {rank}: {found}"
