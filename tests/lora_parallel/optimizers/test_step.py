"""Optimizers of all kinds step on a mesh to what they step to in one process, and resume on another mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lora_parallel import parallelize
from lora_parallel.distributed.dtensors import local
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.oracle import full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.optimizer_rows import CASE, LR, MAKES, MORE, STEPS, bound, on_ranks, one_process, train
from tests.oracle.workers import Failure, attempt

BY_SHARD = ["Rprop", "LBFGS, line search"]
BY_MATRIX = ["Muon", "bitsandbytes AdamW 8-bit", "one that nobody knows"]
"""The optimizers that `make test` runs: one for each way of stepping and of keeping states, on a mesh whose shards are
strided where a step needs whole matrices. Other tests have Adafactor, a schedule-free one and torchao's.
"""


def check(found: dict[str, Any], want: dict[str, Any], part: int) -> None:
    wrong = {}
    for name, adapters in found.items():
        if isinstance(adapters, Failure):
            wrong[name] = adapters.trace
        else:
            error = relative_error(adapters, want[name][part])
            if not error <= bound(name):
                wrong[name] = f"{error:.1e}"
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


@pytest.mark.parametrize(
    ("names", "mesh", "other"),
    cases(
        (BY_MATRIX, "2x2", "1x2"),
        (BY_SHARD, "1x2", "2x1"),
        matrix=[(list(MAKES), "2x1", "2x2"), (list(MAKES), "2x2", "1x2"), (list(MAKES), "2x2x1", "1x1")],
    ),
)
def test_steps_are_those_of_one_process_and_go_on_elsewhere(pool, tmp_path, names, mesh, other):
    want = {name: one_process(name) for name in names}
    for found in pool.run(ranks_of(mesh), on_ranks, names, mesh, range(STEPS), tmp_path, False):
        check(found, want, 0)
    for found in pool.run(ranks_of(other), on_ranks, names, other, range(STEPS, STEPS + MORE), tmp_path, True):
        check(found, want, 1)


BY_PARAMETER = ["Adafactor of transformers", "Muon", "Rprop"]
TOGETHER = "LBFGS computes one step from all parameters together"


def test_steps_under_pp(pool, tmp_path):
    names = [*BY_PARAMETER, "LBFGS", "prodigyopt Prodigy"]
    want = {name: one_process(name) for name in BY_PARAMETER}
    for found in pool.run(2, on_ranks, names, "1x1pp2", range(STEPS), tmp_path, False):
        assert TOGETHER in found.pop("LBFGS").message
        assert "Prodigy computes one step from all" in found.pop("prodigyopt Prodigy").message
        check(found, want, 0)


class Noisy(torch.optim.Optimizer):
    """A step with noise, as stochastic rounding adds it, and half as long as the one before."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad + torch.randn(parameter.shape), alpha=group["lr"])
            group["lr"] /= 2


class Searches(torch.optim.LBFGS):
    """LBFGS under another name: what it does depends on the loss."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


PARTING = {"noise": Noisy, "search": partial(Searches, line_search_fn="strong_wolfe", max_iter=4)}
"""Optimizers whose steps differ between ranks that draw other numbers, or have other losses."""


def two_steps(name: str, model: Any, ids: Tensor) -> dict[str, Tensor]:
    optimizer = PARTING[name]([p for p in model.parameters() if p.requires_grad])

    def closure() -> Tensor:
        model.zero_grad()
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss

    for _ in range(2):
        if name == "noise":
            closure()
            optimizer.step()
        else:
            optimizer.step(closure)
    return {name: full(p) for name, p in trained(model).items()}


def own_seeds(mesh_text: str) -> tuple[dict[str, dict[str, Tensor]], bool]:
    """Adapters after steps of ranks that draw other numbers, and of a search for which they have other losses."""
    mesh, config = on_mesh(mesh_text)
    ids = CASE.batches()[0].chunk(dp_size(mesh))[dp_rank(mesh)]
    found = {}
    for name in PARTING:
        model = parallelize(CASE.model(), mesh, config)
        torch.manual_seed(1000 + dist.get_rank())
        before = torch.get_rng_state()
        found[name] = two_steps(name, model, ids)
    return found, bool(dist.get_rank() == 0 or torch.equal(before, torch.get_rng_state()))


def test_ranks_with_other_seeds_and_losses_step_alike(pool):
    """All draw as rank 0 does, and search along the loss of all rows."""
    models = {name: CASE.model() for name in PARTING}
    torch.manual_seed(1000)
    want = {name: two_steps(name, model, CASE.batches()[0]) for name, model in models.items()}
    for found, kept in pool.run(4, own_seeds, "2x2"):
        assert kept
        for name in PARTING:
            assert relative_error(found[name], want[name]) <= 1e-10, name


class Fails(torch.optim.SGD):
    """It fails half-way, and steps on full tensors, as its `step` is not SGD's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["lr"] = 0.0
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = parameter.grad.clone()
            parameter.zero_()
        raise ArithmeticError("half-way")


def failed() -> Any:
    mesh, settings = on_mesh("2x1")
    model = parallelize(CASE.model(), mesh, settings)
    optimizer = Fails(trained(model).values(), lr=LR)
    model(input_ids=CASE.batches()[0], labels=CASE.batches()[0]).loss.backward()
    before = {name: full(p) for name, p in trained(model).items()}
    failure = attempt(optimizer.step)
    same = all(torch.equal(full(p), before[name]) for name, p in trained(model).items())
    own = {*optimizer.param_groups[0]["params"]} == {*trained(model).values()}
    return failure, same, own, dict(optimizer.state), optimizer.param_groups[0]["lr"]


def test_a_step_that_fails_leaves_all_as_it_was(pool):
    for failure, same, own, state, lr in pool.run(2, failed):
        assert (failure.kind, failure.message) == ("ArithmeticError", "half-way")
        assert (same, own, state, lr) == (True, True, {}, LR)


def at_rest() -> Any:
    mesh, settings = on_mesh("2x2")
    model = parallelize(CASE.model(), mesh, settings)
    kept = {}
    for name in ("Muon", "Rprop"):
        optimizer = MAKES[name](model)
        train(model, optimizer, range(1), dp_rank(mesh), dp_size(mesh))
        kept[name] = [
            (local(value).shape == local(parameter).shape, value.placements == parameter.placements)
            for parameter in trained(model).values()
            for value in optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.shape == parameter.shape
        ]
    return kept


def test_states_are_sharded_between_steps(pool):
    for kept in pool.run(4, at_rest):
        for name, fits in kept.items():
            assert fits, name
            assert all(all(each) for each in fits), name
