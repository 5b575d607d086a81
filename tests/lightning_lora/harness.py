"""Trainers and Fabrics for tests: the same training under plain Lightning in one process and under ours on a mesh.

The oracle is `Trainer(accelerator="cpu", devices=1)` with plain PEFT, which knows nothing of this project. On a mesh
the Trainer runs inside the worker pool, whose processes have a process group already: `environment` tells Lightning so.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from lightning_lora import strategy_base
from lora_parallel import ParallelConfig, build_mesh
from lora_parallel.distributed.mesh import mesh_sizes
from tests.oracle import SIZES, dp_of, full, mesh_text, parse_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import COLLECTIVE_TIMEOUT

ROWS, TOKENS, STEPS = 8, 12, 3
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}


# ---------------------------------------------------------------------- the pool's processes as a cluster


class PoolRanks:
    """The part of a ClusterEnvironment that says which process this is."""

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()

    def node_rank(self) -> int:
        return 0


def environment(fabric: str = "lightning.fabric") -> Any:
    """A ClusterEnvironment of the given namespace that describes the process group this process is in."""
    base = import_module(f"{fabric}.plugins.environments").ClusterEnvironment

    class PoolEnvironment(PoolRanks, base):
        creates_processes_externally = True
        main_address = "127.0.0.1"
        main_port = 1

        @staticmethod
        def detect() -> bool:
            return False

        def set_world_size(self, size: int) -> None:
            assert size == dist.get_world_size()

        def set_global_rank(self, rank: int) -> None:
            assert rank == dist.get_rank()

    return PoolEnvironment()


@contextmanager
def tidy() -> Iterator[None]:
    """A test's Trainers leave no seeds and no default dtype behind in the process, and one mesh of each shape."""
    before, dtype, build = dict(os.environ), torch.get_default_dtype(), strategy_base.build_mesh
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    strategy_base.build_mesh = shared_mesh
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        strategy_base.build_mesh = build
        torch.set_default_dtype(dtype)
        os.environ.clear()
        os.environ.update(before)


def shared_mesh(config: ParallelConfig, device_type: str | None = None) -> DeviceMesh:
    """As `build_mesh`, once for each shape: a mesh holds sockets and threads for good, and a pool sees hundreds."""
    sizes = mesh_text(mesh_sizes(config, dist.get_world_size()))
    if sizes not in _meshes:
        _meshes[sizes] = build_mesh(replace(config, timeout_seconds=COLLECTIVE_TIMEOUT), device_type)
    return _meshes[sizes]


_meshes: dict[str, DeviceMesh] = {}


def strategy(mesh: str, package: str = "lightning_lora", kind: str = "LoRAParallelStrategy", **options: Any) -> Any:
    """The strategy for a mesh like "2x2" (dp_shard x tp) or "2x2x2" (with dp_replicate in front).

    On a mesh with a pp axis it has two micro-batches, unless the options say otherwise.
    """
    sizes = parse_mesh(mesh)
    settings = {
        "tensor_parallel_size": sizes["tp"],
        "context_parallel_size": sizes.get("cp", 1),
        "pipeline_parallel_size": sizes.get("pp", 1),
        "pipeline_microbatches": 2 if "pp" in sizes else 1,
        "data_parallel_size": sizes["dp_replicate"] * sizes["dp_shard"],
        "replicate_size": sizes["dp_replicate"],
        "timeout_seconds": COLLECTIVE_TIMEOUT,
    }
    return getattr(import_module(package), kind)(**{**settings, **options})


def trainer(mesh: str | None, lora: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    """A Trainer on a mesh inside the pool, with the strategy's options in `lora`; without a mesh, the oracle's.

    `options` are Trainer's; `plugins` are put beside the cluster environment.
    """
    if mesh is None:
        return pl.Trainer(**{**QUIET, **options}, devices=1)
    settings = {**QUIET, "strategy": strategy(mesh, **(lora or {})), **options}
    settings["plugins"] = [environment(), *settings.get("plugins", [])]
    return pl.Trainer(**settings, devices=ranks_of(mesh))


def fabric(mesh: str, lightning: str = "lightning.fabric", lora: dict[str, Any] | None = None, **options: Any) -> Any:
    """A launched Fabric of the given namespace on a mesh inside the pool, with the strategy's options in `lora`."""
    package = "lightning_lora" if lightning == "lightning.fabric" else "lightning_lora.legacy"
    settings = {
        "accelerator": "cpu",
        "strategy": strategy(mesh, package, "FabricLoRAParallelStrategy", **(lora or {})),
        "devices": ranks_of(mesh),
        "plugins": [environment(lightning)],
        **options,
    }
    made = import_module(lightning).Fabric(**settings)
    made.launch()
    return made


def share(mesh: str | None) -> tuple[int, int]:
    """(data-parallel size, data-parallel rank) of this process, from the layout that the docs promise: pp outermost,
    then the dp axes, tp innermost.
    """
    if mesh is None:
        return 1, 0
    dp, stage = dp_of(mesh), ranks_of(mesh) // parse_mesh(mesh).get("pp", 1)
    return dp, dist.get_rank() % stage * dp // stage


# ---------------------------------------------------------------------- data


class Tokens(Dataset):
    """Rows of random token ids as a causal LM wants them."""

    def __init__(self, rows: int, seed: int = 5, vocabulary: int = SIZES["vocab_size"]) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, vocabulary, (rows, TOKENS), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index], "index": torch.tensor(index)}


