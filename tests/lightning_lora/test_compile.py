"""Compiled training under the strategy: the option, and modules that arrive compiled as a whole."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer import trainer as lightning_trainer
from torch._dynamo.utils import counters

from lora_parallel.distributed.torch_private import without_compile
from lora_parallel.runtime import compiled_blocks
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import (
    ROWS,
    STEPS,
    Gradients,
    Outcome,
    Tokens,
    check,
    fabric,
    finish,
    fit,
    loader,
    tidy,
    trainer,
    tuner,
)
from tests.logs import listening
from tests.oracle.workers import Failure, attempt

Tuner = tuner()
DOUBLE: dict[str, Any] = {"precision": "64-true"}
BACKEND: dict[str, Any] = {"backend": "aot_eager"}


class CompilesItself(Tuner):  # type: ignore[misc,valid-type]
    """Torch's way to compile a model, in the module's own code."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        self.model = torch.compile(self.model, **BACKEND)


class CompilesTooLate(Tuner):  # type: ignore[misc,valid-type]
    def on_fit_start(self) -> None:
        self.model.compile()


def whole_module() -> Outcome:
    module, watch = Tuner(m.adapted), Gradients()
    run = trainer("1x2", callbacks=[watch], max_epochs=1, **DOUBLE)
    run.fit(torch.compile(module, **BACKEND), loader(Tokens(STEPS * ROWS), "1x2"))
    return finish(module, run, watch.outcome)


def ways() -> dict[str, Any]:
    """By way of asking for it: what training comes to, how many graphs it took, and what was logged."""
    found: dict[str, Any] = {}
    kinds: dict[str, Any] = {
        "option": lambda: fit(Tuner(m.adapted), "1x2", lora={"compile": {**BACKEND, "fullgraph": True}}, **DOUBLE),
        "in the module": lambda: fit(CompilesItself(), "1x2", **DOUBLE),
        "the module": whole_module,
    }
    for name, run in kinds.items():
        torch.compiler.reset()
        counters.clear()
        with listening(compiled_blocks.__name__) as told:
            outcome = attempt(run)
        found[name] = outcome, counters["stats"]["unique_graphs"], told
    with tidy():
        late = trainer("1x2", max_epochs=1, **DOUBLE)
        found["too late"] = attempt(late.fit, CompilesTooLate(m.adapted), loader(Tokens(8), "1x2"))
        run = fabric("1x2", precision="64-true")
        model = run.setup(torch.compile(m.adapted(), **BACKEND))
        found["fabric"] = attempt(model, input_ids=torch.arange(24).view(2, -1))
    return found


def compiled_parts_of_a_fit() -> tuple[list[str], bool]:
    """Names of what is compiled as a whole, and whether blocks are, where no batch is trained on."""
    module = CompilesItself()
    with tidy():
        trainer("1x2", max_epochs=1, limit_train_batches=0, **DOUBLE).fit(module, loader(Tokens(8), "1x2"))
    whole = [name for name, inner in module.named_modules() if without_compile(inner) is not None]
    return whole, bool(compiled_blocks.compiled_parts(module))


def test_a_model_that_the_module_compiles_is_compiled_by_blocks(pool):
    assert pool.run(2, compiled_parts_of_a_fit) == [([], True)] * 2


@pytest.mark.matrix
def test_every_way_to_ask_for_compiled_blocks(pool):
    want: Outcome = fit(Tuner(m.adapted), None, **DOUBLE)
    for rank, found in enumerate(pool.run(2, ways)):
        for name in ("option", "in the module", "the module"):
            got, graphs, told = found[name]
            assert not isinstance(got, Failure), f"{name}:\n{got.trace}"
            check(got, want)
            assert graphs > 0, name
            assert (len(told) == 1) == (rank == 0 and name != "option"), (name, told)
        for name in ("too late", "fabric"):
            assert isinstance(found[name], Failure)
            assert "torch.compile cannot trace a sharded model as a whole" in found[name].message, found[name].trace


def test_other_strategies_treat_a_compiled_module_as_before():
    """What is wrapped is Lightning's private code: if it is renamed or asks for more, this says so."""
    module = torch.compile(Tuner(m.adapted), **BACKEND)
    bare = lightning_trainer._maybe_unwrap_optimized(module)
    assert bare._compiler_ctx is not None
    lightning_trainer._verify_strategy_supports_compile(bare, SingleDeviceStrategy())
    with pytest.raises(RuntimeError, match="incompatible with the current strategy"):
        lightning_trainer._verify_strategy_supports_compile(bare, object())
    assert isinstance(bare, pl.LightningModule)
