"""Models that arrive compiled as a whole, and sharded ones that somebody compiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lora_parallel import parallelize
from lora_parallel.runtime.compiled_blocks import unwrap_compiled
from tests.cases import cases
from tests.oracle import Case, on_mesh
from tests.oracle.workers import Failure, attempt


def test_every_wrapper_is_taken_off(caplog):
    inner, beside = nn.Linear(2, 2), nn.Linear(2, 2)
    beside.compile(backend="eager")
    whole = nn.ModuleDict({"inner": torch.compile(inner, backend="eager"), "beside": beside})
    bare, arguments = unwrap_compiled(torch.compile(whole, backend="eager"))
    assert arguments is not None
    assert bare is whole
    assert bare["inner"] is inner
    assert list(bare.state_dict()) == ["inner.weight", "inner.bias", "beside.weight", "beside.bias"]
    assert "torch.compile is taken off ModuleDict, inner, beside: each block is" in caplog.text
    caplog.clear()
    assert unwrap_compiled(whole) == (whole, None)
    assert not caplog.text


def compiled_afterwards(mesh_text: str) -> list[Any]:
    """What each way to compile a sharded model as a whole comes to; and the model's loss afterwards."""
    mesh, config = on_mesh(mesh_text)
    model, second = (parallelize(Case().model(), mesh, config) for _ in range(2))
    ids = torch.arange(12)[None]

    def loss() -> float:
        return model(input_ids=ids, labels=ids).loss.item()

    ways = [
        model.compile,
        lambda: torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids, labels=ids),
        # torch remembers in a process, by code, what it has failed to trace.
        *[lambda: torch.compile(model, backend="eager")(input_ids=ids, labels=ids)] * 2,
        lambda: torch.compile(second, backend="eager")(input_ids=ids, labels=ids),
        *[lambda: torch.compile(loss, backend="eager")()] * 2,
    ]
    return [*(attempt(way) for way in ways), loss()]


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1"]))
def test_a_sharded_model_is_not_compiled_as_a_whole(pool, mesh):
    ids = torch.arange(12)[None]
    want = Case().model()(input_ids=ids, labels=ids).loss.item()
    for *refused, loss in pool.run(2, compiled_afterwards, mesh):
        for failure in refused:
            assert isinstance(failure, Failure)
            assert "compile its blocks with compile=True" in failure.message, failure.trace
        assert loss == pytest.approx(want, rel=1e-12)