class Points(Dataset):
    """Inputs and targets of a regression, float32."""

    def __init__(self, rows: int, width: int = 12) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(rows, width, generator=generator)
        self.y = torch.randn(rows, width, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


@dataclass
class Shares:
    """Batch sampler: this data-parallel rank's chunk of each global batch, in order."""

    rows: int
    size: int
    rank: int
    batch: int = ROWS
    start: int = 0
    """The batch that the next pass begins with."""

    position: int = 0
    """How many batches of the current pass have been handed out."""

    def __len__(self) -> int:
        return self.rows // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        width = self.batch // self.size
        self.position, self.start = self.start, 0
        while self.position < len(self):
            first = self.position * self.batch + self.rank * width
            self.position += 1
            yield list(range(first, first + width))


class Resumable(DataLoader):
    """A loader whose position is part of a checkpoint."""

    def state_dict(self) -> dict[str, int]:
        return {"position": self.batch_sampler.position}  # type: ignore[union-attr]

    def load_state_dict(self, state: dict[str, int]) -> None:
        # At the end of an epoch the next one begins.
        self.batch_sampler.start = state["position"] % len(self.batch_sampler)  # type: ignore[union-attr,arg-type]


def loader(dataset: Dataset, mesh: str | None, batch: int = ROWS, kind: type[DataLoader] = DataLoader) -> DataLoader:
    """Global batches in the dataset's order, this rank's share of each."""
    return kind(dataset, batch_sampler=Shares(len(dataset), *share(mesh), batch=batch))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- LightningModules


def language_loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
    """A causal LM's own loss."""
    return module.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss


@cache
def tuner(lightning: str = "lightning.pytorch") -> type[Any]:
    """An ordinary LightningModule of the given namespace.

    It takes a function that builds the model, called in `__init__` or in `configure_model`, and a loss.
    """
    base = import_module(lightning).LightningModule

    class Tuner(base):
        def __init__(
            self,
            build: Callable[[], nn.Module],
            late: bool = False,
            loss: Callable[[Any, Any], Tensor] = language_loss,
            optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
            lr: float = 1e-2,
        ) -> None:
            super().__init__()
            self.build, self.loss, self.optimizer, self.lr = build, loss, optimizer, lr
            self.model = None if late else build()
            self.losses: list[Tensor] = []

        def configure_model(self) -> None:
            if self.model is None:
                self.model = self.build()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.loss(self, batch)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(self, batch), sync_dist=True)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(self, batch), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
            return {"index": batch["index"], "logits": self.model(input_ids=batch["input_ids"]).logits}

        def configure_optimizers(self) -> Any:
            return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    return Tuner


# ---------------------------------------------------------------------- what a run computed


@dataclass
class Outcome:
    """Full tensors and global means of one run, the same on every rank."""

    losses: list[float] = field(default_factory=list)
    """Of each microbatch, the mean over data-parallel ranks."""

    raw: dict[str, Tensor] = field(default_factory=dict)
    """The first step's gradients before clipping."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """The first step's gradients as the optimizer used them, after clipping."""

    adapters: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class Gradients(pl.Callback):
    """Copies the first step's gradients before and after clipping."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if not self.outcome.raw:
            self.outcome.raw = _gradients(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if self.outcome.raw and not self.outcome.gradients:
            self.outcome.gradients = _gradients(pl_module)


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad) for name, p in trained(module).items() if p.grad is not None}


def global_means(losses: Sequence[Tensor]) -> list[float]:
    """Means over all ranks of the losses that each saw; tp peers must have had the same."""
    if not losses:
        return []
    values = torch.stack([loss.double() for loss in losses])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values.tolist()


def finish(module: Any, run: pl.Trainer, outcome: Outcome) -> Outcome:
    """Fill in what is known after the run."""
    outcome.losses = global_means(module.losses)
    outcome.adapters = {name: full(p) for name, p in trained(module).items()}
    outcome.metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return outcome


def fit(module: Any, mesh: str | None, steps: int = STEPS, dataset: Dataset | None = None, **options: Any) -> Outcome:
    """Train `module` for some optimizer steps and say what came out."""
    data = Tokens(steps * ROWS * options.get("accumulate_grad_batches", 1)) if dataset is None else dataset
    watch = Gradients()
    run = trainer(mesh, callbacks=[watch, *options.pop("callbacks", [])], max_epochs=1, **options)
    run.fit(module, loader(data, mesh))
    assert run.global_step == steps * len(run.optimizers)
    return finish(module, run, watch.outcome)


def joined(answers: Sequence[Outcome]) -> Outcome:
    """What the ranks of a pipeline computed, of which each has the tensors of its own stages."""
    first = answers[0]
    for each in answers:
        assert each.losses == first.losses
        assert each.metrics == pytest.approx(first.metrics, rel=1e-5)
    whole = replace(first, raw={}, gradients={}, adapters={})
    for each in answers:
        whole.raw |= each.raw
        whole.gradients |= each.gradients
        whole.adapters |= each.adapters
    return whole


def check(got: Outcome, want: Outcome, close: float = 1e-12) -> None:
    """The guaranteed bounds; `close` is the largest relative error of a gradient.

    By default parameters are float64 (transformers computes losses in float32 all the same).
    """
    double = close <= 1e-12
    assert want.gradients, "no gradients: the oracle did not train"
    assert relative_error(got.raw, want.raw) <= close
    assert relative_error(got.gradients, want.gradients) <= close
    assert relative_error(got.adapters, want.adapters) <= (1e-10 if double else 1e-3)
    assert len(got.losses) == len(want.losses)
    worst = max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True))
    assert worst <= (1e-6 if double else 1e-5), (got.losses, want.losses)
