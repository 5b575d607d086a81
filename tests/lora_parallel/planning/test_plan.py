"""From a model to styles: names without PEFT's components, the model's own plan, globs over it, and what is refused."""

from __future__ import annotations

import logging
import threading
from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor.placement_types import Replicate, Shard
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from lora_parallel.layers.layer_parameters import clean_names
from lora_parallel.layers.styles import EXPERT_SPLITS, STYLES, style_named
from lora_parallel.planning.entries import _SHOWN_BY_RUNNING
from lora_parallel.planning.plan import check_globs, resolve_plan
from tests.oracle import SEVEN, causal_lm, lora_config
from tests.oracle.rows import base_model


def styles_of(model, globs=None, tp=2):
    by_style = {id(style): name for name, style in STYLES.items()}
    return {name: by_style[id(style)] for name, style in resolve_plan(model, globs, tp).styles.values()}


def adapted(family="llama", sizes=None, **changes):
    return get_peft_model(causal_lm(family, **(sizes or {})), lora_config(**changes))


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_BERT = {**_SMALL, "intermediate_size": 48, "vocab_size": 131}
UNPLANNED = {
    "BertModel": _BERT,
    "RobertaForSequenceClassification": {**_BERT, "pad_token_id": 1},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 64},
    "OPTForCausalLM": {**_SMALL, "ffn_dim": 48, "vocab_size": 131, "word_embed_proj_dim": 32},
    "FalconForCausalLM": {**_SMALL, "vocab_size": 131, "new_decoder_architecture": True, "num_kv_heads": 2},
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 131,
        "decoder_start_token_id": 0,
    },
    "ModernBertForMaskedLM": {**_BERT, "pad_token_id": 0, "global_attn_every_n_layers": 2},
    "ViTForImageClassification": {**_SMALL, "intermediate_size": 48, "image_size": 16, "patch_size": 8},
}


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
        {"*.mlp.*_proj": "replicate", "*.1.mlp.up_proj": "colwise_gather_output", "lm_head": "replicate"},
    )
    assert found["model.layers.0.mlp.up_proj"] == found["model.layers.1.mlp.down_proj"] == "replicate"
    assert found["model.layers.1.mlp.up_proj"] == "colwise_gather_output"
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


@pytest.mark.parametrize("style", ["columnwise", "COLWISE", None, 3, "moe_identity_expert", "grouped_gemm"])
def test_an_unknown_style_is_refused_with_the_known_ones(style):
    with pytest.raises(ValueError, match=r"the entry '\*\.q_proj' asks for the style") as caught:
        check_globs(adapted(), {"*.q_proj": style})
    assert repr(style) in str(caught.value)
    assert all(known in str(caught.value) for known in STYLES)


