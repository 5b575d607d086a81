"""Tenants, experts, checkpoints, exports and quantised bases where a result that is not waited for is NaN.

Ranks are those of `tests/oracle/late_group.py`. Each feature is held against one process by the test that holds it over
gloo, which is given these ranks instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.cases import cases
from tests.lora_parallel.checkpoint import test_save_load
from tests.lora_parallel.export import test_merged, test_save_pretrained
from tests.lora_parallel.fsdp import test_whole_base
from tests.lora_parallel.tenants import test_pool, test_steps
from tests.lora_parallel.tp import test_experts
from tests.oracle import late_group, relative_error, rows
from tests.oracle.tenant_rows import alone
from tests.oracle.workers import WorkerPool

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about target_parameters


Feature = Callable[[WorkerPool, Path], None]
"""What holds a feature against one process, on ranks of a pool and in an empty folder."""


@pytest.fixture(scope="module", params=late_group.MODES)
def mode(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def own_pool(mode) -> Iterator[WorkerPool]:
    with closing(WorkerPool(backend="cpu:late", prepare=partial(late_group.prepare, mode))) as workers:
        yield workers


def a_tenant_goes_on(pool: WorkerPool, folder: Path) -> None:
    """A tenant that is sharded steps, is saved, and goes on in slices."""
    pool.run(2, test_pool.part, "2x1", str(folder / "bea"), True, True)
    for got in pool.run(2, test_pool.part, "1x2", str(folder / "bea"), False, False):
        assert relative_error(got, alone("bea")) <= 1e-10


def table(mesh: str, *names: str) -> Feature:
    """Return the comparison of rows of the oracle table in a column."""

    def held(pool: WorkerPool, folder: Path) -> None:
        chosen = [rows.rows()[name] for name in names]
        found = rows.compare_all(pool, chosen, mesh, partial(rows.one_process, column=mesh))
        assert {name: cell.failure or cell.refusal for name, cell in found.items()} == dict.fromkeys(names)

    return held


def experts(way: str, *meshes: str) -> Feature:
    """Return a run by shares of experts on a mesh, which is saved and goes on by the other kind of share on others."""
    return partial(test_experts.test_experts_that_saw_no_token_have_zeros_that_are_kept, meshes=[*meshes], way=way)


def export(mesh: str, *kinds: str) -> Feature:
    return lambda pool, folder: test_merged.test_the_folder_is_that_of_one_process(pool, folder, mesh, [*kinds])


FEW: dict[str, Feature] = {
    "a tenant that goes on": a_tenant_goes_on,
    "experts": experts("by experts", "1x2", "2x1"),
    "checkpoints in inference mode": test_save_load.test_inference_mode_is_no_hindrance,
    "export of shards": export("2x1", "a saved head"),
    "export of slices": export("1x2", "experts"),
    "shards of a quantised base": table("2x1", "llama, nf4, double"),
    "slices of a quantised base": table("1x2", "llama, torchao float8"),
}
"""One for each mechanism."""

MORE: dict[str, Feature] = {
    "tenants of slices": lambda pool, _: test_steps.test_tenants_step_when_they_like(pool, "1x2", False, True, False),
    "tenants of shards": lambda pool, _: test_steps.test_tenants_step_when_they_like(pool, "2x2", True, True, True),
    "tenants in one batch": lambda pool, _: test_pool.test_each_tenant_trains_as_alone(
        pool, "2x2", test_pool.train_batched
    ),
    "tenants elsewhere": test_pool.test_a_tenant_goes_on_in_another_job_on_another_mesh,
    "tenants on a quantised base": lambda pool, _: test_pool.test_tenants_on_a_quantised_base(
        pool, "2x2", "nf4, double", True
    ),
    "experts by features": experts("by features", "2x2", "1x2"),
    "rank's own slices": lambda pool, folder: test_save_load.test_each_rank_gets_its_own_slices_back(
        pool, folder, "2x2", [*test_save_load.FILLED]
    ),
    "adapters of experts": lambda pool, folder: test_experts.test_saved_adapters_are_peft_s(
        pool, folder, "2x2", "by experts"
    ),
    "checkpoints of a whole base": test_whole_base.test_a_checkpoint_knows_nothing_of_it,
    "export": export("2x2", *test_merged.KINDS),
    "what users call": lambda pool, folder: test_save_pretrained.test_what_users_call(pool, folder, "2x2"),
    "mixtures": table("2x2", *(name for name, row in rows.rows().items() if row.group == "experts")),
    "quantised bases": table("2x2", *(name for name, row in rows.rows().items() if row.group == "quantised")),
    "whole bases": table("2x2 whole", "llama", "mixtral", "llama, nf4", "DoRA"),
}


MATRIX = [*((name, "lazy") for name in MORE), *((name, mode) for name in FEW for mode in ("eager", "blocking"))]


@pytest.mark.parametrize(("name", "mode"), cases(*((name, "lazy") for name in FEW), matrix=MATRIX), indirect=["mode"])
def test_a_feature_is_that_of_one_process(own_pool, tmp_path, mode, name):
    {**FEW, **MORE}[name](own_pool, tmp_path)
