"""What PEFT can do beside plain LoRA: on a mesh as in one process, or refused by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoftQConfig,
    LoHaConfig,
    LoraConfig,
    LoraGAConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from peft.helpers import DoraCaching
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import CordaConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from lora_parallel import ParallelConfig, load_adapter, parallelize, save_adapter
from lora_parallel.adapters.injection import LateAdapter, check_adapters, inject_adapter
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.layers.styles import STYLES
from lora_parallel.planning.plan import resolve_plan
from tests.cases import cases
from tests.oracle import (
    causal_lm,
    differing,
    full,
    lora_config,
    on_mesh,
    ranks_of,
    relative_error,
    trained,
)
from tests.oracle.feature_rows import ANY_LAYER, ENDS, Branched, Normed, layers_of
from tests.oracle.rows import DECODER, base_model, fill, language, rows
from tests.oracle.workers import Failure, attempt


class Picture(nn.Module):
    """A convolution, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 4, 3, padding=1)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.look(x).mean((-1, -2)))))


def dropped(mesh_text: str) -> dict[str, Tensor]:
    """The gradients of two steps of a DoRA whose adapters drop."""
    mesh, config = on_mesh(mesh_text)
    model = rows()["DoRA"].build()
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.lora_dropout["default"] = nn.Dropout(0.3)
    model = parallelize(model, mesh, config)
    for _ in range(2):
        batch = {key: value.chunk(dp_size(mesh))[dp_rank(mesh)] for key, value in language().items()}
        model(**batch).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def test_dora_drops_the_same_elements_on_every_mesh(pool):
    (want,) = pool.run(1, dropped, "1x1")
    for found in pool.run(4, dropped, "2x2"):
        assert relative_error(found, want) <= 1e-12


def picture(**lora: Any) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["look", "up", "down"], **lora)
    model = get_peft_model(Picture(), config).double()
    fill(model)
    return model.train()


PICTURES = torch.randn(8, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def picture_gradients(mesh_text: str, lora: dict[str, Any], plan: dict[str, str]) -> dict[str, Tensor]:
    mesh, config = on_mesh(mesh_text, tp_plan=plan)
    model = parallelize(picture(**lora), mesh, config)
    model(PICTURES.chunk(dp_size(mesh))[dp_rank(mesh)]).square().mean().backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}])
@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1", "2x2"]))
def test_a_convolution_is_computed_in_full_on_every_rank(pool, mesh, lora):
    model = picture(**lora)
    model(PICTURES).square().mean().backward()
    want = {name: p.grad for name, p in trained(model).items()}
    assert any("look" in name for name in want)
    for found in pool.run(
        ranks_of(mesh), picture_gradients, mesh, lora, {"up": "colwise", "down": "rowwise", "look": "replicate"}
    ):
        assert relative_error(found, want) <= 1e-12


# ---------------------------------------------------------------------- initialisations


def float_model(**lora: Any) -> nn.Module:
    torch.manual_seed(3)
    return get_peft_model(float_base(), lora_config(**lora))


def float_base() -> nn.Module:
    return causal_lm(dtype=torch.float32, num_hidden_layers=1)


def initialised(mesh_text: str, kinds: list[Any], ours: bool) -> list[dict[str, Tensor]]:
    """The values and gradients of adapters of these initialisations."""
    found = []
    for kind in kinds:
        mesh, config = on_mesh(mesh_text, seed=3)
        if ours:
            model = parallelize(float_base(), mesh, config, lora_config=lora_config(init_lora_weights=kind, r=4))
        else:
            model = parallelize(float_model(init_lora_weights=kind, r=4), mesh, config)
        values = {f"{name} value": full(p) for name, p in trained(model).items()}
        batch = language()["input_ids"]
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
        model(input_ids=mine, labels=mine).loss.backward()
        found.append({**values, **{name: full(p.grad) for name, p in trained(model).items()}})
    return found


INITS = [True, "gaussian", "orthogonal", "pissa", "pissa_niter_1", "olora"]


def one_process_inits(kinds: list[Any], ours: bool) -> list[dict[str, Tensor]]:
    found = []
    for kind in kinds:
        base = float_base()
        torch.manual_seed(3)
        model = (
            get_peft_model(base, lora_config(init_lora_weights=kind, r=4))
            if ours
            else float_model(init_lora_weights=kind, r=4)
        )
        batch = language()["input_ids"]
        model.train()(input_ids=batch, labels=batch).loss.backward()
        values = {f"{name} value": full(p) for name, p in trained(model).items()}
        found.append({**values, **{name: full(p.grad) for name, p in trained(model).items()}})
    return found


