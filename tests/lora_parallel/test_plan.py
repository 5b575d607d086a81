"""From a model to styles: names without PEFT's components, the model's own plan, globs over it, and what is refused."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard

from lora_parallel.plan import check_globs, clean_names, resolve_plan
from lora_parallel.styles import STYLES, style_named
from tests.oracle import SEVEN, causal_lm, lora_config


def styles_of(model, globs=None, tp=2):
    by_style = {id(style): name for name, style in STYLES.items()}
    return {name: by_style[id(style)] for name, style in resolve_plan(model, globs, tp).styles.values()}


def adapted(family="llama", sizes=None, **changes):
    return get_peft_model(causal_lm(family, **(sizes or {})), lora_config(**changes))


class Mlp(nn.Module):
    """A model without a plan of its own."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(6, width)
        self.down = nn.Linear(width, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


OWN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.0.self_attn.q_proj": "colwise",
    "model.layers.1.self_attn.o_proj": "rowwise",
    "model.layers.1.mlp.down_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_models_own_plan_is_found_under_peft(family):
    """As a PeftModel, with adapters injected in place, inside of a user's module, and without adapters."""
    want = styles_of(causal_lm(family).requires_grad_(False))
    assert want.items() >= OWN.items()
    assert len(want) == 2 + 2 * (7 + (2 if family == "qwen3" else 0))
    assert styles_of(adapted(family)) == want
    assert styles_of(adapted(family).get_base_model()) == want

    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = adapted(family)

    assert styles_of(Wrapping()) == {f"net.{name}": style for name, style in want.items()}


def test_qwen3_norms_between_slices_have_partial_gradients():
    assert styles_of(causal_lm("qwen3"))["model.layers.0.self_attn.q_norm"] == "replicated_with_grad_allreduce"


def test_names_are_those_before_peft():
    model = adapted(modules_to_save=["lm_head"])
    names = set(clean_names(model).values())
    assert {"model.layers.0.mlp.up_proj", "lm_head", "model.norm", ""} <= names
    assert not any(part in name for name in names for part in ("base_layer", "lora_", "base_model", "modules_to_save"))


def test_globs_are_laid_over_the_models_own_plan():
    """A glob's * crosses dots; later entries win."""
    found = styles_of(
        adapted(),
        {"*.mlp.*_proj": "replicate", "*.1.mlp.up_proj": "colwise", "lm_head": "replicate"},
    )
    assert found["model.layers.0.mlp.up_proj"] == found["model.layers.1.mlp.down_proj"] == "replicate"
    assert found["model.layers.1.mlp.up_proj"] == "colwise"
    assert found["lm_head"] == "replicate"
    assert found["model.layers.0.self_attn.q_proj"] == "colwise"


def test_a_star_in_the_models_own_plan_is_one_component():
    class Planned(nn.Module):
        _tp_plan: ClassVar = {"*.up": "colwise", "*.down": "rowwise"}

        def __init__(self) -> None:
            super().__init__()
            self.a = Mlp()
            self.b = nn.ModuleDict({"deep": Mlp()})

    assert styles_of(Planned().requires_grad_(False)) == {"a.up": "colwise", "a.down": "rowwise"}


def test_what_trains_outside_of_the_plan_is_replicated():
    model = causal_lm().requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    assert styles_of(model)["model.norm"] == "replicate"
    assert "model.layers.0.input_layernorm" not in styles_of(model)


def test_modules_to_save_have_the_style_of_the_layer():
    model = adapted(modules_to_save=["lm_head"])
    plan = resolve_plan(model, None, 2)
    heads = [module for module, (name, _) in plan.styles.items() if name == "lm_head"]
    assert len(heads) == 2  # the original and the trained copy
    assert all(plan.styles[head][1] is STYLES["colwise_gather_output"] for head in heads)


@pytest.mark.parametrize(
    ("glob", "hint"),
    [
        ("*.q_porj", "model.layers"),
        ("base_model.model.model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("model.layers.*.mlp.up_proj.base_layer", "Write names without"),
        ("*.attention.o_proj", "model.layers.0.self_attn.o_proj"),
    ],
)
def test_an_entry_that_matches_nothing_is_refused_with_a_hint(glob, hint):
    with pytest.raises(ValueError, match="matches no module") as caught:
        check_globs(adapted(), {"*.q_proj": "colwise", glob: "colwise"})
    assert repr(glob) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("style", ["columnwise", "COLWISE", None, 3, "moe_tp_experts", "packed_colwise"])
def test_an_unknown_style_is_refused_with_the_known_ones(style):
    with pytest.raises(ValueError, match=r"the entry '\*\.q_proj' asks for the style") as caught:
        check_globs(adapted(), {"*.q_proj": style})
    assert repr(style) in str(caught.value)
    assert all(known in str(caught.value) for known in STYLES)


def test_an_unknown_style_in_the_models_own_plan_is_refused():
    class Planned(Mlp):
        _tp_plan: ClassVar = {"up": "sequence_parallel"}

    with pytest.raises(ValueError, match="the model's own entry for 'up' asks for the style 'sequence_parallel'"):
        resolve_plan(Planned(), None, 2)


def test_no_plan_at_all_is_refused():
    with pytest.raises(ValueError, match="tp=2, but Mlp carries no tp_plan: pass") as caught:
        resolve_plan(get_peft_model(Mlp(), LoraConfig(target_modules=["up"])), None, 2)
    assert "colwise" in str(caught.value)


def test_an_own_plan_that_matches_nothing_is_refused():
    class Renamed(Mlp):
        _tp_plan: ClassVar = {"fc1": "colwise"}

    with pytest.raises(ValueError, match="no entry of the plan that Renamed carries matches"):
        resolve_plan(Renamed(), None, 2)


def test_adapter_layers_without_a_style_are_refused():
    class Planned(Mlp):
        _tp_plan: ClassVar = {"up": "colwise"}

    model = get_peft_model(Planned(), LoraConfig(target_modules=["up", "down"]))
    with pytest.raises(ValueError, match=r"'down' has adapter layers .* but no tensor parallel style") as caught:
        resolve_plan(model, None, 2)
    assert "replicate" in str(caught.value)
    assert styles_of(model, {"down": "rowwise"}) == {"up": "colwise", "down": "rowwise"}


class Attention(nn.Module):
    """Heads of width 4, as attention code tells them."""

    head_dim = 4

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q = nn.Linear(8, heads * 4)
        self.o = nn.Linear(heads * 4, 8)


class Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.attention = Attention(heads)
        self.mlp = Mlp(width)


BLOCK = {"attention.q": "colwise", "attention.o": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise"}


@pytest.mark.parametrize(
    ("heads", "width", "tp", "parts"),
    [
        (6, 12, 4, ["'attention.q': 6 heads (of width 4) (and 1 more layers)", "tp can be 1, 2, 3, 6"]),
        (4, 10, 4, ["'mlp.up': out_features=10 (and 1 more layers)", "tp can be 1, 2."]),
        (3, 12, 2, ["'attention.q': 3 heads", "tp can be 1, 3."]),
        (2, 7, 2, ["'mlp.up': out_features=7", "tp can be 1."]),
    ],
)
def test_a_size_that_tp_does_not_divide_is_refused_with_those_it_could_be(heads, width, tp, parts):
    """24 columns of heads divide by 4 where 6 heads do not."""
    with pytest.raises(ValueError, match=f"tp={tp} does not divide") as caught:
        resolve_plan(Block(heads, width), BLOCK, tp)
    for part in parts:
        assert part in str(caught.value)


def test_sizes_that_divide_are_accepted_and_kv_heads_count():
    assert styles_of(Block(6, 12), BLOCK, tp=3) == BLOCK
    with pytest.raises(ValueError, match=r"k_proj': 2 heads \(of width 6\).*tp can be 1, 2\."):
        resolve_plan(adapted(sizes={"num_key_value_heads": 2}), None, 4)
    with pytest.raises(ValueError, match=r"gate_proj': out_features=42.*tp can be 1, 2\."):
        resolve_plan(adapted(sizes={"intermediate_size": 42}), None, 4)


def test_widths_between_whole_tensors_may_be_uneven():
    globs = {"up": "colwise_gather_output", "down": "rowwise_split_input"}
    assert styles_of(Mlp(7), globs, tp=4) == globs


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"target_modules": [], "target_parameters": ["lm_head.weight"]}, "ParamWrapper"),
    ],
)
def test_adapters_without_a_tensor_parallel_form_are_refused_by_name(changes, reason):
    with pytest.raises(ValueError, match=r"tp=2: .* cannot be ") as caught:
        resolve_plan(adapted(**changes), None, 2)
    assert reason in str(caught.value)
    assert "tp=1" in str(caught.value)


