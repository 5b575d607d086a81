"""Tenants of one sharded base, each against plain PEFT on its own samples in one process."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lora_parallel import parallelize
from lora_parallel.inject import adapt_dropout
from lora_parallel.dropout import ForwardCount
from lora_parallel.mesh import dp_rank, dp_size
from lora_parallel.tenants import TenantPool
from tests.oracle import causal_lm, full, on_mesh, ranks_of, relative_error, trained
from tests.workers import Failure, attempt

ROWS, STEPS = 4, 3
CONFIGS: dict[str, dict[str, Any]] = {
    "ada": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "bea": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "lora_dropout": 0.3},
    "cyd": {"r": 2, "lora_alpha": 9, "target_modules": ["down_proj", "o_proj"], "use_rslora": True},
    "dan": {"r": 5, "lora_alpha": 5, "target_modules": ["gate_up_proj", "up_proj", "lm_head"], "lora_dropout": 0.1},
}
RATES = {"ada": 1e-2, "bea": 3e-3, "cyd": 2e-2, "dan": 5e-3}
SEEDS = {name: 10 + number for number, name in enumerate(CONFIGS)}


def config_of(name: str) -> LoraConfig:
    return LoraConfig(**CONFIGS[name], init_lora_weights=False, task_type="CAUSAL_LM")


def optimizer_of(name: str) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=RATES[name])


def batch(name: str, step: int) -> Tensor:
    """The rows of a tenant's step."""
    generator = torch.Generator().manual_seed(100 * SEEDS[name] + step)
    return torch.randint(0, 131, (ROWS, 12), generator=generator)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@cache
def alone(name: str, steps: int = STEPS) -> dict[str, Tensor]:
    """Plain PEFT on this tenant's samples, with the project's dropout."""
    base = causal_lm()
    torch.manual_seed(SEEDS[name])
    model = get_peft_model(base, config_of(name)).train()
    count = ForwardCount(running=True)
    adapt_dropout(model, SEEDS[name], count, 0)
    optimizer = optimizer_of(name)(trained(model).values())
    for step in range(steps):
        count.advance(True)
        ids = batch(name, step)
        loss_of(model(input_ids=ids).logits, ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain(trained(model))


def plain(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name.replace("base_model.model.", ""): full(p).clone() for name, p in named.items()}


def pool_of(mesh_text: str) -> tuple[Any, nn.Module, TenantPool]:
    mesh, config = on_mesh(mesh_text, require_adapters=False)
    model = parallelize(causal_lm(), mesh, config).train()
    return mesh, model, TenantPool(model)


def values(model: nn.Module, name: str) -> dict[str, Tensor]:
    found = {n: p for n, p in model.named_parameters() if f".{name}." in n}
    return {n.replace(f".{name}.", ".default."): full(p).clone() for n, p in found.items()}


def add(pool: TenantPool, name: str) -> None:
    pool.add(name, config_of(name), optimizer_of(name), SEEDS[name])


def train_in_turn(mesh_text: str) -> dict[str, dict[str, Tensor]]:
    mesh, model, pool = pool_of(mesh_text)
    for name in CONFIGS:
        add(pool, name)
    for step in range(STEPS):
        for name in CONFIGS:
            ids = batch(name, step).chunk(dp_size(mesh))[dp_rank(mesh)]
            with pool.train(name):
                loss_of(model(input_ids=ids).logits, ids).backward()
            pool.step(name)
    return {name: values(model, name) for name in CONFIGS}


def train_batched(mesh_text: str) -> dict[str, dict[str, Tensor]]:
    """All tenants' rows in one forward, dealt out unevenly: the last data-parallel rank has none of the first's."""
    mesh, model, pool = pool_of(mesh_text)
    for name in CONFIGS:
        add(pool, name)
    for step in range(STEPS):
        mine = [(name, row) for name, row in dealt(step, dp_size(mesh))[dp_rank(mesh)]]
        ids = torch.stack([batch(name, step)[row] for name, row in mine])
        names = [name for name, _ in mine]
        with pool.route(names):
            logits = model(input_ids=ids).logits
            here = {name: torch.tensor([n == name for n in names]) for name in dict.fromkeys(names)}
            sum(loss_of(logits[rows], ids[rows]) for rows in here.values()).backward()
        for name in CONFIGS:
            pool.step(name)
    return {name: values(model, name) for name in CONFIGS}


def dealt(step: int, ranks: int) -> list[list[tuple[str, int]]]:
    """Each rank's samples: all of them in order of rank for each tenant, but of no even number."""
    hands: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
    for number, name in enumerate(CONFIGS):
        for row in range(ROWS):
            hands[0 if number == 0 else min(row * (1 + number % 2) * ranks // (2 * ROWS), ranks - 1)].append((name, row))
    order = torch.Generator().manual_seed(step)
    for hand in hands:
        tenants = torch.randperm(len(CONFIGS), generator=order).tolist()
        names = list(CONFIGS)
        hand.sort(key=lambda each: tenants[names.index(each[0])] if step else 0)
    for rank, hand in enumerate(hands):  # none without a sample
        if not hand:
            hand.append(hands[0].pop())
            del rank
    return hands


@pytest.mark.parametrize("mesh", ["1x1", "2x1", "1x2", "2x2"])
@pytest.mark.parametrize("way", [train_in_turn, train_batched])
def test_each_tenant_trains_as_alone(pool, mesh, way):
    for found in pool.run(ranks_of(mesh), way, mesh):
        for name, got in found.items():
            assert relative_error(got, alone(name)) <= 1e-10, name
