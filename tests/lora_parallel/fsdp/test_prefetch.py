"""`prefetch_blocks`: weights are gathered ahead of the block that runs. The numbers: `test_parallelize.py`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.fsdp.unit_order import UnitOrder
from tests.oracle import Case, full, on_mesh, relative_error, trained

CASE = Case(steps=2, sizes={"num_hidden_layers": 4})


def order_of_gathers(prefetch_blocks: int) -> list[str]:
    """Return what happens in the forward and the backward of a step: gathers of blocks, and blocks that begin."""
    mesh, config = on_mesh("2x1", prefetch_blocks=prefetch_blocks)
    model: Any = parallelize(CASE.model(), mesh, config)
    found: list[str] = []
    for index, block in enumerate(model.get_base_model().model.layers):
        block.mlp.register_forward_pre_hook(lambda *_, index=index: found.append(f"block {index}"))
        block.mlp.register_full_backward_hook(lambda *_, index=index: found.append(f"backward {index}"))
    take = UnitOrder.take

    def noted(self: UnitOrder, step: str) -> None:
        if step.startswith("gather of") and "layers" in step:
            found.append(f"gather {step.partition('layers.')[2][0]}")
        take(self, step)

    for batch in CASE.batches():
        found.clear()
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
        with patch.object(UnitOrder, "take", noted):
            model(input_ids=mine, labels=mine).loss.backward()
    return found


def test_blocks_are_gathered_ahead(pool):
    for found in pool.run(2, order_of_gathers, 0):
        assert found.index("block 0") < found.index("gather 1")
    for found in pool.run(2, order_of_gathers, 2):
        forward, backward = found[: found.index("backward 3")], found[found.index("block 3") + 1 :]
        assert forward[:4] == ["gather 0", "gather 1", "gather 2", "block 0"]
        assert forward[4:6] == ["gather 3", "block 1"]
        assert backward[:4] == ["gather 3", "gather 2", "gather 1", "backward 3"]


def left_out(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """The gradients of a second step, after a forward for a metric, without block 1, ahead of the first one's end."""
    optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
    trunk = model.get_base_model().model  # type: ignore[operator]
    blocks = trunk.layers
    for ids in batches:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = {n: full(p.grad) for n, p in trained(model).items()}
        trunk.layers = nn.ModuleList([blocks[0], *blocks[2:]])
        model(input_ids=ids)
        trunk.layers = blocks
        optimizer.step()
    return gradients


def left_out_on_ranks() -> dict[str, Tensor]:
    mesh, config = on_mesh("2x1", prefetch_blocks=1)
    model = parallelize(CASE.model(), mesh, config)
    return left_out(model, [batch.chunk(dp_size(mesh))[dp_rank(mesh)] for batch in CASE.batches()])


def test_what_was_gathered_for_a_block_that_did_not_run_is_not_that_of_the_next_step(pool):
    """FSDP2 keeps it until something waits for it, and the block has trained since."""
    want = left_out(CASE.model(), CASE.batches())
    for got in pool.run(2, left_out_on_ranks):
        assert relative_error(got, want) <= 1e-12