def test_styles_want_their_kind_of_layer():
    with pytest.raises(ValueError, match=r"'model\.norm' cannot be colwise: LlamaRMSNorm is no nn\.Linear"):
        resolve_plan(causal_lm(), {"model.norm": "colwise"}, 2)
    with pytest.raises(ValueError, match=r"'lm_head' cannot be embedding_rowwise: Linear is no nn\.Embedding"):
        resolve_plan(causal_lm(), {"lm_head": "embedding_rowwise"}, 2)
    model = causal_lm()
    model.model.embed_tokens.max_norm = 1.0
    with pytest.raises(ValueError, match="max_norm"):
        resolve_plan(model, None, 2)


def test_quantised_weights_are_refused():
    model = Mlp().requires_grad_(False)
    model.up.weight = nn.Parameter(torch.zeros(8, 6, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="'up' cannot be colwise: Linear holds quantised weights"):
        resolve_plan(model, {"up": "colwise", "down": "rowwise"}, 2)


def test_tied_layers_must_be_split_alike():
    tied = causal_lm(tie_word_embeddings=True)
    assert styles_of(tied)["lm_head"] == "colwise_gather_output"
    with pytest.raises(ValueError, match=r"the weight of shape \(131, 40\) is tied") as caught:
        resolve_plan(tied, {"lm_head": "replicate"}, 2)
    assert "lm_head" in str(caught.value)
    assert "model.embed_tokens" in str(caught.value)


def test_nothing_is_touched_by_a_refusal():
    model = adapted(sizes={"intermediate_size": 42})
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match="does not divide"):
        resolve_plan(model, None, 4)
    assert all(id(p) == before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())


def test_the_table_of_styles():
    """One row of placements for each, and what that must mean for the adapter to cost no collective of its own."""
    for name, style in STYLES.items():
        assert style_named(name, "here") is style
        assert {style.weight, style.bias, style.lora_A, style.lora_B} <= {Replicate(), Shard(0), Shard(1)}
        if style.weight == Shard(0) and style.enter != "mask":  # slices of the output
            assert (style.lora_A, style.lora_B, style.bias) == (Replicate(), Shard(0), Shard(0))
            assert style.partial == {"lora_A"}
            assert style.enter == "copy"
        elif style.weight != Replicate():  # partial sums
            assert (style.lora_A, style.lora_B, style.bias) == (Shard(1), Replicate(), Replicate())
            assert style.partial == {"lora_B"}
            assert style.leave == "reduce"
    assert set(SEVEN) <= {name.rsplit(".", 1)[-1] for name in styles_of(causal_lm())}
