"""Each style against the unsharded layer: output, input gradient and every parameter's gradient, LoRA's included."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lora_parallel import parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.layers.layer_parameters import base_of, layer_tensors, shared_parameters
from lora_parallel.layers.styles import EXPERT_SPLITS, STYLES
from tests.cases import cases
from tests.oracle import full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

HIDDEN, VOCABULARY = 6, 13


class Pair(nn.Module):
    """Two colwise layers that share an input, as gate and up do, and a rowwise one; all with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 8)
        self.up = nn.Linear(HIDDEN, 8)
        self.down = nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        key = "x" if hasattr(self.up, "lora_A") else "input"  # PEFT's name for it and nn.Linear's
        return x + self.down(torch.tanh(self.gate(x)) * self.up(**{key: x}))


class Peeking(Pair):
    """Uses its input without a graph first: that use may not be shared with those that need the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up(x)
        return super().forward(x)


class Ends(nn.Module):
    """Whole in, whole out, through widths that no tp divides."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = nn.Linear(HIDDEN, 7)
        self.split = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.split(torch.tanh(self.gather(x)))


class Narrow(nn.Module):
    """Widths below tp: some ranks hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = nn.Linear(HIDDEN, 3)
        self.split = nn.Linear(3, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.split(torch.tanh(self.gather(x)))


class Between(nn.Module):
    """A norm's weight and a linear layer that run on each rank's heads only."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 16)
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 4)
        self.down = nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (-1, 4))
        return self.down(self.mix(self.norm(heads)).flatten(-2))


class Fused(nn.Module):
    """Gate and up in one layer, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(HIDDEN, 16)
        self.down = nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.down(torch.tanh(gate) * up)


class Grouped(nn.Module):
    """Four query heads share one key and value head; features of a row's last dim attend to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 2), nn.Linear(HIDDEN, 2)
        self.o = nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 2)) for layer in (self.q, self.k, self.v))
        return x + self.o((torch.tanh(q * k) * v).flatten(-2))