@pytest.mark.parametrize(
    ("mesh", "kinds", "ours"),
    cases(
        *(("1x2", INITS, True), ("1x2", ["pissa"], False)),
        matrix=[("1x2", INITS, False), *((mesh, INITS, ours) for mesh in ("2x1", "2x2") for ours in (True, False))],
    ),
)
def test_initialisations_from_the_base_weights(pool, mesh, kinds, ours):
    wanted = one_process_inits(kinds, ours)
    for answers in pool.run(ranks_of(mesh), initialised, mesh, kinds, ours):
        for kind, found, want in zip(kinds, answers, wanted, strict=True):
            want = {name.removeprefix("base_model.model." if ours else ""): tensor for name, tensor in want.items()}
            assert found.keys() == want.keys()
            for name, tensor in want.items():
                if name.endswith(" value"):
                    assert torch.equal(found[name], tensor), (kind, name)
            scale = max(t.norm() for name, t in want.items() if not name.endswith(" value"))
            worst = max((found[name] - t).norm() for name, t in want.items() if not name.endswith(" value"))
            assert worst <= 1e-4 * scale, kind


@pytest.mark.parametrize("kind", ["eva", "corda", "lora_ga", "loftq"])
def test_initialisations_from_data_are_refused_with_the_way_there(kind):
    changes: dict[str, Any] = {"init_lora_weights": kind}
    if kind == "loftq":
        pytest.importorskip("scipy")
        changes["loftq_config"] = LoftQConfig()
    if kind == "corda":
        changes["corda_config"] = CordaConfig()
    if kind == "lora_ga":
        changes["lora_ga_config"] = LoraGAConfig()
    with pytest.raises(
        ValueError, match=f"init_lora_weights={kind!r}, which takes more than the base weights"
    ) as caught:
        check_adapters(causal_lm(), ParallelConfig(), lora_config(**changes))
    assert "PeftModel first" in str(caught.value)


# ---------------------------------------------------------------------- what is refused under tp


def llama_of(kind: type[nn.Linear], name: str) -> nn.Module:
    """A Llama whose layers of this name are of a subclass of `nn.Linear`."""
    return base_model("LlamaForCausalLM", DECODER, layers_of(kind, [name])).double()


def inside() -> nn.Module:
    return get_peft_model(llama_of(Branched, "k_proj"), lora_config(target_modules=["k_proj.down"]))


REFUSED = [
    (inside, "a layer inside of Branched is adapted by itself"),
]


@pytest.mark.parametrize(("build", "reason"), REFUSED)
def test_what_has_no_tensor_parallel_form_is_refused_by_name(build, reason):
    with pytest.raises(ValueError, match=r"tp=2: 'model\.layers\.0\..*' cannot be") as caught:
        resolve_plan(build(), None, 2)
    assert reason in str(caught.value)
    assert "tp=1" in str(caught.value)


def test_a_tied_weight_with_two_adapters_is_refused():
    model = get_peft_model(
        causal_lm(tie_word_embeddings=True),
        lora_config(trainable_token_indices=[1, 2], target_modules=["q_proj", "lm_head"]),
    )
    with pytest.raises(ValueError, match="'lm_head' cannot be replicate: trainable_token_indices reaches it"):
        resolve_plan(model, None, 2)


@pytest.mark.parametrize(
    ("base", "lora", "plan", "reason"),
    [
        (
            causal_lm,
            {"target_modules": ENDS, "use_dora": True},
            {"*embed_tokens": "embedding_rowwise"},
            "DoraEmbedding",
        ),
        (
            causal_lm,
            {"trainable_token_indices": [1]},
            {"*embed_tokens": "embedding_rowwise"},
            "trainable_token_indices",
        ),
        (causal_lm, {"alora_invocation_tokens": [1, 2]}, {"*.q_proj": "colwise"}, "ALoraLinearVariant"),
        (partial(llama_of, Normed, "up_proj"), {}, {"*.up_proj": "colwise"}, "slices of its output"),
        (partial(llama_of, Normed, "down_proj"), {}, {"*.down_proj": "rowwise"}, "partial sums of its output"),
    ],
)
def test_what_cannot_be_cut_is_refused_where_the_user_says_so(base, lora, plan, reason):
    with pytest.raises(ValueError, match=r"tp=2: .* cannot be ") as caught:
        resolve_plan(get_peft_model(base(), lora_config(**lora)), plan, 2)
    assert reason in str(caught.value)
    assert 'the style "replicate"' in str(caught.value)


