"""`from_pretrained` on meta against a normal load, and the private parts of transformers that this rests on."""

from __future__ import annotations

import copy
import inspect
import json
import os
import warnings

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from lora_parallel import meta_init
from lora_parallel.lazy.files import open_checkpoint
from lora_parallel.lazy.graph import read
from lora_parallel.lazy.lazy_tensor import LazyTensor
from lora_parallel.lazy.materialize import read_weights
from lora_parallel.lazy.tracking import check_checkpoints, check_fresh, fresh_of, is_deferred
from tests.oracle import SIZES, causal_lm

HOOKED = "_load_pretrained_model"


def tiny(kind):
    torch.manual_seed(4)
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 31, "n_positions": 24}
    bert = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
    conv = {"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_conv_pos_embedding_groups": 2}
    return {
        "llama": lambda: causal_lm("llama", torch.float32),
        "llama, tied": lambda: causal_lm("llama", torch.float32, tie_word_embeddings=True),
        "phi3": lambda: causal_lm("phi3", torch.float32),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**gpt2, bos_token_id=0, eos_token_id=1)),
        "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3)),
        "bert": lambda: BertForMaskedLM(BertConfig(**bert, vocab_size=31, max_position_embeddings=24)),
        "wav2vec2": lambda: Wav2Vec2Model(Wav2Vec2Config(**bert, **conv, num_feat_extract_layers=2, vocab_size=31)),
    }[kind]()


