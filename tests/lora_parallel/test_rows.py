"""The rows of the oracle table: each equals one process on a mesh, or is refused with the text that it names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tests.cases import cases
from tests.oracle.model_rows import MECHANISMS
from tests.oracle.rows import Cell, Step, compare, compare_all, one_process, rows

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about tied weights and Conv1D
reference = cache(one_process)


# One row a mechanism; `make table NAME=oracle` has all of them, on five meshes.
ONE_EACH = {
    "llama, one kv head",  # a plan of the model's own, and fewer heads than ranks
    "phi3",  # fused layers
    "falcon, grouped",  # fused and interleaved, of our table
    "gpt2",  # Conv1D
    "mpt",  # found by trying
    "bert, masked",  # a tied head with biases
    "t5, tied",  # encoder and decoder
    "whisper",  # adapters on convolutions beside
    *MECHANISMS,  # images, sound, recurrences, convolutions, keys of low rank, shared experts
    "llava, images on one rank",
    "mixtral",
    "mixtral, by experts",
    "gpt-oss",
    "deepseek-v3",
    "phi3, nf4",  # other formats: quantised/test_conversion.py
    "biases everywhere, frozen",
    "embeddings and head, tied",
    "DoRA, embeddings and head",
    "target_parameters",
    "DoRA, grouped",
    "DoRA, phi3",
    "DoRA, styles for any layer",
    "lora_bias, grouped",
    "lora_bias, gpt2",
    "bias='all', gpt2",
    "trainable_token_indices, tied",
    "modules_to_save: fused",
    "modules_to_save: norms of heads",
    "modules_to_save: grouped",
    "one layer of a group is whole",
    "aLoRA",
    "a Linear with factors, DoRA",
    "a Linear with factors, without adapters",
    "a Linear with layers in it",
    "a Linear with an empty bias, bias='all'",
    "sequence_parallel, gpt2",
    "loss_parallel, gemma2",  # soft caps on logits
    "loss_parallel, embeddings and head, tied",
    "loss_parallel, sequence_parallel, llama",
}
ON_FOUR_RANKS = {"gpt-oss", "DoRA, phi3", "llava, images on one rank"}
"""Rows of `make test` that are cut twice, by tp and by FSDP2; the others are computed on two ranks there."""

CHOSEN = [(name, "2x2" if name in ON_FOUR_RANKS else "1x2") for name in rows() if name in ONE_EACH]
PAIRS = cases(*CHOSEN, matrix=[pair for pair in product(rows(), ("2x2", "1x4")) if pair not in CHOSEN])
NAMES = [pytest.param(name, marks=() if name in ONE_EACH else pytest.mark.matrix) for name in rows()]
assert rows().keys() >= ONE_EACH


CALL = 32
"""Number of rows that are computed in one call of the pool: all that `make test` has of a mesh are two calls."""


@pytest.fixture(scope="module")
def cell_of(pool, request) -> Callable[[str, str], Cell]:
    """The cell of a row and a mesh. The first that is asked for is computed with the next ones of this run."""
    chosen: dict[str, list[str]] = defaultdict(list)
    for item in request.session.items:
        if "cell_of" in getattr(item, "fixturenames", ()):
            chosen[item.callspec.params["mesh"]].append(item.callspec.params["name"])
    cells: dict[tuple[str, str], Cell] = {}

    def find(name: str, mesh: str) -> Cell:
        if (name, mesh) not in cells:
            first = chosen[mesh].index(name)
            found = compare_all(pool, [rows()[each] for each in chosen[mesh][first : first + CALL]], mesh, reference)
            cells.update({(each, mesh): cell for each, cell in found.items()})
        return cells[name, mesh]

    return find


@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_a_row_equals_one_process_or_is_refused(cell_of, name, mesh):
    row = rows()[name]
    refusal = row.refusal(mesh)
    cell = cell_of(name, mesh)
    assert cell.failure is None, cell.failure
    if refusal is None:
        assert cell.refusal is None
    else:
        assert cell.refusal is not None, f"works, with an error of {cell.error}: take {refusal!r} off the row"
        assert refusal in cell.refusal


@pytest.mark.parametrize("name", NAMES)
def test_a_row_trains_what_can_be_compared(name):
    """An adapter without a gradient, or with one that is rounding, would agree with anything."""
    norms = [gradient.norm().item() for gradient in reference(name).gradients.values()]
    assert min(norms) > 1e-3


def test_the_comparison_fails_where_it_should(pool):
    row, want = rows()["llama"], reference("llama")
    first = next(iter(want.gradients))
    off = {**want.gradients, first: want.gradients[first] * (1 + 1e-9)}
    fewer = {name: gradient for name, gradient in want.gradients.items() if name != first}
    assert compare(pool, row, "2x1", want).error <= 1e-14
    assert "gradients differ by 1.0e-09" in compare(pool, row, "2x1", Step(want.loss, off)).failure
    assert "other gradients" in compare(pool, row, "2x1", Step(want.loss, fewer)).failure
    assert "in place of" in compare(pool, row, "2x1", Step(want.loss + 0.1, want.gradients)).failure
    unknown = replace(row, name="no such row")
    assert "KeyError" in compare(pool, unknown, "2x1", want).failure
    cells = compare_all(pool, [row, unknown], "2x1", lambda name: want)
    assert cells["llama"].error <= 1e-14
    assert "KeyError" in cells["no such row"].failure