def test_a_partial_gradient_of_what_acts_on_no_slices_is_refused():
    plan = {"*.input_layernorm": "replicated_with_grad_allreduce"}
    with pytest.raises(ValueError, match=r"input_layernorm'.* and it does not: use replicate"):
        resolve_plan(get_peft_model(causal_lm(), lora_config()), plan, 2)
    norms = get_peft_model(causal_lm("qwen3"), lora_config())
    assert resolve_plan(norms, {"*.[qk]_norm": "replicated_with_grad_allreduce"}, 2)


def test_what_cannot_be_cut_is_whole_in_a_plan_of_our_own_and_said_so(caplog):
    model = get_peft_model(causal_lm(), lora_config(alora_invocation_tokens=[1, 2], target_modules=["q_proj"]))
    with caplog.at_level(logging.WARNING):
        plan = resolve_plan(model, None, 2)
    assert {style is STYLES["replicate"] for name, style in plan.styles.values() if "q_proj" in name} == {True}
    assert "q_proj (2 layers) is computed in full on every tp rank: its adapter is a LoRA variant" in caplog.text


def unsaid_otherwise() -> dict[str, Any]:
    """What would compute something else without a word."""
    mesh, config = on_mesh("1x2")
    model: Any = parallelize(rows()["llama"].build(), mesh, config)
    batch = language()["input_ids"]
    inner = model.get_base_model()

    def asked_of_config() -> Any:
        inner.set_attn_implementation("eager")
        inner.config.output_attentions = True
        return model(input_ids=batch)

    def other_config_on_each_rank() -> Any:
        return parallelize(rows()["llama"].build(), mesh, replace(config, sequence_parallel=dist.get_rank() == 1))

    return {
        "merge_and_unload": attempt(model.merge_and_unload),
        "unload": attempt(model.unload),
        "attentions": attempt(model, input_ids=batch, output_attentions=True),
        "attentions of the config": attempt(asked_of_config),
        "other configs": attempt(other_config_on_each_rank),
    }


def test_what_would_be_wrong_without_a_word_is_refused_on_every_rank(pool):
    reasons = {
        "merge_and_unload": "write the merged model with export_merged",
        "unload": "write the merged model with export_merged",
        "attentions": "output_attentions=True: .* Leave it False, or use tp=1",
        "attentions of the config": "output_attentions=True: .* Leave it False, or use tp=1",
        "other configs": "config.sequence_parallel is .* on rank 1: give every rank the same config",
    }
    for rank, found in enumerate(pool.run(2, unsaid_otherwise)):
        for name, reason in reasons.items():
            failure = found[name]
            assert isinstance(failure, Failure), (rank, name)
            assert failure.kind == "ValueError", failure.trace
            assert re.search(reason, failure.message, re.DOTALL), (rank, name, failure.message)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)


def test_the_attention_of_torch_is_refused():
    config = LoraConfig(r=2, target_modules=["attention"])
    reason = r"attention adapts nn\.MultiheadAttention.* not supported on a mesh"
    model = get_peft_model(Attending(), config)
    with pytest.raises(ValueError, match=reason):
        check_adapters(model, ParallelConfig(), None)
    with pytest.raises(ValueError, match=reason):
        inject_adapter(Attending(), config, 0)


def bert() -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=11))


def test_copies_inside_of_a_saved_copy_are_refused():
    """PEFT takes the end of word_embeddings for embeddings, and some parameters of the copies get no gradient."""
    config = LoraConfig(r=2, target_modules=["query"], modules_to_save=["embeddings"])
    reason = r"bert\.embeddings and word_embeddings in it.*Write more of the name \(bert\.embeddings\)"
    with pytest.raises(ValueError, match=reason):
        check_adapters(get_peft_model(bert(), config), ParallelConfig(), None)
    with pytest.raises(ValueError, match=reason):
        inject_adapter(bert(), config, 0)
    config.modules_to_save = ["bert.embeddings"]
    check_adapters(get_peft_model(bert(), config), ParallelConfig(), None)


