"""Flows found by running: which layers, which features, which sizes; and what is no flow."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.tracing.inputs import TraceError
from lora_parallel.tracing.prove_feature_slices import find_structure
from tests.oracle import causal_lm
from tests.oracle.rows import base_model

HIDDEN = 8


def structure(model: nn.Module, tp: int = 2):
    return find_structure(model, clean_names(model), tp)


def layer_groups(model: nn.Module, tp: int = 2) -> dict[str, dict[str, list[list[int]]]]:
    """By sink: each source with the features of each rank."""
    found = structure(model, tp)
    return {
        " ".join(sorted(layer_group.consumers)): {
            name: [partition.rows(rank).tolist() for rank in range(tp)]
            for name, partition in layer_group.producers.items()
        }
        for layer_group in found.layer_groups
    }


class Gated(nn.Module):
    """Gate and up in one layer, half and half or feature by feature."""

    def __init__(self, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.both, self.down = nn.Linear(HIDDEN, 8), nn.Linear(4, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        both = self.both(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        return x + self.down(gate.relu() * up)


def test_a_head_count_of_zero_is_none():
    """Sizes that a module keeps are guesses, whatever they are."""
    model = Gated(interleaved=False)
    model.num_heads = 0
    assert layer_groups(model).keys() == {"down"}


@pytest.mark.parametrize(
    ("interleaved", "rows"), [(False, [[0, 1, 4, 5], [2, 3, 6, 7]]), (True, [[0, 1, 2, 3], [4, 5, 6, 7]])]
)
def test_the_rows_of_a_fused_layer_are_those_that_a_slice_needs(interleaved, rows):
    """A ReLU, whose gradient is zero for half of its inputs, hides none of them."""
    assert layer_groups(Gated(interleaved)) == {"down": {"both": rows}}


class Attention(nn.Module):
    """Fewer key heads than query heads, and the number of heads in an attribute or written into the code."""

    def __init__(self, heads: int, kv: int, width: int = 2) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv, width
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n * width) for n in (heads, kv, kv))
        self.o = nn.Linear(heads * width, HIDDEN)

    def heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:-1], count, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.heads(self.q(x), self.num_heads)
        k, v = (self.heads(layer(x), self.num_kv_heads) for layer in (self.k, self.v))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return x + self.o(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("heads", "kv", "tp", "kv_rows", "kv_heads"),
    [
        (4, 4, 2, [[0, 1, 2, 3], [4, 5, 6, 7]], 2),
        (4, 2, 2, [[0, 1], [2, 3]], 1),
        (4, 2, 4, [[0, 1], [0, 1], [2, 3], [2, 3]], 1),
        (4, 1, 2, [[0, 1], [0, 1]], 1),
    ],
)
def test_key_heads_that_several_ranks_need_are_on_each(heads, kv, tp, kv_rows, kv_heads):
    model = Attention(heads, kv)
    (layer_group,) = structure(model, tp).layer_groups
    assert layer_groups(model, tp)["o"]["k"] == layer_groups(model, tp)["o"]["v"] == kv_rows
    assert layer_group.producers["q"].is_chunked
    changed = layer_group.attributes.get(model, {})
    assert changed.get("num_heads") == heads // tp
    assert changed.get("num_kv_heads", kv) == kv_heads


def test_nothing_is_changed_by_looking():
    model = Attention(4, 2)
    seen: list[object] = []
    model.q.register_forward_hook(lambda *_: seen.append(1))
    model.register_forward_pre_hook(lambda *_: seen.append(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    structure(model, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert (model.num_heads, model.num_kv_heads) == (4, 2)
    assert seen == []
    assert "forward" not in model.q.__dict__
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_random_states_of_accelerators_are_left_alone(monkeypatch):
    """Nobody would restore them: a rank's dropout would start from another state than the user's seed gave."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    torch.manual_seed(3)
    assert seeded == [3]
    structure(Attention(4, 2), 4)
    assert seeded == [3]


class Counted(Attention):
    """Heads that only the code knows."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:-1], 4, 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return x + self.o(((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Normed(nn.Module):
    """A norm over all features between the two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(HIDDEN, 12), nn.LayerNorm(12), nn.Linear(12, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class Seen(nn.Module):
    """What the first layer gives is used elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return up + self.down(up)


class Ruled(nn.Module):
    """The code looks at the values in a way that autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(up * (up == up.max(-1, keepdim=True).values.detach()))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Counted(4, 4), "invalid for input of size"),
        (Normed(), "depends on all features"),
        (Seen(), None),
        (Ruled(), "do not depend on equally many|not fed what it should be"),
    ],
)
def test_what_is_no_flow(model, reason):
    found = structure(model)
    assert found.layer_groups == []
    if reason is not None:
        assert any(re.search(reason, text) for text in found.rejected.values()), found.rejected


