"""A job that stops and goes on, on the mesh that it had or on another, ends as if it had not."""

from __future__ import annotations

import itertools
import random
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from lora_parallel.checkpoint import states
from tests.cases import cases
from tests.lora_parallel.checkpoint.resume import OPTIMIZERS, STEPS, Job, Trained
from tests.oracle import Case, ranks_of, relative_error

MESHES = ["1x1", "2x1", "1x2", "2x2", "4x1", "1x4", "2x2x1", "2x1x2", "2x2x2"]
# Each mechanism once as source and once as target; `make matrix` runs every pair.
SAMPLE = {("2x2", "2x1"), ("1x2", "2x2x1")}
PAIRS = [
    pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.matrix)
    for pair in itertools.product(MESHES, MESHES)
]

oracle = cache(lambda job: job.in_one_process())


def check_same(got: Trained, want: Trained, steps: int) -> None:
    """The last `steps` of a run against a whole one, in float64."""
    assert got.losses == pytest.approx(want.losses[-steps:], abs=1e-6)
    assert relative_error(got.adapters, want.adapters) <= 1e-10


def check_equal(got: Trained, want: Trained, steps: int) -> None:
    """The same, bit for bit."""
    assert got.losses == want.losses[-steps:]
    assert got.adapters.keys() == want.adapters.keys()
    for name, tensor in want.adapters.items():
        assert torch.equal(got.adapters[name], tensor), name


def stopped(pool, job: Job, mesh: str, folder: Path, step: int) -> list[Trained]:
    """Run the job whole, and leave its checkpoint of `step` in the folder."""
    return pool.run(ranks_of(mesh), job.on_mesh, mesh, folder, (step,))


@pytest.fixture(scope="module")
def sources(pool, tmp_path_factory):
    """By mesh: the whole run, and a folder with a checkpoint of it; each is made once."""

    @cache
    def source(mesh: str) -> tuple[list[Trained], Path, int]:
        folder = tmp_path_factory.mktemp("source")
        step = random.Random(mesh).randint(1, STEPS - 1)
        return stopped(pool, Job(), mesh, folder, step), folder, step

    return source


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda mesh: mesh)
def test_any_mesh_to_any_mesh(pool, sources, source, target):
    wholes, folder, step = sources(source)
    for whole in wholes:
        check_same(whole, oracle(Job()), STEPS)
    for resumed in pool.run(ranks_of(target), Job().on_mesh, target, folder):
        check_same(resumed, oracle(Job()), STEPS - step)


@pytest.mark.parametrize("mesh", cases("2x2", matrix=[mesh for mesh in MESHES if mesh != "2x2"]))
def test_the_same_mesh_bit_for_bit(pool, sources, mesh):
    wholes, folder, step = sources(mesh)
    for whole, resumed in zip(wholes, pool.run(ranks_of(mesh), Job().on_mesh, mesh, folder), strict=True):
        check_equal(resumed, whole, STEPS - step)


def goes_on(pool, job: Job, folder: Path) -> None:
    """Stop a job on 2x1; it goes on there bit for bit, and on 1x2."""
    wholes = stopped(pool, job, "2x1", folder, 2)
    for whole, resumed in zip(wholes, pool.run(2, job.on_mesh, "2x1", folder), strict=True):
        check_same(whole, oracle(job), STEPS)
        check_equal(resumed, whole, STEPS - 2)
    for resumed in pool.run(2, job.on_mesh, "1x2", folder):
        check_same(resumed, oracle(job), STEPS - 2)


OWN_WAYS = ["AdamW, two groups", "schedule-free"]
"""Optimizers whose states differ in kind from AdamW's: in groups, and with an average beside."""


