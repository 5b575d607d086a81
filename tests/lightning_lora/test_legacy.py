"""`pytorch_lightning`: the same strategy for the other namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from torch import Tensor

from lightning_lora.legacy import LoRAParallelStrategy
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import (
    QUIET,
    ROWS,
    STEPS,
    Outcome,
    Tokens,
    environment,
    finish,
    fit,
    loader,
    tidy,
    tuner,
)
from tests.oracle import relative_error
from tests.oracle.workers import Failure, attempt

Tuner = tuner("pytorch_lightning")


def legacy_trainer(**options: Any) -> Any:
    """`pytorch_lightning`'s Trainer with the bare name as its flag."""
    settings = {**QUIET, "strategy": "lora_fsdp2_tp", "devices": 2, "precision": "64-true", **options}
    settings["plugins"] = [environment("lightning_fabric"), *settings.get("plugins", [])]
    return pytorch_lightning.Trainer(**settings)


def train(folder: str) -> tuple[Outcome, bool, dict[str, Tensor], Any]:
    module = Tuner(m.adapted)
    with tidy():
        run = legacy_trainer(max_epochs=1, enable_checkpointing=True, default_root_dir=folder)
        assert isinstance(run.strategy, LoRAParallelStrategy)
        run.validate(module, loader(Tokens(ROWS, seed=90), "1x2"), verbose=False)
        run.fit(module, loader(Tokens(STEPS * ROWS), "1x2"), loader(Tokens(ROWS, seed=90), "1x2"))
        assert run.global_step == STEPS
        outcome = finish(module, run, Outcome())
        fresh = Tuner(m.adapted)
        again = legacy_trainer(max_epochs=1)
        again.validate(
            fresh, loader(Tokens(ROWS), "1x2"), ckpt_path=run.checkpoint_callback.best_model_path, verbose=False
        )
        loaded = finish(fresh, again, Outcome()).adapters
        refused = legacy_trainer(callbacks=[pytorch_lightning.callbacks.StochasticWeightAveraging(1e-3)])
        failure = attempt(refused.fit, Tuner(m.adapted), loader(Tokens(ROWS), "1x2"))
    return outcome, Path(run.checkpoint_callback.best_model_path, "adapter").is_dir(), loaded, failure


def test_training_equals_one_process(pool, tmp_path):
    """The oracle is `lightning`'s Trainer: the two namespaces compute the same."""
    with tidy():
        want = fit(tuner()(m.adapted), None, precision="64-true")
    for got, written, loaded, failure in pool.run(2, train, str(tmp_path)):
        assert relative_error(got.adapters, want.adapters) <= 1e-10
        assert max(abs(a - b) for a, b in zip(got.losses, want.losses, strict=True)) <= 1e-6
        assert written
        assert all(torch.equal(loaded[name], got.adapters[name]) for name in got.adapters)
        assert isinstance(failure, Failure)
        assert "StochasticWeightAveraging" in failure.message