class Transposed(nn.Module):
    """GPT-2's layers; the first is fused."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Conv1D(16, HIDDEN)
        self.down = Conv1D(HIDDEN, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, dim=-1)
        return x + self.down(torch.tanh(gate) * up)


class PerHead(nn.Module):
    """A bias of each head from a table, and a parameter with a row for each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)
        self.table = nn.Embedding(3, 4)
        self.scale = nn.Parameter(torch.ones(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (-1, 4)) * self.scale
        bias = self.table(torch.tensor([0, 2])).sum(0)
        return self.down(torch.tanh(heads + bias.unsqueeze(-1)).flatten(-2))


class Whole(nn.Module):
    """Computed in full on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(HIDDEN, 5)
        self.unplanned = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.unplanned(self.one(x))


class Words(nn.Module):
    """An embedding with a padding token, and a head."""

    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=padding_idx)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(ids)))


COLUMNS = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
WORDS = {"embed": "embedding_rowwise", "head": "colwise_gather_output"}
MODELS: dict[str, tuple[Any, dict[str, str]]] = {
    "colwise, rowwise": (Pair, COLUMNS),
    "used without a graph": (Peeking, COLUMNS),
    "gathered, split": (Ends, {"gather": "colwise_gather_output", "split": "rowwise_split_input"}),
    "narrow": (Narrow, {"g*": "colwise_gather_output", "split": "rowwise_split_input"}),
    "between": (
        Between,
        {"up": "colwise", "down": "rowwise", "[nm]*": "replicated_with_grad_allreduce"},
    ),
    "replicated": (Whole, {"one": "replicate"}),
    "fused": (Fused, {}),
    "packed": (Fused, {"both": "packed_colwise", "down": "rowwise"}),
    "fewer key heads than ranks": (Grouped, {}),
    "transposed": (Transposed, {}),
    "something for each head": (PerHead, {"table": "embedding_colwise", "up": "colwise", "down": "rowwise"}),
    "embedding": (lambda: Words(None), WORDS),
    "padding at the start": (lambda: Words(0), WORDS),
    "padding at the end": (lambda: Words(VOCABULARY - 1), WORDS),
}
SHAPES = {"2-D": (4,), "3-D": (4, 3)}


def build(name: str, lora: bool) -> nn.Module:
    torch.manual_seed(2)
    model = MODELS[name][0]().double()
    if lora:
        targets = [n for n, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D, nn.Embedding))]
        model = get_peft_model(model, LoraConfig(r=3, target_modules=targets))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) / 2
    return model.requires_grad_(True).train()


def inputs(name: str, shape: str) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    if isinstance(MODELS[name][0](), Words):
        return torch.randint(0, VOCABULARY, SHAPES[shape], generator=generator)
    return torch.randn(*SHAPES[shape], HIDDEN, generator=generator, dtype=torch.float64)


def step(model: nn.Module, x: Tensor, share: slice) -> dict[str, Tensor]:
    """Output and input gradient of the rows in `share`, and gradients of the mean over them."""
    x = x[share].clone().requires_grad_(x.is_floating_point())
    y = model(x)
    weight = torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype)
    (y * weight).cos().mean(tuple(range(1, y.dim()))).mean().backward()
    found = {"output": y.detach()}
    if x.grad is not None:
        found["input gradient"] = x.grad
    return found


@cache
def in_one_process(name: str, shape: str, lora: bool) -> dict[str, Tensor]:
    model = build(name, lora)
    found = step(model, inputs(name, shape), slice(None))
    return {**found, **{n: full(p.grad) for n, p in trained(model).items() if p.grad is not None}}


def on_ranks(mesh_text: str, models: list[tuple[str, bool]]) -> dict[tuple[str, str, bool], Any]:
    """By model, shape and whether it has adapters: this rank's rows, what it has of them, and gradients."""
    mesh, _ = on_mesh(mesh_text)
    found = {}
    for name, lora in models:
        _, config = on_mesh(mesh_text, tp_plan=MODELS[name][1] or "auto", require_adapters=False)
        model = parallelize(build(name, lora), mesh, config)
        for shape in SHAPES:
            x = inputs(name, shape)
            rows = x.shape[0] // dp_size(mesh)
            share = slice(dp_rank(mesh) * rows, (dp_rank(mesh) + 1) * rows)
            model.zero_grad()
            local = step(model, x, share)
            grads = {n: full(p.grad) for n, p in trained(model).items() if p.grad is not None}
            found[name, shape, lora] = share, local, grads
    return found


ALL = [(name, lora) for name in MODELS for lora in (True, False)]
CUT_TWICE = [(name, True) for name in ("colwise, rowwise", "packed", "something for each head", "embedding")]
"""Models of which dp and tp cut a parameter along the same dim, or along two."""


@pytest.mark.parametrize(
    ("mesh", "models"), cases(("1x2", ALL), ("2x2", CUT_TWICE), matrix=[("2x2", ALL), ("1x4", ALL)])
)
def test_every_style_equals_the_unsharded_layer(pool, mesh, models):
    """Everything trains, base weights too, so that each tensor's gradient is seen."""
    for answers in pool.run(ranks_of(mesh), on_ranks, mesh, models):
        for case, (share, local, grads) in answers.items():
            expected = dict(in_one_process(*case))
            mine = {"output": expected.pop("output")[share]}
            if "input gradient" in expected:
                whole = expected.pop("input gradient")
                mine["input gradient"] = whole[share] * (len(whole) / (share.stop - share.start))  # of this rank's mean
            assert relative_error(local, mine) <= 1e-12, case
            assert relative_error(grads, expected) <= 1e-12, case


def test_the_padding_token_has_no_gradient_and_others_have():
    """What the padding cases above rest on."""
    grad = in_one_process("padding at the start", "3-D", False)["embed.weight"]
    assert not grad[0].any()
    assert grad.any()


def outside_the_vocabulary():
    mesh, config = on_mesh("1x2", tp_plan=WORDS, require_adapters=False)
    model = parallelize(build("embedding", True), mesh, config)
    errors = [attempt(model, torch.tensor([0, bad])) for bad in (VOCABULARY, -1)]
    return errors, model(torch.tensor([0, 1])).isfinite().all().item()


def test_a_token_outside_the_vocabulary_is_refused(pool):
    """Each rank looks up only its own rows: without a check the token would be silently zero."""
    for errors, went_on in pool.run(2, outside_the_vocabulary):
        for error, bad in zip(errors, (VOCABULARY, -1), strict=True):
            assert isinstance(error, Failure)
            assert error.kind == "IndexError"
            assert str(bad) in error.message
            assert f"vocabulary of {VOCABULARY}" in error.message
        assert went_on


def placements():
    """By parameter: its placement on the tp axis and this rank's shape."""
    mesh, config = on_mesh("1x2", tp_plan={**COLUMNS}, require_adapters=False)
    model = parallelize(build("colwise, rowwise", True), mesh, config)
    return {n: (str(p.placements[-1]), tuple(p.to_local().shape)) for n, p in model.named_parameters()}


def test_tensors_are_placed_as_the_table_says(pool):
    prefix = "base_model.model."
    want = {
        "gate.base_layer.weight": ("S(0)", (4, HIDDEN)),
        "gate.base_layer.bias": ("S(0)", (4,)),
        "gate.lora_A.default.weight": ("R", (3, HIDDEN)),
        "gate.lora_B.default.weight": ("S(0)", (4, 3)),
        "down.base_layer.weight": ("S(1)", (HIDDEN, 4)),
        "down.base_layer.bias": ("R", (HIDDEN,)),
        "down.lora_A.default.weight": ("S(1)", (3, 4)),
        "down.lora_B.default.weight": ("R", (HIDDEN, 3)),
    }
    for found in pool.run(2, placements):
        for name, expected in want.items():
            assert found[prefix + name] == expected, name


def compute_is_plain():
    """Inside a unit's forward its tensors are plain; outside, and after an error in it, they are DTensors again."""
    mesh, config = on_mesh("1x2", tp_plan=COLUMNS, require_adapters=False)
    model = parallelize(build("colwise, rowwise", False), mesh, config)
    seen = []

    def look(module, args):
        seen.append(type(module.weight).__name__)

    model.gate.register_forward_pre_hook(look)
    attempt(model, torch.ones(2, HIDDEN + 1, dtype=torch.float64))  # a wrong width, refused inside of gate's forward
    names = sorted(name for name, _ in model.named_parameters())
    y = model(torch.ones(2, HIDDEN, dtype=torch.float64))
    kinds = {type(p.data).__name__ for p in model.parameters()}
    return seen, names, kinds, sorted(model.state_dict()), "weight" in model.gate.__dict__, y.isfinite().all().item()


def test_units_leave_no_trace_outside_of_their_forward(pool):
    for seen, names, kinds, keys, shadowed, finite in pool.run(2, compute_is_plain):
        assert seen == ["DTensor", "DTensor"]  # hooks of the layer run outside
        assert names == keys == sorted(n for n, _ in build("colwise, rowwise", False).named_parameters())
        assert kinds == {"DTensor"}
        assert not shadowed
        assert finite


def test_roles_and_shared_parameters():
    model = build("embedding", True).get_base_model()
    assert {(t.key, t.role) for t in layer_tensors(model.embed)} == {
        ("weight", "weight"),
        ("default", "lora_A"),
        ("default", "lora_B"),
    }
    assert sorted(t.role for t in layer_tensors(build("colwise, rowwise", True).get_base_model().up)) == [
        "bias",
        "lora_A",
        "lora_B",
        "weight",
    ]
    assert isinstance(base_of(model.head), nn.Linear)
    assert shared_parameters(model) == {}
    base_of(model.head).weight = base_of(model.embed).weight
    assert [len(holders) for holders in shared_parameters(model).values()] == [2]


def test_every_style_is_tested_here():
    assert {style for _, plan in MODELS.values() for style in plan.values()} == set(STYLES) - set(EXPERT_SPLITS)
