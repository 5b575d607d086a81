"""Tensors in the place of a sharded model's parameters are refused; what FSDP2 puts there itself is none."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.oracle import Case, full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

CASE = Case(steps=1)


def called(mesh_text):
    """functional_call with own parameters of each kind, before and after a forward; and the step that follows."""
    mesh, config = on_mesh(mesh_text)
    model = parallelize(CASE.model(), mesh, config)
    mine = CASE.batches()[0].chunk(dp_size(mesh))[dp_rank(mesh)]
    fed = {"input_ids": mine, "labels": mine}
    parameters = trained(model)
    kinds = {
        "shards": {name: p.detach() * 0.5 for name, p in parameters.items()},
        "full": {name: full(p) for name, p in parameters.items()},
        "base": {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad},
    }
    found = {(kind, 1): attempt(functional_call, model, own, (), fed) for kind, own in kinds.items()}
    first = model(**fed).loss  # no backward: FSDP2's root keeps what it gathered
    found |= {(kind, 2): attempt(functional_call, model, own, (), fed) for kind, own in kinds.items()}
    if isinstance(model, FSDPModule):
        model.unshard()
    (first + functional_call(model, parameters, (), fed).loss).backward()
    return found, {name: full(p.grad) for name, p in parameters.items()}


@pytest.mark.parametrize("mesh", cases("2x1", "1x2", matrix=["2x2", "2x2x1"]))
def test_parameters_of_ones_own_are_refused(pool, mesh):
    plain = CASE.model()
    batch = CASE.batches()[0]
    plain(input_ids=batch, labels=batch).loss.backward()
    want = {name: 2 * p.grad for name, p in trained(plain).items()}
    for found, gradients in pool.run(ranks_of(mesh), called, mesh):
        for kind, failure in found.items():
            assert isinstance(failure, Failure), kind
            assert failure.kind == "RuntimeError"
            assert "another tensor is in the place of base_model.model" in failure.message, kind
            assert "functional_call" in failure.message
        assert relative_error(gradients, want) <= 1e-12


def replaced(mesh_text):
    """A head, a block or a parameter that is put in place afterwards; and a frozen layer, which may be."""
    found = {}
    for what in ("head", "block", "parameter", "frozen"):
        mesh, config = on_mesh(mesh_text)
        model = parallelize(CASE.model(), mesh, config)
        batch = CASE.batches()[0].chunk(dp_size(mesh))[dp_rank(mesh)]
        inner = model.get_base_model()
        model(input_ids=batch, labels=batch).loss.backward()
        if what == "head":
            inner.lm_head = torch.nn.Linear(inner.config.hidden_size, inner.config.vocab_size, dtype=torch.float64)
        elif what == "block":
            inner.model.layers[1] = CASE.model().get_base_model().model.layers[1]
        elif what == "parameter":
            inner.scale = torch.nn.Parameter(torch.ones(1))
        else:
            inner.unused = torch.nn.Linear(2, 2).requires_grad_(False)
        found[what] = attempt(lambda model=model, batch=batch: model(input_ids=batch, labels=batch).loss.backward())
    return found


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2", "1x2"]))
def test_layers_that_come_afterwards_and_train_are_refused(pool, mesh):
    for found in pool.run(ranks_of(mesh), replaced, mesh):
        assert found.pop("frozen") is None
        names = {"head": "lm_head.weight", "parameter": "scale"}
        for what, failure in found.items():
            assert isinstance(failure, Failure), what
            assert failure.kind == "RuntimeError", failure.message
            assert names.get(what, "lora_A") in failure.message
            assert "was put into the model after parallelize" in failure.message


def called_on_one_rank():
    mesh, config = on_mesh("1x1")
    model = parallelize(CASE.model(), mesh, config)
    own = {name: p.detach() * 0 for name, p in trained(model).items()}
    batch = CASE.batches()[0]
    given = functional_call(model, own, (), {"input_ids": batch}).logits
    with model.disable_adapter():
        return torch.equal(given, model(input_ids=batch).logits)


def test_one_rank_computes_with_them(pool):
    assert pool.run(1, called_on_one_rank) == [True]
