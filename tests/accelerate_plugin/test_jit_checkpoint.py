"""SIGTERM in the midst of a step of Trainer, on one process or on all, with `enable_jit_checkpoint=True`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from transformers.trainer_jit_checkpoint import JITCheckpointCallback
from transformers.trainer_utils import get_last_checkpoint

from tests.accelerate_plugin.harness import environment, launched
from tests.accelerate_plugin.test_trainer import make
from tests.cases import cases
from tests.oracle import dp_of, full, ranks_of, relative_error, trained

STEPS = 6


def ends(mesh: str, base: Path, output: Path, ranks: tuple[int, ...] | None, resume: str | None = None) -> Any:
    """Train with SIGTERM to some ranks in the second step's first forward; None: to nobody, and no callback."""
    settings = {"max_steps": STEPS, "eval_strategy": "no", "save_strategy": "no", "gradient_accumulation_steps": 1}
    with launched(**environment(mesh)):
        trainer = make(base, output, dp_of(mesh), enable_jit_checkpoint=ranks is not None, **settings)
        calls: list[int] = []

        def forward(*args: Any) -> None:
            calls.append(1)
            if len(calls) == 2 and dist.get_rank() in (ranks or ()):
                os.kill(os.getpid(), signal.SIGTERM)

        trainer.model.get_base_model().model.layers[1].register_forward_hook(forward)
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, JITCheckpointCallback):
                callback.jit_manager.kill_wait = 0  # seconds from the signal to the flag, 3 otherwise
        before = signal.getsignal(signal.SIGTERM)
        try:
            trainer.train(resume_from_checkpoint=resume)
        finally:
            if ranks is None:
                assert signal.getsignal(signal.SIGTERM) is before
        return trainer.state.global_step, {name: full(p) for name, p in trained(trainer.model).items()}


def stopped_and_resumed(mesh: str, base: Path, output: Path, ranks: tuple[int, ...]) -> tuple[int, list[str], float]:
    whole = ends(mesh, base, output / "whole", None)[1]
    step, _ = ends(mesh, base, output / "stopped", ranks)
    newest = get_last_checkpoint(str(output / "stopped"))
    resumed: dict[str, Tensor]
    last, resumed = ends(mesh, base, output / "resumed", None, newest)
    assert last == STEPS
    return step, sorted(os.listdir(output / "stopped")), relative_error(resumed, whole)


@pytest.mark.parametrize(
    ("mesh", "ranks"), cases(("2x1", (1,)), matrix=[("2x2", (1,)), ("2x2", (0, 1, 2, 3)), ("2x2", (0,))])
)
def test_sigterm_on_some_ranks_saves_on_all(pool, tmp_path, base, mesh, ranks):
    """Without the agreement of `jit_checkpoint.py` rank 1 would save alone, and wait for the others."""
    answers = pool.run(ranks_of(mesh), stopped_and_resumed, mesh, base, tmp_path, ranks)
    for step, folders, error in answers:
        assert 2 <= step < STEPS
        assert folders == [f"checkpoint-{step}"]
        assert error < 1e-6
        assert step == answers[0][0]
