"""`meta_init`: parameters on meta, buffers as ever, and torch as it was afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedModel,
)

from lora_parallel import meta_init
from lora_parallel.lazy.tracking import is_deferred
from lora_parallel.loading.meta_init import defer_from_pretrained
from tests.oracle import SIZES, causal_lm

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=24, bos_token_id=0, eos_token_id=1),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3),
}


class Mixed(nn.Module):
    """Of everything a module can hold."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 5, dtype=torch.bfloat16)
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.norm = nn.BatchNorm1d(5)
        self.conv = nn.Conv2d(3, 4, 2, bias=False)
        self.attention = nn.MultiheadAttention(8, 2)
        self.table = nn.ParameterDict({"a": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(()))})
        self.list = nn.ParameterList([torch.ones(3, dtype=torch.float64)])
        self.frozen = nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
        self.register_parameter("none", None)
        self.register_buffer("steps", torch.arange(6))
        self.register_buffer("angles", torch.linspace(0, 1, 7).cos(), persistent=False)


def signature(model):
    return {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}


def check_on_meta(model, like):
    """All parameters on meta and otherwise as in `like`; all buffers as in `like`."""
    assert signature(model) == signature(like)
    assert all(is_deferred(parameter) and type(parameter) is nn.Parameter for parameter in model.parameters())
    mine, theirs = dict(model.named_buffers()), dict(like.named_buffers())
    assert mine.keys() == theirs.keys()
    for name, buffer in theirs.items():
        assert mine[name].device.type == "cpu"
        assert mine[name].dtype == buffer.dtype
        assert torch.equal(mine[name], buffer), name
    assert model.state_dict().keys() == like.state_dict().keys()
    assert model.training == like.training


def test_any_module_has_its_parameters_on_meta_and_its_buffers_in_memory():
    with meta_init():
        model = Mixed()
    check_on_meta(model, Mixed())
    assert model.none is None


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_config(name, dtype):
    want = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    with meta_init():
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    check_on_meta(model, want)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_a_transformers_constructor():
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20, vocab_size=31)
    with meta_init():
        model = BertModel(config)
    check_on_meta(model, BertModel(config))


@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_ties_stay_one_object(name):
    with meta_init():
        model = AutoModelForCausalLM.from_config(CONFIGS[name])
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is embedding.weight
    assert is_deferred(head.weight)


def test_ties_of_a_plain_module_stay_one_object():
    with meta_init():
        first, second = nn.Linear(3, 4), nn.Linear(3, 4)
        second.weight = first.weight
        assert second.weight is first.weight
        third = nn.Linear(3, 4)
    third.weight = first.weight
    assert third.weight is first.weight


def test_a_parameter_that_is_shared_before_either_module_took_it():
    """As `self.a.weight = self.b.weight = nn.Parameter(...)`: two modules must end with one parameter, not two."""
    shared = {}
    for where in ("memory", "meta"):
        first, second = nn.Module(), nn.Module()
        if where == "memory":
            first.weight = second.weight = nn.Parameter(torch.ones(3))
        else:
            with meta_init():
                first.weight = second.weight = nn.Parameter(torch.ones(3))
        shared[where] = first.weight is second.weight
    assert shared == {"memory": True, "meta": True}


def test_a_parameter_that_is_replaced_goes_to_meta_too():
    with meta_init():
        layer = nn.Linear(3, 4)
        layer.weight = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    assert is_deferred(layer.weight)
    assert layer.weight.shape == (2, 3)
    assert not layer.weight.requires_grad


