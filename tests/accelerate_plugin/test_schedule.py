"""Learning-rate schedules that go on where an update takes other numbers of processes, rows or microbatches."""

from __future__ import annotations

import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lr
from transformers import get_linear_schedule_with_warmup

from accelerate_plugin.checkpoint import check_schedule, resume_schedule

UPDATES = 12
# A schedule for `unit` steps an update.
SCHEDULES: dict[str, Any] = {
    "linear with warm-up": lambda o, unit: get_linear_schedule_with_warmup(o, 3 * unit, UPDATES * unit),
    "lambda": lambda o, unit: lr.LambdaLR(o, lambda step: 1 / (1 + step / unit)),
    "exponential": lambda o, unit: lr.ExponentialLR(o, 0.9 ** (1 / unit)),
    "steps": lambda o, unit: lr.StepLR(o, 4 * unit, 0.5),
    "cosine": lambda o, unit: lr.CosineAnnealingLR(o, UPDATES * unit),
    "warm restarts": lambda o, unit: lr.CosineAnnealingWarmRestarts(o, 4 * unit),
    "one after the other": lambda o, unit: lr.SequentialLR(
        o, [lr.ConstantLR(o, 0.5, 3 * unit), lr.CosineAnnealingLR(o, 9 * unit)], [3 * unit]
    ),
}


def made(name: str, unit: int) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return optimizer, SCHEDULES[name](optimizer, unit)


def rates(optimizer: torch.optim.Optimizer, schedule: Any, unit: int, updates: int) -> list[float]:
    found = []
    for _ in range(updates):
        optimizer.step()
        for _ in range(unit):
            schedule.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4), (2, 2)])
def test_a_schedule_goes_on_in_another_unit(name, before, after):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = rates(*made(name, after), after, UPDATES)
        optimizer, schedule = made(name, before)
        rates(optimizer, schedule, before, 5)
        again, resumed = made(name, after)
        again.load_state_dict(optimizer.state_dict())
        resume_schedule(resumed, schedule.state_dict(), Fraction(after, before))
        assert rates(again, resumed, after, UPDATES - 5) == pytest.approx(want[5:], abs=1e-12)


def test_a_schedule_by_results_keeps_what_it_has_counted():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = lr.ReduceLROnPlateau(optimizer, patience=3)
    for value in (1.0, 2.0, 3.0):
        schedule.step(value)
    resumed = lr.ReduceLROnPlateau(optimizer, patience=3)
    resume_schedule(resumed, schedule.state_dict(), Fraction(1, 2))
    assert (resumed.best, resumed.num_bad_epochs) == (1.0, 2)


def test_another_kind_of_schedule_is_refused():
    with pytest.raises(ValueError, match="none of ExponentialLR"):
        check_schedule(made("exponential", 1)[1], made("cosine", 1)[1].state_dict())
