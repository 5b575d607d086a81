"""Collectives are counted with their bytes, issued by hand and by compiled code alike; kernels with theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from benchmarks.meters import Collective, Kernels, metered_collectives, metered_step


def issue() -> list[Collective]:
    """One collective of each kind, of tensors whose dtype the operator's record has and of lists, whose it has not."""
    rows, all_rows = torch.ones(4, 3), torch.empty(8, 3)
    with metered_collectives() as met:
        dist.all_reduce(torch.ones(5, dtype=torch.int64))
        dist.all_gather_into_tensor(all_rows, rows)
        dist.reduce_scatter_tensor(rows, all_rows)
        functional.all_reduce(torch.ones(2, 6, dtype=torch.bfloat16), "sum", dist.group.WORLD) + 1
        dist.barrier()
    return met.calls


def test_collectives_and_bytes(pool):
    for calls in pool.run(2, issue):
        assert [(each.kind, each.bytes) for each in calls] == [
            ("all_reduce", 5 * 8),
            ("all_gather", 8 * 3 * 4),
            ("reduce_scatter", 8 * 3 * 4),
            ("all_reduce", 2 * 6 * 2),
        ]


def test_memory_of_a_step_is_the_most_above_its_start(tmp_path: Path):
    with metered_step("cpu") as met:
        kept = torch.zeros(1000)
        for _ in range(3):
            torch.zeros(5000)
    assert kept.numel() * 4 + 5000 * 4 <= met.memory < kept.numel() * 4 + 2 * 5000 * 4


X = torch.ones(4, 6, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "kernels", "elements"),
    [
        pytest.param(lambda: X * 2, 1, 24 + 24, id="product"),
        pytest.param(lambda: X * X, 1, 24 + 24, id="one tensor twice"),
        pytest.param(lambda: X + X[:1].expand(4, 6), 1, 24 + 6 + 24, id="expanded"),
        pytest.param(lambda: X.clone().mul_(3), 2, 2 * (24 + 24), id="in place"),
        pytest.param(lambda: torch.empty_like(X).fill_(0), 1, 24, id="written only"),
        pytest.param(lambda: X.view(6, 4).t()[1:].unsqueeze(0).detach(), 0, 0, id="views"),
        pytest.param(lambda: torch.native_dropout(X, 0.5, True), 1, 24 + 24 + 24 / 2, id="mask of one byte"),
    ],
)
def test_kernels_and_the_bytes_that_they_read_and_write(call, kernels, elements):
    with Kernels() as counted:
        call()
    assert (counted.count, counted.bytes) == (kernels, elements * X.element_size())


def test_kernels_of_a_backward_are_counted():
    x = X.clone().requires_grad_()
    y = x * 2
    grad = torch.ones_like(y)
    with Kernels() as counted:
        y.backward(grad)
    assert (counted.count, counted.bytes) == (1, (24 + 24) * X.element_size())
