"""What a model on meta remembers of a checkpoint that was attached, and what is said of one that does not fit."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from lora_parallel import attach_checkpoint, meta_init
from lora_parallel.lazy.graph import read
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.lazy.materialize import read_plan, read_weights
from lora_parallel.lazy.tracking import (
    check_checkpoints,
    defer,
    has_deferred,
    is_deferred,
    lazy_tensors_of,
)
from tests.oracle import SIZES, causal_lm


class Net(nn.Module):
    """Tied weights, a persistent buffer and one that is not."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(11, 4, dtype=dtype)
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(2))
        self.norm = nn.BatchNorm1d(4, dtype=dtype)
        self.head = nn.Linear(4, 11, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.register_buffer("angles", torch.linspace(0, 1, 3).cos(), persistent=False)


def trained(dtype=torch.float32):
    torch.manual_seed(1)
    model = Net(dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.shape != (3,):
                tensor.copy_(torch.randn(tensor.shape))
    model.norm.num_batches_tracked += 7
    model.layers[1].bias.requires_grad_(False)
    return model


def save(model, path, drop=("head.weight",), **changes):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in drop}
    state |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(state, path)


def problem_of(model):
    """What `parallelize` would raise."""
    with pytest.raises((ValueError, OSError)) as raised:
        check_checkpoints(model, materialize=True)
    return str(raised.value)


def filled(model):
    check_checkpoints(model, materialize=True)
    read_weights(model, "cpu")
    assert not has_deferred(model)
    return model


def check_equal(model, want):
    mine, theirs = model.state_dict(), want.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name
    for name, buffer in want.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


@pytest.mark.parametrize("where", ["meta", "memory", "torch's meta"])
def test_a_plain_module(tmp_path, where):
    want = trained()
    save(want, tmp_path / "model.safetensors")
    if where == "meta":
        with meta_init():
            model = Net()
    elif where == "memory":
        model = Net()
    else:
        with torch.device("meta"):
            model = Net()
        model.angles = torch.linspace(0, 1, 3).cos()
    model.layers[1].bias.requires_grad_(False)
    assert attach_checkpoint(model, tmp_path) is model
    state = model.state_dict(keep_vars=True)
    assert all(tensor.is_meta for tensor in state.values())
    assert all(is_deferred(parameter) for parameter in model.parameters())
    assert not model.angles.is_meta
    assert model.head.weight is model.embedding.weight
    filled(model)
    check_equal(model, want)
    assert model.head.weight is model.embedding.weight
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in want.named_parameters()
    }


@pytest.mark.parametrize("names", ["both", "the first", "the second"])
def test_a_tie_may_be_in_the_file_under_any_of_its_names(tmp_path, names):
    want = trained()
    drop = {"both": (), "the first": ("head.weight",), "the second": ("embedding.weight",)}[names]
    save(want, tmp_path / "model.safetensors", drop)
    with meta_init():
        model = Net()
    filled(attach_checkpoint(model, tmp_path))
    check_equal(model, want)
    assert model.head.weight is model.embedding.weight


def test_a_tied_tensor_is_read_once(tmp_path):
    save(trained(), tmp_path / "model.safetensors", drop=())
    with meta_init():
        model = Net()
    plan = read_plan(attach_checkpoint(model, tmp_path))
    names = [read.parameter for read in plan]
    assert names.count("embedding.weight") == 1
    assert "head.weight" not in names


def test_a_file_that_has_changed_since_the_model_was_built(tmp_path):
    save(trained(), tmp_path / "model.safetensors")
    with meta_init():
        model = Net()
    check_checkpoints(attach_checkpoint(model, tmp_path), materialize=True)
    save(trained(), tmp_path / "model.safetensors", layers__0__bias=torch.ones(1))  # as if it held for each feature
    with pytest.raises(ValueError, match="the file has changed since the model was built"):
        read_weights(model, "cpu")


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16, torch.float16])
def test_weights_are_cast_to_the_models_dtype(tmp_path, stored):
    want = trained(stored)
    save(want, tmp_path / "model.safetensors")
    with meta_init():
        model = Net(torch.float32)
    filled(attach_checkpoint(model, tmp_path))
    steps = want.norm.num_batches_tracked.clone()
    check_equal(model, want.to(torch.float32))
    assert torch.equal(model.norm.num_batches_tracked, steps)


