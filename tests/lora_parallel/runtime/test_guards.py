"""The guards after sharding and on the first batch: each fired by breaking what it watches, on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from lora_parallel import parallelize
from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.distributed.mesh import dp_rank
from lora_parallel.runtime.guards import verify
from lora_parallel.state import state_of
from tests.cases import cases
from tests.oracle import (
    SEVEN,
    Case,
    causal_lm,
    fill_adapters,
    full,
    lora_config,
    on_mesh,
    ranks_of,
    relative_error,
    trained,
)
from tests.oracle.workers import Failure, attempt

ENDS = [*SEVEN, "embed_tokens", "lm_head"]


def fresh(mesh_text, **config):
    mesh, settings = on_mesh(mesh_text, **config)
    model = causal_lm()
    return parallelize(model, mesh, settings, lora_config=lora_config(target_modules=ENDS))


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def find(model, ending):
    return next((name, p) for name, p in model.named_parameters() if name.endswith(ending))


def perturbed(model, ending, ranks):
    """Add one to the first element of this rank's shard, on some ranks only."""
    _, parameter = find(model, ending)
    with torch.no_grad():
        if dist.get_rank() in ranks and local(parameter).numel():
            local(parameter).view(-1)[0] += 1


def check(model):
    return attempt(verify, model, state_of(model))


# By mesh: the end of a parameter's name, the ranks that change theirs, the ranks that should hold the same (or None).
COPIES = {
    "1x2": [
        ("layers.0.self_attn.q_proj.lora_A.default.weight", (1,), [0, 1]),  # whole under colwise
        ("layers.1.mlp.down_proj.lora_B.default.weight", (0,), [0, 1]),  # whole under rowwise
        ("layers.0.self_attn.q_proj.lora_B.default.weight", (1,), None),  # slices may differ
        ("layers.1.mlp.down_proj.lora_A.default.weight", (1,), None),
    ],
    "2x2": [
        ("layers.0.mlp.up_proj.lora_A.default.weight", (3,), [2, 3]),
        ("layers.0.mlp.up_proj.lora_A.default.weight", (0,), [0, 1]),
        ("layers.0.mlp.up_proj.lora_A.default.weight", (2, 3), None),  # another shard of it, alike on both peers
    ],
    "2x2x1": [
        ("layers.0.mlp.up_proj.lora_B.default.weight", (3,), [1, 3]),
        ("layers.0.mlp.down_proj.lora_A.default.weight", (0,), [0, 2]),
        ("layers.0.mlp.up_proj.lora_B.default.weight", (1, 3), None),
    ],
    "2x1x2": [
        ("layers.0.mlp.up_proj.lora_A.default.weight", (3,), [0, 1, 2, 3]),
        ("layers.0.mlp.up_proj.lora_B.default.weight", (3,), [1, 3]),
        ("layers.0.mlp.up_proj.lora_B.default.weight", (1, 3), None),
    ],
}


def built(mesh_text):
    mesh, settings = on_mesh(mesh_text)
    return parallelize(Case().model(), mesh, settings)


def changed_copies(mesh_text):
    found, model = [], built(mesh_text)
    for ending, ranks, _ in COPIES[mesh_text]:
        assert check(model) is None
        name, parameter = find(model, ending)
        before = local(parameter).clone()
        perturbed(model, ending, ranks)
        found.append((name, check(model)))
        with torch.no_grad():
            local(parameter).copy_(before)
    return found


@pytest.mark.parametrize("mesh", COPIES)
def test_copies_that_differ_are_found(pool, mesh):
    for found in pool.run(2 if mesh == "1x2" else 4, changed_copies, mesh):
        for (ending, _, peers), (name, error) in zip(COPIES[mesh], found, strict=True):
            if peers is None:
                assert error is None, (ending, error)
            else:
                assert isinstance(error, Failure), ending
                assert error.kind == "RuntimeError"
                assert f"{name} should be equal on ranks {peers}" in error.message