def test_lora_that_is_tied_by_its_memory_is_refused():
    """The trained copies of `modules_to_save` are one parameter, and stay it."""
    reason = (
        r"'default' has ensure_weight_tying=True.* tied weights \(lm_head\) in the memory.* Use ensure_weight_tying=F"
    )
    ways: list[Callable[[nn.Module, LoraConfig], object]] = [
        lambda base, config: check_adapters(get_peft_model(base, config), ParallelConfig(), None),
        lambda base, config: inject_adapter(base, config, 0),
        lambda base, config: LateAdapter(base, config, True),
    ]
    for way in ways:
        with pytest.raises(ValueError, match=reason):
            way(
                causal_lm(tie_word_embeddings=True),
                lora_config(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
            )
        way(causal_lm(tie_word_embeddings=True), lora_config(modules_to_save=["lm_head"], ensure_weight_tying=True))


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        LoHaConfig(target_modules=["k_proj"]),
        AdaLoraConfig(target_modules=["k_proj"], total_step=10),
        OFTConfig(target_modules=["k_proj"], oft_block_size=4),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_other_methods_are_refused_with_what_works(config):
    model = get_peft_model(causal_lm(), config)
    for given, adapter in ((model, None), (causal_lm(), config)):
        with pytest.raises((TypeError, ValueError), match=r"only LoRA|only LORA") as caught:
            check_adapters(given, ParallelConfig(), adapter)
        assert "What works: LoRA, DoRA and rsLoRA on linear layers, Conv1D and embeddings" in str(caught.value)


# ---------------------------------------------------------------------- saving, merging, several adapters


def saved_and_loaded(mesh_text: str, names: list[str], folder: str) -> dict[str, Any]:
    """Save on this mesh; fill a model whose adapters hold other values, and say what it gives then."""
    mesh, _ = on_mesh(mesh_text)
    found = {}
    for name in names:
        row = rows()[name]
        _, config = on_mesh(mesh_text, **row.config)
        model = parallelize(row.build(), mesh, config)
        path = Path(folder) / f"{mesh_text} {name}"
        save_adapter(model, path)
        other = parallelize(row.build(), mesh, config)
        with torch.no_grad():
            for parameter in trained(other).values():
                parameter.zero_()
        load_adapter(other, path)
        found[name] = differing(
            {n: full(p) for n, p in trained(other).items()}, {n: full(p) for n, p in trained(model).items()}
        )
    return found


SAVED = [
    "DoRA",
    "DoRA, phi3",
    "DoRA, embeddings and head",
    "lora_bias, grouped",
    "trainable_token_indices",
    "trainable_token_indices, tied",
    "modules_to_save: fused",
    "a Linear with an empty bias, bias='all'",
]


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(
        ("1x2", [name for name in SAVED if name not in ("DoRA", "trainable_token_indices")]),
        matrix=[(mesh, SAVED) for mesh in ("1x2", "2x1", "2x2", "1x4")],
    ),
)
def test_saved_adapters_are_peft_s(pool, tmp_path, mesh, names):
    for found in pool.run(ranks_of(mesh), saved_and_loaded, mesh, names, str(tmp_path)):
        assert not any(found.values())
    for name in names:
        rows()[name].build().save_pretrained(tmp_path / name)
        want = load_file(tmp_path / name / "adapter_model.safetensors")
        got = load_file(tmp_path / f"{mesh} {name}" / "adapter_model.safetensors")
        assert not differing(got, want), name


def loaded_elsewhere(mesh_text: str, name: str, path: str) -> list[str]:
    mesh, config = on_mesh(mesh_text)
    model = parallelize(rows()[name].build(), mesh, config)
    want = {n: full(p) for n, p in trained(model).items()}
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.zero_()
    load_adapter(model, path)
    return differing({n: full(p) for n, p in trained(model).items()}, want)


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["1x4", "2x1"]))
def test_dora_is_loaded_on_another_mesh(pool, tmp_path, mesh):
    rows()["DoRA, phi3"].build().save_pretrained(tmp_path)
    assert not any(pool.run(ranks_of(mesh), loaded_elsewhere, mesh, "DoRA, phi3", str(tmp_path)))


def merging(names: list[str]) -> dict[str, Any]:
    mesh, config = on_mesh("1x2")
    found = {}
    for name in names:
        model = parallelize(rows()[name].build(), mesh, config)
        found[name] = attempt(model.merge_adapter)
    return found


def test_merging_what_cannot_be_merged_under_tp_is_refused(pool):
    for found in pool.run(2, merging, ["DoRA", "DoRA, phi3", "lora_bias, gpt2"]):
        for name, error in found.items():
            assert isinstance(error, Failure), name
            assert error.kind == "ValueError", error.trace
            assert "cannot be merged under tensor parallelism: save the adapter" in error.message


MERGED: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("llama", {"tp_plan": {"*.q_proj": "replicate", "*.up_proj": "replicate", "*.down_proj": "replicate"}}),
    "gathered": ("biases everywhere, frozen", ANY_LAYER),
    "sliced": ("biases everywhere, frozen", {}),
    "arranged": ("phi3", {}),
}


