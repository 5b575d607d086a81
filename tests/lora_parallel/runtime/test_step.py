"""What is watched at the edges of forward and backward."""

from __future__ import annotations

import pytest
import torch

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.oracle import Case, causal_lm, full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

CASE = Case()


def checkpointed_gradients(mesh_text, reentrant):
    """Of one step with the model's own activation checkpointing, switched on after sharding."""
    mesh, config = on_mesh(mesh_text)
    model = parallelize(CASE.model(), mesh, config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    mine = CASE.batches()[0].chunk(dp_size(mesh))[dp_rank(mesh)]
    model(input_ids=mine, labels=mine).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def test_checkpointing_leaves_gradients_as_they_are(pool):
    """A reentrant checkpoint runs each block in a backward pass of its own, inside the model's."""
    plain = CASE.model()
    batch = CASE.batches()[0]
    plain(input_ids=batch, labels=batch).loss.backward()
    want = {name: full(p.grad) for name, p in trained(plain).items()}
    for mesh in ("1x2", "2x1"):
        for reentrant in (True, False):
            for got in pool.run(ranks_of(mesh), checkpointed_gradients, mesh, reentrant):
                assert relative_error(got, want) <= 1e-12, (mesh, reentrant)


def inferred_and_trained(mesh: str, called: str) -> tuple[dict[str, torch.Tensor], bool]:
    """The gradients of a first step after the model, or a block of it alone, ran in inference mode."""
    device_mesh, config = on_mesh(mesh)
    model = parallelize(CASE.model(), device_mesh, config)
    batch = CASE.batches()[0].chunk(dp_size(device_mesh))[dp_rank(device_mesh)]
    with torch.inference_mode():
        if called == "model":
            model(input_ids=batch)
        else:
            model.get_base_model()(input_ids=batch)
        still = torch.is_inference_mode_enabled()
    model(input_ids=batch, labels=batch).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}, still


@pytest.mark.parametrize("mesh", cases("2x1", "1x2", matrix=["2x2", "1x1cp2"]))
@pytest.mark.parametrize("called", ["model", "base"])
def test_a_model_trains_after_it_ran_in_inference_mode(pool, mesh, called):
    """A model of PEFT's calls its base, whose blocks are units of FSDP2."""
    plain, batch = CASE.model(), CASE.batches()[0]
    plain(input_ids=batch, labels=batch).loss.backward()
    want = {name: full(p.grad) for name, p in trained(plain).items()}
    for got, still in pool.run(ranks_of(mesh), inferred_and_trained, mesh, called):
        assert still
        assert relative_error(got, want) <= 1e-12


def frozen_in_inference_mode() -> tuple[list[torch.Tensor], torch.Tensor, bool]:
    mesh, config = on_mesh("2x1", require_adapters=False)
    model, batch = causal_lm().requires_grad_(False), CASE.batches()[0]
    with torch.no_grad():
        want = model(input_ids=batch).logits
    parallelize(model, mesh, config)
    got = []
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            got.append(model(input_ids=batch).logits)
    with torch.inference_mode():
        attempt(model, input_ids=batch.float())  # fails
        return got, want, torch.is_inference_mode_enabled()


def test_a_frozen_model_runs_in_inference_mode_under_fsdp(pool):
    for got, want, still in pool.run(2, frozen_in_inference_mode):
        assert still
        for logits in got:
            assert torch.allclose(logits, want, rtol=0, atol=1e-12)


def seed_by_rank():
    from torch import distributed as dist

    mesh, config = on_mesh("1x2", seed=dist.get_rank())
    return attempt(parallelize, CASE.model(), mesh, config)


def test_a_seed_that_differs_between_ranks_is_refused(pool):
    for answer in pool.try_run(2, seed_by_rank):
        assert isinstance(answer, Failure)
        assert "config.seed is 0 on rank 0 and 1 on rank 1: give every rank the same config, and the same seed too" in (
            answer.message
        )
