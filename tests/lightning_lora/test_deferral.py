"""Which constructions are deferred to meta, in Trainer's hooks and in Fabric's contexts, and what comes of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.warnings import PossibleUserWarning
from peft import get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from lightning_lora import strategy_base
from lightning_lora.precision import convert_base
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import (
    ROWS,
    STEPS,
    Outcome,
    Tokens,
    check,
    fabric,
    fit,
    language_loss,
    loader,
    tidy,
    trainer,
    tuner,
)
from tests.oracle import causal_lm, fill_adapters, full, lora_config, relative_error, trained
from tests.oracle.workers import Failure, attempt

DOUBLE: dict[str, Any] = {"precision": "64-true"}


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Stand-ins for the engine's contexts; the list holds those that are open."""
    before, opened = (strategy_base.meta_init, strategy_base.defer_from_pretrained), []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        opened.append(name)
        try:
            yield
        finally:
            opened.remove(name)

    strategy_base.meta_init = lambda: note("meta_init")  # type: ignore[assignment]
    strategy_base.defer_from_pretrained = lambda: note("defer_from_pretrained")  # type: ignore[assignment]
    try:
        yield opened
    finally:
        strategy_base.meta_init, strategy_base.defer_from_pretrained = before


class Watching(tuner()):  # type: ignore[misc]
    """Builds a model anew at each `configure_model`, and notes what is open then."""

    def __init__(self, opened: list[str]) -> None:
        super().__init__(m.adapted, late=True)
        self.opened, self.seen = opened, []

    def configure_model(self) -> None:
        self.model = m.adapted()
        self.seen.append([*self.opened, torch.get_default_dtype(), next(self.model.parameters()).device.type])


EMPTY_INIT = {None: ["defer_from_pretrained"], True: ["meta_init"], False: []}


def contexts() -> dict[str, Any]:
    found: dict[str, Any] = {}
    held_out = loader(Tokens(ROWS, seed=90), "2x1")
    with tidy(), recorded() as opened:
        module = Watching(opened)
        run = trainer("2x1", max_epochs=1, **DOUBLE)
        run.fit(module, loader(Tokens(2 * ROWS), "2x1"))
        trained_on = module.model
        run.validate(module, held_out, verbose=False)
        found["configure_model"] = module.seen
        found["built anew"] = module.model is not trained_on and "val_loss" in run.callback_metrics
        launched = fabric("2x1", **DOUBLE)
        for empty_init in EMPTY_INIT:
            with warnings.catch_warnings():
                warnings.simplefilter("error", PossibleUserWarning)  # "cannot fully support": it does
                with run.init_module(empty_init=empty_init):
                    found[f"Trainer {empty_init}"] = list(opened)
            with launched.init_module(empty_init=empty_init):
                found[f"Fabric {empty_init}"] = list(opened)
        found["left open"] = opened
    return found


def test_contexts(pool):
    for found in pool.run(2, contexts):
        # In float64, on the CPU: the whole model may not fit on a device.
        assert found["configure_model"] == [["defer_from_pretrained", torch.float64, "cpu"]] * 2
        assert found["built anew"]
        for empty_init, names in EMPTY_INIT.items():
            assert found[f"Trainer {empty_init}"] == names
            assert found[f"Fabric {empty_init}"] == names
        assert not found["left open"]


def fail_on_one_rank() -> dict[str, Any]:
    """Rank 1 cannot build the model; then the process group still trains.

    Fabric's contexts belong to the user, who may enter them on one rank after the other: nothing is sent there.
    """

    def build() -> nn.Module:
        if dist.get_rank() == 1:
            raise OSError("no such model")
        return m.adapted()

    def in_fabric() -> None:
        with fabric("2x1").init_module():
            build()

    def one_after_the_other() -> None:
        run = fabric("2x1")
        with run.rank_zero_first(), run.init_module():
            m.adapted()

    with tidy():
        data = loader(Tokens(ROWS), "2x1")
        found = {
            "Trainer": attempt(trainer("2x1", max_epochs=1).fit, tuner()(build, late=True), data),
            "Fabric": attempt(in_fabric),
            "one after the other": attempt(one_after_the_other),
        }
        run = trainer("2x1", max_epochs=1)
        run.fit(tuner()(m.adapted, late=True), data)
        found["good"] = run.global_step == 1
    return found


def test_a_failed_construction_is_an_error_on_every_rank(pool):
    for rank, found in enumerate(pool.run(2, fail_on_one_rank)):
        assert found["good"]
        assert found["one after the other"] is None
        assert found["Trainer"].kind == "OSError"
        assert found["Trainer"].message == ("no such model" if rank == 1 else "on rank 1: no such model")
        assert (found["Fabric"] is None) == (rank != 1)