PAIR = {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("plan", [None, {}, {"up": "mla_kv_a_proj"}, {"fc1": "colwise"}, {"up": "colwise"}])
def test_what_a_models_own_plan_leaves_open_is_derived(plan):
    """No plan, one of styles or modules that there are not, one of half of the layers."""

    class Planned(Mlp):
        _tp_plan: ClassVar = plan

    model = get_peft_model(Planned(), LoraConfig(target_modules=["up", "down"]))
    assert styles_of(model) == PAIR


class Unknown(Mlp):
    """Takes what nobody can guess."""

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.down(self.up(x)) * scale


def test_no_plan_for_a_model_that_cannot_be_run_is_refused():
    with pytest.raises(ValueError, match="tp=2, but Unknown carries no tp_plan, and none can be derived") as caught:
        resolve_plan(get_peft_model(Unknown(), LoraConfig(target_modules=["up"])), None, 2)
    assert "scale" in str(caught.value)
    assert "colwise_gather_output" in str(caught.value)


class Packed:
    """A style as diffusers' Flux has it in its plan: an object."""

    def __repr__(self) -> str:
        return "PackedRowwiseParallel()"


ASIDE = "is set aside, since its entry 'down' asks for the style PackedRowwiseParallel(), which is not known"


def test_an_own_plan_with_an_unknown_style_is_set_aside_and_a_line_says_so(caplog):
    """The layers before the one of that style would be cut for nobody."""

    class Flux(Mlp):
        _tp_plan: ClassVar = {"up": "colwise_gather_output", "down": Packed()}

    assert styles_of(get_peft_model(Flux(), LoraConfig(target_modules=["up", "down"]))) == PAIR
    assert f"the plan that Flux carries {ASIDE}" in caplog.text


@pytest.mark.parametrize("style", [Packed(), "packed_rowwise", "local_params"])
def test_the_error_of_a_model_whose_plan_is_not_understood_and_that_cannot_be_run_names_that_plan(style):
    class Flux(Unknown):
        _tp_plan: ClassVar = {"up": "colwise", "down": style}

    with pytest.raises(
        ValueError, match="tp=2, but Flux carries a plan whose entry 'down' asks for the style"
    ) as caught:
        resolve_plan(Flux(), None, 2)
    assert f"style {style!r}, which is not known without a run, and none can be derived" in str(caught.value)


def test_every_style_of_transformers_is_known():
    """A style that a later release adds is either ours, or seen by running the model."""
    assert set(ALL_PARALLEL_STYLES.valid_keys()) <= STYLES.keys() | _SHOWN_BY_RUNNING


@pytest.mark.parametrize("plan", [None, {"fc1": "colwise"}])
def test_an_empty_plan_computes_a_model_in_full_that_cannot_be_run(plan):
    class Planned(Unknown):
        _tp_plan: ClassVar = plan

    model = get_peft_model(Planned(), LoraConfig(target_modules=["up"]))
    assert styles_of(model, {}) == {"up": "replicate"}
    with pytest.raises(ValueError, match=r"tp_plan=\{\} to compute what no entry names in full on every tp rank"):
        styles_of(model)


def test_an_own_plan_of_such_a_model_that_matches_nothing_is_refused():
    class Renamed(Unknown):
        _tp_plan: ClassVar = {"fc1": "colwise"}

    with pytest.raises(ValueError, match="no entry of the plan that Renamed carries matches"):
        resolve_plan(Renamed(), None, 2)


def test_a_plan_of_such_a_model_holds_until_the_first_batch_and_a_line_says_so(caplog):
    caplog.set_level(logging.INFO)
    model = Unknown().requires_grad_(False)
    torch.manual_seed(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert styles_of(model, PAIR) == PAIR
    assert "Unknown could not be run without its weights" in caplog.text
    assert "tried on the first batch" in caplog.text
    assert "forward was replaced" not in caplog.text
    assert torch.equal(torch.rand(2), drawn)  # the plan leaves the random state


def test_a_plan_of_a_model_that_cannot_be_copied_holds_and_a_line_says_that_it_is_unchecked(caplog):
    model = adapted()
    model.get_base_model().lock = threading.Lock()  # which cannot be copied
    with caplog.at_level(logging.WARNING):
        styles = styles_of(model, {"*.q_proj": "colwise_gather_output", "*_proj": "replicate"})
    assert "model.layers.0.self_attn.q_proj" in styles
    assert "it cannot be copied (TypeError: cannot pickle" in caplog.text
    assert "holds unchecked. Compare a step with one process once" in caplog.text


def test_a_forward_that_was_replaced_is_named(caplog):
    """As TRL does; it may go on with the model itself, not with the copy that is tried."""
    caplog.set_level(logging.INFO)
    model = Unknown().requires_grad_(False)
    model.forward = model.forward
    styles_of(model, PAIR)
    assert "(its forward was replaced, as TRL's trainers do; " in caplog.text
    assert "There is nothing to do." in caplog.text


def test_a_weight_that_trains_and_is_used_without_calling_its_layer_is_refused():
    class ByHand(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.linear(x, self.up.weight))

    model = get_peft_model(ByHand(), LoraConfig(target_modules=["down"]))
    styles_of(model)
    model.get_base_model().up.weight.requires_grad_(True)
    with pytest.raises(ValueError, match="tp=2: 'up' trains, and its weight is used without calling it"):
        resolve_plan(model, None, 2)


def test_adapter_layers_without_a_style_are_refused():
    """A plan that the user writes is the whole plan."""
    model = get_peft_model(Unknown(), LoraConfig(target_modules=["up", "down"]))
    with pytest.raises(ValueError, match=r"'down' has adapter layers .* but no tensor parallel style") as caught:
        resolve_plan(model, {"up": "colwise_gather_output"}, 2)
    assert "replicate" in str(caught.value)


@pytest.mark.parametrize(
    ("globs", "named"),
    [
        ({"up": "rowwise", "down": "colwise"}, "the entry 'down' makes 'down' colwise"),
        ({"up": "colwise", "down": "replicate"}, "the entry 'up' makes 'up' colwise"),
        ({"up": "replicate", "down": "rowwise"}, "the entry 'down' makes 'down' rowwise"),
    ],
)
def test_styles_that_do_not_fit_what_the_model_computes_are_refused(globs, named):
    with pytest.raises(ValueError, match="which is not what Mlp computes") as caught:
        resolve_plan(Mlp().requires_grad_(False), globs, 2)
    assert named in str(caught.value)
    assert '"colwise_gather_output" and "rowwise_split_input" are right for any' in str(caught.value)


def test_packed_layers_are_halves_where_the_model_cannot_be_run():
    class Packed(Unknown):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(6, 8)
            self.down = nn.Linear(4, 6)

    globs = {"up": "packed_colwise", "down": "rowwise"}
    model = Packed().requires_grad_(False)
    plan = resolve_plan(model, globs, 2)
    assert plan.styles[model.up] == ("up", STYLES["colwise"])
    assert [plan.partitions[model.up].rows(rank).tolist() for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(ValueError, match="tp=3 does not divide 'up': packed_colwise cuts each half of its 8"):
        resolve_plan(model, globs, 3)


def test_two_styles_swapped_in_a_real_model_are_refused():
    with pytest.raises(ValueError, match="which is not what LlamaForCausalLM computes"):
        resolve_plan(adapted(), {"*.0.self_attn.o_proj": "colwise", "*.0.self_attn.q_proj": "rowwise"}, 2)


def rows(model, name, tp=2):
    """The output features of each rank."""
    plan = resolve_plan(model, None, tp)
    layer = next(module for module, (each, _) in plan.styles.items() if each == name)
    return [plan.partitions[layer].rows(rank).tolist() for rank in range(tp)]


def test_fused_layers_are_cut_matrix_by_matrix():
    """Phi3's own plan gathers them."""
    model = adapted("phi3", target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"])
    found = styles_of(model)
    assert found["model.layers.0.mlp.gate_up_proj"] == found["model.layers.0.self_attn.qkv_proj"] == "colwise"
    assert found["model.layers.0.mlp.down_proj"] == "rowwise"
    assert rows(model, "model.layers.0.mlp.gate_up_proj")[0] == [*range(22), *range(44, 66)]
    heads, kv = 24, 12  # half of eight heads of width 6, half of four
    assert rows(model, "model.layers.0.self_attn.qkv_proj")[0] == [
        *range(heads),
        *range(2 * heads, 2 * heads + kv),
        *range(2 * heads + 2 * kv, 2 * heads + 3 * kv),
    ]


def test_pairs_are_found_in_families_that_carry_no_plan():
    for name, settings in UNPLANNED.items():
        model = base_model(name, settings).requires_grad_(False)
        assert not getattr(model, "_tp_plan", None), name
        wanted = {"colwise", "rowwise"} | ({"embedding_colwise"} if name.startswith("T5") else set())
        assert wanted <= set(styles_of(model).values()), name


def test_layers_that_no_flow_has_are_gathered_and_a_line_says_so(caplog):
    """OLMo2 norms all query heads together."""
    settings = {**_SMALL, "num_key_value_heads": 4, "vocab_size": 131, "intermediate_size": 48, "pad_token_id": 0}
    model = base_model("BitNetForCausalLM", settings).requires_grad_(False)
    found = styles_of(model)
    assert found["model.layers.0.mlp.up_proj"] == "colwise_gather_output"
    assert "model.layers.*.mlp.up_proj (2 layers) is gathered after each" in caplog.text
    assert "depends on all features" in caplog.text


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
    assert rows(adapted(sizes={"num_key_value_heads": 2}), "model.layers.0.self_attn.k_proj", 4) == [
        [*range(6)],
        [*range(6)],
        [*range(6, 12)],
        [*range(6, 12)],
    ]
    with pytest.raises(ValueError, match=r"q_proj': 8 heads \(of width 6\).*tp can be 1, 2, 4, 8"):
        resolve_plan(adapted(sizes={"intermediate_size": 48}), None, 3)
    with pytest.raises(ValueError, match=r"gate_proj': out_features=42.*tp can be 1, 2\."):
        resolve_plan(adapted(sizes={"intermediate_size": 42}), None, 4)


ONE_KV_HEAD = {"num_key_value_heads": 1}


@pytest.mark.parametrize(("layer", "style"), [("q_proj", "colwise"), ("k_proj", "colwise"), ("o_proj", "rowwise")])
def test_an_entry_that_says_what_is_derived_anyway_changes_nothing(layer, style):
    # transformers 5.17's plan of the model does not name the embeddings, and beside entries none are added.
    entries = {f"model.layers.0.self_attn.{layer}": style, "model.embed_tokens": "embedding_rowwise"}
    derived, told = (resolve_plan(adapted(sizes=ONE_KV_HEAD), globs, 2) for globs in (None, entries))
    assert [*told.styles.values()] == [*derived.styles.values()]
    assert [*told.partitions.values()] == [*derived.partitions.values()]


@pytest.mark.parametrize(("layer", "style"), [("k_proj", "replicate"), ("o_proj", "rowwise_split_input")])
def test_an_entry_for_one_layer_leaves_the_others_of_its_flow_a_style_that_is_right_for_any(layer, style):
    """One head is no width that tp divides, which is no matter where it is not cut."""
    styles = styles_of(adapted(sizes=ONE_KV_HEAD), {f"model.layers.0.self_attn.{layer}": style})
    first, second = (
        {styles[f"model.layers.{block}.self_attn.{each}"] for each in SEVEN[:4] if each != layer} for block in (0, 1)
    )
    assert styles[f"model.layers.0.self_attn.{layer}"] == style
    assert first == {"colwise_gather_output"}
    assert "colwise" in second


def test_half_of_a_flow_with_one_kv_head_is_refused_for_what_it_is():
    globs = {"*.0.self_attn.k_proj": "replicate", "*.0.self_attn.v_proj": "colwise"}
    with pytest.raises(ValueError, match=r"v_proj' colwise, which is not what .*k_proj' asks for another style"):
        resolve_plan(adapted(sizes=ONE_KV_HEAD), globs, 2)


def test_no_tp_is_named_that_was_just_refused():
    """Where a model cannot be run nothing shows that ranks can share a head."""
    block = Block(4, 8)
    block.attention.k = nn.Linear(8, 4)
    with pytest.raises(ValueError, match=r"'attention.k': 1 heads \(of width 4\). For this model tp can be 1\."):
        resolve_plan(block, {**BLOCK, "attention.k": "colwise"}, 2)


def test_widths_between_whole_tensors_may_be_uneven():
    globs = {"up": "colwise_gather_output", "down": "rowwise_split_input"}
    assert styles_of(Mlp(7), globs, tp=4) == globs


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
        if name in EXPERT_SPLITS:  # several tensors, each placed along its own dim
            assert (style.enter, style.leave) == ("experts", "reduce")
            assert style.partial_roles == {"lora_A", "lora_B", "addend", "other"}
        elif style.weight == Shard(0) and style.enter != "mask":  # slices of the output
            assert (style.lora_A, style.lora_B, style.bias) == (Replicate(), Shard(0), Shard(0))
            assert style.partial_roles == {"lora_A", "per_input", "other"}
            assert (style.magnitude, style.per_output, style.addend, style.per_input) == (*[Shard(0)] * 3, Replicate())
            assert style.enter == "copy"
        elif style.leave == "reduce":  # partial sums
            assert (style.lora_A, style.lora_B, style.bias) == (Shard(1), Replicate(), Replicate())
            assert style.partial_roles == {"lora_B", "magnitude", "per_output", "addend", "other"}
            embeds = style.enter == "mask"
            assert (style.magnitude, style.per_output, style.addend) == (Replicate(),) * 3
            assert style.per_input == (Replicate() if embeds else Shard(0))
            assert style.leave == "reduce"
    assert set(SEVEN) <= {name.rsplit(".", 1)[-1] for name in styles_of(causal_lm())}
