"""Hooks of users are called with finished gradients, or refused; so are other ways to a gradient than `.grad`."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from torch import nn

from lora_parallel import no_sync, parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.oracle import Case, full, half_sum_of_squares, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

MESHES = cases("2x1", "1x2", "2x2x1", matrix=["2x2"])
CASE, STACK = Case(steps=2, sizes={"num_hidden_layers": 1}), Case(steps=2)


def built(mesh_text, case=CASE, **config):
    """Return a new model, and a function that gives its loss on this rank's part of a batch."""
    mesh, config = on_mesh(mesh_text, **config)
    mine = [batch.chunk(dp_size(mesh))[dp_rank(mesh)] for batch in case.batches()]

    def loss(model, number=0):
        return model(input_ids=mine[number], labels=mine[number]).loss

    return parallelize(case.model(), mesh, config), loss


@cache
def one_process(*numbers):
    model = CASE.model()
    for number in numbers:
        batch = CASE.batches()[number]
        model(input_ids=batch, labels=batch).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def gradients(model):
    return {name: full(p.grad) for name, p in trained(model).items()}


def doubling(parameter):
    parameter.grad.mul_(2)


def hooked(mesh_text):
    """Gradients that post-accumulate hooks doubled: in one pass, and where two are added up; and then without hooks."""
    model, loss = built(mesh_text)
    handles = [p.register_post_accumulate_grad_hook(doubling) for p in trained(model).values()]
    found = {}
    loss(model).backward()
    found["once"] = gradients(model)
    loss(model, 1).backward()
    found["twice"] = gradients(model)
    model.zero_grad()
    removing = [p.register_hook(lambda grad: None) for p in trained(model).values()]
    for handle in removing:
        handle.remove()  # one that is gone is in nobody's way
    for handle in handles:
        handle.remove()
    loss(model).backward()
    found["removed"] = gradients(model)
    model.zero_grad()
    seen = []
    last = list(trained(model).items())[-1]
    last[1].register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad)))
    with no_sync(model):
        loss(model).backward()
    loss(model, 1).backward()
    return found, last[0], seen[-1]


@pytest.mark.parametrize("mesh", MESHES)
def test_post_accumulate_hooks_have_the_finished_gradient(pool, mesh):
    first, second = one_process(0), one_process(1)
    wanted = {
        "once": {name: 2 * grad for name, grad in first.items()},
        "twice": {name: 2 * (2 * grad + second[name]) for name, grad in first.items()},
        "removed": first,
    }
    for found, name, seen in pool.run(ranks_of(mesh), hooked, mesh):
        for kind, want in wanted.items():
            assert relative_error(found[kind], want) <= 1e-12, kind
        assert relative_error({name: seen}, {name: one_process(0, 1)[name]}) <= 1e-12


def with_a_term(mesh_text, **config):
    """Return what hooks saw where the loss has a term of the parameters, computed before or after the model."""
    model, loss = built(mesh_text, STACK, **config) if mesh_text else (STACK.model(), None)
    batch = STACK.batches()[0]
    seen = {}

    def note(name, parameter):
        seen.setdefault(name, []).append(full(parameter.grad).clone())

    for name, p in trained(model).items():
        p.register_post_accumulate_grad_hook(partial(note, name))

    def squares():
        return sum(half_sum_of_squares(p) for p in trained(model).values())

    found = {}
    for order in ("before", "after"):
        term = squares() if order == "before" else 0
        total = loss(model) if loss else model(input_ids=batch, labels=batch).loss
        (total + 0.1 * (term if order == "before" else squares())).backward()
        found[order] = dict(seen), gradients(model)
        seen.clear()
        model.zero_grad()
    return found


GPIPE = {"pp_schedule": "gpipe", "pp_microbatches": 2}
WITH_TERMS = cases(
    ("2x1", {}), ("1x2", {}), ("1x1pp2", GPIPE), matrix=[("2x2", {}), ("2x2x1", {}), ("1x2pp2", GPIPE), ("1x1pp2", {})]
)


@pytest.mark.parametrize(("mesh", "config"), WITH_TERMS)
def test_hooks_are_called_once_where_the_loss_has_a_term_of_the_parameters(pool, mesh, config):
    wanted = with_a_term(None)
    for found in pool.run(ranks_of(mesh), partial(with_a_term, mesh, **config)):
        for order, (seen, after) in found.items():
            want = {name: grad for name, grad in wanted[order][1].items() if name in after}
            assert {name: len(calls) for name, calls in seen.items()} == dict.fromkeys(want, 1), order
            assert relative_error({name: calls[0] for name, calls in seen.items()}, want) <= 1e-12, order
            assert relative_error(after, want) <= 1e-12, order


class Scaled(nn.Module):
    """A language model with a parameter outside of it."""

    def __init__(self, lm):
        super().__init__()
        self.lm, self.config = lm, lm.config
        self.scale = nn.Parameter(torch.ones(131, dtype=torch.float64))

    def forward(self, ids):
        return self.lm(input_ids=ids).logits * self.scale


def met_by_its_own_term():
    """Count the calls of the hook of a parameter that a term of the loss reaches, before or after all layers."""
    mesh, config = on_mesh("1x2", require_adapters=False)
    model, ids, calls = parallelize(Scaled(CASE.model()), mesh, config), CASE.batches()[0], []
    model.scale.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad is not None))
    for term_first in (False, True):
        # What is computed last is first in backward.
        term = half_sum_of_squares(model.scale) if not term_first else None
        layers = model.lm(input_ids=ids).logits.square().mean()
        term = half_sum_of_squares(model.scale) if term is None else term
        (term + layers if term_first else layers + term).backward()
    return calls


