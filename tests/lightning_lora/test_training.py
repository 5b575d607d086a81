"""Plain Lightning in one process against the strategy on a mesh: same losses, same gradients, same adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from peft import get_peft_model, prepare_model_for_kbit_training

from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import (
    ROWS,
    STEPS,
    Outcome,
    Points,
    Tokens,
    check,
    fit,
    loader,
    tidy,
    trainer,
    tuner,
)
from tests.oracle import fill_adapters, full, ranks_of, trained
from tests.oracle.quantised_rows import ROUNDING_OF_PRODUCTS, quantised

Tuner = tuner()
DOUBLE: dict[str, Any] = {"precision": "64-true"}


def in_init(mesh: str | None) -> Outcome:
    return fit(Tuner(m.adapted), mesh, **DOUBLE)


def in_configure_model(mesh: str | None) -> Outcome:
    return fit(Tuner(m.adapted, late=True), mesh, **DOUBLE)


def peft_layers_without_peft_model(mesh: str | None) -> Outcome:
    return fit(Tuner(m.injected), mesh, **DOUBLE)


def from_lora_config(mesh: str | None) -> Outcome:
    """The adapter comes from the strategy; in the oracle from `get_peft_model` after the same seed."""
    pl.seed_everything(m.SEED)
    if mesh is None:
        return fit(Tuner(m.plain_with_peft), None, **DOUBLE)
    return fit(Tuner(m.plain), mesh, lora={"lora_config": m.random_lora()}, **DOUBLE)


def plain_module(mesh: str | None) -> Outcome:
    """No plan of its own, float inputs that Lightning converts."""
    module = Tuner(m.perceptron, loss=m.squared_error)
    return fit(module, mesh, dataset=Points(STEPS * ROWS), lora={"tp_plan": m.PLAN}, **DOUBLE)


def plain_module_as_built(mesh: str | None) -> Outcome:
    """The same in a float64 that the user chose: nothing is converted."""
    module = Tuner(
        m.perceptron, loss=lambda self, batch: m.squared_error(self, {k: v.double() for k, v in batch.items()})
    )
    return fit(module.double(), mesh, dataset=Points(STEPS * ROWS), lora={"tp_plan": m.PLAN})


def unseeded(mesh: str | None) -> Outcome:
    return fit(Tuner(m.unseeded), mesh, **DOUBLE)


def frozen_teacher(mesh: str | None) -> Outcome:
    return fit(m.Distillation(), mesh, **DOUBLE)


def two_adapted_models(mesh: str | None) -> Outcome:
    return fit(m.Pair(), mesh, **DOUBLE)


def manual(mesh: str | None) -> Outcome:
    return fit(m.Manual(), mesh, **DOUBLE)


def toggled(mesh: str | None) -> Outcome:
    return fit(m.Toggled(), mesh, **DOUBLE)


def accumulated(mesh: str | None) -> Outcome:
    """Eight microbatches make three steps, the last of two."""
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05, **DOUBLE}
    return fit(Tuner(m.adapted), mesh, dataset=Tokens(8 * ROWS), **options)


def clipped_by_norm(mesh: str | None) -> Outcome:
    return fit(Tuner(m.adapted), mesh, gradient_clip_val=0.05, **DOUBLE)


def clipped_by_value(mesh: str | None) -> Outcome:
    return fit(Tuner(m.adapted), mesh, gradient_clip_val=1e-3, gradient_clip_algorithm="value", **DOUBLE)


def fused(mesh: str | None) -> Outcome:
    """An optimizer that takes all parameters in one kernel, whatever mesh each is on."""
    return fit(Tuner(m.adapted, optimizer=lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)), mesh, **DOUBLE)


def on_full_tensors(mesh: str | None) -> Outcome:
    """An optimizer that takes means over rows and columns; Lightning gives its step a closure."""
    module = Tuner(m.adapted, optimizer=lambda p, lr: torch.optim.Adafactor(p, lr=lr))
    return fit(module, mesh, accumulate_grad_batches=2, gradient_clip_val=0.05, **DOUBLE)


def recomputed(mesh: str | None) -> Outcome:
    return fit(Tuner(m.adapted), mesh, lora={"activation_checkpointing": True}, **DOUBLE)


def loss_from_slices(mesh: str | None) -> Outcome:
    """The user's own loss, of logits that stay in slices."""

    def loss(module: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = module.model(input_ids=batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    return fit(Tuner(m.adapted, loss=loss), mesh, lora={"loss_parallel": True}, **DOUBLE)


def fit_twice(mesh: str | None) -> Outcome:
    """One Trainer, trained on; then a second Trainer on the same module."""
    module = Tuner(m.adapted)
    run = trainer(mesh, max_epochs=1, **DOUBLE)
    run.fit(module, loader(Tokens(2 * ROWS), mesh))
    run.fit_loop.max_epochs = 2
    run.fit(module, loader(Tokens(2 * ROWS, seed=6), mesh))
    assert run.global_step == 4
    second = fit(module, mesh, steps=2, dataset=Tokens(2 * ROWS, seed=7), **DOUBLE)
    assert len(second.losses) == 6
    return second


def float32(mesh: str | None) -> Outcome:
    return fit(Tuner(m.adapted), mesh, steps=10, gradient_clip_val=1.0)


def adapted_quantised(kind: str, prepare: bool, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    base = quantised(kind, dtype=dtype)
    if prepare:
        base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    model = get_peft_model(base, m.lora_config())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    fill_adapters(model)
    return model.train()  # on some processors bitsandbytes rounds the weights anew in evaluation


def four_bits(mesh: str | None) -> Outcome:
    """QLoRA as its authors' recipe has it; on a mesh each rank quantises its slices."""
    return fit(Tuner(partial(adapted_quantised, "nf4, double", prepare=True), late=True), mesh)


def eight_bits_in_memory(mesh: str | None) -> Outcome:
    return fit(Tuner(partial(adapted_quantised, "torchao float8", prepare=False, dtype=torch.float64)), mesh)


Case = Callable[[Any], Outcome]
FLOATS: dict[Case, float] = {float32: 1e-5, four_bits: ROUNDING_OF_PRODUCTS}
"""Cases that compute in float32, with the largest relative error of a gradient."""

EVERYWHERE: list[Case] = [in_init, from_lora_config, manual, accumulated, clipped_by_norm]
CASES: dict[str, list[Case]] = {
    "2x2": [
        *EVERYWHERE,
        in_configure_model,
        peft_layers_without_peft_model,
        plain_module,
        plain_module_as_built,
        unseeded,
        frozen_teacher,
        two_adapted_models,
        toggled,
        clipped_by_value,
        fused,
        on_full_tensors,
        recomputed,
        loss_from_slices,
        fit_twice,
        *FLOATS,
        eight_bits_in_memory,
    ],
    "2x1": [*EVERYWHERE, unseeded, plain_module_as_built],
    "1x2": [*EVERYWHERE, unseeded, plain_module_as_built, clipped_by_value, fused],
    "1x1cp2": [*EVERYWHERE, unseeded, frozen_teacher, recomputed, loss_from_slices, fit_twice],
    "1x2cp2": [in_init, manual, accumulated, clipped_by_norm, loss_from_slices],
    "1x4": [in_init, frozen_teacher, manual, accumulated],
    "2x2x2": [in_init, from_lora_config, manual, accumulated, unseeded],
}


def run_case(case: Case, mesh: str | None) -> Outcome:
    with tidy():
        return case(mesh)


oracle = cache(lambda case: run_case(case, None))


def without_peft_prefix(outcome: Outcome) -> Outcome:
    """Names as they are where the adapter was injected into a bare model."""
    for attribute in ("raw", "gradients", "adapters"):
        named = getattr(outcome, attribute)
        setattr(outcome, attribute, {name.replace("base_model.model.", ""): t for name, t in named.items()})
    return outcome


ON_TWO_RANKS: dict[str, list[Case]] = {
    "2x1": [
        accumulated,
        unseeded,
        two_adapted_models,
        toggled,
        on_full_tensors,
        recomputed,
        fit_twice,
        eight_bits_in_memory,
    ],
    "1x2": [
        manual,
        clipped_by_value,
        fused,
        in_configure_model,
        from_lora_config,
        plain_module_as_built,
        frozen_teacher,
        loss_from_slices,
        four_bits,
    ],
}
FEW = [("2x2", in_init), *((mesh, case) for mesh, chosen in ON_TWO_RANKS.items() for case in chosen)]


@pytest.mark.parametrize(
    ("mesh", "case"),
    cases(
        *FEW,
        matrix=[(mesh, case) for mesh, chosen in CASES.items() for case in chosen if (mesh, case) not in FEW],
    ),
)
def test_training_equals_plain_lightning(pool, mesh, case):
    want = without_peft_prefix(oracle(case))
    for got in pool.run(ranks_of(mesh), run_case, case, mesh):
        check(without_peft_prefix(got), want, close=FLOATS.get(case, 1e-12))


def test_clipping_and_values_bind():
    """The oracle's own runs: each limit is one that the gradients exceed."""
    raw, clipped = oracle(clipped_by_norm).raw, oracle(clipped_by_norm).gradients
    assert total_norm(raw) > 0.1
    assert total_norm(clipped) == pytest.approx(0.05, rel=1e-4)
    by_value = oracle(clipped_by_value)
    assert max(g.abs().max().item() for g in by_value.raw.values()) > 1e-3
    assert max(g.abs().max().item() for g in by_value.gradients.values()) == 1e-3


def total_norm(gradients: dict[str, torch.Tensor]) -> float:
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()


def start(mesh: str | None) -> dict[str, torch.Tensor]:
    """The adapter as training starts, default initialisation."""
    seen: dict[str, torch.Tensor] = {}

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.update({name: full(p) for name, p in trained(pl_module.model).items()})

    with tidy():
        pl.seed_everything(m.SEED)
        options = {"lora_config": m.lora_config()} if mesh else {}
        run = trainer(mesh, options, max_steps=1, callbacks=[Look()])
        if mesh is None:
            base = m.plain()
            torch.manual_seed(m.SEED)
            module = Tuner(lambda: m.get_peft_model(base, m.lora_config()))
        else:
            module = Tuner(m.plain)
        run.fit(module, loader(Tokens(ROWS), mesh))
    return {name.replace("base_model.model.", ""): tensor for name, tensor in seen.items()}


def test_injected_adapters_start_bit_identical(pool):
    want = start(None)
    for got in pool.run(4, start, "2x2"):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
        assert not any(tensor.any() for name, tensor in got.items() if "lora_B" in name)
