"""Linear layers and their subclasses: which can be cut, and what becomes of what they add."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lora_parallel.layers import linear_classes
from lora_parallel.layers.linear_classes import own_roles, subclass_problem
from lora_parallel.layers.styles import STYLES
from tests.oracle.feature_rows import Branched, Normed, Scaled, Unbiased

COLUMNS, ROWS = STYLES["rowwise"], STYLES["colwise"]


class Rectified(nn.Linear):
    """Slices of the output are slices; partial sums are none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class QuantisedLayer(nn.Linear):
    """Looks at the whole of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight / self.weight.abs().max(), self.bias)


class Told(nn.Linear):
    """Looks at its size, which is the layer's and not the slice's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(-1, self.out_features)


class Noisy(nn.Linear):
    """Only when it trains."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Transposed(Conv1D):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(self.nf))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


@pytest.mark.parametrize("sizes", [(6, 10), (8, 8)])
@pytest.mark.parametrize(
    ("kind", "rows", "columns"),
    [
        (nn.Linear, True, True),
        (nn.modules.linear.NonDynamicallyQuantizableLinear, True, True),
        (Scaled, True, True),
        (Unbiased, True, True),
        (Rectified, True, False),
        (Normed, False, False),
        (QuantisedLayer, False, False),
        (Told, False, True),
        (Noisy, False, True),  # the ranks of tp share their random state: one mask for all partial sums
    ],
)
def test_whether_a_subclass_can_be_cut(kind, rows, columns, sizes):
    layer = kind(*sizes)
    before = {name: p.clone() for name, p in layer.named_parameters()}
    state = torch.get_rng_state()
    problems = [subclass_problem(layer, style) for style in (ROWS, COLUMNS)]
    assert [problem is None for problem in problems] == [rows, columns]
    assert all(kind.__name__ in problem for problem in problems if problem)
    assert subclass_problem(layer, STYLES["replicate"]) is None
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("sizes", [(6, 10), (8, 8)])
def test_roles_of_what_a_subclass_adds(sizes):
    """Where the shape does not say which features it is of, too."""
    layer = Scaled(*sizes)
    for style in (ROWS, COLUMNS):
        assert own_roles(layer, style) == {
            (layer, "fed"): ("per_input", 1),
            (layer, "given"): ("per_output", 0),
            (layer, "gain"): ("other", None),
            (layer, "bias"): ("addend", 0),
        }
    branched = Branched(*sizes)
    found = own_roles(branched, COLUMNS)
    assert found[branched.down, "weight"] == ("per_input", 1)
    assert found[branched.up, "weight"] == ("per_output", 0)
    assert found[branched.up, "bias"] == ("addend", 0)
    conv = Transposed(8, 6)
    assert own_roles(conv, ROWS)[conv, "gain"] == ("per_output", 0)
    assert own_roles(nn.Linear(*sizes), ROWS) == {}


def test_one_trial_serves_all_layers_of_a_class_and_shape(monkeypatch):
    tried = []
    search = linear_classes._search
    monkeypatch.setattr(linear_classes, "_known_roles", {})
    monkeypatch.setattr(linear_classes, "_search", lambda base, columns: tried.append(base) or search(base, columns))
    for layer in (Scaled(6, 10), Scaled(6, 10), Scaled(6, 12)):
        assert subclass_problem(layer, ROWS) is None
    assert len(tried) == 2


def test_a_layer_on_meta_is_tried_as_well():
    with torch.device("meta"):
        layer = Scaled(6, 10)
    assert subclass_problem(layer, COLUMNS) is None