def broken_models():
    """By what is broken, on rank 1 only or on all: the name that the guard should say, and the error."""
    found = {}

    def broken(what, model, ending, action, ranks=(0, 1)):
        name, parameter = find(model, ending)
        if dist.get_rank() in ranks:
            action(parameter)
        found[what] = name, check(model)

    def to_meta(parameter):
        holder = next(m for m in model.modules() if any(p is parameter for p in m._parameters.values()))
        key = next(k for k, p in holder._parameters.items() if p is parameter)
        holder._parameters[key] = nn.Parameter(torch.empty(parameter.shape, device="meta"), parameter.requires_grad)

    for what, ranks in (("", (0, 1)), (" on rank 1", (1,))):
        model = built("1x2")
        broken(f"base trains{what}", model, "layers.1.input_layernorm.weight", lambda p: p.requires_grad_(True), ranks)
        model = built("1x2")
        broken(
            f"adapter frozen{what}",
            model,
            "layers.1.mlp.up_proj.lora_A.default.weight",
            lambda p: p.requires_grad_(False),
            ranks,
        )
        model = built("1x2")
        broken(f"on meta{what}", model, "model.norm.weight", to_meta, ranks)
        model = fresh("1x2")
        broken(
            f"B not zero{what}",
            model,
            "layers.0.mlp.up_proj.lora_B.default.weight",
            lambda p: p.data.fill_(1e-30),
            ranks,
        )
        model = fresh("1x2")
        broken(
            f"embedding A not zero{what}",
            model,
            "embed_tokens.lora_embedding_A.default",
            lambda p: p.data.fill_(1e-30),
            ranks,
        )
    model = built("1x2")
    model.register_buffer("late", torch.empty(2, device="meta"))
    found["buffer on meta"] = "late", check(model)
    return found


GUARDS = {
    "base trains": "the base parameter {} would train",
    "adapter frozen": "the adapter parameter {} would not train",
    "on meta": "the parameter {} is on the meta device",
    "B not zero": "the fresh adapter factor {} is not zero",
    "embedding A not zero": "the fresh adapter factor {} is not zero",
    "buffer on meta": "the buffer {} is on the meta device",
}


def test_each_guard_fires_on_every_rank(pool):
    for rank, found in enumerate(pool.run(2, broken_models)):
        assert {what.removesuffix(" on rank 1") for what in found} == GUARDS.keys()
        for what, (name, error) in found.items():
            assert isinstance(error, Failure), what
            assert error.kind == "RuntimeError", what
            assert GUARDS[what.removesuffix(" on rank 1")].format(name) in error.message
            assert ("on rank 1: " in error.message) == (what.endswith(" on rank 1") and rank == 0), what


def lifted_by_parallelize():
    """The same conditions as `parallelize` meets them: refused, and accepted with require_adapters=False."""
    mesh, strict = on_mesh("1x2")
    _, loose = on_mesh("1x2", require_adapters=False)

    def trains():
        model = get_peft_model(causal_lm(), lora_config())
        model.get_base_model().model.norm.weight.requires_grad_(True)
        return model

    def frozen():
        return get_peft_model(causal_lm(), lora_config(inference_mode=True))

    def inactive():
        model = get_peft_model(causal_lm(), lora_config())
        model.add_adapter("second", lora_config())  # PEFT freezes what is not active
        return model

    return {
        "base trains": attempt(parallelize, trains(), mesh, strict),
        "frozen": attempt(parallelize, frozen(), mesh, strict),
        "accepted": [
            isinstance(attempt(parallelize, build(), mesh, settings), Failure)
            for build, settings in ((trains, loose), (frozen, loose), (inactive, strict), (causal_lm, loose))
        ],
    }


def test_parallelize_runs_the_guards_and_require_adapters_lifts_them(pool):
    for found in pool.run(2, lifted_by_parallelize):
        assert found["base trains"].kind == found["frozen"].kind == "RuntimeError"
        assert "model.norm.weight would train" in found["base trains"].message
        assert "would not train" in found["frozen"].message
        assert "is_trainable=True" in found["frozen"].message
        assert found["accepted"] == [False] * 4


