"""Hold the bytes of a fused LoRA layer, as the benchmark counts them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.fixture(scope="module")
def costs():
    import bytes as counting

    return {(mesh, side, adapters): cost for mesh, side, adapters, cost in counting.measure(LLAMA_8B, 4096)}


@pytest.mark.parametrize(
    ("mesh", "adapters", "gigabytes", "saved"),
    [("1x1", "float32", 2.6, 0.75), ("1x1", "bfloat16", 2.1, 0.72), ("1x1", "float32, autocast", 2.1, 0.72)],
)
def test_share_of_lora(costs, mesh, adapters, gigabytes, saved):
    base, ours, peft = (costs[(mesh, *row)] for row in (("the base alone", ""), ("ours", adapters), ("PEFT", adapters)))
    assert (ours.bytes - base.bytes) / 1e9 < gigabytes
    assert ours.saved / 1e9 < saved
    assert ours.large - base.large == 6 * 7  # products of seven layers, and nothing else of an activation's size
    assert (peft.bytes - base.bytes) > 2.5 * (ours.bytes - base.bytes)


@pytest.mark.parametrize("mesh", ["1x2", "2x2"])
def test_tensor_parallel_ranks_have_their_share(costs, mesh):
    one, two = (
        {side: costs[each, side, "" if side == "the base alone" else "float32"] for side in ("ours", "the base alone")}
        for each in ("1x1", mesh)
    )
    share = (two["ours"].bytes - two["the base alone"].bytes) / (one["ours"].bytes - one["the base alone"].bytes)
    assert share < 0.7  # inputs of colwise layers and outputs of rowwise ones are whole on each rank
    assert two["ours"].large - two["the base alone"].large == 6 * 7
