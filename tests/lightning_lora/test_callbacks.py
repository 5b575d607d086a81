"""The user's callbacks stay whatever their classes are called; ours is there during the fit alone."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Tokens, loader, tidy, trainer, tuner
from tests.oracle.workers import Failure, attempt


def namesakes() -> list[Any]:
    """Callbacks of the user's that are called like ours, and like those of Lightning's that are refused."""
    seen: list[str] = []

    def started(self: Any, trainer: Any, pl_module: Any) -> None:
        seen.append(type(self).__name__)

    names = ("Signals", "WeightAveraging", "BaseFinetuning")
    return [seen, *(type(name, (pl.Callback,), {"on_train_start": started})() for name in names)]


class Looks(pl.Callback):
    """Copies the Trainer's callbacks in a hook, and keeps the dictionary of another."""

    def __init__(self) -> None:
        self.copied: Any = None
        self.pickled: Any = None
        self.checkpoint: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.copied = attempt(lambda: len(copy.deepcopy(trainer.callbacks)))
        written = [each for each in trainer.callbacks if each is self or type(each).__module__ != __name__]
        self.pickled = attempt(pickle.dumps, written)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.checkpoint = checkpoint


def fitted(folder: str) -> dict[str, Any]:
    seen, *own = namesakes()
    looks = Looks()
    with tidy():
        made = trainer("2x1", callbacks=[*own, looks], max_steps=2, default_root_dir=folder)
        before = list(made.callbacks)
        made.fit(tuner()(m.adapted), loader(Tokens(4 * ROWS), "2x1"))
        made.save_checkpoint(f"{folder}/kept.ckpt")
        handlers = sorted(vars(made._signal_connector))
    return {
        "seen": seen,
        "same callbacks": made.callbacks == before,
        "copied": looks.copied,
        "pickled": looks.pickled if isinstance(looks.pickled, Failure) else None,
        "handlers": [name for name in handlers if name.endswith("_fn")],
        "keys": sorted(looks.checkpoint),
    }


def test_callbacks_of_the_user_stay_and_ours_goes(pool, tmp_path):
    for found in pool.run(2, fitted, str(tmp_path)):
        assert found["seen"] == ["Signals", "WeightAveraging", "BaseFinetuning"]
        assert found["same callbacks"]
        assert found["copied"] >= 5, "three namesakes, the one that copies, and ours"
        assert found["pickled"] is None
        assert found["handlers"] == []
        assert {"state_dict", "optimizer_states", "callbacks", "loops"} <= set(found["keys"])


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_refused_callbacks_are_in_lightnings_own_packages(package):
    callbacks = import_module(f"{package}.callbacks")
    for name in ("StochasticWeightAveraging", "WeightAveraging", "ModelPruning", "BaseFinetuning"):
        assert getattr(callbacks, name).__module__.split(".")[0] == package.split(".")[0]
