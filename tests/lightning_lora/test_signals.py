"""A job that is told that its time is over, by SLURM or by SIGTERM, on one rank or on all, in the midst of a step."""

from __future__ import annotations

import inspect
import os
import signal
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import (
    QUIET,
    ROWS,
    PoolRanks,
    Resumable,
    Tokens,
    loader,
    strategy,
    tidy,
    trainer,
    tuner,
)
from tests.logs import listening
from tests.oracle import full, ranks_of, trained


class Pool(PoolRanks, SLURMEnvironment):
    """This process's group as a SLURM job."""

    def validate_settings(self, *args: Any, **kwargs: Any) -> None: ...


class Told(tuner()):  # type: ignore[misc]
    """Is told on some ranks, in the midst of its second forward."""

    def __init__(self, ranks: tuple[int, ...], signal: int = signal.SIGUSR1) -> None:
        super().__init__(m.adapted)
        self.ranks, self.signal, self.calls = ranks, signal, 0
        self.model.get_base_model().model.layers[1].register_forward_hook(self.tell)

    def tell(self, *args: Any) -> None:
        self.calls += 1
        if self.calls == 2 and dist.get_rank() in self.ranks:
            os.kill(os.getpid(), self.signal)


def run(
    mesh: str, folder: str, ranks: tuple[int, ...], accumulate: int, ckpt_path: str | None = None
) -> dict[str, Tensor]:
    module = Told(ranks)
    made = pl.Trainer(
        **QUIET,
        strategy=strategy(mesh),
        plugins=[Pool(requeue_signal=signal.SIGUSR1)],
        devices=ranks_of(mesh),
        max_epochs=1,
        default_root_dir=folder,
        accumulate_grad_batches=accumulate,
    )
    made.fit(module, loader(Tokens(9 * ROWS), mesh, kind=Resumable), ckpt_path=ckpt_path)
    return {name: full(p) for name, p in trained(module).items()}


def told(mesh: str, folder: str, ranks: tuple[int, ...], accumulate: int) -> list[Any]:
    """The job that was told trains on until SLURM ends it; what it saved goes on to the same end."""
    with tidy():
        os.environ.update(SLURM_JOB_ID="123", PATH=f"{folder}:{os.environ['PATH']}")
        os.environ.pop("SLURM_ARRAY_JOB_ID", None)
        whole = run(mesh, folder, ranks, accumulate)
        resumed = run(mesh, folder, (), accumulate, "hpc")
    step = torch.load(f"{folder}/hpc_ckpt_1.ckpt/extra.pt", weights_only=True)["trainer"]["global_step"]
    return [step, all(torch.equal(resumed[name], whole[name]) for name in whole)]


@pytest.mark.parametrize(
    ("mesh", "ranks", "accumulate"),
    cases(("2x1", (1,), 3), matrix=[("2x2", (1,), 3), ("2x2", (0, 1, 2, 3), 1), ("2x2", (2,), 1)]),
)
def test_a_job_that_is_told_is_saved_and_requeued(pool, tmp_path, mesh, ranks, accumulate):
    script = tmp_path / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    script.chmod(0o755)
    for step, same in pool.run(ranks_of(mesh), told, mesh, str(tmp_path), ranks, accumulate):
        assert step == (3 if accumulate == 1 else 2)
        assert same
    assert (tmp_path / "requeued").read_text().splitlines() == ["requeue 123"]


def terminated(mesh: str, folder: str, ranks: tuple[int, ...], accumulate: int, warns: bool) -> list[Any]:
    """Train whole, train until SIGTERM, and on from there: steps saved, exit code, what was logged, equal adapters."""

    def run(ranks: tuple[int, ...], kept: list[Any], ckpt_path: str | None = None) -> dict[str, Tensor]:
        module = Told(ranks, signal.SIGTERM)
        options = {"max_epochs": 1, "default_root_dir": folder, "accumulate_grad_batches": accumulate}
        made = trainer(mesh, callbacks=kept, **options, enable_checkpointing=bool(kept))
        made.fit(module, loader(Tokens(9 * ROWS), mesh, kind=Resumable), ckpt_path=ckpt_path)
        return {name: full(p) for name, p in trained(module).items()}

    with tidy(), listening("lightning_lora.callbacks") as lines:
        whole = run((), [])
        keep = [ModelCheckpoint(folder, "stopped", save_on_exception=not warns, save_top_k=0)]
        handler = signal.getsignal(signal.SIGTERM)
        try:
            run(ranks, keep)
            code: Any = "went on"
        except SystemExit as ending:
            code = ending.code
        assert signal.getsignal(signal.SIGTERM) is handler
        if warns:
            return [code, lines, os.path.exists(f"{folder}/stopped.ckpt")]
        resumed = run((), [], f"{folder}/stopped.ckpt")
    step = torch.load(f"{folder}/stopped.ckpt/extra.pt", weights_only=True)["trainer"]["global_step"]
    return [code, lines, step, all(torch.equal(resumed[name], whole[name]) for name in whole)]


@pytest.mark.parametrize(
    ("mesh", "ranks", "accumulate"),
    cases(("2x1", (1,), 3), matrix=[("2x2", (1,), 3), ("2x2", (0, 1, 2, 3), 1), ("2x2", (0,), 1)]),
)
def test_sigterm_saves_after_the_next_step_and_ends_with_zero(pool, tmp_path, mesh, ranks, accumulate):
    """Without the agreement of `signals.py` rank 1 would leave, and the others would wait for it in a collective."""
    for answer in pool.run(ranks_of(mesh), terminated, mesh, str(tmp_path), ranks, accumulate, False):
        assert answer == [None, [], 3 if accumulate == 1 else 2, True]  # the exit code of None is 0


def test_sigterm_without_a_callback_that_saves_is_told(pool, tmp_path):
    first, *others = pool.run(2, terminated, "2x1", str(tmp_path), (1,), 1, True)
    assert first[0] is None
    assert "no callback saves it: add ModelCheckpoint(save_on_exception=True)" in first[1][0]
    assert others == [[None, [], False]]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightnings_handlers_are_registered_by_the_names_that_are_replaced(package):
    connector = import_module(f"{package}.trainer.connectors.signal_connector")._SignalConnector
    assert next(iter(inspect.signature(connector._sigterm_notifier_fn).parameters)) == "self"
    assert "self._sigterm_notifier_fn" in inspect.getsource(connector.register_signal_handlers)
    assert issubclass(import_module(f"{package}.utilities.exceptions").SIGTERMException, SystemExit)
    assert next(iter(inspect.signature(connector._slurm_sigusr_handler_fn).parameters)) == "self"
    assert "self._slurm_sigusr_handler_fn" in inspect.getsource(connector.register_signal_handlers)
    module = import_module(f"{package}.trainer.trainer")
    body = inspect.getsource(module.Trainer._run)
    assert body.index("self.strategy.setup(self)") < body.index("register_signal_handlers()")
