"""A plain torch loop in one process against a Fabric loop on a mesh: same losses, gradients and adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Outcome, Points, Tokens, check, fabric, global_means, loader, tidy, tuner
from tests.oracle import full, ranks_of, trained

STEPS = 3
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def everything(model: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters, frozen ones too, as many scripts have it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    named = trained(model)
    first = {name: p for name, p in named.items() if "lora_A" in name}
    others = [p for name, p in named.items() if name not in first]
    return torch.optim.AdamW([{"params": list(first.values())}, {"params": others, "lr": 3e-3}], lr=1e-2)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model).values(), lr=1e-2, fused=True)


def language_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


def squared_error(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["x"]), batch["y"].to(next(model.parameters()).dtype))


class Scored(nn.Module):
    """A model inside of another, which returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = m.adapted()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return language_loss(self.inner, batch)


@dataclass(frozen=True)
class Case:
    """One loop."""

    build: Callable[[], nn.Module] = m.adapted
    loss: Callable[[Any, Any], Tensor] = language_loss
    optimizer: Optimizers = everything
    joint: bool = True
    accumulate: int = 1
    max_norm: float | None = None
    clip_val: float | None = None
    points: bool = False
    lora: dict[str, Any] = field(default_factory=dict, hash=False)
    plain: Callable[[], nn.Module] | None = None
    """What the oracle builds, where it is another model."""

    lightning: str = "lightning.fabric"

    def data(self) -> Any:
        return (Points if self.points else Tokens)(STEPS * self.accumulate * ROWS)


CASES: dict[str, Case] = {
    "joint": Case(),
    "joint, accumulated and clipped": Case(accumulate=3, max_norm=0.05),
    "separate, accumulated and clipped": Case(joint=False, accumulate=2, max_norm=0.05, optimizer=grouped),
    "groups": Case(optimizer=grouped),
    "fused": Case(optimizer=fused),
    "by value": Case(clip_val=1e-3),
    "injected": Case(build=m.plain, plain=m.plain_with_peft, joint=False, lora={"lora_config": m.random_lora()}),
    "unseeded": Case(build=m.unseeded),
    "inner": Case(build=Scored, loss=lambda model, batch: model(batch)),
    "points": Case(build=m.perceptron, loss=squared_error, points=True, lora={"tp_plan": m.PLAN}),
    "no adapters": Case(build=m.plain, lora={"require_adapters": False}, max_norm=0.5),
    "module": Case(
        build=lambda: tuner()(m.adapted), loss=lambda model, batch: model.training_step(batch, 0), joint=False
    ),
    "legacy": Case(lightning="lightning_fabric", max_norm=0.05),
    "name": Case(lora={"by name": True}),
}
CLIPPED = "joint, accumulated and clipped"
KEPT = {
    "2x2": [CLIPPED],
    "2x1": ["separate, accumulated and clipped", "inner", "no adapters"],
    "1x2": ["by value", "injected", "points", "module", "name"],
}
FIRST = list(CASES)[:3]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


def oracle_run(case: Case) -> Outcome:
    """Torch and PEFT, nothing else."""
    model = (case.plain or case.build)().double().train()
    optimizer = case.optimizer(model)
    outcome, losses = Outcome(), []
    batches = list(loader(case.data(), None))
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches[step * case.accumulate : (step + 1) * case.accumulate]:
            batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            loss = case.loss(model, batch) / case.accumulate
            loss.backward()
            losses.append(loss.detach())
        if not outcome.raw:
            outcome.raw = gradients(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if case.max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, case.max_norm)
            outcome.metrics[f"norm {step}"] = norm.item()
        if case.clip_val is not None:
            torch.nn.utils.clip_grad_value_(parameters, case.clip_val)
        if not outcome.gradients:
            outcome.gradients = gradients(model)
        optimizer.step()
    outcome.losses = global_means(losses)
    outcome.adapters = {name: full(p) for name, p in trained(model).items()}
    return outcome


def fabric_run(case: Case, mesh: str) -> Outcome:
    """The same in a Fabric loop, on every rank."""
    options: dict[str, Any] = {"precision": "64-true", "lora": case.lora}
    if case.lora.get("by name"):
        options = {"precision": "64-true", "strategy": "lora_fsdp2_tp"}
    run = fabric(mesh, case.lightning, **options)
    model = case.build().train()
    if case.joint:
        model, optimizer = run.setup(model, case.optimizer(model))
    else:
        model = run.setup_module(model)
        optimizer = run.setup_optimizers(case.optimizer(model))
    original = model.module
    data = run.setup_dataloaders(loader(case.data(), mesh), use_distributed_sampler=False)
    outcome, losses = Outcome(), []
    for index, batch in enumerate(data):
        last = (index + 1) % case.accumulate == 0
        with run.no_backward_sync(model, enabled=not last):
            loss = case.loss(model, batch) / case.accumulate
            run.backward(loss)
        losses.append(loss.detach())
        if not last:
            continue
        if not outcome.raw:
            outcome.raw = gradients(original)
        if case.max_norm is not None:
            norm = run.clip_gradients(model, optimizer, max_norm=case.max_norm)
            outcome.metrics[f"norm {index // case.accumulate}"] = norm.item()
        if case.clip_val is not None:
            assert run.clip_gradients(model, optimizer, clip_val=case.clip_val) is None
        if not outcome.gradients:
            outcome.gradients = gradients(original)
        optimizer.step()
        optimizer.zero_grad()
    outcome.losses = global_means(losses)
    outcome.adapters = {name: full(p) for name, p in trained(original).items()}
    return outcome


@cache
def oracle(name: str) -> Outcome:
    with tidy():
        pl.seed_everything(m.SEED, verbose=False)
        return oracle_run(CASES[name])


def run_all(mesh: str, names: list[str]) -> dict[str, Outcome]:
    outcomes = {}
    for name in names:
        with tidy():
            pl.seed_everything(m.SEED, verbose=False)
            outcomes[name] = fabric_run(CASES[name], mesh)
    return outcomes


def without_peft_prefix(named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("base_model.model.", ""): tensor for name, tensor in named.items()}


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(
        *KEPT.items(),
        matrix=[("2x2", [name for name in CASES if name != CLIPPED]), ("2x1", FIRST), ("1x2", FIRST), ("2x2x2", FIRST)],
    ),
)
def test_training_equals_one_process(pool, mesh, names):
    answers = pool.run(ranks_of(mesh), run_all, mesh, names)
    for outcomes in answers:
        for name, got in outcomes.items():
            want = oracle(name)
            if name == "injected":
                for outcome in (got, want):
                    for kind in ("raw", "gradients", "adapters"):
                        setattr(outcome, kind, without_peft_prefix(getattr(outcome, kind)))
            try:
                check(got, want)
                assert got.metrics == pytest.approx(want.metrics, rel=1e-9)
            except AssertionError as error:
                raise AssertionError(f"{name} on {mesh}") from error
