"""Optimizers, each held against one process: on a mesh, and resumed from a checkpoint on another."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lora_parallel import load_checkpoint, parallelize, save_checkpoint
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.oracle import Case, full, on_mesh, over_stages, trained
from tests.oracle.workers import attempt

LR = 1e-2
STEPS, MORE = 3, 2
CASE = Case(
    steps=STEPS + MORE, lora={"r": 8, "target_modules": ["q_proj", "down_proj"]}, sizes={"intermediate_size": 512}
)
"""Some factors have 4096 elements, from which on states are kept in 8 bits."""


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

    return create_lorafa_optimizer(model, r=8, lora_alpha=6, lr=LR)


def lion(model: nn.Module) -> Optimizer:
    from lion_pytorch import Lion

    return Lion(trained(model).values(), lr=1e-3)


def prodigy(model: nn.Module) -> Optimizer:
    from prodigyopt import Prodigy

    return Prodigy(trained(model).values(), d0=1e-4)


def torchao(model: nn.Module) -> Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(list(trained(model).values()), lr=LR)


class TwoNorms(Optimizer):
    """A step has norms of a gradient and a state of no shape of its parameter."""

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
    "AdamW": of_torch("AdamW"),
    "AdamW, fused": of_torch("AdamW", fused=True),
    "SGD, fused": of_torch("SGD", momentum=0.9, fused=True),
    "Rprop": of_torch("Rprop", lr=1e-3),
    "Adafactor of torch": of_torch("Adafactor"),
    "Adafactor of transformers": of_transformers(),
    "Adafactor with momentum": of_transformers(lr=LR, scale_parameter=False, relative_step=False, beta1=0.9),
    "Muon": of_torch("Muon"),
    "LBFGS": of_torch("LBFGS", max_iter=3),
    "LBFGS, line search": of_torch("LBFGS", max_iter=3, line_search_fn="strong_wolfe"),
    "AdamW, schedule-free": schedule_free,
    "AdamW, LoRA+ groups": lora_plus,
    "LoRA-FA": lora_fa,
    "bitsandbytes AdamW": of_bitsandbytes("AdamW"),
    "bitsandbytes AdamW 8-bit": of_bitsandbytes("AdamW8bit"),
    "bitsandbytes paged AdamW 8-bit": of_bitsandbytes("PagedAdamW8bit"),
    "bitsandbytes Lion": of_bitsandbytes("Lion"),
    "bitsandbytes Lion 8-bit": of_bitsandbytes("Lion8bit"),
    "bitsandbytes AdEMAMix": of_bitsandbytes("AdEMAMix"),
    "bitsandbytes LAMB": of_bitsandbytes("LAMB"),
    "torchao AdamW 8-bit": torchao,
    "lion-pytorch Lion": lion,
    "prodigyopt Prodigy": prodigy,
    "one that nobody knows": lambda model: TwoNorms(trained(model).values()),
}
KEPT_IN_FLOAT32 = 1e-6
"""Bound for optimizers that keep their states in float32 or less: a gradient may be rounded to a neighbour there."""


def bound(name: str) -> float:
    return KEPT_IN_FLOAT32 if name.startswith(("bitsandbytes", "torchao")) else 1e-10


def train(model: nn.Module, optimizer: Optimizer, steps: range, share: int = 0, shares: int = 1) -> None:
    """The loss is computed in float64: a line search compares losses."""
    batches = CASE.batches()
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
    model = CASE.model()
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
        model = parallelize(CASE.model(), device_mesh, settings)
        optimizer = MAKES[name](model)
        if resume:
            load_checkpoint(model, optimizer, folder / name)
        train(model, optimizer, steps, *share)
        if not resume:
            save_checkpoint(model, optimizer, folder / name)
        return over_stages({key: full(p) for key, p in model.named_parameters() if "lora_" in key}, mesh)

    return {name: attempt(trained_by, name) for name in names}