@pytest.mark.parametrize(
    "optimizer", cases(OWN_WAYS[0], matrix=[n for n in OPTIMIZERS if n not in ("AdamW", OWN_WAYS[0])])
)
def test_optimizers(pool, tmp_path, optimizer):
    """Their states go from 2x1 to 2x1, bit for bit, and to 1x2."""
    if optimizer == "schedule-free":
        pytest.importorskip("schedulefree")
    goes_on(pool, Job(optimizer=optimizer), tmp_path)


KINDS = {
    "tied, biases": Job(
        Case(steps=STEPS, family="qwen3", lora={"bias": "lora_only"}, sizes={"tie_word_embeddings": True})
    ),
    "embeddings": Job(Case(steps=STEPS, lora={"target_modules": ["embed_tokens", "lm_head", "q_proj"]})),
    "a saved head": Job(Case(steps=STEPS, lora={"modules_to_save": ["lm_head"]})),
    "everything trains": Job(Case(steps=STEPS, adapters=False), config={"require_adapters": False}),
}


@pytest.mark.parametrize("kind", cases("embeddings", "everything trains", matrix=["tied, biases", "a saved head"]))
def test_kinds_of_training(pool, tmp_path, kind):
    goes_on(pool, KINDS[kind], tmp_path)


DROPOUT = Job(Case(steps=STEPS, lora={"lora_dropout": 0.3}), config={"seed": 11})


def test_dropout_goes_on_where_it_was(pool, tmp_path):
    """Masks are the same on any mesh, and continue there."""
    (whole,) = stopped(pool, DROPOUT, "1x1", tmp_path, 2)
    assert whole.losses != oracle(Job()).losses
    for mesh in ("2x1", "1x2"):
        for resumed in pool.run(ranks_of(mesh), DROPOUT.on_mesh, mesh, tmp_path):
            check_same(resumed, whole, STEPS - 2)


OWN_DROPOUT = Job(Case(steps=STEPS, sizes={"attention_dropout": 0.3}))


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_the_models_own_randomness_goes_on_where_it_was(pool, tmp_path, mesh):
    wholes = pool.run(ranks_of(mesh), seeded, OWN_DROPOUT, mesh, tmp_path, 5)
    assert wholes[0].losses != oracle(Job()).losses
    for whole, resumed in zip(wholes, pool.run(ranks_of(mesh), seeded, OWN_DROPOUT, mesh, tmp_path, 77), strict=True):
        check_equal(resumed, whole, STEPS - 3)


def seeded(job: Job, mesh: str, folder: Path, seed: int) -> Trained:
    torch.manual_seed(seed + torch.distributed.get_rank())
    return job.on_mesh(mesh, folder, (3,) if seed == 5 else ())


def test_ranks_that_a_larger_mesh_adds_draw_numbers_of_their_own(monkeypatch):
    before = states._capture("cpu")
    drawn = []
    try:
        for rank in (1, 2):
            monkeypatch.setattr(states, "dp_rank", lambda mesh, rank=rank: rank)
            states.restore_random_state([before], None)
            drawn.append((torch.rand(()).item(), random.random(), np.random.random()))
    finally:
        states._put(before, "cpu")
    assert all(one != other for one, other in zip(*drawn, strict=True))


def test_saving_in_the_background_is_saving(pool, tmp_path):
    """Each save is of the step that it was called at, whatever is trained meanwhile."""
    job = Job()
    for answer in pool.run(2, save_in_background, job, tmp_path / "background"):
        check_same(answer, oracle(job), STEPS)
    for step in range(1, STEPS):
        alone = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "background" / f"step-{step}", alone / f"step-{step}")
        for resumed in pool.run(2, job.on_mesh, "2x1", alone):
            check_same(resumed, oracle(job), STEPS - step)


def save_in_background(job: Job, folder: Path) -> Trained:
    from lora_parallel import wait_for_save

    answer = job.on_mesh("2x1", folder, tuple(range(1, STEPS)), async_save=True)
    wait_for_save()
    assert {path.name for path in folder.iterdir()} == {f"step-{step}" for step in range(1, STEPS)}
    return answer