@pytest.mark.parametrize("form", ["safetensors", "pickle", "dcp"])
def test_any_source(tmp_path, form):
    want = trained()
    if form == "safetensors":
        path = tmp_path / "other name"
        save(want, path)
    elif form == "pickle":
        path = tmp_path / "model.pt"
        torch.save(want.state_dict(), path)
    else:
        path = tmp_path / "step"
        dcp.save(want.state_dict(), checkpoint_id=path, no_dist=True)
    with meta_init():
        model = Net()
    filled(attach_checkpoint(model, path, allow_pickle=form == "pickle"))
    check_equal(model, want)


def test_nothing_is_read_when_it_is_attached(tmp_path, monkeypatch):
    save(trained(), tmp_path / "model.safetensors")
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start:] = bytes(len(data) - start)
    (tmp_path / "model.safetensors").write_bytes(data)
    with meta_init():
        model = attach_checkpoint(Net(), tmp_path)
    save(trained(), tmp_path / "model.safetensors")
    filled(model)
    check_equal(model, trained())


def test_it_survives_a_copy_and_another_tree(tmp_path):
    save(trained(), tmp_path / "model.safetensors")
    with meta_init():
        model = attach_checkpoint(Net(), tmp_path)
    outer = nn.ModuleDict({"inner": copy.deepcopy(model)})
    del model
    filled(outer)
    check_equal(outer["inner"], trained())
    assert outer["inner"].head.weight is outer["inner"].embedding.weight


def test_attached_twice_the_second_counts(tmp_path):
    for name, factor in (("a", 1), ("b", 2)):
        model = trained()
        with torch.no_grad():
            model.embedding.weight.mul_(factor)
        save(model, tmp_path / name)
    with meta_init():
        model = Net()
    attach_checkpoint(model, tmp_path / "a")
    attach_checkpoint(model, tmp_path / "b")
    filled(model)
    assert torch.equal(model.embedding.weight, trained().embedding.weight * 2)


def test_a_bad_one_is_forgotten_for_a_good_one(tmp_path):
    save(trained(), tmp_path / "model.safetensors")
    with meta_init():
        model = attach_checkpoint(Net(), tmp_path / "nothing")
    assert "there is no checkpoint at" in problem_of(model)
    attach_checkpoint(model, tmp_path)
    filled(model)
    check_equal(model, trained())


@pytest.mark.parametrize("given", ["all", "the embedding", "the head", "a layer"])
def test_load_state_dict_wins_and_ties_stay(tmp_path, given):
    save(trained(), tmp_path / "model.safetensors")
    model = attached(tmp_path)
    names = {
        "all": list(trained().state_dict()),
        "the embedding": ["embedding.weight"],
        "the head": ["head.weight"],
        "a layer": ["layers.0.weight", "layers.0.bias"],
    }[given]
    state = trained().state_dict()
    for name in list(state):
        if name in names:
            state[name] = state[name] * 2
        else:
            del state[name]
    model.load_state_dict(state, strict=given == "all")
    filled(model)
    assert model.head.weight is model.embedding.weight
    for name, tensor in trained().state_dict().items():
        tied = name in ("embedding.weight", "head.weight") and given in ("the embedding", "the head")
        want = tensor * 2 if name in names or tied else tensor
        assert torch.equal(model.state_dict()[name], want), name


@pytest.mark.parametrize("way", ["to_empty", "an assignment"])
def test_memory_that_was_given_since_is_refused(tmp_path, way):
    save(trained(), tmp_path / "model.safetensors")
    model = attached(tmp_path)
    if way == "to_empty":
        model.layers[0].to_empty(device="cpu")
    else:
        model.layers[0].weight = nn.Parameter(torch.ones(4, 4))
    said = problem_of(model)
    assert said.startswith("layers.0.weight was built on meta, to be filled from ")
    assert "model.safetensors: layers.0.weight, and has been given memory since" in said


# ---------------------------------------------------------------------- a checkpoint that does not fit


def attached(path, **settings):
    """Attaching raises nothing: it would leave peers waiting."""
    with meta_init():
        model = Net()
    return attach_checkpoint(model, path, **settings)


def test_a_name_that_is_missing(tmp_path):
    save(trained(), tmp_path / "model.safetensors", drop=("head.weight", "layers.1.weight", "norm.running_mean"))
    said = problem_of(attached(tmp_path))
    assert str(tmp_path) in said
    assert "does not fit Net" in said
    assert "does not hold 2 of its parameters and buffers" in said
    assert "layers.1.weight" in said
    assert "Names must be those of model.state_dict()" in said


def test_both_names_of_a_tie_are_missing(tmp_path):
    save(trained(), tmp_path / "model.safetensors", drop=("head.weight", "embedding.weight"))
    assert "embedding.weight" in problem_of(attached(tmp_path))


