"""A folder is loaded where its config and the model's make the same function of its tensors, and refused elsewhere."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from lora_parallel import load_adapter, save_adapter
from lora_parallel.adapters.inspection import _SAME_FUNCTION, check_config
from tests.oracle import causal_lm

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
IDS = torch.arange(10, 46).view(4, 9)
TOKENS = "trainable_token_indices"

# PEFT takes the first key that matches a layer, and writes them sorted: "layers.0" first.
WIDE_FIRST = {"q_proj": 64, "layers.0.self_attn.q_proj": 2}
SORTED = dict(sorted(WIDE_FIRST.items()))

# (fields of the folder's config, fields of the model's): the same function of the same tensors.
SAME = {
    "dropout": ({"lora_dropout": 0.1}, {"lora_dropout": 0.5}),
    "mode": ({"inference_mode": True}, {}),
    "places": ({"revision": "a"}, {"revision": "b"}),
    "task": ({"task_type": None}, {}),
    "targets as an expression": ({"target_modules": r".*\.(q_proj|down_proj)"}, {}),
    "excluded": ({"target_modules": ["q_proj", "k_proj", "down_proj"], "exclude_modules": ["k_proj"]}, {}),
    "all layers": ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, {}),
    "no bias to train": ({"bias": "all"}, {}),
    "drawn otherwise": ({"init_lora_weights": "gaussian"}, {"init_lora_weights": "orthogonal"}),
    "minor components": ({"init_lora_weights": "mica"}, {}),
    "a config that is not used": ({"loftq_config": {"loftq_bits": 8}}, {}),
    "tokens by layer": ({TOKENS: [20, 21]}, {TOKENS: {"embed_tokens": [20, 21]}}),
    "tokens by two layers": (
        {TOKENS: {"embed_tokens": [20], "lm_head": [21]}},
        {TOKENS: {"model.embed_tokens": [20], "lm_head": [21]}},
    ),
    "alpha as a float": ({"lora_alpha": 8.0}, {"lora_alpha": 8}),
    "weights that are not tied": ({"ensure_weight_tying": True}, {}),
    "Megatron's core": ({"megatron_core": "megatron.core.other"}, {}),
    "layout of the base": ({"fan_in_fan_out": True}, {}),
    "other keys of a pattern": ({"alpha_pattern": {"q_proj": 64}}, {"alpha_pattern": {"self_attn.q_proj": 64}}),
    "an expression in a pattern": ({"rank_pattern": {"q_proj": 2}}, {"rank_pattern": {".*q_proj": 2}}),
    "a pattern that matches nothing": ({"alpha_pattern": {"other": 64}}, {}),
    "a pattern in the place of r": ({"rank_pattern": {".*_proj": 4}, "r": 2}, {}),
    "a pattern in another order": ({"alpha_pattern": WIDE_FIRST}, {"alpha_pattern": SORTED}),
    "group size that is not used": ({"qalora_group_size": 32}, {}),
    "OLoRA in capitals": ({"init_lora_weights": "olora"}, {"init_lora_weights": "OLoRA"}),
    "MiCA in capitals": ({"init_lora_weights": "MiCA"}, {}),
    "PiSSA twice": ({"init_lora_weights": "pissa"}, {"init_lora_weights": "pissa"}),
}
# The same, for another function. The first field that differs is named.
OTHER = {
    "alpha": ({"lora_alpha": 16}, {}),
    "rslora": ({"use_rslora": True}, {}),
    "alpha of some layers": ({"alpha_pattern": {"q_proj": 64}}, {}),
    "a pattern in another order": ({"alpha_pattern": SORTED}, {"alpha_pattern": WIDE_FIRST}),
    "PiSSA": ({"init_lora_weights": "pissa"}, {}),
    "PiSSA of the model's": ({}, {"init_lora_weights": "pissa"}),
    "OLoRA": ({"init_lora_weights": "olora"}, {"init_lora_weights": "pissa"}),
    "tokens": ({TOKENS: [20, 21, 22]}, {TOKENS: [30, 31, 32]}),
    "tokens in another order": ({TOKENS: [20, 21, 22]}, {TOKENS: [22, 21, 20]}),
    "tokens of two layers": (
        {TOKENS: {"embed_tokens": [20], "lm_head": [21]}},
        {TOKENS: {"embed_tokens": [21], "lm_head": [20]}},
    ),
    "activated by tokens": ({"alora_invocation_tokens": [13]}, {}),
    "layers that are repeated": ({"layer_replication": [[0, 2]]}, {"layer_replication": [[0, 1], [0, 1]]}),
}


def adapted(**changes):
    torch.manual_seed(1)
    usual = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    model = get_peft_model(base(), LoraConfig(**{**usual, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.mul_(3)
    return model


def base():
    torch.manual_seed(0)
    return causal_lm(dtype=torch.float32)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def saved(folder, changes, model=None):
    (model or adapted(**changes)).save_pretrained(folder)
    return folder


def rewritten(folder, drop=(), **changes):
    """Change an adapter's config file, as another version of PEFT would have written it."""
    path = folder / CONFIG
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps({**kept, **changes}))
    return folder


