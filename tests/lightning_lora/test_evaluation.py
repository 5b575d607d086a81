"""Evaluation asks for no adapters; the fit of the same module, or its first training forward, does."""

from __future__ import annotations

import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric

from lightning_lora import FabricLoRAParallelStrategy, LoRAParallelStrategy
from tests.cases import cases
from tests.lightning_lora.harness import ROWS, Tokens, environment, loader, strategy, tidy, trainer, tuner
from tests.oracle import causal_lm
from tests.oracle.workers import attempt

LACKS = "has no PEFT layers and no lora_config is given"


def validated(mesh: str | None) -> dict[str, Any]:
    module = tuner()(causal_lm_of_float32)
    with tidy():
        made = trainer(mesh, max_steps=1)
        found = {"loss": list(made.validate(module, loader(Tokens(2 * ROWS), mesh), verbose=False))}
        if mesh is not None:
            found["fit"] = attempt(made.fit, module, loader(Tokens(2 * ROWS), mesh))
    return found


def causal_lm_of_float32() -> Any:
    return causal_lm(dtype=torch.float32)


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1"]))
def test_validation_of_a_bare_model_and_the_refusal_of_its_fit(pool, mesh):
    want = validated(None)
    for got in pool.run(2, validated, mesh):
        assert got["loss"][0] == pytest.approx(want["loss"][0], rel=1e-5)
        assert LACKS in got["fit"].message


def in_fabric(mesh: str) -> dict[str, Any]:
    batch = torch.arange(24).view(2, 12)
    with tidy():
        fabric = Fabric(
            accelerator="cpu",
            devices=2,
            strategy=strategy(mesh, kind="FabricLoRAParallelStrategy"),
            plugins=[environment()],
        )
        fabric.launch()
        model = fabric.setup_module(causal_lm_of_float32())
        with torch.no_grad():
            found = {"evaluated": model.eval()(input_ids=batch, labels=batch).loss.item()}
        found["trained"] = attempt(model.train(), input_ids=batch)
        found["optimized"] = attempt(fabric.setup_optimizers, torch.optim.SGD(model.parameters(), 0.1))
        bare = causal_lm_of_float32()
        found["both"] = attempt(fabric.setup, bare, torch.optim.SGD(bare.parameters(), 0.1))
    return found


def test_fabric_asks_for_adapters_where_a_model_trains(pool):
    batch = torch.arange(24).view(2, 12)
    loss = causal_lm_of_float32()(input_ids=batch, labels=batch).loss.item()
    for got in pool.run(2, in_fabric, "1x2"):
        assert got["evaluated"] == pytest.approx(loss, rel=1e-5)
        for name in ("trained", "optimized", "both"):
            assert LACKS in got[name].message, name


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trainer_can_be_pickled(precision):
    made = pl.Trainer(accelerator="cpu", devices=1, strategy=LoRAParallelStrategy(), precision=precision, logger=False)
    copy = pickle.loads(pickle.dumps(made))
    assert type(copy.strategy) is LoRAParallelStrategy
    assert copy.strategy.precision_plugin.precision == precision
    assert copy.strategy.config == made.strategy.config
    assert pickle.dumps(FabricLoRAParallelStrategy())