def test_the_hook_of_a_parameter_that_only_its_own_term_reaches_is_called(pool):
    assert pool.run(2, met_by_its_own_term) == [[True, True]] * 2


def failing_hook(mesh_text):
    """A step after one in which a layer failed, between the start of backward and its end."""
    model, loss = built(mesh_text)
    for p in trained(model).values():
        p.register_post_accumulate_grad_hook(doubling)

    def fail(*args):
        raise ArithmeticError

    block = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    handle = block.register_full_backward_hook(fail)
    failure = attempt(loss(model).backward)
    handle.remove()
    model.zero_grad()
    loss(model).backward()
    return failure, gradients(model)


@pytest.mark.parametrize("mesh", cases("1x2", "2x1", matrix=["2x2"]))
def test_a_failed_step_leaves_the_hooks_in_place(pool, mesh):
    for failure, found in pool.run(ranks_of(mesh), failing_hook, mesh):
        assert failure.kind == "ArithmeticError"
        assert relative_error(found, {name: 2 * grad for name, grad in one_process(0).items()}) <= 1e-12


def unfinished(mesh_text):
    """What comes of each way, and of an ordinary step after all of them."""
    model, loss = built(mesh_text)
    parameters = trained(model)
    found = {}
    for name, p in parameters.items():
        if "q_proj.lora_" in name:  # lora_A is replicated over tp, lora_B is not
            handle = p.register_hook(lambda grad: None)
            found["lora_A" if "lora_A" in name else "lora_B"] = attempt(loss(model).backward)
            handle.remove()
            model.zero_grad()
    handle = torch.autograd.graph.register_multi_grad_hook(list(parameters.values()), lambda grads: None)
    found["multi"] = attempt(loss(model).backward)
    handle.remove()
    model.zero_grad()
    found["inputs"] = attempt(loss(model).backward, inputs=list(parameters.values()))
    found["inputs gave"] = None if isinstance(found["inputs"], Failure) else gradients(model)
    model.zero_grad()
    asked = attempt(torch.autograd.grad, loss(model), list(parameters.values()), allow_unused=True)
    found["grad"] = asked if isinstance(asked, Failure) else "gave"
    model.zero_grad()
    loss(model).backward()
    return found, gradients(model)


@pytest.mark.parametrize("mesh", MESHES)
def test_other_ways_to_a_gradient_are_right_or_refused(pool, mesh):
    for found, after in pool.run(ranks_of(mesh), unfinished, mesh):
        by_a, by_b = found["lora_A"], found["lora_B"]
        assert "lora_A.default.weight has a hook of register_hook" in by_a.message
        assert "register_post_accumulate_grad_hook" in by_a.message
        assert "register_multi_grad_hook" in found["multi"].message
        assert "Call loss.backward() and read parameter.grad" in found["grad"].message
        assert "would not be called with its gradient" in by_b.message
        if mesh == "1x2":  # the leaves that stand for the parameters stay the same from pass to pass
            assert relative_error(found["inputs gave"], one_process(0)) <= 1e-12
        else:
            assert "backward(inputs=...) is asked for the gradient of base_model" in found["inputs"].message
        assert relative_error(after, one_process(0)) <= 1e-12


def with_a_graph():
    model, loss = built("1x2", fused=False)  # a fused layer raises an error of its own
    failure = attempt(loss(model).backward, create_graph=True)
    model.zero_grad()
    loss(model).backward()
    return failure, gradients(model)


def test_gradients_have_no_graph_and_say_so(pool):
    for failure, after in pool.run(2, with_a_graph):
        assert "have no graph" in failure.message
        assert relative_error(after, one_process(0)) <= 1e-12


def hooked_before():
    mesh, config = on_mesh("1x2")
    found = []
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        model = CASE.model()
        getattr(next(iter(trained(model).values())), register)(lambda each: None)
        found.append(attempt(parallelize, model, mesh, config))
    return found


def test_hooks_that_sharding_would_leave_behind_are_refused(pool):
    for found in pool.run(2, hooked_before):
        for failure in found:
            assert "lora_A.default.weight has a gradient hook" in failure.message
            assert "after parallelize" in failure.message


def seen_by_module_hooks(mesh_text):
    """What goes in and out of layers of the first block, and the gradients of that."""
    model, batch = CASE.model(), CASE.batches()[0]
    if mesh_text is not None:
        mesh, config = on_mesh(mesh_text)
        model = parallelize(model, mesh, config)
    block = next(module for name, module in model.named_modules() if name.endswith("layers.0"))
    seen = {}
    for name, module in {"q": block.self_attn.q_proj, "o": block.self_attn.o_proj, "block": block}.items():

        def forward(module, args, output, name=name):
            seen[f"{name} in"], seen[f"{name} out"] = args[0].detach(), output.detach()

        def backward(module, given, taken, name=name):
            seen[f"{name} grad in"], seen[f"{name} grad out"] = given[0], taken[0]

        module.register_forward_hook(forward)
        module.register_full_backward_hook(backward)
    model(input_ids=batch, labels=batch).loss.backward()
    return {name: tensor for name, tensor in seen.items() if tensor is not None}


def test_module_hooks_see_slices_of_layers_that_are_cut(pool):
    whole = seen_by_module_hooks(None)
    for rank, seen in enumerate(pool.run(2, seen_by_module_hooks, "1x2")):
        for name, want in whole.items():
            if name in ("q out", "q grad out", "o in", "o grad in"):
                want = want.chunk(2, dim=-1)[rank]
            assert relative_error({name: seen[name]}, {name: want}) <= 1e-12, name