KINDS = {
    "llama": LlamaForCausalLM,
    "llama, tied": LlamaForCausalLM,
    "phi3": AutoModelForCausalLM,
    "gpt2": AutoModelForCausalLM,
    "mixtral": AutoModelForCausalLM,
    "bert": BertForMaskedLM,
    "wav2vec2": AutoModel,  # weight norm: its initialisation fills a weight that is computed anew each time
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A directory with a checkpoint for each kind of model."""
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        tiny(kind).save_pretrained(root / kind)
    return root


def both(load, seed=7):
    """A normal load and one on meta; the random state must be the same after either."""
    states = []
    torch.manual_seed(seed)
    want = load()
    states.append(torch.rand(3))
    torch.manual_seed(seed)
    with meta_init():
        model = load()
    states.append(torch.rand(3))
    assert torch.equal(*states)
    return model, want


def check_alike(model, want, in_memory=()):
    """Names, shapes, dtypes, ties, buffers and settings are those of `want`; parameters are on meta."""
    mine, theirs = dict(model.named_parameters()), dict(want.named_parameters())
    assert list(mine) == list(theirs)
    for name, parameter in theirs.items():
        assert mine[name].shape == parameter.shape, name
        assert mine[name].dtype == parameter.dtype, name
        assert mine[name].requires_grad == parameter.requires_grad, name
        if name in in_memory:
            assert torch.equal(mine[name], parameter), name
        else:
            assert is_deferred(mine[name]), name
    buffers = dict(model.named_buffers())
    assert list(buffers) == [name for name, _ in want.named_buffers()]
    for name, buffer in want.named_buffers():
        assert buffers[name].dtype == buffer.dtype, name
        assert torch.equal(buffers[name], buffer), name
    assert type(model) is type(want)
    assert model.training == want.training
    assert model.dtype == want.dtype
    assert model.config.to_dict() == want.config.to_dict()
    assert model.name_or_path == want.name_or_path
    # By name: parametrize makes a class for each module.
    assert [type(module).__qualname__ for module in model.modules()] == [type(m).__qualname__ for m in want.modules()]
    if want.can_generate():
        assert model.generation_config.to_dict() == want.generation_config.to_dict()


def check_filled(model, want):
    check_checkpoints(model, materialize=True)
    read_weights(model, "cpu")
    mine, theirs = model.state_dict(), want.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


def problem_of(model):
    """What `parallelize` would raise."""
    with pytest.raises((ValueError, OSError)) as raised:
        check_checkpoints(model, materialize=True)
    return str(raised.value)


# ---------------------------------------------------------------------- what is used of transformers


@pytest.mark.matrix  # of upstream alone
def test_what_is_replaced_has_the_same_parameters():
    own = PreTrainedModel.__dict__[HOOKED]
    assert isinstance(own, staticmethod)
    names = ["model", "state_dict", "checkpoint_files", "load_config", "expected_keys"]
    assert list(inspect.signature(own.__func__).parameters) == names
    assert isinstance(PreTrainedModel.__dict__["from_pretrained"], classmethod)


def test_from_pretrained_calls_it_on_the_class(checkpoints, monkeypatch):
    """With files, no state dict, and a config that says how names map; what it returns is used."""
    own, calls = PreTrainedModel.__dict__[HOOKED].__func__, []

    def noted(*args, **kwargs):
        calls.append(inspect.signature(own).bind(*args, **kwargs).arguments)
        return own(*args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, HOOKED, staticmethod(noted))
    path = checkpoints / "mixtral"
    LlamaForCausalLM.from_pretrained(checkpoints / "llama")
    model = AutoModelForCausalLM.from_pretrained(path, key_mapping={"^a": "b"}, dtype=torch.bfloat16)
    call = calls[1]
    assert len(calls) == 2
    assert call["state_dict"] is None
    assert call["checkpoint_files"] == [str(path / "model.safetensors")]
    assert call.get("expected_keys") is None
    assert call["model"] is model
    config = call["load_config"]
    assert config.dtype == torch.bfloat16
    assert config.hf_quantizer is None
    assert config.pretrained_model_name_or_path == path
    assert config.use_safetensors is not False
    assert config.ignore_mismatched_sizes is False
    assert config.weight_mapping


def test_the_model_arrives_on_meta_and_its_buffers_are_computed_afterwards(checkpoints, monkeypatch):
    own, seen = PreTrainedModel.__dict__[HOOKED].__func__, []

    def noted(model, *args):
        seen.append({tensor.device.type for tensor in (*model.parameters(), *model.buffers())})
        return own(model, *args)

    monkeypatch.setattr(PreTrainedModel, HOOKED, staticmethod(noted))
    LlamaForCausalLM.from_pretrained(checkpoints / "llama")
    assert seen == [{"meta"}]


@pytest.mark.matrix  # of upstream alone
def test_no_model_of_transformers_has_its_own_load(checkpoints):
    """A class that overrides what is replaced would read."""

    def below(kind):
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    assert not [kind for kind in below(PreTrainedModel) if HOOKED in kind.__dict__]


@pytest.mark.parametrize("kind", KINDS)
def test_convert_and_load_puts_stored_tensors_in_place(checkpoints, kind):
    """It converts names and layouts, casts, and sets parameters; it never looks at a value."""
    want = KINDS[kind].from_pretrained(checkpoints / kind, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = type(want)(want.config).to(torch.bfloat16)
    found = open_checkpoint(checkpoints / kind, allow_pickle=False)
    config = LoadStateDictConfig(
        pretrained_model_name_or_path="x", dtype=torch.bfloat16, weight_mapping=get_model_conversion_mapping(model)
    )
    stored = {key: LazyTensor(leaf) for key, leaf in found.items()}
    info, offloaded = convert_and_load_state_dict_in_model(
        model=model, state_dict=stored, load_config=config, disk_offload_index=None
    )
    assert offloaded is None
    assert info.unexpected_keys == set()
    assert info.mismatched_keys == set()
    assert not info.conversion_errors
    assert info.missing_keys <= set(model.all_tied_weights_keys)
    placed = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, LazyTensor)}
    assert placed.keys() | info.missing_keys == model.state_dict().keys()
    for name, tensor in placed.items():
        assert isinstance(tensor, torch.nn.Parameter) is (name in dict(want.named_parameters(remove_duplicate=False)))
        value = read(tensor.node)
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, want.state_dict()[name]), name


def test_convert_and_load_reports_what_does_not_fit(checkpoints):
    with torch.device("meta"):
        model = LlamaForCausalLM(tiny("llama").config)
    found = open_checkpoint(checkpoints / "llama", allow_pickle=False)
    stored = {key: LazyTensor(leaf) for key, leaf in found.items()}
    stored["other.weight"] = stored.pop("lm_head.weight")
    stored["model.norm.weight"] = stored["model.norm.weight"][1:]
    info, _ = convert_and_load_state_dict_in_model(model, stored, LoadStateDictConfig(), disk_offload_index=None)
    assert info.missing_keys == {"lm_head.weight", "model.norm.weight"} - {each[0] for each in info.mismatched_keys}
    assert info.unexpected_keys == {"other.weight"}
    assert [(name, tuple(a), tuple(b)) for name, a, b in info.mismatched_keys] == [("model.norm.weight", (39,), (40,))]


# ---------------------------------------------------------------------- from_pretrained


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, "auto", torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_that_of_a_normal_load(checkpoints, kind, dtype):
    settings = {} if dtype is None else {"dtype": dtype}
    model, want = both(lambda: KINDS[kind].from_pretrained(checkpoints / kind, **settings))
    check_alike(model, want)
    check_filled(model, want)


@pytest.mark.parametrize("kind", ["llama, tied", "gpt2", "bert"])
def test_ties_stay_one_object(checkpoints, kind):
    with meta_init():
        model = KINDS[kind].from_pretrained(checkpoints / kind)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    read_weights(model, "cpu")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("same", [True, False])
def test_a_head_and_an_embedding_that_the_file_holds_both(tmp_path, same):
    """Transformers unties the two if their values differ, and looks at them for it."""
    want = causal_lm("llama", torch.float32, tie_word_embeddings=True)
    want.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    if not same:
        state["lm_head.weight"][-1, -1] += 1
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, want = both(lambda: LlamaForCausalLM.from_pretrained(tmp_path))
    check_alike(model, want)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is same
    assert (want.lm_head.weight is want.model.embed_tokens.weight) is same
    check_filled(model, want)


def test_several_files(tmp_path):
    tiny("mixtral").save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model, want = both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path))
    check_alike(model, want)
    check_filled(model, want)


def test_a_variant_and_a_subfolder(tmp_path):
    tiny("llama").save_pretrained(tmp_path / "inner", variant="fp32")
    settings = {"subfolder": "inner", "variant": "fp32"}
    model, want = both(lambda: AutoModelForCausalLM.from_pretrained(tmp_path, **settings))
    check_alike(model, want)
    check_filled(model, want)


def test_output_loading_info(checkpoints):
    (model, mine), (want, theirs) = both(
        lambda: LlamaForCausalLM.from_pretrained(checkpoints / "llama", output_loading_info=True)
    )
    check_alike(model, want)
    assert mine == theirs


def test_a_config_that_is_given(checkpoints):
    config = copy.deepcopy(tiny("llama").config)
    config.num_hidden_layers = 1
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(checkpoints / "llama", config=config)
    assert len(model.model.layers) == 1
    assert "nothing in LlamaForCausalLM claims model.layers.1" in problem_of(model)


def test_a_state_dict_that_is_given(checkpoints):
    """There is nothing to defer."""
    given = tiny("llama")
    model, want = both(
        lambda: LlamaForCausalLM.from_pretrained(None, config=given.config, state_dict=given.state_dict())
    )
    for name, parameter in want.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_a_buffer_of_the_checkpoint(tmp_path):
    """A persistent buffer is the file's; one that is not is computed."""

    class Counted(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
            self.register_buffer("scale", torch.ones(2))

    torch.manual_seed(0)
    own = Counted(tiny("llama").config)
    own.seen += 5
    own.scale *= 3
    own.save_pretrained(tmp_path)
    model, want = both(lambda: Counted.from_pretrained(tmp_path))
    assert model.seen.is_meta
    assert want.seen.tolist() == [5, 5, 5]
    check_filled(model, want)


# ---------------------------------------------------------------------- what no file holds


def test_a_new_head_is_drawn_as_in_a_normal_load(checkpoints):
    model, want = both(lambda: AutoModelForSequenceClassification.from_pretrained(checkpoints / "llama", num_labels=3))
    check_alike(model, want, in_memory=["score.weight"])
    assert model.score.weight.abs().sum() > 0
    assert fresh_of(model.score) == {"weight"}
    assert fresh_of(model) == set()
    check_filled(model, want)


def test_a_new_head_with_a_bias_and_a_pooler(checkpoints):
    """BERT's pooler belongs to the base: it may be new, if it trains."""
    path = checkpoints / "bert"
    model, want = both(lambda: BertForSequenceClassification.from_pretrained(path, num_labels=3))
    heads = ["classifier.weight", "classifier.bias"]
    poolers = ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    check_alike(model, want, in_memory=[*heads, *poolers])
    check_filled(model, want)
    check_fresh(model)
    model.bert.pooler.requires_grad_(False)
    with pytest.raises(ValueError, match=r"bert\.pooler\.dense.* frozen: it would stay random"):
        check_fresh(model)


def test_a_base_that_lacks_some_layers(tmp_path):
    """A part of which the file holds a part is not a new one."""
    config = copy.deepcopy(tiny("llama").config)
    config.num_hidden_layers = 1
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(tmp_path, config=tiny("llama").config)
    assert "no file of it holds model.layers.1.input_layernorm.weight (nor 8 others)" in problem_of(model)


def test_one_class_of_a_checkpoint_that_is_of_more(tmp_path):
    """As CLIP's vision model of a CLIP checkpoint, and BERT's masked language model of one with a pooler."""
    BertForPreTraining(tiny("bert").config).save_pretrained(tmp_path)
    for kind in (BertForMaskedLM, BertForQuestionAnswering, BertModel):
        model, want = both(lambda kind=kind: kind.from_pretrained(tmp_path))
        check_filled(model, want)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "bert.gate.weight": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with meta_init():
        model = BertForMaskedLM.from_pretrained(tmp_path)
    assert "nothing in BertForMaskedLM claims bert.gate.weight" in problem_of(model)


def test_a_new_head_on_a_base_with_its_pooler(tmp_path):
    BertModel(tiny("bert").config).save_pretrained(tmp_path)
    model, want = both(lambda: BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3))
    check_alike(model, want, in_memory=["classifier.weight", "classifier.bias"])
    check_filled(model, want)


def test_a_base_without_its_head(checkpoints):
    model, want = both(lambda: AutoModel.from_pretrained(checkpoints / "llama"))
    assert type(model) is LlamaModel
    check_alike(model, want)
    check_filled(model, want)


def test_a_head_from_a_base(tmp_path):
    tiny("llama").model.save_pretrained(tmp_path)
    model, want = both(lambda: LlamaForCausalLM.from_pretrained(tmp_path))
    check_alike(model, want, in_memory=["lm_head.weight"])
    check_filled(model, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_new_head_in_another_dtype(checkpoints, dtype):
    settings = {"num_labels": 3, "dtype": dtype}
    model, want = both(lambda: AutoModelForSequenceClassification.from_pretrained(checkpoints / "llama", **settings))
    check_alike(model, want, in_memory=["score.weight"])


def test_a_head_of_another_size(tmp_path):
    AutoModelForSequenceClassification.from_config(tiny("llama").config).save_pretrained(tmp_path)
    settings = {"num_labels": 5, "ignore_mismatched_sizes": True}
    model, want = both(lambda: AutoModelForSequenceClassification.from_pretrained(tmp_path, **settings))
    assert want.score.weight.shape[0] == 5
    check_alike(model, want, in_memory=["score.weight"])
    assert fresh_of(model.score) == {"weight"}
    check_filled(model, want)


def test_a_head_of_another_size_that_is_not_expected(tmp_path):
    AutoModelForSequenceClassification.from_config(tiny("llama").config).save_pretrained(tmp_path)
    with meta_init():
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    said = problem_of(model)
    assert f"{tmp_path / 'model.safetensors'}: score.weight has shape (2, 40)" in said
    assert "has (5, 40)" in said
    assert "ignore_mismatched_sizes=True" in said


def test_a_key_mapping(tmp_path):
    want = tiny("llama")
    want.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.layers.", "blocks."): tensor for name, tensor in state.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    mapping = {r"^blocks\.": "model.layers."}
    model, want = both(lambda: LlamaForCausalLM.from_pretrained(tmp_path, key_mapping=mapping))
    check_alike(model, want)
    check_filled(model, want)
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(tmp_path)
    said = problem_of(model)
    assert str(tmp_path) in said
    assert "nothing in LlamaForCausalLM claims blocks.0.input_layernorm.weight" in said


# ---------------------------------------------------------------------- arguments and surroundings


@pytest.mark.parametrize(
    "settings",
    [
        {"device_map": "auto"},
        {"device_map": "balanced"},
        {"device_map": "sequential"},
        {"device_map": {"model": "cpu", "lm_head": "disk"}},
        {"tp_plan": "auto"},
        {"tp_size": 2},
        {"device_mesh": object()},
        {"distributed_config": object()},
    ],
    ids=lambda settings: next(iter(settings)) + "=" + str(next(iter(settings.values())))[:12],
)
def test_arguments_that_spread_a_model_are_refused(checkpoints, settings):
    name = next(iter(settings))
    with meta_init(), pytest.raises(ValueError, match=rf"from_pretrained\({name}=.*leave (it|{name}) out"):
        LlamaForCausalLM.from_pretrained(checkpoints / "llama", **settings)


@pytest.mark.parametrize(
    "device_map", ["cpu", "cuda", {"": 0}, {"": "cpu"}, {"": "meta"}, None, torch.device("cpu"), 0]
)
def test_a_device_map_of_one_device_is_nothing(checkpoints, device_map):
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(checkpoints / "llama", device_map=device_map)
    want = LlamaForCausalLM.from_pretrained(checkpoints / "llama")
    check_alike(model, want)
    check_filled(model, want)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_accelerates_launcher_asks_for_no_broadcast(checkpoints, monkeypatch, rank):
    """With this, transformers leaves ranks other than 0 with zeros; new heads and buffers too."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    path = checkpoints / "llama"
    torch.manual_seed(7)
    want = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    torch.manual_seed(7)
    with meta_init():
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3)
    monkeypatch.undo()
    check_alike(model, want, in_memory=["score.weight"])
    check_filled(model, want)


def test_the_environment_is_as_it_was(checkpoints, monkeypatch, tmp_path):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "True")
    with meta_init():
        LlamaForCausalLM.from_pretrained(checkpoints / "llama")
        assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
        with pytest.raises(OSError, match="no file named"):
            LlamaForCausalLM.from_pretrained(tmp_path)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "True"
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING")
    with meta_init():
        LlamaForCausalLM.from_pretrained(checkpoints / "llama")
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_data_is_read(tmp_path, kind):
    """With other bytes in the place of every tensor the model on meta is the same; it is filled from the right ones."""
    tiny(kind).save_pretrained(tmp_path)
    want = KINDS[kind].from_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    file.write_bytes(data[:start] + b"\xff" * (len(data) - start))
    with warnings.catch_warnings(), meta_init():
        model = KINDS[kind].from_pretrained(tmp_path)
    file.write_bytes(data)
    check_alike(model, want)
    check_filled(model, want)


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_is_asked_of_safetensors(checkpoints, monkeypatch, kind):
    asked = []

    class Watched:
        def __init__(self, path, *args, **kwargs):
            self.file = safetensors.safe_open(path, *args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_tensor(self, key):
            asked.append(key)
            return self.file.get_tensor(key)

        def get_slice(self, key):
            view = self.file.get_slice(key)

            class View:
                get_shape, get_dtype = view.get_shape, view.get_dtype

                def __getitem__(self, region):
                    asked.append((key, region))
                    return view[region]

            return View()

    for module in ("transformers.modeling_utils", "lora_parallel.lazy.files"):
        monkeypatch.setattr(f"{module}.safe_open", Watched)
    with meta_init():
        model = KINDS[kind].from_pretrained(checkpoints / kind)
    assert asked == []
    read_weights(model, "cpu")
    assert asked  # else the test shows nothing


def test_a_pickle_is_read_only_if_asked_for(tmp_path):
    want = tiny("llama")
    want.config.save_pretrained(tmp_path)
    torch.save(want.state_dict(), tmp_path / "pytorch_model.bin")
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(tmp_path)
    said = problem_of(model)
    assert f"{tmp_path / 'pytorch_model.bin'} is a pickle" in said
    assert "pass use_safetensors=False to from_pretrained" in said
    with meta_init():
        model = LlamaForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
    check_filled(model, LlamaForCausalLM.from_pretrained(tmp_path, use_safetensors=False))


def test_experts_that_the_config_does_not_have(tmp_path):
    """The files are named, also where several tensors make one parameter."""
    want = tiny("mixtral")
    want.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_local_experts"] = 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with meta_init():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert str(tmp_path) in problem_of(model)
