"""Operations of training: against sums by hand, and against what torch counts while a model trains."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import get_peft_model
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lora_parallel.metrics import TokenFlops, device_peak, token_flops
from tests.oracle import causal_lm, lora_config
from tests.oracle.families import FAMILIES

LAYERS = 12
"""Enough layers that the first one counts for little: nothing needs the gradient of its input."""


def model(lora: bool) -> nn.Module:
    made = causal_lm(dtype=torch.float32, num_hidden_layers=LAYERS, attn_implementation="eager")
    return get_peft_model(made, lora_config(r=8)) if lora else made


def test_by_hand():
    made = model(lora=True)
    config = made.get_base_model().config
    hidden, inner, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    width = config.num_attention_heads * config.head_dim
    shapes = [(width, hidden), (kv, hidden), (kv, hidden), (hidden, width), *[(inner, hidden)] * 2, (hidden, inner)]
    frozen = LAYERS * sum(out * of for out, of in shapes) + config.vocab_size * hidden
    trained = LAYERS * sum(8 * (out + of) for out, of in shapes)
    assert token_flops([made]) == TokenFlops(frozen, trained, LAYERS * width)
    assert token_flops([made]).training(16) == 4 * frozen + 6 * trained + 12 * LAYERS * width * 16


@pytest.mark.parametrize("lora", [True, False])
def test_torch_counts_as_many(lora):
    """Eager attention, whose products torch counts one by one; LoRA at 4 N and full fine-tuning at 6 N."""
    made, ids = model(lora), torch.randint(0, 131, (2, 32))
    with FlopCounterMode(display=False) as counter:
        made(input_ids=ids, labels=ids).loss.backward()
    want = token_flops([made]).training(ids.shape[1]) * ids.numel()
    assert counter.get_total_flops() == pytest.approx(want, rel=0.03)
    counted = token_flops([made])
    all_trained = TokenFlops(0, counted.frozen + counted.trained, counted.attention)
    full = all_trained.training(ids.shape[1]) * ids.numel()
    assert full == want if not lora else full > 1.2 * want  # 6 N for a frozen base would be far off


def test_a_token_goes_to_some_experts_only():
    family = FAMILIES["mixtral"]
    made = family.model_class()(getattr(transformers, family.config)(**family.settings))
    config = made.config
    experts = config.num_hidden_layers * 3 * config.num_local_experts * config.hidden_size * config.intermediate_size
    every = sum(p.numel() for p in made.parameters() if p.dim() > 1) - made.get_input_embeddings().weight.numel()
    counted = token_flops([made])
    unused = experts * (1 - config.num_experts_per_tok / config.num_local_experts)
    assert counted.frozen + counted.trained == every - unused


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_of_a_device_by_its_name(name, peak):
    assert device_peak("cuda", name) == peak
    assert device_peak("cpu", name) is None
