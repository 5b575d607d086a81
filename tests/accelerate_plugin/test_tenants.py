"""Tenants of a pool in a loop on Accelerate, each against plain PEFT on its own samples in one process."""

from __future__ import annotations

import pytest
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from lora_parallel import TenantPool
from tests.accelerate_plugin.harness import launched, plugin
from tests.cases import cases
from tests.oracle import causal_lm, ranks_of, relative_error
from tests.oracle.tenant_rows import MIXED, ROWS, Mixed, add, alone, loss_of, values


def trained_by_accelerate(mesh: str) -> dict[str, dict[str, Tensor]]:
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh, require_adapters=False))
        size = accelerator.num_processes
        loader = DataLoader(Mixed(size, range(size)), batch_size=len(MIXED) * ROWS // size)
        model, loader = accelerator.prepare(causal_lm().train(), loader)
        pool = TenantPool(model)
        for name in MIXED:
            add(pool, name)
        for ids, numbers in loader:
            with pool.route([MIXED[number] for number in numbers.tolist()]):
                logits = model(input_ids=ids).logits
                accelerator.backward(sum(loss_of(logits[numbers == n], ids[numbers == n]) for n in range(len(MIXED))))
            for name in MIXED:
                pool.step(name)
        return {name: values(model, name) for name in MIXED}


@pytest.mark.parametrize("mesh", cases("2x1", "1x2", matrix=["2x2"]))
def test_tenants_train_in_a_loop_as_alone(pool, mesh):
    for found in pool.run(ranks_of(mesh), trained_by_accelerate, mesh):
        for name, got in found.items():
            assert relative_error(got, alone(name)) <= 1e-10, name
