"""Factors of a tenant that each tp rank has whole stay equal, though kernels of its ranks round otherwise."""

from __future__ import annotations

from tests.oracle import differing, full
from tests.oracle.tenant_rows import add, batch, loss_of, pool_of


def trained_by_ranks_that_round_otherwise():
    mesh, model, tenants = pool_of("1x2", {"tp_plan": {"lm_head": "replicate"}})
    factor = 1 + 1e-9 * mesh.get_local_rank("tp")
    add(tenants, "dan")
    model.lm_head.register_full_backward_pre_hook(lambda module, grads: tuple(grad * factor for grad in grads))
    ids = batch("dan", 0)
    with tenants.train("dan"):
        loss_of(model(input_ids=ids).logits, ids).backward()
    tenants.step("dan")
    return {name: full(p) for name, p in model.named_parameters() if "lm_head" in name and ".dan." in name}


def test_they_stay_equal(pool):
    found = pool.run(2, trained_by_ranks_that_round_otherwise)
    assert len(found[0]) == 2
    assert not differing(*found)
