"""Precision flags: what is stored, what is computed in, and how close the result is."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from peft import get_peft_model
from torch import Tensor, nn

from lightning_lora import LoRAParallelStrategy
from lora_parallel.adapters.inspection import adapter_parameters
from tests.cases import cases
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Outcome, Points, Tokens, fit, loader, tidy, trainer, tuner
from tests.oracle import causal_lm, fill_adapters, lora_config, ranks_of

Tuner = tuner()
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def stored(model: nn.Module) -> dict[str, set[torch.dtype]]:
    """The dtypes of base weights, adapters and rotary tables."""
    adapters = set(adapter_parameters(model).values())
    return {
        "base": {p.dtype for p in model.parameters() if p not in adapters},
        "adapters": {p.dtype for p in adapters},
        "rotary": {buffer.dtype for name, buffer in model.named_buffers() if name.endswith("inv_freq")},
    }


def dtypes(mesh: str | None, precision: str | None, build: Any = m.adapted, **lora: Any) -> dict[str, Any]:
    """What a fit stored, what it computed in, and the state that the optimizer kept."""
    module = Tuner(build)
    computed: dict[str, torch.dtype] = {}

    def note(layer: nn.Module, args: Any, output: Tensor) -> None:
        computed["layer"] = output.dtype

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            layer = next(layer for name, layer in pl_module.named_modules() if name.endswith("layers.1.mlp.up_proj"))
            layer.register_forward_hook(note)

    with tidy():
        run = trainer(mesh, lora, precision=precision, max_epochs=1, callbacks=[Look()])
        run.fit(module, loader(Tokens(2 * ROWS), mesh))
        states = run.optimizers[0].state.values()
        found = stored(module.model)
        found["moments"] = {state["exp_avg"].dtype for state in states}
        found["gradients"] = {p.grad.dtype for p in module.parameters() if p.grad is not None}
        found["computed"] = computed["layer"]
        found["tables"] = [b.clone() for n, b in module.model.named_buffers() if n.endswith("inv_freq")]
        found["default"] = torch.get_default_dtype()
    return found


EXPECTED: dict[str, dict[str, Any]] = {
    "32-true": {"base": FP32, "adapters": FP32, "computed": FP32},
    "64-true": {"base": FP64, "adapters": FP64, "computed": FP64},
    "bf16-true": {"base": BF16, "adapters": FP32, "computed": BF16},
    "bf16-mixed": {"base": FP32, "adapters": FP32, "computed": BF16},
}


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2", "1x2", "1x1"]))
def test_what_is_stored(pool, mesh):
    table = m.adapted().get_buffer("base_model.model.model.rotary_emb.inv_freq")
    for precision, expected in EXPECTED.items():
        for found in pool.run(ranks_of(mesh), dtypes, mesh, precision):
            assert found["base"] == {expected["base"]}, precision
            assert found["adapters"] == {expected["adapters"]}, precision
            assert found["moments"] == {expected["adapters"]}, precision
            assert found["gradients"] == {expected["adapters"]}, precision
            assert found["computed"] is expected["computed"], precision
            assert found["default"] is FP32
            assert found["rotary"] == {FP32}
            assert all(torch.equal(each, table) for each in found["tables"])


def injected(mesh: str) -> list[dict[str, Any]]:
    """bf16-true where the strategy injects the adapters, and where the user wants them in bfloat16."""
    injected = dtypes(mesh, "bf16-true", m.plain, lora_config=lora_config())
    narrow = dtypes(mesh, "bf16-true", m.plain, lora_config=lora_config(), autocast_adapter_dtype=False)
    own = dtypes(mesh, "bf16-true", autocast_adapter_dtype=False)
    return [injected, narrow, own]


def test_adapters_of_a_bfloat16_base(pool):
    for wide, narrow, own in pool.run(2, injected, "2x1"):
        assert [found["base"] for found in (wide, narrow, own)] == [{BF16}] * 3
        assert wide["adapters"] == {FP32}
        assert narrow["adapters"] == {BF16}
        assert own["adapters"] == {BF16}


# ---------------------------------------------------------------------- how close


class Repeated(Tokens):
    """One global batch again and again: the loss falls by more than the tolerance."""

    def __len__(self) -> int:
        return 10 * ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index % ROWS)


def ten_steps(mesh: str | None, precision: str | None, build: Any = m.adapted) -> Outcome:
    with tidy():
        return fit(Tuner(build, lr=3e-3), mesh, steps=10, dataset=Repeated(ROWS), precision=precision)


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2", "2x1", "2x2x2"]))
def test_bf16_mixed_equals_one_rank(pool, mesh):
    """Against our own 1x1 run under the same policy; and it is not the float32 run."""
    (want,) = pool.run(1, ten_steps, "1x1", "bf16-mixed")
    assert want.losses[0] - want.losses[-1] > 0.05
    assert want.losses != ten_steps(None, None).losses
    for got in pool.run(ranks_of(mesh), ten_steps, mesh, "bf16-mixed"):
        assert got.losses == pytest.approx(want.losses, abs=1e-2)
        assert all(tensor.dtype is FP32 for tensor in got.adapters.values())


def half_base() -> nn.Module:
    """PEFT on a bfloat16 base whose rotary tables are not rounded: float32 adapters."""
    base = causal_lm(dtype=FP32)
    tables = {name: buffer.clone() for name, buffer in base.named_buffers()}
    base.to(BF16)
    for name, buffer in base.named_buffers():
        buffer.data = tables[name]
    model = get_peft_model(base, lora_config())
    fill_adapters(model)
    return model


@cache
def peft_on_bfloat16() -> Outcome:
    return ten_steps(None, None, half_base)


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2", "1x4"]))
def test_bf16_true_follows_peft(pool, mesh):
    """One process of PEFT with the same dtypes; bfloat16 activations differ in their last bits."""
    want = peft_on_bfloat16()
    assert want.losses[0] - want.losses[-1] > 0.05
    for got in pool.run(ranks_of(mesh), ten_steps, mesh, "bf16-true"):
        assert got.losses == pytest.approx(want.losses, abs=1e-2)


def float_inputs(precision: str) -> list[Any]:
    """The dtype in which float inputs reach a model, and new tensors that a step makes."""
    seen: list[Any] = []

    def loss(module: Any, batch: dict[str, Tensor]) -> Tensor:
        seen.append((batch["x"].dtype, torch.zeros(()).dtype))
        return m.squared_error(module, batch)

    with tidy():
        run = trainer("1x2", {"tp_plan": m.PLAN}, precision=precision, max_epochs=1)
        run.fit(Tuner(m.perceptron, loss=loss), loader(Points(ROWS), "1x2"))
    return seen


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", FP64), ("bf16-true", BF16), ("32-true", FP32)])
def test_float_inputs_are_converted(pool, precision, dtype):
    """As with Lightning's own plugins."""
    for seen in pool.run(2, float_inputs, precision):
        assert seen == [(dtype, dtype)]


