"""Accelerators and Trainers for tests, on ranks of the worker pool: the processes that `accelerate launch` would start.

The oracle is plain PEFT in one process (`tests.oracle`), or stock Accelerate and Trainer in one.
"""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from accelerate_plugin import LoRAParallelPlugin, parallelism
from accelerate_plugin.patches import patched
from lora_parallel import ParallelConfig
from lora_parallel.distributed.mesh import mesh_sizes
from tests.oracle import Case, Run, full, mesh_of, mesh_text, parse_mesh, trained

TIMEOUT = 60


def _shared_mesh(config: ParallelConfig, device_type: str) -> DeviceMesh:
    """One mesh of each shape a process: every one makes process groups."""
    return mesh_of(mesh_text(mesh_sizes(config, dist.get_world_size())))


@contextmanager
def launched(**environment: str) -> Iterator[None]:
    """This rank as a process that was started with these variables; afterwards everything is as before."""
    before, build, state = dict(os.environ), parallelism.build_mesh, (random.getstate(), torch.get_rng_state())
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world > 1:
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ.update(environment)
    pooled = dist.is_initialized()
    if pooled:
        parallelism.build_mesh = _shared_mesh  # type: ignore[assignment]
    _forget()
    try:
        with patched(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _forget()
        if dist.is_initialized() and not pooled:
            dist.destroy_process_group()
        parallelism.build_mesh = build
        os.environ.clear()
        os.environ.update(before)
        random.setstate(state[0])
        torch.set_rng_state(state[1])


def _forget() -> None:
    """Accelerate keeps its state in classes."""
    AcceleratorState._reset_state()
    PartialState._shared_state.clear()  # _reset_state does no more
    GradientState._reset_state()
    parallelism._last_plugin = None


def environment(mesh: str, precision: str = "no", **others: str) -> dict[str, str]:
    """Return the environment that `accelerate launch` makes of a file with this mesh.

    For a mesh with a pp axis it is that of `accelerate-lora launch`.
    """
    sizes = parse_mesh(mesh)
    more = {"PARALLELISM_CONFIG_PP_MICROBATCHES": "2"} if "pp" in sizes else {}
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "ACCELERATE_MIXED_PRECISION": precision,
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        **{f"PARALLELISM_CONFIG_{axis.upper()}_SIZE": str(size) for axis, size in sizes.items()},
        **more,
        **others,
    }


def plugin(mesh: str, **settings: Any) -> LoRAParallelPlugin:
    """The plugin for a mesh; with a pp axis it has two micro-batches, unless the settings say otherwise."""
    sizes = {f"{axis}_size": size for axis, size in parse_mesh(mesh).items()}
    more = {"pp_microbatches": 2} if "pp" in parse_mesh(mesh) else {}
    return LoRAParallelPlugin(**{**sizes, "timeout_seconds": TIMEOUT, **more, **settings})


class Rows(Dataset[Any]):
    """Rows of token ids; if uneven, rows lose some labels, so that shares of a batch have other numbers of them."""

    def __init__(self, tokens: torch.Tensor, uneven: bool = False) -> None:
        self.tokens, self.uneven = tokens, uneven

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[index].clone()
        if self.uneven:
            labels[: index % 7] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


def rows_of(case: Case) -> Rows:
    """The rows of the case's batches, in order."""
    return Rows(torch.cat(case.batches()))


def trains(
    case: Case,
    accelerator: Accelerator,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int | None = None,
    between: Callable[[Any], None] | None = None,
) -> Run:
    """The loop of a script that knows nothing of us."""
    model = case.model() if model is None else model
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2) if optimizer is None else optimizer
    dp = accelerator.num_processes
    loader: Any = DataLoader(rows_of(case), batch_size=case.rows // dp)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    parameters = trained(model)
    run = Run([], [], {}, {})
    total = 0.0
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += accelerator.gather(loss.detach()).double().mean().item() / case.accumulate
            if accelerator.sync_gradients and case.clip is not None:
                run.norms.append(accelerator.clip_grad_norm_(model.parameters(), case.clip).item())
            if accelerator.sync_gradients and not run.gradients:
                run.gradients = {name: full(p.grad) for name, p in parameters.items() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            run.losses.append(total)
            total = 0.0
            if between is not None:
                between(model)
            if steps is not None and len(run.losses) == steps:
                break
    run.adapters = {name: full(p) for name, p in parameters.items()}
    return run
