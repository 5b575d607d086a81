"""Ranks whose data reaches other layers inside of a block train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from lora_parallel import no_sync, parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from tests.cases import cases
from tests.lora_parallel.traffic import Traffic
from tests.oracle import differing, fill_adapters, full, half_sum_of_squares, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

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


def choosing(dtype: torch.dtype = torch.float64, zeros: bool = True) -> nn.Module:
    torch.manual_seed(0)
    heads = [f"heads.{index}" for index in range(3)]
    chosen = [f"choices.{index}.{layer}" for index in range(3) for layer in (0, 2)]
    model = get_peft_model(Choosing(), LoraConfig(r=2, target_modules=chosen, modules_to_save=heads)).to(dtype)
    fill_adapters(model)
    for name, parameter in model.named_parameters():
        if zeros and "layers.0" in name and "lora_B" in name:
            parameter.data.zero_()  # as PEFT begins: the gradient of lora_A is zero, which is not to have none
    return model.train()


# The task of each of two micro batches, by step. In the second no rank has task 0, in the third all have the same one,
# and in the fourth the second micro batch alone reaches what the first does not.
TASKS = [(0, 1), (1, 2), (2, 2), (0, 0), (1, 0), (2, 1)]


@contextmanager
def fsdp_setting(setting: Callable[[bool], None]) -> Iterator[None]:
    setting(False)
    yield
    setting(True)


def fsdp_no_sync(model: Any) -> Any:
    return fsdp_setting(model.set_requires_gradient_sync)


def everything_reduced(model: Any) -> Any:
    return nullcontext()


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
            gradients = {name: full(p.grad) for name, p in parameters.items() if p.grad is not None}
            seen |= {f"{step} {name} gradient": gradient for name, gradient in gradients.items()}
            optimizer.step()
            for name, parameter in parameters.items():
                seen[f"{step} {name} has"] = torch.tensor(name in reached)
                seen[f"{step} {name}"] = full(parameter)
            optimizer.zero_grad()
    return seen


PLAN = {"*choices.*.0": "colwise_gather_output", "*choices.*.2": "rowwise_split_input", "heads.*": "replicate"}


def choose(
    mesh_text: str, together: int, native: bool, settings: dict[str, Any], accumulate: Any = no_sync
) -> dict[str, Tensor]:
    mesh, config = on_mesh(mesh_text, tp_plan=PLAN, **settings)
    own = FSDPModule.set_reduce_scatter_unused_params
    try:
        if not native:  # as in torch before 2.13
            del FSDPModule.set_reduce_scatter_unused_params
        dtype = torch.float32 if settings else torch.float64
        return train(parallelize(choosing(dtype), mesh, config), dp_rank(mesh), together, accumulate)
    finally:
        FSDPModule.set_reduce_scatter_unused_params = own


@pytest.mark.parametrize("native", cases(False, matrix=[True]))
@pytest.mark.parametrize("mesh", cases("2x2", "2x1x1", matrix=["2x1"]))
def test_ranks_that_reach_other_layers_of_a_block_train_as_one_process(pool, mesh, native):
    for together in (1, 2):
        want = train(choosing(), None, together)
        for got in pool.run(ranks_of(mesh), choose, mesh, together, native, {}):
            flags = [name for name in want if name.endswith("has")]
            assert [name for name in flags if got[name] != want[name]] == []
            assert any(not want[name] for name in flags), "the tasks reach everything in every step"
            values = want.keys() - set(flags)
            assert relative_error({n: got[n] for n in values}, {n: want[n] for n in values}) < 1e-10


def no_all_reduce(model: Any) -> Any:
    return fsdp_setting(model.set_requires_all_reduce)


@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [("2x1", fsdp_no_sync), ("2x1", everything_reduced), ("2x1x1", no_all_reduce), ("2x1x1", everything_reduced)],
)
def test_gradients_of_two_batches_come_together(pool, mesh, accumulate):
    """By FSDP2's own settings, or reduced one after the other into what is there."""
    want = train(choosing(), None, 2)
    for got in pool.run(2, choose, mesh, 2, True, {}, accumulate):
        assert [name for name in want if name.endswith("has") and got[name] != want[name]] == []
        values = [name for name in want if not name.endswith("has")]
        assert relative_error({n: got[n] for n in values}, {n: want[n] for n in values}) < 1e-10


@pytest.mark.parametrize("accumulate", [no_sync, fsdp_no_sync])
def test_gradients_accumulated_in_another_dtype(pool, accumulate):
    settings = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    want = train(choosing(torch.float32), None, 2)
    for got in pool.run(2, choose, "2x1", 2, True, settings, accumulate):
        assert [name for name in want if name.endswith("has") and got[name] != want[name]] == []
        # Those before AdamW's first step, which is lr * sign(gradient): bfloat16 rounds some to the other side of zero.
        first = [name for name in want if name.startswith("1 ") and name.endswith("gradient")]
        assert relative_error({n: got[n] for n in first}, {n: want[n] for n in first}) < 0.03


