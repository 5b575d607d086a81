"""Names of modules without PEFT's wrappers, and the blocks that they are in."""

from __future__ import annotations

import pytest

from lora_parallel.layers.layer_parameters import block_of, clean_parameter_name, without_block_numbers


@pytest.mark.parametrize(
    ("name", "block", "glob"),
    [
        ("model.layers.10.self_attn.q_proj", "model.layers.10", "model.layers.*.self_attn.q_proj"),
        ("h.0.mlp.experts.12.w1", "h.0", "h.*.mlp.experts.*.w1"),
        ("0.3.fc", "0", "*.*.fc"),
        ("score.2", "score.2", "score.2"),  # one of several layers, not a block with the layer in it
        ("block2.fc1", "", "block2.fc1"),
        ("lm_head", "", "lm_head"),
    ],
)
def test_block_names(name, block, glob):
    assert block_of(name) == block
    assert without_block_numbers(name) == glob


def test_parameter_names_without_wrappers():
    assert clean_parameter_name("layers.0.q_proj.base_layer.weight") == "layers.0.q_proj.weight"
    assert clean_parameter_name("score.original_module.bias") == "score.bias"
    assert clean_parameter_name("my_base_layer.weight") == "my_base_layer.weight"
