"""A batch in which one data-parallel rank has no image: its tower does not run there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.oracle import full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.rows import Batch, one_process, rows
from tests.oracle.workers import Failure

ROW = "llava, images on one rank"


def with_a_dummy(batch: Batch, image: int, places: int) -> Batch:
    """Return rows without an image with one at padded tokens behind the first row, as many as it has features."""
    more = torch.zeros(len(batch["input_ids"]), places, dtype=torch.long)
    more[0] = image
    return {
        "input_ids": torch.cat([batch["input_ids"], more], 1),
        "labels": torch.cat([batch["labels"], torch.full_like(more, -100)], 1),
        "attention_mask": torch.cat([torch.ones_like(batch["input_ids"]), torch.zeros_like(more)], 1),
        "pixel_values": torch.zeros(1, 3, 16, 16, dtype=torch.float64),
    }


def on_rank(mesh: str, dummy: bool, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the gradients of a step in which the second dp rank has no image."""
    device_mesh, settings = on_mesh(mesh, **config)
    row = rows()[ROW]
    model: Any = parallelize(row.build(), device_mesh, settings)
    image, whole = model.config.image_token_id, row.batch()
    batch = row.part(whole, dp_rank(device_mesh), dp_size(device_mesh))
    if dummy and "pixel_values" not in batch:
        batch = with_a_dummy(batch, image, int((whole["input_ids"][0] == image).sum()))
    model(**batch).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_a_rank_without_an_image_is_told_what_to_give_it(pool, mesh):
    for raised in pool.try_run(ranks_of(mesh), on_rank, mesh, False, {}):
        assert isinstance(raised, Failure)
        assert raised.kind == "RuntimeError"
        assert "vision_tower" in raised.message
        assert "Rows without an image do not run its tower" in raised.message


@pytest.mark.parametrize(
    ("mesh", "config", "dummy"),
    cases(("2x1", {}, True), ("2x1", {"shard_base": False}, False), matrix=[("2x2", {"shard_base": False}, False)]),
)
def test_both_remedies_are_right(pool, mesh, config, dummy):
    want = one_process(ROW).gradients
    assert any("vision_tower" in name and gradient.any() for name, gradient in want.items())
    for got in pool.run(ranks_of(mesh), on_rank, mesh, dummy, config):
        assert relative_error(got, want) < 1e-12