def test_a_name_that_nothing_claims(tmp_path):
    save(trained(), tmp_path / "model.safetensors", layers__2__weight=torch.ones(4, 4))
    said = problem_of(attached(tmp_path))
    assert "nothing claims 1 of its tensors (first: ['layers.2.weight'])" in said


def test_a_buffer_that_is_not_persistent_is_not_the_checkpoints(tmp_path):
    save(trained(), tmp_path / "model.safetensors", angles=torch.ones(3))
    assert "nothing claims 1 of its tensors (first: ['angles'])" in problem_of(attached(tmp_path))


@pytest.mark.parametrize("shape", [(5, 4), (4,), (4, 4, 1), ()])
def test_another_shape(tmp_path, shape):
    save(trained(), tmp_path / "model.safetensors", layers__0__weight=torch.ones(shape))
    said = problem_of(attached(tmp_path))
    where = f"{tmp_path / 'model.safetensors'}: layers.0.weight"
    assert f"{where} has shape {shape}, and layers.0.weight has (4, 4): the model's config is not" in said


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_a_quantised_weight(tmp_path, dtype):
    save(trained(), tmp_path / "model.safetensors", layers__0__weight=torch.ones(4, 4).to(dtype))
    said = problem_of(attached(tmp_path))
    assert f"layers.0.weight has dtype {dtype}, and layers.0.weight is torch.float32" in said
    assert "a quantised checkpoint is read by from_pretrained" in said


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
def test_a_buffer_of_integers_must_be_of_the_same(tmp_path, dtype):
    save(trained(), tmp_path / "model.safetensors", norm__num_batches_tracked=torch.tensor(7, dtype=dtype))
    said = problem_of(attached(tmp_path))
    assert f"norm.num_batches_tracked has dtype {dtype}, and norm.num_batches_tracked is torch.int64" in said


def test_a_pickle_that_is_not_allowed(tmp_path):
    torch.save(trained().state_dict(), tmp_path / "model.pt")
    assert "pass allow_pickle=True" in problem_of(attached(tmp_path))
    filled(attached(tmp_path, allow_pickle=True))


@pytest.mark.parametrize(
    "index", ["{", '{"weight_map": {"w": 3}}', '{"weight_map": {"w": []}}', '{"weight_map": {"w": "x.safetensors"}}']
)
def test_attaching_a_bad_index_raises_nothing_itself(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert str(tmp_path) in problem_of(attached(tmp_path))


@pytest.mark.parametrize("data", [b"", b"garbage", b"K\x05.", b"}."])
def test_attaching_bad_metadata_raises_nothing_itself(tmp_path, data):
    (tmp_path / ".metadata").write_bytes(data)
    assert str(tmp_path) in problem_of(attached(tmp_path))


def test_a_model_whose_checkpoint_does_not_fit_stays_as_it_was_in_memory(tmp_path):
    save(trained(), tmp_path / "model.safetensors", layers__1__bias=torch.ones(5))
    model = trained()
    attach_checkpoint(model, tmp_path)
    check_equal(model, trained())
    assert "layers.1.bias has shape (5,)" in problem_of(model)


def test_nothing_attached():
    with meta_init():
        model = Net()
    said = problem_of(model)
    assert said.startswith("embedding.weight is on the meta device, and nothing fills it")
    assert "attach_checkpoint(model, path)" in said
    check_checkpoints(model, materialize=False)
    assert {read.parameter for read in read_plan(model) if read.file is None} == {
        name for name, _ in model.named_parameters()
    }


def test_a_layer_that_was_replaced_is_not_filled(tmp_path):
    save(trained(), tmp_path / "model.safetensors")
    model = attached(tmp_path)
    with meta_init():
        model.layers[0] = nn.Linear(4, 4)
    assert "layers.0.weight is on the meta device, and nothing fills it" in problem_of(model)


# ---------------------------------------------------------------------- transformers models from a config


def tiny(kind):
    torch.manual_seed(2)
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3, tie_word_embeddings=False))
    elif kind == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31, "n_positions": 24}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    else:
        model = causal_lm("llama", torch.float32, tie_word_embeddings=kind == "llama, tied")
    return model.eval()


