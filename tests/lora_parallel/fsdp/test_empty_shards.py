"""Layers with fewer features than tp ranks, and parameters without elements: FSDP2 reduces no empty gradient."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_parallel import (
    attach_checkpoint,
    clip_grad_norm_,
    load_checkpoint,
    meta_init,
    parallelize,
    save_checkpoint,
)
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.planning.plan import resolve_plan
from tests.cases import cases
from tests.oracle import full, on_mesh, ranks_of, relative_error, trained


class Block(nn.Module):
    """Gates of one, two and three features, and layers that are fed as few."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.one, self.two, self.three = nn.Linear(8, 1), nn.Linear(8, 2), nn.Linear(8, 3)
        self.of_one, self.of_three = nn.Linear(1, 8), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.one(x).sigmoid() * self.two(x).sigmoid().mean(-1, keepdim=True)
        x = x + gate * self.down(torch.tanh(self.up(x)))
        return x + self.of_one(self.one(x)) + self.of_three(torch.tanh(self.three(x)))


class Narrow(nn.Module):
    """A vocabulary of five (on four ranks 2, 2, 1 and none), one of one, and a head with one output."""

    def __init__(self) -> None:
        super().__init__()
        self.five, self.single = nn.Embedding(5, 8), nn.Embedding(1, 8)
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(8, 1)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.five(input_ids) + self.single(torch.zeros_like(input_ids))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


LINEAR = ["up", "down", "one", "two", "three", "of_one", "of_three"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "r=1, all that can train": {
        "r": 1,
        "target_modules": [*LINEAR, "five", "single"],
        "modules_to_save": ["head"],
        "bias": "all",
    },
    "DoRA": {"r": 2, "target_modules": [*LINEAR, "head"], "use_dora": True},
    "lora_bias": {"r": 3, "target_modules": LINEAR, "modules_to_save": ["single"], "lora_bias": True},
}
WRITTEN = {
    **dict.fromkeys(["*.up", "*.one", "*.two", "*.three", "head"], "colwise_gather_output"),
    **dict.fromkeys(["*.down", "*.of_one", "*.of_three"], "rowwise_split_input"),
    **dict.fromkeys(["five", "single"], "embedding_rowwise"),
}
RUNS: list[tuple[str, Any]] = [
    ("r=1, all that can train", "auto"),
    ("r=1, all that can train", WRITTEN),
    ("DoRA", "auto"),
    ("lora_bias", WRITTEN),
]


def narrow(adapter: str) -> nn.Module:
    torch.manual_seed(0)
    model = get_peft_model(Narrow().double(), LoraConfig(**ADAPTERS[adapter]))
    for name, parameter in trained(model).items():
        noise = torch.randn(parameter.shape, dtype=torch.float64) * 0.3
        parameter.data = parameter.data.double() * (1 + noise) if "magnitude" in name else noise
    return model.train()


def ids(step: int) -> Tensor:
    return torch.randint(0, 5, (8, 3), generator=torch.Generator().manual_seed(step))


def steps(model: nn.Module, optimizer: Any, numbers: Any, share: int = 0, shares: int = 1) -> dict[str, Tensor]:
    """Train; the gradients of the last step."""
    for step in numbers:
        optimizer.zero_grad()
        model(ids(step).chunk(shares)[share]).square().mean().backward()
        gradients = {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return gradients


def adam(model: nn.Module, foreach: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model).values(), lr=1e-2, foreach=foreach)