def outside(precision: str) -> list[torch.dtype]:
    """The dtypes of a frozen second model and of a buffer of the LightningModule."""
    module = m.Distillation()
    module.register_buffer("temperature", torch.ones(()))
    with tidy():
        trainer("2x1", precision=precision, max_epochs=1).fit(module, loader(Tokens(ROWS), "2x1"))
    return [*{p.dtype for p in module.teacher.parameters()}, module.temperature.dtype]


@pytest.mark.parametrize(("precision", "dtype"), [("64-true", FP64), ("bf16-true", BF16), ("bf16-mixed", FP32)])
def test_what_is_not_parallelized_is_converted_too(pool, precision, dtype):
    for found in pool.run(2, outside, precision):
        assert found == [dtype, dtype]


# ---------------------------------------------------------------------- refusals


class Custom(Precision):
    """Somebody's own plugin."""

    precision = "32-true"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "16-mixed": ({"plugins": [MixedPrecision("16-mixed", "cuda")]}, "loss scaling"),
    "16-true": ({"precision": "16-true"}, "loss scaling"),
    "half plugin": ({"plugins": [HalfPrecision("16-true")]}, "16-true"),
    "custom": ({"plugins": [Custom()]}, "Custom"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_precision(name):
    options, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason) as caught:
        pl.Trainer(
            strategy=LoRAParallelStrategy(tensor_parallel_size=2), accelerator="cpu", devices=4, logger=False, **options
        )
    assert "bf16-mixed" in str(caught.value), "no remedy"


@pytest.mark.parametrize("precision", EXPECTED)
def test_flags_are_taken(precision):
    run = pl.Trainer(strategy="lora_fsdp2_tp", accelerator="cpu", devices=4, logger=False, precision=precision)
    assert run.precision == precision
    assert isinstance(run.strategy.precision_plugin, Precision)
    assert run.strategy.precision_plugin.precision == precision
