"""Jobs of the engine, of tenants and on a quantised base: written at step 2 of 4, and gone on with from there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import DeviceMesh

from lora_parallel import (
    TenantPool,
    latest_checkpoint,
    load_adapter,
    load_checkpoint,
    parallelize,
    save_adapter,
    save_checkpoint,
)
from tests.formats import bases
from tests.oracle import full, on_mesh, over_stages, trained

STEPS, SAVED = 4, 2
ROWS, TOKENS = 4, 8


@dataclass
class Outcome:
    """Hold what a job computed after its save, in full and the same on every rank."""

    losses: list[float] = field(default_factory=list)
    adapters: dict[str, Tensor] = field(default_factory=dict)
    """All parameters that train, at the end."""

    drawn: list[list[float]] = field(default_factory=list)
    """Numbers of the random states of Python, NumPy and torch after the save, of each data-parallel rank."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Values that the script saved with the checkpoint."""

    folder: dict[str, Tensor] = field(default_factory=dict)
    """The parameters that the adapter folders give, which were written at the end."""


def batch(step: int, seed: int = 0) -> Tensor:
    """Return the rows of a step's global batch, [ROWS, TOKENS]."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randint(0, bases.VOCABULARY, (ROWS, TOKENS), generator=generator)


def place(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the number of data-parallel ranks, and which of them this is."""
    shards = mesh["dp_shard"].size()
    rank = mesh.get_local_rank("dp_replicate") * shards + mesh.get_local_rank("dp_shard")
    return mesh["dp_replicate"].size() * shards, rank


def share(mesh: DeviceMesh, rows: Tensor) -> Tensor:
    """Return the rows of this data-parallel rank."""
    size, rank = place(mesh)
    return rows.chunk(size)[rank]


def loss_of(model: Any, ids: Tensor) -> Tensor:
    """Compute the cross entropy in the dtype of the logits; transformers' own is in float32."""
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def mean(loss: Tensor) -> float:
    """Return the mean over the data-parallel ranks. Collective."""
    value = loss.detach().double()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def draw(mesh: DeviceMesh) -> list[list[float]]:
    """Draw a number from each random state of a process; return those of each data-parallel rank. Collective."""
    mine = place(mesh)[1], [random.random(), float(np.random.random()), float(torch.randint(2**30, ()))]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    numbers = dict(reversed(everyone))
    return [numbers[rank] for rank in sorted(numbers)]


@contextmanager
def own_random_states() -> Iterator[None]:
    """Leave the random states of this process as they are: loads set them."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def zero(model: nn.Module) -> None:
    """Set everything that trains to zero, so that nothing which is not loaded is right."""
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.zero_()


@dataclass(frozen=True)
class EngineJob:
    """A script that trains with `save_checkpoint` and `save_adapter`."""

    mesh: str
    build: Callable[[Path], nn.Module]
    """Builds the model with its adapters, from the folder with the bases."""

    config: dict[str, Any] = field(default_factory=dict, hash=False)
    """For `ParallelConfig`."""

    adapters: tuple[str, ...] = ("default",)

    def _start(self, mesh_text: str, bases_folder: Path, rate: float) -> tuple[Any, Any, Any, Any]:
        micro_batches = {"pp_microbatches": 2} if "pp" in mesh_text else {}
        mesh, config = on_mesh(mesh_text, **self.config, **micro_batches)
        model = parallelize(self.build(bases_folder).train(), mesh, config)
        own = trained(model)
        first = [p for name, p in own.items() if "lora_A" in name]
        rest = [p for name, p in own.items() if "lora_A" not in name]
        groups = [{"params": first, "weight_decay": 0.1}, {"params": rest, "lr": 2 * rate, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=rate)
        return mesh, model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    @staticmethod
    def _train(mesh: DeviceMesh, model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = loss_of(model, share(mesh, batch(step)))
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(mean(loss))
        return losses

    def write(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Train, and write a checkpoint at step 2 and the adapters at the end."""
        mesh, model, optimizer, scheduler = self._start(mesh_text, bases_folder, rate=2e-2)
        self._train(mesh, model, optimizer, scheduler, range(SAVED))
        extra = {"step": SAVED, "scheduler": scheduler.state_dict(), "seen": batch(0), "note": "kept"}
        save_checkpoint(model, optimizer, folder / "saved" / f"step-{SAVED}", extra)
        drawn = draw(mesh)
        losses = self._train(mesh, model, optimizer, scheduler, range(SAVED, STEPS))
        for name in self.adapters:
            save_adapter(model, folder / "adapter", name)
        adapters = over_stages({name: full(p) for name, p in trained(model).items()}, mesh_text)
        return Outcome(losses, adapters, drawn)

    def resume(self, mesh_text: str, bases_folder: Path, folder: Path, optimizer_too: bool = True) -> Outcome:
        """Load the checkpoint into a model of zeros and go on; then load the adapter folders into zeros.

        Args:
            mesh_text: The mesh.
            bases_folder: The folder with the bases.
            folder: The files.
            optimizer_too: False: the optimizer starts anew.
        """
        with own_random_states():
            mesh, model, optimizer, scheduler = self._start(mesh_text, bases_folder, rate=2e-2)
            zero(model)
            path = latest_checkpoint(folder / "saved")
            assert path == folder / "saved" / f"step-{SAVED}", path
            extra = load_checkpoint(model, optimizer if optimizer_too else None, path)
            drawn = draw(mesh)
            scheduler.load_state_dict(extra["scheduler"])
            losses = self._train(mesh, model, optimizer, scheduler, range(extra["step"], STEPS))
            adapters = over_stages({name: full(p) for name, p in trained(model).items()}, mesh_text)
            zero(model)
            for name in self.adapters:
                load_adapter(model, folder / "adapter", name)
            loaded = over_stages({name: full(p) for name, p in trained(model).items()}, mesh_text)
        return Outcome(losses, adapters, drawn, extra, loaded)


