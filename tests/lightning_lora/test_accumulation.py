"""`accumulate_grad_batches`: what each microbatch sends."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Tokens, loader, tidy, trainer, tuner
from tests.lora_parallel.traffic import Traffic
from tests.oracle import ranks_of

AXES = ("dp_replicate", "dp_shard", "tp")


class Count(pl.Callback):
    """Counts each microbatch's reductions by axis, optimizer step excluded."""

    def __init__(self) -> None:
        self.seen: list[dict[str, int]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.traffic = Traffic()
        self.traffic.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.traffic.__exit__(None, None, None)
        mesh = trainer.strategy.device_mesh
        self.seen.append(
            {
                f"{kind} over {axis}": self.traffic.count(kind, mesh.get_group(axis))
                for axis in AXES
                if mesh[axis].size() > 1
                for kind in ("reduce_scatter", "all_reduce")
            }
        )


def microbatches(mesh: str, accumulate: int) -> list[dict[str, int]]:
    """The reductions of each microbatch of two steps."""
    count = Count()
    with tidy():
        run = trainer(mesh, max_epochs=1, accumulate_grad_batches=accumulate, callbacks=[count])
        run.fit(tuner()(m.adapted), loader(Tokens(2 * accumulate * ROWS), mesh))
    return count.seen


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["1x2", "2x2x2"]))
def test_only_the_last_microbatch_reduces(pool, mesh):
    """Blocked microbatches send what the activations need and nothing else; the third sends it all, once."""
    every, third = (pool.run(ranks_of(mesh), microbatches, mesh, n) for n in (1, 3))
    units = 3  # two blocks and the rest
    for always, blocked in zip(every, third, strict=True):
        assert blocked[2] == blocked[5] == always[0]
        for index in (0, 1, 3, 4):
            change = {name: always[0][name] - blocked[index][name] for name in always[0]}
            assert change.pop("all_reduce over tp") == 1  # all adapter gradients in one message
            assert blocked[index].get("reduce_scatter over dp_shard", 0) == 0
            assert blocked[index].get("all_reduce over dp_replicate", 0) == 0
            if mesh != "1x2":
                # The third unit (embedding and head) has nothing that trains.
                assert change.pop("reduce_scatter over dp_shard") == units - 1
                assert change.pop("all_reduce over dp_shard") == 1  # which parameters were used
            if mesh == "2x2x2":
                assert change.pop("all_reduce over dp_replicate") == units - 1 + 1
            assert not any(change.values())