KINDS = ["llama", "llama, tied", "gpt2", "mixtral"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_transformers_model(tmp_path, kind):
    """The names in its files are those of save_pretrained, which may be others than the model's."""
    want = tiny(kind)
    want.save_pretrained(tmp_path)
    with meta_init():
        model = AutoModelForCausalLM.from_config(want.config).eval()
    assert attach_checkpoint(model, tmp_path) is model
    filled(model)
    check_equal(model, want)
    ids = torch.arange(6)[None]
    assert torch.equal(model(input_ids=ids).logits, want(input_ids=ids).logits)
    if kind in ("llama, tied", "gpt2"):
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_it_may_be_attached_inside_the_context(tmp_path, kind):
    want = trained() if kind == "plain" else tiny(kind)
    if kind == "plain":
        save(want, tmp_path / "model.safetensors")
    else:
        want.save_pretrained(tmp_path)
    with meta_init():
        model = Net() if kind == "plain" else AutoModelForCausalLM.from_config(want.config)
        attach_checkpoint(model, tmp_path)
    filled(model)
    check_equal(model, want)


def test_a_transformers_model_in_another_dtype(tmp_path):
    want = tiny("mixtral")
    want.save_pretrained(tmp_path)
    with meta_init():
        model = AutoModelForCausalLM.from_config(want.config, dtype=torch.bfloat16)
    filled(attach_checkpoint(model, tmp_path))
    check_equal(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))


def test_a_transformers_model_and_its_own_state_dict(tmp_path):
    """As a trainer saved it, not save_pretrained: the names are the model's own."""
    want = tiny("mixtral")
    dcp.save(want.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    with meta_init():
        model = AutoModelForCausalLM.from_config(want.config)
    filled(attach_checkpoint(model, tmp_path))
    check_equal(model, want)


def rewritten(path, change):
    state = load_file(path / "model.safetensors")
    change(state)
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})


def test_a_transformers_model_lacks_a_tensor(tmp_path):
    want = tiny("llama")
    want.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda state: state.pop("model.layers.1.mlp.up_proj.weight"))
    with meta_init():
        model = AutoModelForCausalLM.from_config(want.config)
    attach_checkpoint(model, tmp_path)
    said = problem_of(model)
    assert f"{tmp_path} does not fit LlamaForCausalLM: it does not hold 1 of its parameters" in said
    assert "model.layers.1.mlp.up_proj.weight" in said


def test_a_transformers_model_and_a_tensor_too_many(tmp_path):
    want = tiny("llama")
    want.save_pretrained(tmp_path)
    rewritten(tmp_path, lambda state: state.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}))
    with meta_init():
        model = AutoModelForCausalLM.from_config(want.config)
    attach_checkpoint(model, tmp_path)
    said = problem_of(model)
    assert re.search(r"nothing claims 1 of its tensors \(first: \['model\.layers\.2\.mlp\.up_proj\.weight'\]\)", said)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_a_transformers_model_of_another_shape(tmp_path, kind):
    tiny(kind).save_pretrained(tmp_path)
    config = copy.deepcopy(tiny(kind).config)
    config.intermediate_size = 48
    with meta_init():
        model = AutoModelForCausalLM.from_config(config)
    attach_checkpoint(model, tmp_path)
    said = problem_of(model)
    assert str(tmp_path) in said
    assert "has shape" in said
    assert "the config is not the checkpoint's" in said


def test_a_transformers_model_and_a_quantised_weight(tmp_path):
    want = tiny("llama")
    want.save_pretrained(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewritten(tmp_path, lambda state: state.update({name: state[name].to(torch.int8)}))
    with meta_init():
        model = AutoModelForCausalLM.from_config(want.config)
    attach_checkpoint(model, tmp_path)
    assert f"{name} has dtype torch.int8" in problem_of(model)


def test_the_parts_that_no_file_holds_must_be_named(tmp_path):
    """A base in memory whose checkpoint has no head: refused, not left as it is."""
    want = tiny("llama")
    want.model.save_pretrained(tmp_path)
    with meta_init():
        model = AutoModelForCausalLM.from_config(want.config)
    attach_checkpoint(model, tmp_path)
    assert "lm_head.weight" in problem_of(model)


# ---------------------------------------------------------------------- small parts


def test_defer_keeps_all_but_the_values():
    for tensor in (nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2).half(), False), torch.ones(3)):
        deferred = defer(tensor)
        assert type(deferred) is type(tensor)
        assert deferred.is_meta
        assert (deferred.shape, deferred.dtype) == (tensor.shape, tensor.dtype)
        assert deferred.requires_grad == tensor.requires_grad
    assert not is_deferred(nn.Parameter(torch.ones(2, device="meta")))


def test_what_is_remembered_is_where_the_parameter_is(tmp_path):
    want = trained()
    save(want, tmp_path / "model.safetensors")
    model = attached(tmp_path)
    stored = lazy_tensors_of(model.layers[1])
    assert stored.keys() == {"weight", "bias"}
    assert all(type(tensor) is LazyTensor for tensor in stored.values())
    assert torch.equal(read(stored["weight"].node), want.layers[1].weight)
    assert lazy_tensors_of(model) == {}