def _lora(**settings: Any) -> LoraConfig:
    """LoRA with dropout, which drops the same elements on every mesh from the count of forwards on."""
    return LoraConfig(**{"r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "task_type": "CAUSAL_LM", **settings})


def fused_and_a_norm(_: Path) -> nn.Module:
    """Build adapters on fused layers, and a norm that trains and is in no adapter."""
    model = get_peft_model(bases.gpt2(), _lora(target_modules=["c_attn", "attn.c_proj"]))
    bases.fill_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "ln_f" in name)
    return model


def two_adapters(_: Path) -> nn.Module:
    """Build two adapters, of which one gets no gradient and has no state."""
    model = get_peft_model(bases.opt(), _lora(target_modules=["q_proj", "out_proj"]))
    model.add_adapter("idle", _lora(r=1, target_modules=["v_proj"]))
    bases.fill_adapters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def an_embedding(_: Path) -> nn.Module:
    """Build an adapter that has the embedding, whose base PEFT writes too."""
    model = get_peft_model(bases.opt(), _lora(target_modules=["q_proj", "embed_tokens"]))
    bases.fill_adapters(model)
    return model


def a_head(_: Path) -> nn.Module:
    """Build an adapter that has a copy of the head, which trains."""
    model = get_peft_model(bases.opt(), _lora(target_modules=["q_proj", "out_proj"], modules_to_save=["lm_head"]))
    bases.fill_adapters(model)
    return model


def on_nf4(bases_folder: Path) -> nn.Module:
    """Build an adapter on a base in NF4."""
    model = get_peft_model(
        bases.quantised(bases_folder), _lora(target_modules=["q_proj", "o_proj"], layers_to_transform=[1])
    )
    bases.fill_adapters(model, scale=0.125)
    return model


# ---------------------------------------------------------------------- tenants

TENANTS: dict[str, dict[str, Any]] = {
    "ada": {"target_modules": ["q_proj", "v_proj"]},
    "bea": {"r": 1, "lora_dropout": 0.2, "target_modules": ["out_proj"]},
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ada": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "bea": lambda parameters: torch.optim.SGD(parameters, lr=1e-1, momentum=0.9),
}


@dataclass(frozen=True)
class TenantsJob:
    """A script that trains two tenants of one base."""

    mesh: str

    def _start(self, mesh_text: str, seed: int) -> tuple[Any, Any, TenantPool]:
        mesh, config = on_mesh(mesh_text, require_adapters=False)
        model = parallelize(bases.opt(), mesh, config).train()
        pool = TenantPool(model, shard=True)
        for number, (name, settings) in enumerate(TENANTS.items()):
            pool.add(name, _lora(**settings, init_lora_weights=False), OPTIMIZERS[name], seed + number)
        return mesh, model, pool

    @staticmethod
    def _train(mesh: Any, model: Any, pool: TenantPool, steps: range) -> list[float]:
        losses = []
        for step in steps:
            for number, name in enumerate(TENANTS):
                with pool.train(name):
                    loss = loss_of(model, share(mesh, batch(step, 1 + number)))
                    loss.backward()
                pool.step(name)
                losses.append(mean(loss))
        return losses

    @staticmethod
    def _adapters(model: Any) -> dict[str, Tensor]:
        return {name: full(p) for name, p in model.named_parameters() if "lora_" in name}

    def write(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Train, and write the tenants at step 2."""
        mesh, model, pool = self._start(mesh_text, seed=7)
        self._train(mesh, model, pool, range(SAVED))
        for name in TENANTS:
            pool.save(name, folder / name)
        return Outcome(self._train(mesh, model, pool, range(SAVED, STEPS)), self._adapters(model))

    def resume(self, mesh_text: str, bases_folder: Path, folder: Path) -> Outcome:
        """Load the tenants into others, and go on."""
        mesh, model, pool = self._start(mesh_text, seed=70)
        for name in TENANTS:
            pool.load(name, folder / name)
            assert pool.steps(name) == SAVED
        return Outcome(self._train(mesh, model, pool, range(SAVED, STEPS)), self._adapters(model))