def filled_by_peft(model, folder):
    """Fill the model with the folder's tensors whatever its config says, and return the logits."""
    set_peft_model_state_dict(model, load_file(folder / WEIGHTS))
    return logits(model)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set")
@pytest.mark.parametrize("case", SAME)
def test_configs_of_one_function_are_taken(tmp_path, case):
    theirs, ours = SAME[case]
    saved(tmp_path, theirs)
    want = logits(PeftModel.from_pretrained(base(), tmp_path))
    model = adapted(**ours)
    load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), want, rtol=0, atol=0)


@pytest.mark.parametrize("case", OTHER)
def test_a_config_of_another_function_is_refused(tmp_path, case):
    theirs, ours = OTHER[case]
    saved(tmp_path, theirs)
    want = logits(PeftModel.from_pretrained(base(), tmp_path))
    assert (filled_by_peft(adapted(**ours), tmp_path) - want).abs().max() > 1e-4, "the functions are the same"
    model = adapted(**ours)
    before = logits(model)
    with pytest.raises(ValueError, match=f"trained with {next(iter({**theirs, **ours}))}=.*the folder's own config"):
        load_adapter(model, tmp_path)
    assert logits(model).equal(before)


@pytest.mark.parametrize("field", ["alpha_pattern", "rank_pattern"])
def test_patterns_whose_order_matters_are_written_so_that_peft_reads_the_same(tmp_path, field):
    model = adapted(**{field: WIDE_FIRST})
    save_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(base(), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0)
    again = adapted(**{field: WIDE_FIRST})
    load_adapter(again, tmp_path)
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)
    save_adapter(adapted(**{field: SORTED}), tmp_path / "sorted")
    assert json.loads((tmp_path / "sorted" / CONFIG).read_text())[field] == SORTED


def test_a_field_that_the_folder_lacks_has_peft_s_default(tmp_path):
    """A folder of an older PEFT has no such fields: the model's own value is not meant."""
    later = ("use_rslora", "rank_pattern", "alpha_pattern", "alora_invocation_tokens", "layer_replication", "lora_bias")
    rewritten(saved(tmp_path, {}), drop=later)
    load_adapter(adapted(), tmp_path)
    for changes in ({"use_rslora": True}, {"alpha_pattern": {"q_proj": 64}}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            load_adapter(adapted(**changes), tmp_path)


@pytest.mark.parametrize("field", ["use_later_method", "merge_weights"])  # of a later and of a former PEFT
def test_an_unknown_field_is_ignored_with_peft_s_warning(tmp_path, field):
    want = logits(PeftModel.from_pretrained(base(), saved(tmp_path, {})))
    rewritten(tmp_path, **{field: True})
    with pytest.warns(UserWarning, match=rf"Unexpected keyword arguments \['{field}'\] for class LoraConfig"):
        PeftModel.from_pretrained(base(), tmp_path)
    model = adapted()
    with pytest.warns(UserWarning, match=rf"Unexpected keyword arguments \['{field}'\] for class LoraConfig"):
        load_adapter(model, tmp_path)
    torch.testing.assert_close(logits(model), want, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["corda", "lora_ga", "loftq"])
def test_how_the_base_was_changed_is_compared(tmp_path, kind):
    """LoftQ needs packages, CorDA and LoRA-GA data to start from: their configs are compared as they are written."""
    configs = {"corda": "corda_config", "lora_ga": "lora_ga_config", "loftq": "loftq_config"}
    rewritten(saved(tmp_path, {}), init_lora_weights=kind, **{configs[kind]: {"seed": 1}})
    own = adapted().peft_config["default"]
    own.init_lora_weights = kind
    with pytest.raises(ValueError, match=rf"{configs[kind]}=\{{'seed': 1\}}"):
        check_config(tmp_path, own, nn.Module())
    setattr(own, configs[kind], {"seed": 1})
    check_config(tmp_path, own, nn.Module())


def test_a_pickled_adapter_is_named(tmp_path):
    saved(tmp_path, {})
    (tmp_path / WEIGHTS).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"adapter_model\.bin, a pickle"):
        load_adapter(adapted(), tmp_path)


def test_the_fields_are_peft_s():
    """A field that a later PEFT no longer has is no reason to keep its line."""
    assert not set(_SAME_FUNCTION) - {each.name for each in fields(LoraConfig)}