def test_a_parametrization_is_on_meta():
    with meta_init():
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    assert signature(layer) == signature(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_a_parameter_on_meta_already_is_left_alone():
    with meta_init():
        layer = nn.Linear(3, 4, device="meta")
    assert layer.weight.is_meta
    assert not is_deferred(layer.weight)


def test_what_exists_already_stays_in_memory():
    layer = nn.Linear(3, 4)
    weight = layer.weight.detach().clone()
    with meta_init():
        whole = nn.Sequential(layer, nn.Linear(4, 2))
    assert torch.equal(whole[0].weight, weight)
    assert whole[1].weight.is_meta


def patched():
    return {
        "register_parameter": nn.Module.__dict__["register_parameter"],
        "from_pretrained": PreTrainedModel.__dict__["from_pretrained"],
        "_load_pretrained_model": PreTrainedModel.__dict__["_load_pretrained_model"],
    }


def check_normal(before):
    """Constructors and from_pretrained are what they were."""
    assert patched() == before
    assert "from_pretrained" not in LlamaForCausalLM.__dict__
    torch.manual_seed(0)
    layer = nn.Linear(3, 4)
    assert not layer.weight.is_meta
    assert not is_deferred(layer.weight)
    assert layer.weight.abs().sum() > 0


@pytest.mark.parametrize("context", [meta_init, defer_from_pretrained])
def test_all_is_normal_afterwards(context):
    before = patched()
    with context():
        nn.Linear(3, 4)
    check_normal(before)


@pytest.mark.parametrize("context", [meta_init, defer_from_pretrained])
def test_all_is_normal_after_an_exception(context):
    before = patched()
    with pytest.raises(KeyError, match="inside"), context():
        raise KeyError("inside")
    check_normal(before)


def test_all_is_normal_after_from_pretrained_failed(tmp_path):
    before = patched()
    with meta_init():
        with pytest.raises(OSError, match="no file named"):
            LlamaForCausalLM.from_pretrained(tmp_path)
        assert nn.Linear(2, 2).weight.is_meta
    check_normal(before)


def test_all_is_normal_after_a_constructor_failed():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            raise ValueError("broken")

    before = patched()
    with pytest.raises(ValueError, match="broken"), meta_init():
        Broken()
    check_normal(before)


@pytest.mark.parametrize("inner", [meta_init, defer_from_pretrained])
@pytest.mark.parametrize("outer", [meta_init, defer_from_pretrained])
def test_contexts_may_be_nested(outer, inner, tmp_path):
    causal_lm(dtype=torch.float32).save_pretrained(tmp_path)
    before = patched()
    with outer():
        between = patched()
        with inner():
            assert LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight.is_meta
        assert patched() == between
        assert nn.Linear(2, 2).weight.is_meta is (outer is meta_init)
        assert LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight.is_meta
    check_normal(before)
    assert not LlamaForCausalLM.from_pretrained(tmp_path).lm_head.weight.is_meta


def test_defer_from_pretrained_leaves_constructors_alone(tmp_path):
    causal_lm(dtype=torch.float32).save_pretrained(tmp_path)
    with defer_from_pretrained():
        torch.manual_seed(3)
        layer = nn.Linear(3, 4)
        configured = AutoModelForCausalLM.from_config(CONFIGS["llama"])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.manual_seed(3)
    assert torch.equal(layer.weight, nn.Linear(3, 4).weight)
    want = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    for name, parameter in configured.named_parameters():
        assert torch.equal(parameter, want.get_parameter(name))
    assert all(is_deferred(parameter) for parameter in loaded.parameters())


def test_a_subclass_that_has_its_own_from_pretrained(tmp_path):
    """It calls that of its parent, and that is deferred."""

    class Own(GPT2LMHeadModel):
        @classmethod
        def from_pretrained(cls, *args, **kwargs):
            model = super().from_pretrained(*args, **kwargs)
            model.own = True
            return model

    GPT2LMHeadModel(CONFIGS["gpt2"]).save_pretrained(tmp_path)
    with meta_init():
        model = Own.from_pretrained(tmp_path)
    assert model.own
    assert all(is_deferred(parameter) for parameter in model.parameters())


def test_values_may_be_given_under_meta_init_without_harm():
    """Initialisers and checks of values, which constructors are full of."""
    with meta_init():
        layer = nn.Linear(3, 4)
        nn.init.normal_(layer.weight)
        with torch.no_grad():
            layer.weight.mul_(2)
            layer.bias.zero_()
    assert is_deferred(layer.weight)
