"""A simulated step takes no memory, and counts that of a real one."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from torch import nn
from torch.nn import functional

from lora_parallel.cost.simulated_step import simulated_step


def test_bytes_are_counted_until_they_are_freed():
    weight = torch.empty(8, 8, device="meta")
    with simulated_step([weight]) as step:
        x = torch.ones(4, 8)  # a floating-point tensor goes to meta
        assert x.is_meta
        y = x @ weight.t()  # a view of what was there takes nothing
        assert step.alive == 2 * 4 * 8 * 4
        del x
        assert step.alive == 4 * 8 * 4
        step.enter("later")
        del y
        assert step.alive == 0
    assert step.peaks == {"forward": 2 * 4 * 8 * 4, "later": 4 * 8 * 4}
    assert step.flops == 2 * 4 * 8 * 8


def test_a_resized_storage_counts_with_its_new_size():
    """FSDP2 frees and allocates gathered weights so."""
    with simulated_step() as step:
        held = torch.empty(16)
        held.untyped_storage().resize_(0)
        assert step.alive == 0
        held.untyped_storage().resize_(128)
        assert step.alive == 128


def test_integers_have_values_and_tokens_go_to_all_experts():
    with simulated_step():
        ids = torch.arange(6, device="meta")
        assert not ids.is_meta
        assert ids.tolist() == [*range(6)]
        scores = torch.empty(6, 4, device="meta")
        chosen = scores.topk(2).indices
        assert torch.bincount(chosen.flatten(), minlength=4).tolist() == [3, 3, 3, 3]
        assert functional.embedding(ids, torch.empty(10, 3, device="meta")).shape == (6, 3)


def test_an_operator_is_computed_once_for_arguments_of_one_form():
    """The second time its result is made of the form of the first: it must be that of real tensors both times."""

    def form(tensor):
        return tensor.shape, tensor.stride(), tensor.dtype

    def computed():
        x = torch.ones(4, 6)
        y = x.t() + 1
        held = nn.Parameter(torch.zeros(6, 4))
        with torch.no_grad():
            assert held.mul_(2) is held
            assert held.unsqueeze_(0).shape == (1, 6, 4)  # it changes the shape, not the values
        return [y, x + 1, x.double() + 1, x.sum(1), x.sum(1, keepdim=True), y.contiguous(), x.topk(2).values, held]

    want = [*map(form, computed())]
    for _ in range(2):
        with simulated_step() as step:
            assert [*map(form, computed())] == want
            step.enter("in place")  # which takes no memory of its own, not even for a moment
            held = torch.ones(4, 6).mul_(2).mul_(2)
            assert step.peaks["in place"] == step.alive == held.nbytes


def test_attention_keeps_what_a_fused_kernel_keeps():
    query = torch.empty(1, 2, 64, 8, device="meta", requires_grad=True)
    with simulated_step([query]) as step:
        out = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert step.alive == 4 * 64 * 2 * (8 + 1)  # the output, and a number for each row; no matrix of 64 x 64
        forward = step.flops
        out.sum().backward()
    assert forward == 2 * 2 * 64 * 64 * (8 + 8)
    assert step.flops == forward * 7 // 2
    assert functional.scaled_dot_product_attention.__module__ != "lora_parallel.cost.simulated_step"


def test_a_product_of_int8_takes_what_the_kernels_of_cuda_take():
    x = torch.empty(2, 32, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    state = bitsandbytes.MatmulLtState()
    state.threshold, state.has_fp16_weights, state.is_training = 6.0, False, True
    state.CB = torch.empty(128, 64, dtype=torch.int8, device="meta")
    state.SCB = torch.empty(128, device="meta")
    with simulated_step([x, state.CB, state.SCB]) as step:
        out = bitsandbytes.matmul(x, state.CB, state=state)
        assert step.alive == out.numel() * 2
        # int32, float16 and bfloat16 of the output; int8 of the input and a scale for each row
        assert step.peaks == {"forward": out.numel() * (4 + 2 + 2) + 64 * (64 + 4)}
        assert step.flops == 2 * 64 * 64 * 128
        out.sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("width", [4, 7])
def test_the_peak_is_that_of_real_tensors(width):
    """Against the bytes that autograd keeps of a real run."""
    model = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))
    kept: set[int] = set()
    x = torch.randn(3, width)
    known = {each.untyped_storage().data_ptr() for each in (x, *model.parameters())}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            kept.add(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    del out
    twin = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)).to("meta")
    x = torch.empty(3, width, device="meta")
    with simulated_step([x, *twin.parameters()]) as step:
        out = twin(x)
        assert step.alive == 2 * 3 * 16 * 4 + out.numel() * 4  # both sides of the activation, and the output
    assert kept == {3 * 16 * 4}