def merged_logits(model: Any) -> list[Tensor]:
    """With an adapter merged, and taken out again."""
    batch = language()["input_ids"]
    found = []
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        with torch.no_grad():
            found.append(model.eval()(input_ids=batch).logits)
    return found


def merged_on(mesh_text: str) -> dict[str, Any]:
    mesh, _ = on_mesh(mesh_text)
    found = {}
    for name, (row, settings) in MERGED.items():
        _, config = on_mesh(mesh_text, **settings)
        found[name] = attempt(merged_logits, parallelize(rows()[row].build(), mesh, config))
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_an_adapter_is_merged_in_place(pool, mesh):
    for found in pool.run(ranks_of(mesh), merged_on, mesh):
        for name, logits in found.items():
            assert not isinstance(logits, Failure), f"{name}: {logits.trace}"
            for got, want in zip(logits, merged_logits(rows()[MERGED[name][0]].build()), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-10, msg=name)


def two_adapters() -> nn.Module:
    """The second one is not active. Both have copies of a fused projection."""
    model: Any = rows()["modules_to_save: fused"].build()
    model.add_adapter("other", lora_config(target_modules=["o_proj"], modules_to_save=["qkv_proj"]))
    generator = torch.Generator().manual_seed(9)
    for name, parameter in model.named_parameters():
        if ".other." in name:
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
    return model


def switching(mesh_text: str, folder: str) -> list[Tensor]:
    mesh, config = on_mesh(mesh_text)
    model: Any = parallelize(two_adapters(), mesh, config).eval()
    save_adapter(model, folder, adapter_name="other")
    batch = language()["input_ids"]
    with torch.no_grad():
        first = model(input_ids=batch).logits
        model.set_adapter("other")
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        second = model(input_ids=batch).logits
    return [first, second]


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_an_adapter_that_is_not_active_is_whole_and_is_computed_with_later(pool, tmp_path, mesh):
    model: Any = two_adapters().eval()
    batch = language()["input_ids"]
    with torch.no_grad():
        first = model(input_ids=batch).logits
        model.set_adapter("other")
        second = model(input_ids=batch).logits
    for found in pool.run(ranks_of(mesh), switching, mesh, str(tmp_path / "ours")):
        for got, want in zip(found, (first, second), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-10)
    model.save_pretrained(tmp_path / "theirs", selected_adapters=["other"])
    want = load_file(tmp_path / "theirs" / "other" / "adapter_model.safetensors")
    (ours,) = (tmp_path / "ours").rglob("adapter_model.safetensors")
    assert not differing(load_file(ours), want)


def mixed(mesh_text: str) -> Tensor:
    mesh, config = on_mesh(mesh_text)
    return mixed_logits(parallelize(mixed_model(), mesh, config))


def mixed_model() -> nn.Module:
    model: Any = rows()["llama"].build()
    model.add_adapter("other", lora_config())
    fill(model.double())
    return model


def mixed_logits(model: Any) -> Tensor:
    batch = language()["input_ids"]
    with torch.no_grad():
        return model.eval()(input_ids=batch, adapter_names=["default", "other"] * 3 + ["__base__"] * 2).logits


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x1"]))
def test_a_batch_of_several_adapters(pool, mesh):
    want = mixed_logits(mixed_model())
    for got in pool.run(ranks_of(mesh), mixed, mesh):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def cached(mesh_text: str) -> list[Tensor]:
    """In eval mode with PEFT's cache: a first forward, another, and one after a step of training."""
    mesh, config = on_mesh(mesh_text)
    return cached_logits(parallelize(rows()["DoRA"].build(), mesh, config), dp_size(mesh), dp_rank(mesh))


def cached_logits(model: nn.Module, ranks: int = 1, rank: int = 0) -> list[Tensor]:
    batch = language()["input_ids"]
    found = []
    with DoraCaching():
        for _ in range(2):
            with torch.no_grad():
                found.append(model.eval()(input_ids=batch).logits)
                found.append(model(input_ids=batch).logits)
            mine = batch.chunk(ranks)[rank]
            optimizer = torch.optim.SGD(trained(model).values(), lr=0.1)
            model.train()(input_ids=mine, labels=mine).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_peft_s_cache_of_dora(pool, mesh):
    want = cached_logits(rows()["DoRA"].build())
    assert not torch.equal(want[0], want[2])
    for found in pool.run(ranks_of(mesh), cached, mesh):
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-8)
