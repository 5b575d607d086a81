"""PEFT's layers on a base on meta: the values, dtypes and random state of those on a base in memory."""

from __future__ import annotations

import inspect

import accelerate
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraModel
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from safetensors.torch import save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from lora_parallel import meta_init
from lora_parallel.adapters.peft_private import (
    activate,
    converted_adapter,
    converted_config,
    observe_layers,
    refuse_merge,
    sum_weight_norm,
    tied_targets,
)
from tests.oracle import SEVEN, SIZES, causal_lm, lora_config

TO_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}

CONFIGS = {
    "plain": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 2},
    "B is random": {"init_lora_weights": False},
    "bias": {"lora_bias": True},
    "rslora and dropout": {"use_rslora": True, "lora_dropout": 0.1},
    "all biases train": {"bias": "all"},
    "ranks of a pattern": {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"k_proj": 1}},
    "all linear": {"target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "layers": {"layers_to_transform": [1]},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories with a checkpoint each."""
    root = tmp_path_factory.mktemp("checkpoints")
    causal_lm("llama", torch.float32).save_pretrained(root / "llama")
    causal_lm("llama", torch.float32, tie_word_embeddings=True).save_pretrained(root / "tied")
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3)).save_pretrained(root / "mixtral")
    gpt2 = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=24, bos_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(gpt2).save_pretrained(root / "gpt2")
    return root


def seeded(function):
    """The result, and what the random state gives next."""
    torch.manual_seed(11)
    result = function()
    return result, torch.rand(3)


def is_base(name):
    return "lora_" not in name and ".modules_to_save." not in name


def check_same(model, want, in_memory=()):
    """The adapters are those of `want` bit for bit; the base is as there but, save for `in_memory`, on meta."""
    mine, theirs = dict(model.named_parameters()), dict(want.named_parameters())
    assert list(mine) == list(theirs)
    adapters = [name for name in theirs if "lora_" in name]
    assert adapters
    for name, parameter in theirs.items():
        assert mine[name].shape == parameter.shape, name
        assert mine[name].dtype == parameter.dtype, name
        assert mine[name].requires_grad == parameter.requires_grad, name
        if is_base(name) and not any(part in name for part in in_memory):
            assert mine[name].is_meta, name
        elif ".modules_to_save." not in name:
            assert mine[name].device.type == "cpu", name
            assert torch.equal(mine[name], parameter), name
    buffers = dict(want.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    modules = dict(want.named_modules())
    for name, module in model.named_modules():
        assert type(module) is type(modules[name])
        assert module.training == modules[name].training
        if isinstance(module, BaseTunerLayer):
            assert module.scaling == modules[name].scaling
            assert module.active_adapters == modules[name].active_adapters


def wrapped_three_ways(path, config, dtype=torch.float32, **settings):
    """With a base in memory, in the context, and after it."""

    def load():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    want, state = seeded(lambda: get_peft_model(load(), config(), **settings))
    with meta_init():
        inside, inside_state = seeded(lambda: get_peft_model(load(), config(), **settings))
        base = load()
    after, after_state = seeded(lambda: get_peft_model(base, config(), **settings))
    assert torch.equal(inside_state, state)
    assert torch.equal(after_state, state)
    return want, inside, after


@pytest.mark.parametrize("name", CONFIGS)
def test_get_peft_model(checkpoints, name):
    want, inside, after = wrapped_three_ways(checkpoints / "llama", lambda: lora_config(**CONFIGS[name]))
    check_same(inside, want)
    check_same(after, want)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["plain", "embedding", "modules_to_save"])
def test_the_dtype_of_the_base(checkpoints, dtype, autocast, name):
    path, settings = checkpoints / "llama", {"autocast_adapter_dtype": autocast}
    want, inside, after = wrapped_three_ways(path, lambda: lora_config(**CONFIGS[name]), dtype, **settings)
    kept = torch.float32 if autocast and dtype.itemsize == 2 else dtype
    assert {parameter.dtype for name, parameter in want.named_parameters() if "lora_" in name} == {kept}
    check_same(inside, want)
    check_same(after, want)


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_experts(checkpoints, dtype, autocast):
    path, settings = checkpoints / "mixtral", {"autocast_adapter_dtype": autocast}
    want, inside, after = wrapped_three_ways(path, lambda: lora_config(**TO_EXPERTS), dtype, **settings)
    wrappers = [module for module in want.modules() if isinstance(module, ParamWrapper)]
    assert len(wrappers) == 4
    check_same(inside, want)
    check_same(after, want)


