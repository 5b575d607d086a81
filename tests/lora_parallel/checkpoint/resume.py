"""Training that can stop and go on: the same job in one process with plain PEFT, and on any mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lora_parallel import clip_grad_norm_, latest_checkpoint, load_checkpoint, parallelize, save_checkpoint
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.oracle import Case, full, on_mesh, trained

STEPS = 4
CASE = Case(steps=STEPS)


def _groups(parameters: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups, with settings of their own."""
    first = [p for name, p in parameters.items() if ".lora_A." in name]
    rest = [p for name, p in parameters.items() if ".lora_A." not in name]
    return [{"params": first, "weight_decay": 0.1}, {"params": rest, "lr": 2e-2, "weight_decay": 0.0}]


def _schedule_free(parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(parameters.values(), lr=1e-2, warmup_steps=2)
    optimizer.train()
    return optimizer


Make = Callable[[dict[str, nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p.values(), lr=1e-2),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p.values(), lr=1e-2, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p.values(), lr=1e-2, fused=True),
    "AdamW, two groups": lambda p: torch.optim.AdamW(_groups(p), lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p.values(), lr=1e-2),
    "SGD with momentum": lambda p: torch.optim.SGD(p.values(), lr=1e-2, momentum=0.9, nesterov=True),
    "schedule-free": _schedule_free,
    **{
        name: lambda p, name=name: getattr(torch.optim, name)(p.values(), lr=1e-2)  # type: ignore[misc]
        for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop")
    },
}


@dataclass
class Trained:
    """What a job computed: losses of its steps, and full tensors by PEFT's names."""

    losses: list[float] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """Training of `STEPS` steps, gradients clipped, the learning rate decaying."""

    case: Case = CASE
    optimizer: str = "AdamW"
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    """For `ParallelConfig`."""

    def start(self, parameters: dict[str, nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = OPTIMIZERS[self.optimizer](parameters)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def in_one_process(self) -> Trained:
        """Plain PEFT: the oracle."""
        model, run = self.case.model(), Trained()
        parameters = trained(model)
        optimizer, scheduler = self.start(parameters)
        for batch in self.case.batches():
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
            optimizer.step()
            scheduler.step()
            run.losses.append(loss.item())
        run.adapters = {name: full(p) for name, p in parameters.items()}
        return run

    def on_mesh(
        self,
        mesh_text: str,
        folder: Path,
        save_at: tuple[int, ...] = (),
        begin: Callable[[], None] = lambda: None,
        **saving: Any,
    ) -> Trained:
        """On every rank: from the newest checkpoint in `folder`, or from the start, to the end; saving on the way.

        `begin` is called before the first step.
        """
        mesh, config = on_mesh(mesh_text, **self.config)
        model, run = parallelize(self.case.model(), mesh, config), Trained()
        parameters = trained(model)
        optimizer, scheduler = self.start(parameters)
        first, newest = 0, latest_checkpoint(folder)
        if newest is not None:
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.zero_()
            extra = load_checkpoint(model, optimizer, newest)
            scheduler.load_state_dict(extra["scheduler"])
            first = extra["step"]
        begin()
        for step, batch in list(enumerate(self.case.batches()))[first:]:
            optimizer.zero_grad()
            mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
            loss = model(input_ids=mine, labels=mine).loss
            loss.backward()
            clip_grad_norm_(parameters.values(), 0.5)
            optimizer.step()
            scheduler.step()
            run.losses.append(_mean(loss))
            if step + 1 in save_at:
                extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
                save_checkpoint(model, optimizer, folder / f"step-{step + 1}", extra, **saving)
        run.adapters = {name: full(p) for name, p in parameters.items()}
        return run


def _mean(loss: Tensor) -> float:
    mean = loss.detach().to(torch.float64)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