class PerHead(nn.Module):
    """A scale for each head, and one for all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)
        self.scale = nn.Parameter(torch.ones(6, 1))
        self.shift = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (-1, 2))
        return self.down((heads * self.scale + self.shift).flatten(-2))


def test_parameters_between_are_cut_where_they_have_something_for_each_head():
    model = PerHead()
    (layer_group,) = structure(model).layer_groups
    dim, partition = layer_group.between[model, "scale"]
    assert (dim, partition.is_chunked, partition.size) == (0, True, 6)
    assert layer_group.between[model, "shift"] is None


class Chain(nn.Module):
    """Either of two pairs could be cut, not both."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.two(self.one(x).relu()).relu())


def test_of_a_chain_the_larger_pair_is_cut():
    assert set(layer_groups(Chain((8, 16, 4, 4)))) == {"two"}
    assert set(layer_groups(Chain((4, 4, 16, 8)))) == {"three"}


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, HIDDEN), nn.Linear(HIDDEN, 11, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(self.up(x).relu())) + self.head.weight.sum()


def test_weights_that_are_used_without_a_call_are_told():
    assert structure(Tables()).used_directly == {"head"}
    assert set(layer_groups(Tables())) == {"down"}


class Clipped(nn.Module):
    """In training the weight is used without a call."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        up = nn.functional.linear(x, self.up.weight.clamp(-1, 1)) if self.training else self.up(x)
        return self.down(up)


def test_weights_that_are_used_in_training_only_are_told_too():
    model = Clipped().train()
    found = structure(model)
    assert found.used_directly == {"up"}
    assert found.layer_groups == []
    assert found.rejected["down"] == "the weight of up is used without calling it"
    assert model.training


def test_a_transposed_layer_is_a_layer():
    model = nn.Sequential(Conv1D(12, HIDDEN), nn.GELU(), Conv1D(HIDDEN, 12))
    assert layer_groups(model) == {"2": {"0": [list(range(6)), list(range(6, 12))]}}


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_a_models_own_plan_and_its_structure_agree(family):
    model = causal_lm(family)
    found = structure(model)
    consumers = {name for layer_group in found.layer_groups for name in layer_group.consumers}
    assert consumers == {
        f"model.layers.{layer}.{name}" for layer in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    plan = {name: style for name, style in model._tp_plan.items() if style == "rowwise"}
    assert family == "phi3" or {name.rpartition(".")[2] for name in plan} == {"o_proj", "down_proj"}


def test_a_norm_of_all_heads_together_is_no_flow():
    """OLMo2's norm of all query heads together."""
    model = base_model("Olmo2ForCausalLM", {**_SMALL, "num_key_value_heads": 4})
    found = structure(model)
    assert {name.rpartition(".")[2] for layer_group in found.layer_groups for name in layer_group.consumers} == {
        "down_proj"
    }
    assert "model.layers.0.self_attn.o_proj" in found.rejected


_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 131,
    "pad_token_id": 0,
}


def test_a_model_that_cannot_be_run_says_why():
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor, needed: Tensor) -> Tensor:
            return self.up(x) + needed

    with pytest.raises(TraceError, match="missing 1 required positional argument"):
        structure(Picky())


def test_it_costs_no_memory_for_weights():
    """A model of 70B, on meta."""
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=8
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    found = structure(model, 8)
    assert len(found.layer_groups) == 4
    stand_ins = found.tracer.twin.parameters()
    assert sum(p.untyped_storage().nbytes() for p in stand_ins) < 2**21


@pytest.mark.parametrize("kind", [transformers.MixtralConfig, transformers.DeepseekV3Config, transformers.GptOssConfig])
def test_experts_cost_a_row_of_their_weights(kind):
    """Two layers with 64 experts of full width, on meta."""
    experts = {"num_local_experts": 64, "n_routed_experts": 64, "num_experts_per_tok": 4, "first_k_dense_replace": 0}
    sizes = {"hidden_size": 4096, "intermediate_size": 2048, "moe_intermediate_size": 2048, "num_hidden_layers": 2}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, **experts, vocab_size=64))
    with FlopCounterMode(display=False) as counted:
        found = structure(model, 2)
    assert len(found.tracer.experts) == 2
    one_matrix = 2 * 4096 * 2048  # for one token; attention costs less than 30, the experts' own matrices over 3,000
    assert counted.get_total_flops() < 50 * one_matrix
