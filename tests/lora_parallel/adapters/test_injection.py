"""Adapters that `parallelize` injects are, to the bit, those of one process, on every mesh."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from lora_parallel import ParallelConfig, meta_init, parallelize
from lora_parallel.adapters.injection import check_adapters, has_adapters
from tests.cases import cases
from tests.oracle import SIZES, causal_lm, full, lora_config, on_mesh, ranks_of, trained
from tests.oracle.workers import attempt

MESHES = cases("2x2", matrix=["1x1", "2x1", "1x2", "1x4", "4x1", "2x2x2"])
SEED = 11

# What PEFT draws: A, uniform; in bfloat16 where the base is, though kept in float32; A, normal; B too, for embeddings
# too and with another r for some layers.
KINDS = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "gaussian": (torch.float32, {"init_lora_weights": "gaussian"}),
    "all": (
        torch.float32,
        {
            "init_lora_weights": False,
            "target_modules": ["embed_tokens", "q_proj", "lm_head"],
            "rank_pattern": {"q_proj": 5},
        },
    ),
}


@cache
def in_one_process(kind, seed=SEED):
    dtype, changes = KINDS[kind]
    model = causal_lm(dtype=dtype)
    torch.manual_seed(seed)
    model = get_peft_model(model, lora_config(**changes))
    prefix = "base_model.model."
    return {name.removeprefix(prefix): full(p) for name, p in model.named_parameters() if "lora_" in name}


def injected(mesh_text):
    """By kind: the adapter, in full, and whether the surrounding random state stayed as it was."""
    mesh, config = on_mesh(mesh_text, seed=SEED)
    found = {}
    for kind, (dtype, changes) in KINDS.items():
        model = causal_lm(dtype=dtype)
        torch.manual_seed(99)
        before = torch.get_rng_state()
        parallelize(model, mesh, config, lora_config=lora_config(**changes))
        kept = torch.equal(before, torch.get_rng_state())
        found[kind] = {name: full(p) for name, p in model.named_parameters() if "lora_" in name}, kept
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_initial_adapters_are_bit_identical(pool, mesh):
    wanted = {kind: in_one_process(kind) for kind in KINDS}
    for found in pool.run(ranks_of(mesh), injected, mesh):
        for kind, want in wanted.items():
            got, kept = found[kind]
            assert kept, f"{kind}: the random state around the call changed"
            assert got.keys() == want.keys()
            for name in want:
                assert got[name].dtype == want[name].dtype == torch.float32, (kind, name)
                assert torch.equal(got[name], want[name]), (kind, name)


def test_reference_depends_on_the_seed_and_a_bf16_base_rounds():
    """What the comparison above rests on: it would see another seed, and a draw in another dtype."""
    a = "model.layers.1.mlp.down_proj.lora_A.default.weight"
    assert not torch.equal(in_one_process("float32")[a], in_one_process("float32", seed=SEED + 1)[a])
    rounded, exact = in_one_process("bfloat16")[a], in_one_process("float32")[a]
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, exact.bfloat16().float())


def test_no_adapters_and_no_lora_config_is_refused_with_the_remedies():
    model = causal_lm()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM\) has no PEFT layers") as caught:
        check_adapters(model, ParallelConfig(), None)
    for remedy in ("lora_config=", "get_peft_model", "require_adapters=False"):
        assert remedy in str(caught.value)
    check_adapters(model, ParallelConfig(require_adapters=False), None)
    check_adapters(model, ParallelConfig(), lora_config())


@pytest.mark.parametrize(
    ("targets", "named"),
    [(["q_proj", "query"], "'query'"), (["key", "query"], "'key', 'query'"), (r".*\.dense", r"'.*\\.dense'")],
)
@pytest.mark.parametrize("deferred", [False, True])
def test_targets_that_the_model_does_not_have_are_refused(tmp_path, targets, named, deferred):
    """PEFT has nothing to say about one of several. Nothing is touched."""
    model = causal_lm()
    if deferred:
        model.save_pretrained(tmp_path)
        with meta_init():
            model = LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lora_config targets") as caught:
        check_adapters(model, ParallelConfig(), lora_config(target_modules=targets))
    assert f"targets {named}, which no module of LlamaForCausalLM" in str(caught.value)
    assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in str(caught.value)
    assert not has_adapters(model)


def test_targets_that_the_model_has_are_not():
    for targets in ("all-linear", r".*\.(q|k)_proj", ["model.layers.0.self_attn.q_proj"], ["mlp.up_proj", "lm_head"]):
        check_adapters(causal_lm(), ParallelConfig(), lora_config(target_modules=targets))


def refused_targets(mesh: str) -> list[Any]:
    model = causal_lm()
    answer = attempt(parallelize, model, *on_mesh(mesh), lora_config=lora_config(target_modules=["q_proj", "query"]))
    return [answer, has_adapters(model)]


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_targets_are_refused_on_every_rank(pool, mesh):
    for answer, touched in pool.run(ranks_of(mesh), refused_targets, mesh):
        assert answer.kind == "ValueError"
        assert "lora_config targets 'query'" in answer.message
        assert not touched


def test_adapters_and_a_lora_config_are_refused():
    with pytest.raises(ValueError, match="already has PEFT layers"):
        check_adapters(get_peft_model(causal_lm(), lora_config()), ParallelConfig(), lora_config())


def test_two_models_of_peft_in_one_module_are_refused():
    both = torch.nn.ModuleDict({name: get_peft_model(causal_lm(), lora_config()) for name in ("a", "b")})
    with pytest.raises(ValueError, match=r"ModuleDict holds 2 models of PEFT \(a, b\)"):
        check_adapters(both, ParallelConfig(), None)
    check_adapters(torch.nn.ModuleDict({"a": both["a"]}), ParallelConfig(), None)


def test_other_peft_types_are_refused_by_name():
    ia3 = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    with pytest.raises(TypeError, match="IA3"):
        check_adapters(causal_lm(), ParallelConfig(), ia3)
    with pytest.raises(ValueError, match="'default' has PEFT type IA3"):
        check_adapters(get_peft_model(causal_lm(), ia3), ParallelConfig(), None)
    with pytest.raises(TypeError, match="dict"):
        check_adapters(causal_lm(), ParallelConfig(), {"r": 3})


def test_adapter_layers_without_a_config_are_refused_by_type():
    """As when a PEFT model was taken apart: the layers are there, their config is not."""
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    model = get_peft_model(causal_lm(), ia3).get_base_model()
    model.__dict__.pop("peft_config", None)
    with pytest.raises(ValueError, match=r"peft\.tuners\.ia3"):
        check_adapters(model, ParallelConfig(), None)


def test_base_model_name_goes_into_the_config(pool):
    """PEFT writes it into adapter_config.json, over whatever the config had, as get_peft_model does."""
    model = causal_lm()
    model.name_or_path = "org/base"
    chosen = LoraConfig(target_modules=["q_proj"], base_model_name_or_path="chosen")
    want = get_peft_model(model, chosen).peft_config["default"].base_model_name_or_path
    assert pool.run(1, base_model_names) == [["org/base", want]]


def base_model_names():
    names = []
    for changes in ({}, {"base_model_name_or_path": "chosen"}):
        mesh, config = on_mesh("1x1")
        model = causal_lm()
        model.name_or_path = "org/base"
        wanted = LoraConfig(target_modules=["q_proj"], **changes)
        names.append(
            parallelize(model, mesh, config, lora_config=wanted).peft_config["default"].base_model_name_or_path
        )
    return names


def classifier():
    torch.manual_seed(0)
    sizes = {**SIZES, "num_labels": 3, "pad_token_id": 0}
    return LlamaForSequenceClassification(LlamaConfig(**sizes))


def injected_classifier():
    mesh, config = on_mesh("1x2")
    lora = LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS")
    model = parallelize(classifier(), mesh, config, lora_config=lora)
    return {name: full(parameter) for name, parameter in trained(model).items()}


def test_injection_trains_what_the_task_trains(pool):
    """get_peft_model adds the classification head to modules_to_save."""
    base = classifier()
    torch.manual_seed(0)
    peft = get_peft_model(base, LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"))
    want = {name.removeprefix("base_model.model."): full(p) for name, p in trained(peft).items()}
    assert any("score" in name for name in want)
    for got in pool.run(2, injected_classifier):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want if "lora_" in name)


TOKENS = [20, 3, 21]


def trained_tokens(mesh_text, path):
    """Rows of the embedding that PEFT trains, and its LoRA factors, of a model whose weights were on disk by then."""
    mesh, config = on_mesh(mesh_text, seed=SEED)
    found = {}
    for kind in ("injected", "by PEFT"):
        lora, given = lora_config(trainable_token_indices=TOKENS), {}
        with meta_init():
            model = LlamaForCausalLM.from_pretrained(path)
            if kind == "by PEFT":
                torch.manual_seed(SEED)
                model = get_peft_model(model, lora)
            else:
                given = {"lora_config": lora}
        model = parallelize(model, mesh, config, **given)
        found[kind] = {name.removeprefix("base_model.model."): full(p) for name, p in trained(model).items()}
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1", "2x2"]))
def test_trained_tokens_begin_as_the_rows_on_disk(pool, mesh, tmp_path):
    base = causal_lm(dtype=torch.float32)
    base.save_pretrained(tmp_path)
    torch.manual_seed(SEED)
    one = get_peft_model(base, lora_config(trainable_token_indices=TOKENS))
    want = {name.removeprefix("base_model.model."): full(p) for name, p in trained(one).items()}
    (delta,) = (name for name in want if "trainable_tokens_delta" in name)
    assert want[delta].equal(base.get_input_embeddings().token_adapter.base_layer.weight[TOKENS])
    for found in pool.run(ranks_of(mesh), trained_tokens, mesh, tmp_path):
        for kind, got in found.items():
            assert got.keys() == want.keys(), kind
            for name in want:
                assert got[name].equal(want[name]), (kind, name)