def after_a_failure() -> dict[str, Tensor]:
    """Accumulate, fail, and go on with the next step."""
    mesh, config = on_mesh("2x1", param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = parallelize(choosing(torch.float32), mesh, config)
    data = torch.ones(3, WIDTH)
    with no_sync(model):
        model(data * 100, 0).backward()
    assert isinstance(attempt(model, data, 7), Failure)
    model(data, 1).backward()
    return {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


def fresh() -> dict[str, Tensor]:
    mesh, config = on_mesh("2x1", param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = parallelize(choosing(torch.float32), mesh, config)
    model(torch.ones(3, WIDTH), 1).backward()
    return {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


def test_what_was_accumulated_before_a_failure_is_dropped(pool):
    for got, want in zip(pool.run(2, after_a_failure), pool.run(2, fresh), strict=True):
        assert differing(got, want) == []


def two_backwards(mesh_text: str) -> list[Any]:
    """A pass that fails on its way and is followed by that of another forward, which began before."""
    mesh, config = on_mesh(mesh_text)
    model = parallelize(choosing(), mesh, config)
    data = torch.ones(3, WIDTH, dtype=torch.float64)
    fails = [True]

    def fail_once(gradient: Tensor) -> None:
        if fails:
            fails.clear()
            raise ZeroDivisionError

    def watch(block: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail_once)

    model.base_model.model.layers[0].register_forward_hook(watch)
    first, second = model(data, 0), model(data, 0)
    return [attempt(first.backward), attempt(second.backward), attempt(lambda: model(data, 0).backward())]


def test_a_backward_after_one_that_failed_is_refused_until_the_next_forward(pool):
    for failed, refused, third in pool.run(2, two_backwards, "2x1"):
        assert failed.kind == "ZeroDivisionError"
        assert refused.kind == "RuntimeError"
        assert "the last backward pass of this model failed" in refused.message
        assert third is None


def a_block_alone(mesh_text: str) -> list[list[str]]:
    """Name what has a gradient after a step of the whole model, after the backward of one block, and after a step."""
    mesh, config = on_mesh(mesh_text)
    model = parallelize(choosing(), mesh, config)
    data = torch.ones(3, WIDTH, dtype=torch.float64)
    found = []
    for call in (
        lambda: model(data, 0),
        lambda: model.base_model.model.layers[1](data, 1).sum(),
        lambda: model(data, 2),
    ):
        call().backward()
        found.append([name for name, p in trained(model).items() if p.grad is not None])
        model.zero_grad()
    return found


def test_a_block_by_itself_gives_gradients_to_nothing_else(pool):
    for _, alone, whole in pool.run(2, a_block_alone, "2x1"):
        assert alone
        assert all("layers.1.choices.1" in name for name in alone)
        assert whole
        assert all(".2." in name for name in whole)


def penalised(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a batch that does not reach everything, with a loss term that does."""
    penalty = sum(half_sum_of_squares(parameter) for parameter in trained(model).values())
    (model(torch.ones(3, WIDTH, dtype=torch.float64), 0) + penalty).backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def penalised_on(mesh_text: str) -> dict[str, Tensor]:
    mesh, config = on_mesh(mesh_text, tp_plan=PLAN)
    return penalised(parallelize(choosing(zeros=False), mesh, config))


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2"]))
def test_a_loss_term_of_the_parameters_reaches_them_all(pool, mesh):
    want = penalised(choosing(zeros=False))
    for got in pool.run(ranks_of(mesh), penalised_on, mesh):
        assert relative_error(got, want) < 1e-12


class Sometimes(nn.Module):
    """A block that batches of one kind run."""

    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = Block(), Block()

    def forward(self, x: Tensor, image: bool) -> Tensor:
        return self.text(self.image(x, 0) if image else x, 0).pow(2).mean()


def reductions_of(kinds: list[bool]) -> list[int]:
    mesh, config = on_mesh("2x1")
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["choices.0.0"])
    model = parallelize(get_peft_model(Sometimes(), lora).double(), mesh, config)
    counts = []
    for image in kinds:
        with Traffic() as traffic:
            model(torch.ones(3, WIDTH, dtype=torch.float64), image).backward()
        counts.append(traffic.count("reduce_scatter"))
    return counts


def test_a_block_that_no_rank_runs_reduces_nothing(pool):
    for counts in pool.run(2, reductions_of, [False, True, False, True]):
        assert counts == [1, 2, 1, 2]


class HalfUsed(nn.Module):
    """Two blocks with tied layers, of which only the second block runs its own (as Zamba2's blocks do)."""

    _no_split_modules: ClassVar[list[str]] = ["Block"]

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.layers[0].choices[1][0].weight = self.layers[1].choices[1][0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x, 0), 1).pow(2).mean()


def half_used(mesh_text: str | None) -> list[list[str]]:
    """Name what has a gradient after each of two steps."""
    torch.manual_seed(0)
    model = get_peft_model(HalfUsed(), LoraConfig(r=2, target_modules=["choices.0.0", "choices.1.0"])).double()
    if mesh_text is not None:
        model = parallelize(model, *on_mesh(mesh_text))
    found = []
    for _ in range(2):
        model(torch.ones(3, WIDTH, dtype=torch.float64)).backward()
        found.append([name for name, p in trained(model).items() if p.grad is not None])
        model.zero_grad()
    return found


def test_a_tied_layer_that_does_not_run_has_no_gradient(pool):
    """FSDP2 has one unit for tied layers, and sends zeros for those that do not run."""
    want = half_used(None)
    assert not any("layers.0.choices.1" in name for name in want[0])
    assert pool.run(2, half_used, "2x1") == [want, want]


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
