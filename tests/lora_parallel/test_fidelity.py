"""One process with plain PEFT against every mesh: same losses, same gradients, same adapter."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.cases import cases
from tests.oracle import Case, Run, parse_mesh, ranks_of, reference, relative_error, sharded_many

MESHES = ["1x1", "2x1", "1x2", "2x2", "1x4", "4x1", "2x2x2"]
CASES = {
    "llama": Case(steps=20),
    "llama-clip": Case(clip=0.05),
    "llama-accumulate": Case(accumulate=3, clip=0.05),
    "qwen3": Case(family="qwen3", steps=20),
    "llama-tied": Case(sizes={"tie_word_embeddings": True}),
    "blocks saved": Case(
        lora={"modules_to_save": ["layers.1", "layers.2", "layers.3"]}, sizes={"num_hidden_layers": 5}
    ),
    "llama-float32": Case(dtype=torch.float32, steps=10, clip=1.0),
}
FEW = {
    "accumulate, clip": Case(steps=2, accumulate=2, clip=0.05, rows=4),
    "tied": Case(steps=2, sizes={"tie_word_embeddings": True}),
}
"""Cases of `make test`: they are shorter, and one has two mechanisms."""

oracle = cache(reference)


def uneven(mesh: str) -> Case:
    """Widths that tp divides (it must) and dp_shard does not."""
    return Case(steps=2, sizes={"intermediate_size": 11 * parse_mesh(mesh)["tp"]})


def check(case: Case, got: Run) -> None:
    """The guaranteed bounds: float64 gradients 1e-12, adapter 1e-10, losses 1e-6 (HF computes them in float32)."""
    want: Run = oracle(case)
    double = case.dtype is torch.float64
    assert relative_error(got.gradients, want.gradients) <= (1e-12 if double else 1e-5)
    assert relative_error(got.adapters, want.adapters) <= (1e-10 if double else 1e-3)
    assert got.losses == pytest.approx(want.losses, abs=1e-6 if double else 1e-5)
    assert got.norms[:1] == pytest.approx(want.norms[:1], rel=1e-12 if double else 1e-5)
    assert got.norms == pytest.approx(want.norms, rel=1e-10 if double else 1e-3)  # later ones follow the adapter


@pytest.mark.parametrize(
    ("mesh", "chosen"),
    cases(("2x2", [*FEW.values(), uneven("2x2")]), matrix=[(mesh, [*CASES.values(), uneven(mesh)]) for mesh in MESHES]),
)
def test_training_equals_one_process(pool, mesh, chosen):
    for runs in pool.run(ranks_of(mesh), sharded_many, [(case, mesh) for case in chosen]):
        for case, run in zip(chosen, runs, strict=True):
            check(case, run)