class Beside(tuner()):  # type: ignore[misc]
    """A frozen layer beside the adapted model, and a buffer, that each rank draws for itself."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        torch.manual_seed(100 + dist.get_rank())
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("noise", torch.randn(4))


def drawn_on_each_rank() -> tuple[torch.Tensor, torch.Tensor]:
    module = Beside()
    with tidy():
        trainer("2x1", max_epochs=1).fit(module, loader(Tokens(ROWS), "2x1"))
    return module.frozen.weight.clone(), module.noise.clone()


def test_what_is_beside_the_model_is_the_same_on_every_rank(pool):
    first, *others = pool.run(2, drawn_on_each_rank)
    for weight, noise in others:
        assert torch.equal(weight, first[0])
        assert torch.equal(noise, first[1])


# ---------------------------------------------------------------------- from_pretrained


def pretrained(folder: str) -> nn.Module:
    """As scripts have it; adapters are filled so that they differ from zero."""
    model = get_peft_model(LlamaForCausalLM.from_pretrained(f"{folder}/student"), lora_config())
    fill_adapters(model)
    return model


class Distillation(tuner()):  # type: ignore[misc]
    """An existing `configure_model`: two checkpoints, of which one is trained."""

    def __init__(self, folder: str) -> None:
        super().__init__(lambda: pretrained(folder), late=True, loss=m.distillation)
        self.folder, self.deferred = folder, []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build()
            self.teacher = LlamaForCausalLM.from_pretrained(f"{self.folder}/teacher").requires_grad_(False).eval()
            self.deferred = [
                each.model.embed_tokens.weight.is_meta for each in (self.model.get_base_model(), self.teacher)
            ]


def distil(mesh: str | None, folder: str) -> tuple[Outcome, list[bool]]:
    with tidy():
        module = Distillation(folder)
        return fit(module, mesh, **DOUBLE), module.deferred


def fabric_loop(folder: str, empty_init: bool | None) -> tuple[dict[str, torch.Tensor], set[str], list[str]]:
    """Train a model from `init_module`; return its adapters, the devices that it was on, and what was warned."""
    with tidy(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run = fabric("1x2", **DOUBLE)
        with run.init_module(empty_init=empty_init):
            model = pretrained(folder)
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        devices = {"meta" if p.is_meta else p.device.type for p in model.parameters()}
        model, made = run.setup(model.train(), made)
        for batch in loader(Tokens(STEPS * ROWS), "1x2"):
            made.zero_grad()
            run.backward(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)
            made.step()
        adapters = {name: full(p) for name, p in trained(model.module).items()}
        return adapters, devices, [str(each.message) for each in warned]


def save_models(folder: str) -> None:
    for name, seed in (("student", 0), ("teacher", 4)):
        causal_lm(dtype=torch.float32, seed=seed).save_pretrained(f"{folder}/{name}")


def test_configure_model_with_from_pretrained(pool, tmp_path):
    save_models(str(tmp_path))
    want, deferred = distil(None, str(tmp_path))
    assert deferred == [False, False]
    for got, deferred in pool.run(2, distil, "2x1", str(tmp_path)):
        assert deferred == [True, True]
        check(got, want)


def test_fabric_with_from_pretrained(pool, tmp_path):
    save_models(str(tmp_path))
    with tidy():
        want = fit(tuner()(lambda: pretrained(str(tmp_path)), loss=language_loss), None, **DOUBLE).adapters
    want = {name.removeprefix("model."): tensor for name, tensor in want.items()}
    for empty_init in (None, True, False):
        for got, devices, warned in pool.run(2, fabric_loop, str(tmp_path), empty_init):
            assert relative_error(got, want) <= 1e-10
            assert devices == ({"cpu"} if empty_init is False else {"cpu", "meta"})
            assert not any("different devices" in message for message in warned)


class Forgetful(tuner()):  # type: ignore[misc]
    """A frozen model on meta that nothing fills."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        with torch.device("meta"):
            self.frozen = nn.Linear(2, 2).requires_grad_(False)


def nothing_fills() -> Any:
    with tidy():
        return [attempt(trainer("2x1", max_epochs=1).fit, Forgetful(), loader(Tokens(ROWS), "2x1"))]


def test_what_nothing_fills_is_refused(pool):
    for (failure,) in pool.run(2, nothing_fills):
        assert isinstance(failure, Failure)
        assert failure.kind == "ValueError"
        assert "frozen.weight" in failure.message


@pytest.mark.parametrize(("keep", "adapters"), [(True, torch.float32), (False, torch.bfloat16)])
def test_conversion_of_a_model_on_meta(keep, adapters):
    with torch.device("meta"):
        model = m.perceptron()
    convert_base(model, torch.bfloat16, keep)
    assert all(p.is_meta for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (adapters if "lora_" in name else torch.bfloat16), name