@cache
def in_one_process(adapter: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = narrow(adapter)
    optimizer = adam(model)
    first = steps(model, optimizer, [0])
    steps(model, optimizer, [1])
    return first, {name: full(p) for name, p in trained(model).items()}


def on_ranks(mesh_text: str, numbers: list[int], folder: Path, saved_on: str | None) -> dict[str, Any]:
    """By adapter and number of the run: the gradients of the first step, and what two steps come to.

    With `saved_on` the first step is that mesh's; else what it comes to is saved.
    """
    mesh, _ = on_mesh(mesh_text)
    share = dp_rank(mesh), dp_size(mesh)
    found = {}
    for number in numbers:
        adapter, plan = RUNS[number]
        _, config = on_mesh(mesh_text, tp_plan=plan, block_classes=["Block"])
        model = parallelize(narrow(adapter), mesh, config)
        optimizer = adam(model, foreach=adapter == "lora_bias")
        first = None
        if saved_on is None:
            first = steps(model, optimizer, [0], *share)
            save_checkpoint(model, optimizer, folder / f"{mesh_text}-{number}")
        else:
            with torch.no_grad():
                for parameter in trained(model).values():
                    parameter.zero_()
            load_checkpoint(model, optimizer, folder / f"{saved_on}-{number}")
        steps(model, optimizer, [1], *share)
        found[adapter, number] = first, {name: full(p) for name, p in trained(model).items()}
    return found


@pytest.fixture(scope="module")
def ran(pool, tmp_path_factory):
    """By mesh and runs: what its ranks found, and the folder of their checkpoints; each runs once."""

    @cache
    def run(mesh: str, *numbers: int) -> tuple[list[dict[str, Any]], Path]:
        folder = tmp_path_factory.mktemp("narrow")
        return pool.run(ranks_of(mesh), on_ranks, mesh, list(numbers), folder, None), folder

    return run


CUT_TWICE, EVERY = [0, 3], range(len(RUNS))


@pytest.mark.parametrize(
    ("mesh", "numbers"),
    cases(
        ("2x2", CUT_TWICE),
        ("1x2", [1]),
        ("2x1", [2]),
        matrix=[(mesh, EVERY) for mesh in ("2x2", "2x1", "1x2", "2x2x1", "1x4")],
    ),
)
def test_layers_narrower_than_tp_equal_one_process(ran, mesh, numbers):
    for found in ran(mesh, *numbers)[0]:
        for (adapter, number), (first, trained_to) in found.items():
            want_first, want = in_one_process(adapter)
            assert relative_error(first, want_first) <= 1e-12, (adapter, number)
            assert relative_error(trained_to, want) <= 1e-10, (adapter, number)


def test_their_adapters_are_pefts_and_resume_on_another_mesh(pool, ran):
    _, folder = ran("2x2", *CUT_TWICE)
    for number in CUT_TWICE:
        adapter, _ = RUNS[number]
        torch.manual_seed(0)
        loaded = PeftModel.from_pretrained(Narrow().double(), folder / f"2x2-{number}" / "adapter", is_trainable=True)
        again = narrow(adapter)
        steps(again, adam(again), [0])
        want = {name: full(p) for name, p in trained(again).items()}
        got = {name: full(p).double() for name, p in loaded.named_parameters() if name in want}
        assert relative_error(got, want) <= 1e-10, adapter
    for found in pool.run(2, on_ranks, "1x2", CUT_TWICE, folder, "2x2"):
        for (adapter, number), (_, trained_to) in found.items():
            assert relative_error(trained_to, in_one_process(adapter)[1]) <= 1e-10, (adapter, number)


@pytest.mark.parametrize(("tp", "whole"), [(2, {1}), (3, {1, 2}), (4, {1, 2, 3, 5})])
def test_what_leaves_a_rank_without_features_is_computed_in_full(tp, whole):
    """And nothing else is: 3 features on 2 ranks are 2 and 1, 5 on 4 ranks 2, 2, 1 and none."""
    for globs in (None, WRITTEN):
        styles = dict(resolve_plan(narrow("DoRA"), globs, tp).styles.values())
        widths = {"blocks.0.one": 1, "blocks.0.two": 2, "blocks.0.three": 3}
        if globs is not None:
            widths |= {"five": 5, "single": 1, "head": 1, "blocks.0.of_one": 1, "blocks.0.of_three": 3}
        found = {name: styles[name].name == "replicate" for name in widths}
        assert found == {name: width in whole for name, width in widths.items()}


class Front(nn.Module):
    """Register tokens, of which there are none, as DINOv3 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(1, 0, 8))
        self.enter = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.registers.expand(len(x), -1, -1), self.enter(x)], dim=1)


class Registers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.up, self.down = Front(), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        return x + self.down(torch.tanh(self.up(x)))


def registers(kind: str, path: Path | None = None) -> nn.Module:
    """`kind`: which parameters train. Built on meta where a file is given, to be read from there."""
    torch.manual_seed(0)
    with nullcontext() if path is None else meta_init():
        model: nn.Module = Registers().double()
        if path is not None:
            attach_checkpoint(model, path)
    if kind == "all":
        return model.train()
    torch.manual_seed(1)
    model = get_peft_model(
        model, LoraConfig(r=2, target_modules=["up"], modules_to_save=["front"] if kind == "saved" else None)
    )
    for name, parameter in trained(model).items():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    return model.train()


def inputs() -> Tensor:
    return torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def register_gradients(mesh_text: str, folder: Path) -> dict[Any, Any]:
    mesh, _ = on_mesh(mesh_text)
    found: dict[Any, Any] = {}
    for kind, stored in product(("frozen", "saved", "all"), (False, True)):
        _, config = on_mesh(mesh_text, require_adapters=kind != "all")
        model = parallelize(registers(kind, folder / "model.safetensors" if stored else None), mesh, config)
        optimizer = adam(model)
        model(inputs().chunk(dp_size(mesh))[dp_rank(mesh)]).square().mean().backward()
        gradients = {name: full(p.grad) for name, p in trained(model).items()}
        optimizer.step()
        where = folder / f"{mesh_text}-{kind}-{stored}"
        save_checkpoint(model, optimizer, where)
        load_checkpoint(model, optimizer, where)
        found[kind, stored] = gradients, {name: full(p) for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("mesh", cases("2x1", matrix=["2x2", "1x2", "2x2x1"]))
def test_parameters_without_elements(pool, tmp_path, mesh):
    """Frozen or not, in memory or read from a file, saved and loaded. Nothing of them trains."""
    save_file(registers("all").state_dict(), tmp_path / "model.safetensors")
    for found in pool.run(ranks_of(mesh), register_gradients, mesh, tmp_path):
        for (kind, stored), (gradients, values) in found.items():
            model = registers(kind)
            optimizer = adam(model)
            model(inputs()).square().mean().backward()
            want = {name: full(p.grad) for name, p in trained(model).items() if p.numel()}
            optimizer.step()
            assert relative_error(gradients, want) <= 1e-12, (kind, stored)
            assert relative_error(values, {name: full(p) for name, p in model.named_parameters()}) <= 1e-10, kind