@pytest.mark.parametrize("target", [["c_attn", "c_proj"], ["wte", "c_fc"], "all-linear"])
def test_conv1d_of_gpt2(checkpoints, target):
    def config():
        return LoraConfig(r=3, target_modules=target, fan_in_fan_out=True, task_type="CAUSAL_LM")

    want, inside, after = wrapped_three_ways(checkpoints / "gpt2", config)
    check_same(inside, want)
    check_same(after, want)


def test_tied_weights(checkpoints):
    want, inside, after = wrapped_three_ways(checkpoints / "tied", lora_config)
    for model in (want, inside, after):
        base = model.get_base_model()
        assert base.lm_head.weight is base.model.embed_tokens.weight
    check_same(inside, want)
    check_same(after, want)


def test_modules_to_save_are_remembered_with_the_base(checkpoints):
    """A copy of the head, that trains, starts from the head's own values: nothing of it is drawn."""
    from lora_parallel.lazy.materialize import read_weights
    from lora_parallel.lazy.tracking import check_checkpoints

    want, inside, after = wrapped_three_ways(checkpoints / "llama", lambda: lora_config(modules_to_save=["lm_head"]))
    for model in (inside, after):
        check_checkpoints(model, materialize=True)
        read_weights(model, "cpu")
        for name, parameter in want.named_parameters():
            assert torch.equal(model.get_parameter(name), parameter), name
        head = model.get_base_model().lm_head
        assert head.modules_to_save["default"].weight is not head.original_module.weight


def test_a_new_head_that_trains(checkpoints):
    def load():
        model = AutoModelForSequenceClassification.from_pretrained(checkpoints / "llama", num_labels=3)
        return get_peft_model(model, LoraConfig(r=3, target_modules=SEVEN, task_type="SEQ_CLS"))

    want, state = seeded(load)
    with meta_init():
        model, mine = seeded(load)
    assert torch.equal(mine, state)
    check_same(model, want, ["score"])
    heads = [name for name, _ in want.named_parameters() if ".score." in name and "modules_to_save" in name]
    assert heads
    for name in heads:
        assert torch.equal(model.get_parameter(name), want.get_parameter(name))


@pytest.mark.parametrize("where", ["inside", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_adapter(checkpoints, dtype, where):
    def add(model):
        model.add_adapter(LoraConfig(r=3, target_modules=SEVEN), adapter_name="first")
        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), adapter_name="second")
        return model

    def load():
        return AutoModelForCausalLM.from_pretrained(checkpoints / "llama", dtype=dtype)

    want, state = seeded(lambda: add(load()))
    with meta_init():
        if where == "inside":
            model, mine = seeded(lambda: add(load()))
        else:
            base = load()
    if where == "after":
        model, mine = seeded(lambda: add(base))
    assert torch.equal(mine, state)
    check_same(model, want)


@pytest.mark.parametrize("where", ["inside", "after"])
def test_a_second_adapter_of_a_peft_model(checkpoints, where):
    def wrap(base):
        model = get_peft_model(base, lora_config())
        model.add_adapter("other", lora_config(r=2, init_lora_weights=False))
        model.set_adapter("other")
        return model

    def load():
        return AutoModelForCausalLM.from_pretrained(checkpoints / "llama")

    want, state = seeded(lambda: wrap(load()))
    with meta_init():
        if where == "inside":
            model, mine = seeded(lambda: wrap(load()))
        else:
            base = load()
    if where == "after":
        model, mine = seeded(lambda: wrap(base))
    assert torch.equal(mine, state)
    check_same(model, want)


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_name", "settings"),
    [("llama", {}), ("llama", CONFIGS["embedding"]), ("mixtral", TO_EXPERTS)],
    ids=["plain", "embedding", "experts"],
)
def test_an_adapter_that_was_saved(checkpoints, tmp_path, model_name, settings, dtype, trainable):
    path = checkpoints / model_name
    random = lora_config(**settings, init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), random).save_pretrained(tmp_path)

    def load():
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)

    want = PeftModel.from_pretrained(load(), tmp_path, is_trainable=trainable)
    with meta_init():
        inside = PeftModel.from_pretrained(load(), tmp_path, is_trainable=trainable)
        base = load()
    after = PeftModel.from_pretrained(base, tmp_path, is_trainable=trainable)
    values = [parameter for name, parameter in want.named_parameters() if "lora_B" in name]
    assert all(parameter.abs().sum() > 0 for parameter in values)
    # PEFT saves the weights of an embedding with its adapter, and loads them over the base's.
    saved = (
        ["embed_tokens.base_layer", "lm_head.base_layer"]
        if "embed_tokens" in settings.get("target_modules", ())
        else []
    )
    check_same(inside, want, saved)
    check_same(after, want, saved)


