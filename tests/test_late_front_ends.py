"""Lightning, Accelerate and transformers' Trainer where a result that is not waited for is NaN.

Ranks are those of `tests/oracle/late_group.py`. Each case is held against one process by the test that holds it over
gloo, or is itself what such a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.accelerate_plugin import test_checkpoint as accelerate_checkpoints
from tests.accelerate_plugin import test_loop, test_trainer
from tests.accelerate_plugin import test_pipeline as accelerate_pipelines
from tests.accelerate_plugin import test_tenants as accelerate_tenants
from tests.cases import cases
from tests.lightning_lora import test_checkpoint as lightning_checkpoints
from tests.lightning_lora import test_evaluation, test_training
from tests.lightning_lora import test_pipeline as lightning_pipelines
from tests.lightning_lora import test_tenants as lightning_tenants
from tests.oracle import causal_lm, late_group, ranks_of
from tests.oracle.workers import FRONT_ENDS, WorkerPool

Use = Callable[[WorkerPool, Path], None]
"""What holds a use of a front end against one process, on ranks of a pool and in an empty folder."""


@pytest.fixture(scope="module", params=late_group.MODES)
def mode(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def own_pool(mode) -> Iterator[WorkerPool]:
    prepare = partial(late_group.prepare, mode)
    with closing(WorkerPool(modules=FRONT_ENDS, backend="cpu:late", prepare=prepare)) as workers:
        yield workers


def lightning(mesh: str, case: test_training.Case) -> Use:
    return lambda pool, _: test_training.test_training_equals_plain_lightning(pool, mesh, case)


def loop(mesh: str, *names: str) -> Use:
    return lambda pool, _: test_loop.test_a_loop_trains_as_one_process_does(pool, mesh, [*names])


def trainer(mesh: str) -> Use:
    """Return a run of transformers' Trainer that evaluates, saves and predicts."""

    def held(pool: WorkerPool, folder: Path) -> None:
        base = folder / "base"
        causal_lm(dtype=torch.float32).save_pretrained(base)
        want = test_trainer.trains(base, folder / "one", "")
        for got in pool.run(ranks_of(mesh), test_trainer.trains, base, folder / "ranks", mesh):
            test_trainer.compare(got, want)

    return held


def resumed_by_accelerate(pool: WorkerPool, folder: Path) -> None:
    """A loop that saves in mid-epoch goes on on another mesh."""
    with accelerate_checkpoints.launched():
        script = accelerate_checkpoints.Script("")
        want = [script.train(0, 6), script.adapters()]
    accelerate_checkpoints.test_a_run_goes_on_on_any_mesh(pool, folder, want, "2x1", ["2x1", "1x2"])


FEW: dict[str, Use] = {
    "Lightning, accumulated": lightning("2x1", test_training.accumulated),
    "Lightning, loss from slices": lightning("1x2", test_training.loss_from_slices),
    "Lightning, evaluation": lambda pool, _: test_evaluation.test_validation_of_a_bare_model_and_the_refusal_of_its_fit(
        pool, "2x1"
    ),
    "Lightning, evaluation of a pipeline": partial(
        lightning_pipelines.test_evaluation_and_what_follows_from_it, mesh="1x1pp2"
    ),
    "Accelerate, accumulated and clipped": loop("2x1", "accumulated and clipped"),
    "Trainer": trainer("2x1"),
}
"""One for each front end, and what else it sends."""

MORE: dict[str, Use] = {
    **{
        f"Lightning, {mesh}, {case.__name__}": lightning(mesh, case)
        for mesh, chosen in test_training.ON_TWO_RANKS.items()
        for case in chosen
        if (mesh, case) not in [("2x1", test_training.accumulated), ("1x2", test_training.loss_from_slices)]
    },
    "Lightning, dp and tp": lightning("2x2", test_training.clipped_by_norm),
    "Lightning, resumed": lambda pool, folder: lightning_checkpoints.test_a_resumed_run_equals_an_uninterrupted_one(
        pool, "2x1", (2,), folder
    ),
    "Lightning, tenants": lambda pool, folder: lightning_tenants.test_tenants_train_in_a_trainer_as_alone(
        pool, folder, "2x2", False
    ),
    "Accelerate, dp and tp": loop("2x2", "accumulated and clipped", "head saved", "tied"),
    "Accelerate, pipeline": lambda pool, _: accelerate_pipelines.test_a_loop_trains_as_one_process_does(
        pool, "2x1pp2", ["accumulated and clipped"]
    ),
    "Accelerate, resumed": resumed_by_accelerate,
    "Accelerate, tenants": lambda pool, _: accelerate_tenants.test_tenants_train_in_a_loop_as_alone(pool, "2x2"),
    "Trainer, tp": trainer("1x2"),
    "Trainer, cp": trainer("1x1cp2"),
    "Trainer, dp and cp": trainer("2x1cp2"),
}


MATRIX = [*((name, "lazy") for name in MORE), *((name, mode) for name in FEW for mode in ("eager", "blocking"))]


@pytest.mark.parametrize(("name", "mode"), cases(*((name, "lazy") for name in FEW), matrix=MATRIX), indirect=["mode"])
def test_a_front_end_trains_as_one_process(own_pool, tmp_path, mode, name):
    {**FEW, **MORE}[name](own_pool, tmp_path)