def evaluated_only():
    """A model without adapters that is evaluated; what a training forward raises then, and a step."""
    mesh, config = on_mesh("1x1")
    model = parallelize(nn.Sequential(nn.Linear(4, 4)), mesh, config, trains=False)
    x = torch.ones(2, 4)
    with torch.no_grad():
        model.train()(x)
    model.eval()(x)
    torch.optim.SGD([nn.Parameter(torch.ones(2))]).step()  # of another model
    return attempt(model.train(), x), attempt(torch.optim.SGD(model.parameters()).step)


def test_a_model_that_is_evaluated_is_checked_once_it_trains(pool):
    ((forward, step),) = pool.run(1, evaluated_only)
    for error in (forward, step):
        assert isinstance(error, Failure)
        assert "has no PEFT layers" in error.message


def initialisations():
    """Inits whose B A is not zero, or that PEFT corrects for: the guard knows which ones start as the base."""
    mesh, config = on_mesh("1x2")
    kinds = {}
    for init in (True, False, "gaussian"):
        given = lora_config(init_lora_weights=init)
        model = parallelize(causal_lm(), mesh, config, lora_config=given)
        kinds[init] = state_of(model).fresh_adapters
    return kinds


def test_only_inits_that_start_as_the_base_are_held_to_it(pool):
    for kinds in pool.run(2, initialisations):
        assert kinds == {True: ("default",), False: (), "gaussian": ("default",)}


def batches(mesh_text, names):
    """By what is fed: the error. A model checks its first batch for training and its first for evaluation."""
    mesh, _ = on_mesh(mesh_text)
    rank = dist.get_rank()
    ids = torch.arange(24).view(2, 12)
    own = ids + dp_rank(mesh)  # a batch for each dp rank, as it should be
    mask = torch.ones_like(ids)

    sized = torch.arange(12 * (2 + rank % 2)).view(-1, 12)
    first = {
        "equal": {"input_ids": own},
        "ids": {"input_ids": ids + rank},
        "by position": ids + rank,
        "evaluation": {"input_ids": ids + rank},
        "evaluation after training": {"input_ids": ids + rank},
        "another size": {"input_ids": sized},
        "rows in another order": {"input_ids": ids.flip(0) if rank % 2 else ids},
        "mask": {"input_ids": own, "attention_mask": mask.index_fill(1, torch.tensor([rank]), 0)},
        "swapped arguments": {"input_ids": mask if rank % 2 else ids, "attention_mask": ids if rank % 2 else mask},
    }
    found = {}
    for name in names or first:
        model, fed = built(mesh_text), first[name]
        if name == "evaluation after training":
            model(input_ids=own)
        model.train(not name.startswith("evaluation"))
        answer = attempt(model, fed) if isinstance(fed, torch.Tensor) else attempt(model, **fed)
        found[name] = answer if isinstance(answer, Failure) else None
    dist.barrier()
    return found


@pytest.mark.parametrize(("mesh", "names"), cases(("1x2", []), ("2x2", ["equal", "ids"]), matrix=[("2x2", [])]))
def test_tp_peers_must_be_fed_the_same_batch(pool, mesh, names):
    """Without names in every way."""
    for found in pool.run(ranks_of(mesh), batches, mesh, names):
        assert found.pop("equal") is None
        assert found
        for what, error in found.items():
            assert isinstance(error, Failure), what
            assert error.kind == "RuntimeError", (what, error)
            assert "are tensor parallel peers and were fed different batches" in error.message, what
            assert "rank // 2" in error.message