def test_a_saved_head_is_loaded(checkpoints, tmp_path):
    path = checkpoints / "llama"
    saved = get_peft_model(AutoModelForCausalLM.from_pretrained(path), lora_config(modules_to_save=["lm_head"]))
    with torch.no_grad():
        saved.get_base_model().lm_head.modules_to_save["default"].weight.fill_(3)
    saved.save_pretrained(tmp_path)
    with meta_init():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), tmp_path)
    weight = model.get_base_model().lm_head.modules_to_save["default"].weight
    assert not weight.is_meta, "the saved values were dropped"
    assert (weight == 3).all()


def test_from_pretrained_of_a_directory_with_an_adapter(checkpoints, tmp_path):
    """Transformers loads the base that the adapter names, and the adapter."""
    base = AutoModelForCausalLM.from_pretrained(checkpoints / "llama")
    get_peft_model(base, lora_config(init_lora_weights=False)).save_pretrained(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(tmp_path)
    with meta_init():
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
    check_same(model, want)


@pytest.mark.parametrize("where", ["inside", "after"])
def test_load_adapter_of_transformers(checkpoints, tmp_path, where):
    def load():
        return AutoModelForCausalLM.from_pretrained(checkpoints / "llama")

    get_peft_model(load(), lora_config(init_lora_weights=False)).save_pretrained(tmp_path)
    want = load()
    want.load_adapter(str(tmp_path))
    with meta_init():
        model = load()
        if where == "inside":
            model.load_adapter(str(tmp_path))
    if where == "after":
        model.load_adapter(str(tmp_path))
    check_same(model, want)


@pytest.mark.parametrize("where", ["inside", "after"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_adapter_of_a_peft_model(checkpoints, tmp_path, dtype, where):
    def load():
        return AutoModelForCausalLM.from_pretrained(checkpoints / "llama", dtype=dtype)

    def both(base):
        model = PeftModel.from_pretrained(base, tmp_path)
        model.load_adapter(tmp_path, "other")
        return model

    get_peft_model(load(), lora_config(init_lora_weights=False)).save_pretrained(tmp_path)
    want = both(load())
    with meta_init():
        base = load()
        if where == "inside":
            model = both(base)
    if where == "after":
        model = both(base)
    check_same(model, want)


def test_a_plain_module_and_its_adapters():
    def build():
        return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False))

    def config():
        return LoraConfig(r=2, target_modules=["0", "2"])

    want, _ = seeded(lambda: get_peft_model(build(), config()))
    torch.manual_seed(11)
    build()
    state = torch.get_rng_state()
    with meta_init():
        base = build()
        torch.set_rng_state(state)
        model = get_peft_model(base, config())
    check_same(model, want)


# ---------------------------------------------------------------------- a base that is not ours


def stock(model, **settings):
    return get_peft_model(model, lora_config(init_lora_weights=False), **settings)


def test_a_base_on_meta_that_is_not_ours_is_as_ever(checkpoints):
    """PEFT moves the adapters of such a base to meta, with the values lost; low_cpu_mem_usage or not."""
    with meta_init():
        pass  # what is changed in PEFT is changed by now
    with accelerate.init_empty_weights():
        model = AutoModelForCausalLM.from_config(causal_lm().config)
    adapted = stock(model)
    assert {parameter.device.type for parameter in adapted.parameters()} == {"meta"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(causal_lm().config)
    assert {parameter.device.type for parameter in stock(model, low_cpu_mem_usage=True).parameters()} == {"meta"}


def test_an_adapter_that_is_asked_for_on_meta_is_there(checkpoints):
    with meta_init():
        model = AutoModelForCausalLM.from_pretrained(checkpoints / "llama")
    adapted = stock(model, low_cpu_mem_usage=True)
    assert all(parameter.is_meta for parameter in adapted.parameters())


def test_a_base_in_memory_is_as_ever(checkpoints):
    path = checkpoints / "llama"
    with meta_init():
        pass
    model, _ = seeded(lambda: stock(AutoModelForCausalLM.from_pretrained(path)))
    again, _ = seeded(lambda: stock(AutoModelForCausalLM.from_pretrained(path)))
    for name, parameter in again.named_parameters():
        assert not parameter.is_meta
        assert torch.equal(parameter, model.get_parameter(name))
    layer = next(each for each in again.modules() if isinstance(each, BaseTunerLayer))
    layer._move_adapter_to_device_of_base_layer("default", torch.device("meta"))  # a device that is asked for
    assert layer.lora_A["default"].weight.is_meta


def test_a_base_in_memory_that_is_wrapped_inside_the_context(checkpoints):
    path = checkpoints / "llama"
    want, _ = seeded(lambda: stock(AutoModelForCausalLM.from_pretrained(path)))
    torch.manual_seed(11)
    base = AutoModelForCausalLM.from_pretrained(path)
    with meta_init():
        model = stock(base)
    for name, parameter in want.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


# ---------------------------------------------------------------------- what is used of PEFT


def test_a_layer_says_which_adapters_are_active():
    model = get_peft_model(nn.Sequential(nn.Linear(3, 3)), LoraConfig(target_modules=["0"], init_lora_weights=False))
    model.add_adapter("other", LoraConfig(target_modules=["0"], init_lora_weights=False))
    layer, x = model.base_model.model[0], torch.randn(2, 3)
    for adapters in (["other"], ["default", "other"], []):
        layer.set_adapter(adapters)
        want = layer.active_adapters, layer(x)
        layer.set_adapter("default")
        activate(layer, adapters)
        assert layer.active_adapters == want[0] == adapters
        assert torch.equal(layer(x), want[1])


@pytest.mark.matrix  # of upstream alone
def test_the_private_methods_are_what_they_were():
    move = ["self", "adapter_name", "device"]
    for owner in (BaseTunerLayer, ParamWrapper):
        function = inspect.unwrap(owner.__dict__["_move_adapter_to_device_of_base_layer"])
        assert list(inspect.signature(function).parameters) == move
    replace = inspect.unwrap(LoraModel.__dict__["_replace_module"])
    assert list(inspect.signature(replace).parameters) == ["self", "parent", "child_name", "new_module", "child"]
    assert "inject_adapter" in BaseTuner.__dict__
    assert "inject_adapter" not in LoraModel.__dict__


def test_the_weight_norm_of_dora_is_what_it_was():
    """Of parts of the columns, put together, it is PEFT's of all; PEFT takes no gradient through it."""
    assert list(inspect.signature(inspect.unwrap(DoraLinearLayer.get_weight_norm)).parameters) == [
        "self",
        "weight",
        "lora_weight",
        "scaling",
        "adapter_name",
    ]
    assert "weight_norm = weight_norm.detach()" in inspect.getsource(DoraLinearLayer.forward)
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.bfloat16, 1e-2)):
        weight, update = (torch.randn(4, 6, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
        for transposed in (False, True):
            want = DoraLinearLayer(transposed).get_weight_norm(weight.T if transposed else weight, update, 0.5)
            squares = torch.zeros(4, dtype=torch.float64)
            for columns in (slice(0, 2), slice(2, 6)):
                part = DoraLinearLayer(transposed)
                sum_weight_norm(part, squares.add_)
                held = weight[:, columns].requires_grad_()
                got = part.get_weight_norm(
                    weight=held.T if transposed else held,
                    lora_weight=update[:, columns],
                    scaling=0.5,
                    adapter_name="default",
                )
            assert got.dtype == want.dtype
            assert not got.requires_grad
            torch.testing.assert_close(got, want, rtol=tolerance, atol=0)


def test_a_config_says_which_layers_have_the_memory_of_the_embeddings_lora():
    config = LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True)
    assert tied_targets(config) == set()
    base = get_peft_model(causal_lm(tie_word_embeddings=True), config).get_base_model()
    assert tied_targets(config) == {"lm_head"}
    one, other = base.lm_head.lora_A["default"].weight, base.get_input_embeddings().lora_embedding_B["default"]
    assert one is not other
    assert one.data_ptr() == other.data_ptr()


def test_a_layer_that_may_not_merge_says_so():
    """However PEFT comes to merge it."""
    for merge in ("merge_adapter", "merge_and_unload"):
        model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
        refuse_merge(model.base_model.model[0], "the adapter")
        with pytest.raises(ValueError, match="the adapter cannot be merged under tensor parallelism: save the adapter"):
            getattr(model, merge)()


def test_hotswap_goes_on_in_one_process(tmp_path):
    """Refusing it on a sharded model has left PEFT's own functions as they are elsewhere."""
    model, other = (
        get_peft_model(causal_lm(dtype=torch.float32), lora_config(init_lora_weights=False)) for _ in range(2)
    )
    other.save_pretrained(tmp_path)
    prepare_model_for_compiled_hotswap(model, target_rank=8)
    hotswap_adapter(model, str(tmp_path), "default", torch_device="cpu")
    ids = torch.arange(24).view(2, 12)
    torch.testing.assert_close(model(input_ids=ids).logits, other(input_ids=ids).logits)


@pytest.mark.matrix  # of upstream alone
def test_no_tuner_layer_of_lora_has_another_way_to_move():
    """A subclass that overrides it would move its adapters to meta."""

    def below(kind):
        for each in kind.__subclasses__():
            yield each
            yield from below(each)

    own = {kind for kind in below(BaseTunerLayer) if "_move_adapter_to_device_of_base_layer" in kind.__dict__}
    assert {kind for kind in own if kind.__module__.startswith("peft.tuners.lora")} <= {ParamWrapper}


def test_peft_converts_what_a_former_transformers_named_otherwise(tmp_path):
    """Another signature of the two functions, or other keys than PEFT writes today, would show."""
    config = MixtralConfig(hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, vocab_size=5)
    experts = MixtralForCausalLM(config)
    lora = LoraConfig(r=2, target_modules=["w1", "w2", "w3"])
    got = converted_config(lora.to_dict(), lora, experts)
    assert got["target_parameters"] == {"gate_up_proj", "down_proj"}
    assert list(got["rank_pattern"].values()) == [4]
    assert lora.target_modules == {"w1", "w2", "w3"}
    key = "base_model.model.model.layers.0.block_sparse_moe.experts.{}.w2.lora_{}.weight"
    shapes = {"A": (2, config.intermediate_size), "B": (config.hidden_size, 2)}
    save_file(
        {key.format(e, n): torch.ones(shape) for e in range(8) for n, shape in shapes.items()},
        tmp_path / "adapter_model.safetensors",
    )
    found = converted_adapter(tmp_path, experts, lora, "default")
    place = "base_model.model.model.layers.0.mlp.experts.lora_"
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        f"{place}A.weight": (16, config.intermediate_size),
        f"{place}B.weight": (config.hidden_size, 16),
    }


def test_observers_see_each_layer_with_its_adapter_in_memory(checkpoints):
    """In the order of PEFT; afterwards none is told."""
    want, _ = seeded(lambda: get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoints / "llama"), lora_config()))
    with meta_init():
        base = AutoModelForCausalLM.from_pretrained(checkpoints / "llama")
    seen = []
    with observe_layers(lambda layer: seen.append({n: p.detach().clone() for n, p in layer.named_parameters()})):
        seeded(lambda: get_peft_model(base, lora_config()))
    layers = [module for module in want.modules() if isinstance(module, BaseTunerLayer)]
    assert len(seen) == len(layers) == 14
    for found, layer in zip(seen, layers, strict=True):
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                assert torch.equal(found[name], parameter)
    with meta_init():
        other = AutoModelForCausalLM.from_pretrained(checkpoints / "llama")
    get_peft_model(other, lora_config())
    assert len(seen) == 14
