"""The measure that every comparison with one process is made by."""

from __future__ import annotations

import math

import pytest
import torch

from tests.oracle import differing, relative_error

WANT = {"large": torch.full((4,), 2.0, dtype=torch.float64), "small": torch.full((2,), 1e-3, dtype=torch.float64)}


def off(name, change):
    return {**WANT, name: WANT[name] + change}


@pytest.mark.parametrize(
    ("got", "low", "high"),
    [
        (WANT, 0.0, 0.0),
        (off("large", 2e-12), 0.9e-12, 1.1e-12),
        (off("small", 1e-15), 0.0, 0.0),  # less than the rounding of what is 2 in size
        (off("small", 1e-13), 0.9e-10, 1.1e-10),
        (off("small", -1e-3), 0.9, 1.1),
    ],
)
def test_an_error_is_relative_to_its_tensor_unless_it_is_rounding_of_the_largest(got, low, high):
    assert low <= relative_error(got, WANT) <= high


def test_what_is_rounding_in_one_process_has_no_digit_to_compare():
    """Equal values for every token: the terms of q_proj's gradient cancel, to another 1e-17 on each processor."""
    zero = {"large": WANT["large"], "q_proj": torch.tensor([3e-17, -1e-17], dtype=torch.float64)}
    assert relative_error({**zero, "q_proj": -zero["q_proj"]}, zero) == 0.0
    assert relative_error({**zero, "q_proj": torch.full((2,), 1e-9, dtype=torch.float64)}, zero) > 1.0
    exact = {**zero, "q_proj": torch.zeros(2, dtype=torch.float64)}
    assert relative_error(zero, exact) == 0.0
    assert relative_error({**zero, "q_proj": torch.full((2,), 1e-9, dtype=torch.float64)}, exact) == math.inf


def test_a_table_tells_rounding_too():
    assert relative_error(off("small", 1e-15), WANT, rounding_counts=True) == pytest.approx(1e-12, rel=0.1)
    zero = {"large": WANT["large"], "q_proj": torch.tensor([3e-17, -1e-17], dtype=torch.float64)}
    assert relative_error({**zero, "q_proj": -zero["q_proj"]}, zero, rounding_counts=True) == 0.0


def test_nan_is_an_error():
    assert math.isnan(relative_error(off("small", math.nan), WANT))
    assert math.isnan(relative_error(WANT, off("small", math.nan)))


def test_other_keys_or_shapes_are_no_comparison():
    with pytest.raises(AssertionError):
        relative_error({"large": WANT["large"]}, WANT)
    with pytest.raises(AssertionError):
        relative_error({**WANT, "small": torch.zeros(3)}, WANT)


def test_bits_are_compared_where_bits_are_meant():
    assert differing(WANT, dict(WANT)) == []
    assert differing(off("small", 1e-20), WANT) == []
    assert differing(off("small", 1e-15), WANT) == ["small"]
    assert differing({"large": WANT["large"]}, WANT) == ["small"]
