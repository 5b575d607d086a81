"""What is done to a loaded model on meta is kept, or refused where it is done; nothing is lost in between."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import config as peft_config
from torch import nn
from transformers import LlamaForCausalLM

from lora_parallel import meta_init
from lora_parallel.adapters.injection import LateAdapter
from lora_parallel.lazy.lazy_tensor import LazyParameter
from lora_parallel.lazy.materialize import read_weights
from lora_parallel.lazy.tracking import check_checkpoints, settle
from lora_parallel.loading.meta_init import defer_from_pretrained
from tests.oracle import causal_lm, fill_adapters


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("waiting")
    causal_lm(dtype=torch.float32).save_pretrained(folder)
    return folder


def both(path, change):
    """A model loaded in memory and one filled from meta, after `change`."""
    want = LlamaForCausalLM.from_pretrained(path)
    want = change(want) or want
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(path)
    model = change(model) or model
    check_checkpoints(model, materialize=True)
    settle(model)
    assert not any(isinstance(tensor, LazyParameter) for tensor in (*model.parameters(), *model.buffers()))
    read_weights(model, "cpu")
    return model, want


def tie_the_other_way(model):
    model.model.embed_tokens.weight = model.lm_head.weight


def swap(model):
    first, second = (layer.self_attn.q_proj for layer in model.model.layers)
    first.weight, second.weight = second.weight, first.weight


def from_another_layer(model):
    first, second = model.model.layers
    second.load_state_dict(first.state_dict())


def assigned_from_another_layer(model):
    first, second = model.model.layers
    second.mlp.load_state_dict(first.mlp.state_dict(), assign=True)


def copied_from_another_layer(model):
    first, second = model.model.layers
    second.mlp.up_proj.weight.data.copy_(first.mlp.up_proj.weight.data)
    with torch.no_grad():
        second.mlp.gate_proj.weight.copy_(first.mlp.up_proj.weight)


def a_layer_added(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))


def a_layer_removed(model):
    del model.model.layers[0]


def a_new_parameter(model):
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())


def a_new_parameter_of_some_rows(model):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach()[50:])
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(model.model.layers[1].mlp.down_proj.weight.data.t())


def moved(model):
    model.to("cpu").to(device="cpu", dtype=torch.float32)
    model.cpu()


def moved_and_cast(model):
    model.to("cpu", torch.bfloat16)


KEPT = {
    "tie_weights": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "a tie the other way": tie_the_other_way,
    "two weights swapped": swap,
    "load_state_dict from another layer": from_another_layer,
    "load_state_dict with assign": assigned_from_another_layer,
    "copy_ from another layer": copied_from_another_layer,
    "a layer added": a_layer_added,
    "a layer removed": a_layer_removed,
    "a parameter cloned from another": a_new_parameter,
    "a parameter of some rows, and one transposed": a_new_parameter_of_some_rows,
    "data of another, transposed": lambda model: setattr(
        model.model.layers[0].mlp.up_proj.weight, "data", model.model.layers[0].mlp.down_proj.weight.data.t()
    ),
    "half and back": lambda model: model.half().float(),
    "bfloat16, then double": lambda model: model.bfloat16().double(),
    "one module in another dtype": lambda model: model.bfloat16().model.norm.float() and None,
    "moved to a device": moved,
    "moved and cast": moved_and_cast,
    "a deep copy": copy.deepcopy,
    "pickled": lambda model: pickle.loads(pickle.dumps(model)),
    "requires_grad_": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_passes_a_weight_on_is_kept(path, name):
    model, want = both(path, KEPT[name])
    mine, theirs = model.state_dict(), want.state_dict()
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert mine[key].dtype == tensor.dtype, key
        assert torch.equal(mine[key], tensor), key
    own, others = list(model.named_parameters()), list(want.named_parameters())
    assert [(key, p.requires_grad) for key, p in own] == [(key, p.requires_grad) for key, p in others]


def within_no_grad(write):
    def change(model):
        with torch.no_grad():
            write(model.lm_head.weight)

    return change


REFUSED = {
    "copy_": within_no_grad(lambda weight: weight.copy_(torch.ones(weight.shape))),
    "data.copy_": lambda model: model.lm_head.weight.data.copy_(torch.ones(131, 40)),
    "mul_": within_no_grad(lambda weight: weight.mul_(2)),
    "data.mul_ of rows": lambda model: model.lm_head.weight.data[3:5].mul_(2),
    "a row": within_no_grad(lambda weight: weight.__setitem__(3, 0.0)),
    "lerp_ with another": within_no_grad(lambda weight: weight.lerp_(torch.ones(131, 40, device="meta"), 0.5)),
    "nn.init": lambda model: nn.init.normal_(model.lm_head.weight),
    "nn.init of data": lambda model: nn.init.zeros_(model.lm_head.weight.data),
    "reset_parameters": lambda model: model.lm_head.reset_parameters(),
    "data = values": lambda model: setattr(model.lm_head.weight, "data", torch.ones(131, 40)),
    "data = data times two": lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data * 2),
    "out=": within_no_grad(lambda weight: torch.add(torch.ones(weight.shape, device="meta"), 1, out=weight)),
    "a resize": lambda model: model.resize_token_embeddings(140, mean_resizing=False),
    "a resize to the mean": lambda model: model.resize_token_embeddings(140),
    "a new parameter times two": lambda model: setattr(
        model.lm_head, "weight", nn.Parameter(model.lm_head.weight.detach() * 2)
    ),
    "to_empty": lambda model: model.lm_head.to_empty(device="cpu"),
    "a forward": lambda model: model(input_ids=torch.arange(4)[None]),
}


RESIZED = ("a resize", "a resize to the mean")
INSIDE = [(name, "inside") for name in RESIZED]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", RESIZED)
def test_a_vocabulary_may_be_resized_inside(path, name, tied):
    """Embeddings are read whole for that; new rows are drawn from the random state as in a normal load."""

    def loaded():
        model = LlamaForCausalLM.from_pretrained(path)
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
            model.config.tie_word_embeddings = True
        torch.manual_seed(4)
        REFUSED[name](model)
        return model

    want = loaded()
    with meta_init():
        model = loaded()
    assert model.model.layers[0].mlp.up_proj.weight.is_meta
    check_checkpoints(model, materialize=True)
    settle(model)
    read_weights(model, "cpu")
    mine = model.state_dict()
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    for key, tensor in want.state_dict().items():
        assert torch.equal(mine[key], tensor), key


def changed_and_checked(model, change):
    change(model)
    check_checkpoints(model, materialize=True)


PLACES = [(name, where) for name in REFUSED for where in ("inside", "after") if (name, where) not in INSIDE]


@pytest.mark.parametrize(("name", "where"), PLACES)
def test_what_would_be_lost_is_refused(path, name, where):
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(path)
        if name in RESIZED:
            model.lm_head.weight = model.model.embed_tokens.weight
            model.config.tie_word_embeddings = True
    with meta_init() if where == "inside" else nullcontext(), pytest.raises(ValueError, match="meta") as raised:
        changed_and_checked(model, REFUSED[name])
    if "new parameter" not in name:
        assert "model.safetensors: " in str(raised.value)


@pytest.mark.parametrize("merge", ["merge_and_unload", "merge_adapter"])
def test_an_adapter_is_not_merged_into_what_is_on_disk(path, tmp_path, merge):
    adapted = get_peft_model(LlamaForCausalLM.from_pretrained(path), LoraConfig(r=2, target_modules=["q_proj"]))
    fill_adapters(adapted)
    adapted.save_pretrained(tmp_path)
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(path)
    model = PeftModel.from_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match=r"would write into a weight that is still on disk.*LORA_PARALLEL_DEFER=0"):
        getattr(model, merge)()


def test_values_given_by_load_state_dict_are_kept(path):
    def change(model):
        head = torch.full((131, 40), 2.0)
        model.load_state_dict({"lm_head.weight": head}, strict=False)
        model.model.norm.load_state_dict({"weight": torch.full((40,), 3.0)}, assign=True)

    model, _ = both(path, change)
    assert (model.lm_head.weight == 2).all()
    assert (model.model.norm.weight == 3).all()


KASA = {"kasa_config": peft_config.KasaConfig()} if hasattr(peft_config, "KasaConfig") else {}  # came with peft 0.21


@pytest.mark.parametrize("settings", [{"init_lora_weights": "mica"}, *([KASA] if KASA else [])])
def test_an_adapter_that_is_computed_in_another_way_is_refused(path, settings):
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(path)
    with pytest.raises(ValueError, match=r"computes the adapter from the base weights.*LORA_PARALLEL_DEFER=0"):
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **settings))


@pytest.mark.parametrize("settings", [{"init_lora_weights": "pissa"}, {"use_dora": True}])
def test_an_adapter_that_needs_the_base_is_refused_if_no_file_holds_it(path, settings):
    with meta_init():
        model = LlamaForCausalLM(LlamaForCausalLM.from_pretrained(path).config)
    with pytest.raises(ValueError, match=r"computes the adapter from the base weights"):
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], **settings))


def test_an_adapter_that_is_drawn_later_has_no_memory_until_then(path):
    """And then the values of one process."""
    config = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights="gaussian")
    model = deferred(path)
    late = LateAdapter(model, config, autocast_adapter_dtype=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    settle(model)
    late.draw(model, 5, "cpu")
    torch.manual_seed(5)
    want = get_peft_model(LlamaForCausalLM.from_pretrained(path), config).get_base_model()
    adapters = {name: p for name, p in want.named_parameters() if "lora_" in name}
    assert len(adapters) == 6
    for name, values in adapters.items():
        assert model.get_parameter(name).equal(values), name


def deferred(path):
    with meta_init():
        return LlamaForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("index", [[3], [-1, 0, 3], [], torch.tensor([[1, 2], [3, 130]]), torch.arange(131) % 50 == 0])
def test_rows_that_are_picked_are_read_at_once(path, index):
    want = LlamaForCausalLM.from_pretrained(path).lm_head.weight[index]
    got = deferred(path).lm_head.weight[index]
    assert type(got) is torch.Tensor
    assert got.equal(want)
    assert got.dtype == want.dtype


def test_a_row_that_is_not_there_is_an_error(path):
    with pytest.raises(IndexError):
        deferred(path).lm_head.weight[[131]]


def test_moving_a_model_to_its_own_device_loses_nothing(path):
    """sentence-transformers' trainer moves its loss, which holds the model, to the model's device."""
    model = get_peft_model(deferred(path), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapter = {name: p.clone() for name, p in model.named_parameters() if "lora_" in name}
    nn.ModuleList([model]).to(model.device)
    for name, values in adapter.items():
        assert model.get_parameter(name).equal(values), name
    check_checkpoints(model, materialize=True)
    settle(model)
    read_weights(model, "cpu")
    want = LlamaForCausalLM.from_pretrained(path).state_dict()
    for name, value in model.get_base_model().state_dict().items():
        if "lora_" not in name:
            assert value.equal(want[name.replace("base_layer.", "")]), name


def test_tokens_are_trained_only_of_weights_whose_file_is_known(path):
    lora = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2])
    with meta_init():
        model = LlamaForCausalLM(LlamaForCausalLM.from_pretrained(path).config)
    with pytest.raises(ValueError, match=r"trainable_token_indices=.*computes the adapter from the base weights"):
        get_peft_model(model, lora)


def test_a_variable_leaves_models_of_a_flag_in_memory(path, monkeypatch):
    """An explicit `meta_init` is what the script says, and stays."""
    with defer_from_pretrained():
        assert any(isinstance(each, LazyParameter) for each in LlamaForCausalLM.from_pretrained(path).parameters())
        monkeypatch.setenv("LORA_PARALLEL_DEFER", "0")  # as a script may, for one model
        model = LlamaForCausalLM.from_pretrained(path)
    assert not any(isinstance(parameter, LazyParameter) for parameter in model.parameters())
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    assert all(isinstance(parameter, LazyParameter) for parameter in deferred(path).parameters())
