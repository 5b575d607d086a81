"""The tenants that tests train, and what each would become alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import Dataset

from lora_parallel import TenantPool, parallelize
from lora_parallel.adapters.injection import adapt_dropout
from lora_parallel.state import ForwardCount
from tests.oracle import causal_lm, full, on_mesh, trained

ROWS, STEPS = 4, 3
CONFIGS: dict[str, dict[str, Any]] = {
    "ada": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]},
    "bea": {"r": 8, "lora_alpha": 4, "target_modules": "all-linear", "lora_dropout": 0.3},
    "cyd": {"r": 2, "lora_alpha": 9, "target_modules": ["down_proj", "o_proj"], "use_rslora": True},
    "dan": {"r": 5, "lora_alpha": 5, "target_modules": ["up_proj", "lm_head"], "lora_dropout": 0.1},
}
RATES = {"ada": 1e-2, "bea": 3e-3, "cyd": 2e-2, "dan": 5e-3}
SEEDS = {name: 10 + number for number, name in enumerate(CONFIGS)}


def config_of(name: str) -> LoraConfig:
    return LoraConfig(**CONFIGS[name], init_lora_weights=False, task_type="CAUSAL_LM")


def optimizer_of(name: str) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, lr=RATES[name])


def with_optimizer(name: str, kind: type[torch.optim.Optimizer] | None) -> Any:
    return optimizer_of(name) if kind is None else lambda parameters: kind(parameters, lr=RATES[name])


def batch(name: str, step: int) -> Tensor:
    """The rows of a tenant's step."""
    generator = torch.Generator().manual_seed(100 * SEEDS[name] + step)
    return torch.randint(0, 131, (ROWS, 12), generator=generator)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@cache
def alone(
    name: str,
    steps: int = STEPS,
    backwards: int = 1,
    clip: float | None = None,
    optimizer: type[torch.optim.Optimizer] | None = None,
) -> dict[str, Tensor]:
    """Plain PEFT on this tenant's samples, with the project's dropout.

    Args:
        name: The tenant.
        steps: Of its optimizer.
        backwards: Before each step.
        clip: The largest norm of its gradients.
        optimizer: Another optimizer than the tenant's, with that one's rate.
    """
    base = causal_lm()
    torch.manual_seed(SEEDS[name])
    model = get_peft_model(base, config_of(name)).train()
    count = ForwardCount(running=True)
    adapt_dropout(model, SEEDS[name], count, 0)
    made = with_optimizer(name, optimizer)(list(trained(model).values()))
    for number in range(steps * backwards):
        count.advance(True)
        ids = batch(name, number)
        (loss_of(model(input_ids=ids).logits, ids) / backwards).backward()
        if (number + 1) % backwards == 0:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(trained(model).values(), clip)
            made.step()
            made.zero_grad()
    return plain(trained(model))


def plain(named: dict[str, Any]) -> dict[str, Tensor]:
    return {name.replace("base_model.model.", ""): full(p).clone() for name, p in named.items()}


def pool_of(
    mesh_text: str, settings: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, nn.Module, TenantPool]:
    """A mesh, a model on it and a pool; `settings` are `ParallelConfig`'s, `options` the pool's."""
    mesh, config = on_mesh(mesh_text, require_adapters=False, **settings or {})
    model = parallelize(causal_lm(), mesh, config).train()
    return mesh, model, TenantPool(model, **options)


def values(model: nn.Module, name: str) -> dict[str, Tensor]:
    found = {n: p for n, p in model.named_parameters() if f".{name}." in n}
    return {n.replace(f".{name}.", ".default."): full(p).clone() for n, p in found.items()}


def add(pool: TenantPool, name: str) -> None:
    pool.add(name, config_of(name), optimizer_of(name), SEEDS[name])


MIXED = ["ada", "bea"]


class Mixed(Dataset[Any]):
    """Rows of both tenants with the tenant's number: of each step, the rows of these of so many data-parallel ranks."""

    def __init__(self, size: int, ranks: Sequence[int]) -> None:
        self.items = [
            (row, number)
            for step in range(STEPS)
            for rank in ranks
            for number, name in enumerate(MIXED)
            for row in batch(name, step).chunk(size)[rank]
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.items[index]
