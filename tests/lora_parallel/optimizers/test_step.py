"""Optimizers of all kinds step on a mesh to what they step to in one process, and resume on another mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lora_parallel import load_checkpoint, parallelize, save_checkpoint
from lora_parallel.distributed.gather import local
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.oracle import Case, full, on_mesh, over_stages, ranks_of, relative_error, trained
from tests.workers import Failure, attempt

LR = 1e-2
STEPS, MORE = 3, 2


def of_torch(name: str, **settings: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: getattr(torch.optim, name)(trained(model).values(), **{"lr": LR, **settings})


def of_bitsandbytes(name: str, **settings: Any) -> Callable[[nn.Module], Optimizer]:
    def make(model: nn.Module) -> Optimizer:
        import bitsandbytes

        return getattr(bitsandbytes.optim, name)(trained(model).values(), lr=LR, **settings)

    return make


def of_transformers(**settings: Any) -> Callable[[nn.Module], Optimizer]:
    from transformers.optimization import Adafactor

    return lambda model: Adafactor(trained(model).values(), **settings)


def schedule_free(model: nn.Module) -> Optimizer:
    import schedulefree

    optimizer = schedulefree.AdamWScheduleFree(trained(model).values(), lr=LR)
    optimizer.train()
    return optimizer


def lora_plus(model: nn.Module) -> Optimizer:
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=16)


def lora_fa(model: nn.Module) -> Optimizer:
    from peft.optimizers import create_lorafa_optimizer

    return create_lorafa_optimizer(model, r=3, lora_alpha=6, lr=LR)


def torchao(model: nn.Module) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(list(trained(model).values()), lr=LR, block_size=4)


class TwoNorms(Optimizer):
    """An optimizer that nobody knows: its step has norms of a gradient and a state of no shape of its parameter."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": LR})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["rows"] = state.get("rows", 0) + parameter.grad.norm(dim=-1, keepdim=True)
                parameter -= group["lr"] * parameter.grad / parameter.grad.norm().item() / state["rows"].norm()


MAKES: dict[str, Callable[[nn.Module], Optimizer]] = {
    "fused": of_torch("AdamW", fused=True),
    "Rprop": of_torch("Rprop", lr=1e-3),
    "Adafactor of torch": of_torch("Adafactor"),
    "Adafactor of transformers": of_transformers(),
    "Adafactor with momentum": of_transformers(lr=LR, scale_parameter=False, relative_step=False, beta1=0.9),
    "Muon": of_torch("Muon"),
    "LBFGS": of_torch("LBFGS", max_iter=3),
    "LBFGS, line search": of_torch("LBFGS", max_iter=3, line_search_fn="strong_wolfe"),
    "schedule-free": schedule_free,
    "LoRA+": lora_plus,
    "LoRA-FA": lora_fa,
    "bitsandbytes AdamW": of_bitsandbytes("AdamW"),
    "bitsandbytes AdamW 8-bit": of_bitsandbytes("AdamW8bit", min_8bit_size=64),
    "bitsandbytes paged AdamW 8-bit": of_bitsandbytes("PagedAdamW8bit", min_8bit_size=64),
    "bitsandbytes Lion": of_bitsandbytes("Lion"),
    "bitsandbytes Lion 8-bit": of_bitsandbytes("Lion8bit", min_8bit_size=64),
    "bitsandbytes AdEMAMix": of_bitsandbytes("AdEMAMix"),
    "bitsandbytes LAMB": of_bitsandbytes("LAMB"),
    "unknown": lambda model: TwoNorms(trained(model).values()),
}
EACH_KIND = [
    "Rprop",
    "Adafactor of transformers",
    "Muon",
    "LBFGS, line search",
    "schedule-free",
    "LoRA-FA",
    "bitsandbytes AdamW 8-bit",
    "unknown",
]
"""What `make test` runs: one for each way of stepping and of keeping states."""

KEPT_IN_FLOAT32 = 1e-6
"""Bound for optimizers that keep their states in float32 or less: a gradient may be rounded to a neighbour there."""


def bound(name: str) -> float:
    return KEPT_IN_FLOAT32 if name.startswith("bitsandbytes") else 1e-10


def train(model: nn.Module, optimizer: Optimizer, steps: range, share: int = 0, shares: int = 1) -> None:
    """The loss is computed in float64: a line search compares losses."""
    batches = Case(steps=STEPS + MORE).batches()
    for step in steps:
        batch = batches[step].chunk(shares)[share]

        def loss(batch: Tensor = batch) -> Tensor:
            optimizer.zero_grad()
            logits = model(input_ids=batch).logits.double()
            value = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
            value.backward()
            return value

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


def one_process(name: str) -> list[dict[str, Tensor]]:
    model = Case().model()
    optimizer = MAKES[name](model)
    found = []
    for steps in (range(STEPS), range(STEPS, STEPS + MORE)):
        train(model, optimizer, steps)
        found.append({key: full(p) for key, p in model.named_parameters() if "lora_" in key})
    return found


def on_ranks(names: list[str], mesh: str, steps: range, folder: Path, resume: bool) -> dict[str, Any]:
    device_mesh, settings = on_mesh(mesh)
    share = dp_rank(device_mesh), dp_size(device_mesh)

    def trained_by(name: str) -> dict[str, Tensor]:
        model = parallelize(Case().model(), device_mesh, settings)
        optimizer = MAKES[name](model)
        if resume:
            load_checkpoint(model, optimizer, folder / name)
        train(model, optimizer, steps, *share)
        if not resume:
            save_checkpoint(model, optimizer, folder / name)
        return over_stages({key: full(p) for key, p in model.named_parameters() if "lora_" in key}, mesh)

    return {name: attempt(trained_by, name) for name in names}


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
    cases((EACH_KIND, "2x2", "1x2"), matrix=[(list(MAKES), "2x1", "2x2"), (list(MAKES), "2x2x1", "1x1")]),
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
    names = [*BY_PARAMETER, "LBFGS"]
    want = {name: one_process(name) for name in BY_PARAMETER}
    for found in pool.run(2, on_ranks, names, "1x1pp2", range(STEPS), tmp_path, False):
        assert TOGETHER in found.pop("LBFGS").message
        check(found, want, 0)


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
    model = parallelize(Case().model(), mesh, settings)
    optimizer = Fails(trained(model).values(), lr=LR)
    model(input_ids=Case().batches()[0], labels=Case().batches()[0]).loss.backward()
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
    model = parallelize(Case().model(), mesh, settings)
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
