"""Tenants of a pool in a Trainer, each against plain PEFT on its own samples in one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lora_parallel import TenantPool
from tests.cases import cases
from tests.lightning_lora.harness import share, tidy, trainer
from tests.oracle import causal_lm, ranks_of, relative_error
from tests.oracle.tenant_rows import MIXED, ROWS, Mixed, add, alone, loss_of, values


class Tenants(pl.LightningModule):
    """Trains all tenants of a mixed batch at once."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.late, self.model = late, None if late else causal_lm()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = causal_lm()

    def on_fit_start(self) -> None:
        self.pool = TenantPool(self.model)
        for name in MIXED:
            add(self.pool, name)

    def training_step(self, batch: Any, index: int) -> None:
        ids, numbers = batch
        with self.pool.route([MIXED[number] for number in numbers.tolist()]):
            logits = self.model(input_ids=ids).logits
            self.manual_backward(sum(loss_of(logits[numbers == n], ids[numbers == n]) for n in range(len(MIXED))))
        for name in MIXED:
            self.pool.step(name)

    def configure_optimizers(self) -> None:
        """The pool's."""


def trained_by_lightning(mesh: str, late: bool, folder: str) -> dict[str, dict[str, Tensor]]:
    module = Tenants(late)
    size, rank = share(mesh)
    with tidy():
        run = trainer(
            mesh, {"require_adapters": False}, max_epochs=1, enable_checkpointing=True, default_root_dir=folder
        )
        run.fit(module, DataLoader(Mixed(size, [rank]), batch_size=len(MIXED) * ROWS // size))
    return {name: values(module.model, name) for name in MIXED}


@pytest.mark.parametrize(("mesh", "late"), cases(("2x1", False), ("1x2", True), matrix=[("2x2", False)]))
def test_tenants_train_in_a_trainer_as_alone(pool, tmp_path, mesh, late):
    for found in pool.run(ranks_of(mesh), trained_by_lightning, mesh, late, str(tmp_path)):
        for name, got in found.items():
            assert relative_error(got, alone(name)) <= 1e-10, name