def later_batches(mesh_text):
    """Batches that differ later on, a forward more on one rank, and an evaluation on one rank in the middle."""
    rank = dist.get_rank()
    ids = torch.arange(24).view(2, 12)

    def trained_for_two_steps():
        mesh, config = on_mesh(mesh_text)
        model = parallelize(Case().model(), mesh, config)
        for step in range(2):
            model(input_ids=ids + step, labels=ids).loss.backward()
        return model

    def training(model):
        model(input_ids=ids + rank, labels=ids)

    @torch.no_grad()
    def evaluation(model):
        model.eval()
        for step in range(2):
            model(input_ids=ids + step * rank)

    @torch.no_grad()
    def one_more(model):
        model.eval()
        for step in range(3 - rank % 2):
            model(input_ids=ids + step)
        model(input_ids=ids)

    def one_alone(model):
        if rank == 0:
            with torch.no_grad():
                model.eval()(input_ids=ids)
        model.train()(input_ids=ids, labels=ids)

    found = {}
    for way in (training, evaluation, one_more, one_alone):
        found[way.__name__] = attempt(way, trained_for_two_steps())
        dist.barrier()
    return found


def test_tp_peers_must_be_fed_the_same_batches_later_too(pool):
    for found in pool.run(2, later_batches, "1x2"):
        for what, error in found.items():
            assert isinstance(error, Failure), what
            assert error.kind == "RuntimeError", (what, error)
            assert "ranks [0, 1] are tensor parallel peers and were fed different batches in forward" in error.message
            assert "or one of them makes forwards that the others do not" in error.message


def test_tensors_in_any_nest():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(tensors_in({"x": [a, (b, "text", None)], "y": {"z": c}}))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]
    output = CausalLMOutputWithPast(loss=a, logits=b, hidden_states=(c,))
    assert [id(t) for t in tensors_in(output)] == [id(a), id(b), id(c)]
    assert list(tensors_in(3)) == []


def nothing_is_checked_without_tp():
    mesh, config = on_mesh("2x1")
    model = parallelize(Case().model(), mesh, config)
    ids = torch.arange(12).view(1, 12) + dist.get_rank()
    return torch.isfinite(model(input_ids=ids, labels=ids).loss).item(), len(trained(model))


def test_dp_ranks_may_be_fed_what_they_like(pool):
    for finite, count in pool.run(2, nothing_is_checked_without_tp):
        assert finite
        assert count == 28


def unfrozen_afterwards(mesh_text):
    """A base weight, and an adapter that was not active: each unfrozen after sharding."""
    mesh, config = on_mesh(mesh_text)
    ids = torch.arange(12).view(1, 12)
    errors = {}
    for what in ("model.norm.weight", "q_proj.lora_A.second.weight"):
        model = get_peft_model(causal_lm(), lora_config())
        model.add_adapter("second", lora_config(target_modules=["q_proj"]))
        model = parallelize(model, mesh, config)
        find(model, what)[1].requires_grad_(True)
        with torch.no_grad():  # no gradient is to be had: DPO's reference is an adapter that is switched on so
            model(input_ids=ids)
        errors[what] = attempt(model, input_ids=ids, labels=ids)
    return errors


def test_what_is_unfrozen_after_sharding_is_refused(pool):
    """FSDP2 has decided what trains: the gradient would be missing, silently."""
    for errors in pool.run(2, unfrozen_afterwards, "2x1"):
        for what, error in errors.items():
            assert isinstance(error, Failure), what
            assert error.kind == "RuntimeError"
            assert what in error.message
            assert "was frozen when the model was parallelized" in error.message


def switched_adapter():
    """Without FSDP2 another adapter can be activated: its gradients, in full."""
    mesh, config = on_mesh("1x2")
    model = two_adapters()
    model = parallelize(model, mesh, config)
    return second_gradients(model)


def two_adapters():
    model = get_peft_model(causal_lm(), lora_config())
    model.add_adapter("second", lora_config(target_modules=["q_proj", "o_proj"], r=2))
    fill_adapters(model)
    return model


def second_gradients(model):
    ids = torch.arange(24).view(2, 12)
    model.set_adapter("second")
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def test_another_adapter_can_be_activated_without_fsdp(pool):
    want = second_gradients(two_adapters())
    assert all(".second." in name for name in want)
    for got in pool.run(2, switched_adapter):
        assert relative_error(got, want) <= 1e-12
