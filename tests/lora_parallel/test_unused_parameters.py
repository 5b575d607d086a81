"""Ranks whose data reaches other layers inside of a block train as one process does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from lora_parallel import no_sync, parallelize
from lora_parallel.mesh import dp_rank, dp_size
from tests.oracle import differing, fill_adapters, full, on_mesh, ranks_of, relative_error, trained

WIDTH = 8


class Block(nn.Module):
    """Three pairs of layers, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.choices = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return x + self.choices[choice](x)


class Choosing(nn.Module):
    """Two blocks and a head for each of three tasks: a batch is of one task."""

    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 3)])

    def forward(self, x: Tensor, task: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, task)
        return self.heads[task](x).pow(2).mean()


def choosing(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    heads = [f"heads.{index}" for index in range(3)]
    chosen = [f"choices.{index}.{layer}" for index in range(3) for layer in (0, 2)]
    model = get_peft_model(Choosing(), LoraConfig(r=2, target_modules=chosen, modules_to_save=heads)).to(dtype)
    fill_adapters(model)
    return model.train()


# The task of each of two micro batches, by step. In the second no rank has task 0, in the third all have the same one,
# and in the fourth the second micro batch alone reaches what the first does not.
TASKS = [(0, 1), (1, 2), (2, 2), (0, 0), (1, 0), (2, 1)]


@contextmanager
def fsdp_no_sync(model: Any) -> Iterator[None]:
    """By FSDP2's own setting."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def train(model: nn.Module, row: int | None, together: int, accumulate: Any = no_sync) -> dict[str, Tensor]:
    """Parameters and gradients after each step of AdamW with weight decay, which no parameter without a gradient gets.

    Args:
        model: Plain, or sharded.
        row: Of two, which micro batches this rank has; None for both.
        together: How many steps' batches one step of the optimizer takes.
        accumulate: What keeps the gradients of all but the last of them from being reduced.
    """
    seen: dict[str, Tensor] = {}
    parameters = trained(model)
    calls: list[str] = []
    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(name))
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.1)
    data = torch.randn(len(TASKS), 2, 3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for step, tasks in enumerate(TASKS):
        ends = (step + 1) % together == 0
        calls.clear()
        with nullcontext() if ends or row is None else accumulate(model):
            for micro, task in enumerate(tasks) if row is None else [(row, tasks[row])]:
                loss = model(data[step, micro].to(next(iter(parameters.values())).dtype), task)
                (loss / 2 if row is None else loss).backward()
        if ends:
            reached = {name for name, parameter in parameters.items() if parameter.grad is not None}
            if together == 1:
                assert set(calls) == reached
            optimizer.step()
            for name, parameter in parameters.items():
                seen[f"{step} {name} has"] = torch.tensor(name in reached)
                seen[f"{step} {name}"] = full(parameter)
            optimizer.zero_grad()
    return seen


def choose(
    mesh_text: str, together: int, native: bool, settings: dict[str, Any], accumulate: Any = no_sync
) -> dict[str, Tensor]:
    plan = {"*choices.*.0": "colwise_gather_output", "*choices.*.2": "rowwise_split_input", "heads.*": "replicate"}
    mesh, config = on_mesh(mesh_text, tp_plan=plan, **settings)
    own = FSDPModule.set_reduce_scatter_unused_params
    try:
        if not native:  # as in torch before 2.13
            del FSDPModule.set_reduce_scatter_unused_params
        dtype = torch.float32 if settings else torch.float64
        return train(parallelize(choosing(dtype), mesh, config), dp_rank(mesh), together, accumulate)
    finally:
        FSDPModule.set_reduce_scatter_unused_params = own


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("mesh", ["2x1", "2x2", "2x1x1"])
def test_ranks_that_reach_other_layers_of_a_block_train_as_one_process(pool, mesh, native):
    for together in (1, 2):
        want = train(choosing(), None, together)
        for got in pool.run(ranks_of(mesh), choose, mesh, together, native, {}):
            flags = [name for name in want if name.endswith("has")]
            assert [name for name in flags if got[name] != want[name]] == []
            assert any(not want[name] for name in flags), "the tasks reach everything in every step"
            values = want.keys() - set(flags)
            assert relative_error({n: got[n] for n in values}, {n: want[n] for n in values}) < 1e-10


def test_gradients_that_fsdp_itself_is_told_not_to_reduce(pool):
    want = train(choosing(), None, 2)
    for got in pool.run(2, choose, "2x1", 2, True, {}, fsdp_no_sync):
        assert [name for name in want if name.endswith("has") and got[name] != want[name]] == []
        values = [name for name in want if not name.endswith("has")]
        assert relative_error({n: got[n] for n in values}, {n: want[n] for n in values}) < 1e-10


def test_gradients_accumulated_in_another_dtype(pool):
    settings = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    first, second = pool.run(2, choose, "2x1", 2, True, settings)
    want = train(choosing(torch.float32), None, 2)
    assert [name for name in want if name.endswith("has") and first[name] != want[name]] == []
    assert differing(first, second) == []


def switch() -> nn.Module:
    torch.manual_seed(0)
    config = SwitchTransformersConfig(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_sparse_encoder_layers=1, num_decoder_layers=1,
        num_sparse_decoder_layers=0, num_heads=2, num_experts=4, dropout_rate=0.0, router_jitter_noise=0.0,
        expert_capacity=100, decoder_start_token_id=0,
    )  # fmt: skip
    base = SwitchTransformersForConditionalGeneration(config).double()
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q", "v", "wi", "wo"])).double()
    fill_adapters(model)
    return model.train()


def switched(mesh_text: str | None, ids: Tensor) -> dict[str, Tensor]:
    """Gradients, of one process or on a mesh; without one, those of two ranks' batches."""
    if mesh_text is None:
        model = switch()
        for part in ids.chunk(2):
            (model(input_ids=part, labels=part).loss / 2).backward()
    else:
        mesh, config = on_mesh(mesh_text)
        model = parallelize(switch(), mesh, config)
        part = ids.chunk(dp_size(mesh))[dp_rank(mesh)]
        model(input_ids=part, labels=part).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


@pytest.mark.parametrize("mesh", ["2x1", "2x1x1"])
def test_experts_in_a_loop(pool, mesh):
    for seed in (0, 1):  # short rows: each rank's tokens reach other experts, and other numbers of them
        ids = torch.randint(4, 64, (2, 2), generator=torch.Generator().manual_seed(seed))
        want = switched(None, ids)
        assert len(want) < len(trained(switch())), "some expert is reached by no rank"
        for got in pool.run(2, switched, mesh, ids):
            assert relative_error(got, want) < 1e-10
