"""An optimizer that was made before its model was sharded raises an error when it steps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from lora_parallel import clip_grad_norm_, parallelize
from lora_parallel.runtime.optimizer_params import HeldByName
from tests.cases import cases
from tests.oracle import Case, on_mesh, ranks_of, trained
from tests.oracle.workers import Failure, attempt

CASE = Case(steps=1)


def made_before(mesh_text: str) -> dict[str, Any]:
    """By kind of optimizer: what its step raises."""
    mesh, config = on_mesh(mesh_text)
    model = CASE.model()
    base = weakref.ref(model.get_base_model().lm_head.weight)
    everything = torch.optim.SGD(model.parameters(), lr=1.0)
    early = {
        "AdamW": torch.optim.AdamW(trained(model).values(), lr=1e-2),
        "one of several groups": torch.optim.Adam(
            [{"params": [torch.nn.Parameter(torch.ones(2))]}, {"params": list(trained(model).values())[:1]}]
        ),
    }
    model = parallelize(model, mesh, config)
    (batch,) = CASE.batches()
    model(input_ids=batch, labels=batch).loss.backward()
    found: dict[str, Any] = {name: attempt(optimizer.step) for name, optimizer in early.items()}
    found["everything"] = attempt(everything.step)
    del everything
    gc.collect()
    found["base"] = base()
    found["made afterwards"] = attempt(torch.optim.AdamW(trained(model).values(), lr=1e-2).step)
    return found


@pytest.mark.parametrize("mesh", cases("2x1", "1x2", matrix=["2x2", "2x2x1"]))
def test_a_step_of_what_sharding_replaced_is_refused(pool, mesh):
    for found in pool.run(ranks_of(mesh), made_before, mesh):
        assert found.pop("made afterwards") is None
        assert found.pop("base") is None  # remembering the parameters keeps none of them
        for name, raised in found.items():
            assert isinstance(raised, Failure), name
            assert raised.kind == "RuntimeError"
            kind = {"one of several groups": "Adam", "everything": "SGD"}.get(name, name)
            assert f"this {kind} optimizer holds base_model.model." in raised.message
            assert "test_optimizer_params.py:" in raised.message
            assert "accelerator.prepare(model, optimizer)" in raised.message
        assert "lora_A.default.weight and 27 more as before the model was sharded" in found["AdamW"].message


def with_gradients_from_before(mesh_text: str) -> list[Any]:
    """A sanity backward before the model is sharded leaves gradients, or zeros; and a list that is clipped."""
    found = []
    (batch,) = CASE.batches()
    for set_to_none in (None, False):
        mesh, config = on_mesh(mesh_text)
        model = CASE.model()
        early = list(trained(model).values())
        optimizer = torch.optim.SGD(early, lr=1.0)
        model(input_ids=batch, labels=batch).loss.backward()
        if set_to_none is not None:
            optimizer.zero_grad(set_to_none=set_to_none)
        model = parallelize(model, mesh, config)
        model(input_ids=batch, labels=batch).loss.backward()
        found += [attempt(optimizer.step), attempt(clip_grad_norm_, early, 1e-3)]
    return found


@pytest.mark.parametrize("mesh", ["2x1", "1x2"])
def test_gradients_from_before_are_no_sign_of_life(pool, mesh):
    for found in pool.run(ranks_of(mesh), with_gradients_from_before, mesh):
        for stepped, clipped in zip(found[::2], found[1::2], strict=True):
            assert stepped.kind == "RuntimeError"
            assert "this SGD optimizer holds base_model.model." in stepped.message
            assert clipped.kind == "ValueError"
            assert "is the parameter as before the model was sharded" in clipped.message
            assert "model.parameters()" in clipped.message


def step_on_one_rank() -> list[Any]:
    mesh, config = on_mesh("1x1")
    model = CASE.model()
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    model = parallelize(model, mesh, config)
    (batch,) = CASE.batches()
    model(input_ids=batch, labels=batch).loss.backward()
    return [attempt(optimizer.step)]


def test_one_rank_replaces_nothing(pool):
    ((found,),) = pool.run(1, step_on_one_rank)
    assert found is None


def step_of_a_model_that_shares_a_weight() -> tuple[Any, dict[str, Any]]:
    mesh, config = on_mesh("2x1")
    other, model = CASE.model(), CASE.model()
    model.get_input_embeddings().weight = other.get_input_embeddings().weight
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    parallelize(model, mesh, config)
    (batch,) = CASE.batches()
    before = {name: p.detach().clone() for name, p in trained(other).items()}
    other(input_ids=batch, labels=batch).loss.backward()
    return attempt(optimizer.step), {name: torch.equal(p, before[name]) for name, p in trained(other).items()}


def test_another_model_that_shares_a_weight_trains_on(pool):
    for raised, unchanged in pool.run(2, step_of_a_model_that_shares_a_weight):
        assert raised is None
        assert not any(unchanged.values())


def test_an_injected_adapter_is_in_the_groups_of_its_layers():
    model = nn.ModuleDict({"first": nn.Linear(2, 3), "last": nn.Linear(3, 2)})
    groups = [{"params": [*model[layer].parameters()], "lr": rate} for layer, rate in (("last", 0.5), ("first", 0.1))]
    optimizer = torch.optim.Adagrad(groups)  # has state from the beginning
    held = HeldByName(optimizer, model, (), "")
    inject_adapter_in_model(LoraConfig(target_modules=["first", "last"]), model)
    held.restore_adapted(model)
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for group, layer in zip(optimizer.param_groups, ("last", "first"), strict=True):
        assert [names[p] for p in group["params"]] == [f"{layer}.lora_{side}.default.weight" for side in "AB"]
    assert optimizer.state.keys() == names.keys()
