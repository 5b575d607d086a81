"""What PEFT can do beside plain LoRA: on a mesh as in one process, or refused by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
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
from peft.tuners.lora.config import CordaConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from lora_parallel import ParallelConfig, load_adapter, parallelize, save_adapter
from lora_parallel.adapters.injection import check_adapters, inject_adapter
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.layers.styles import STYLES
from lora_parallel.planning.plan import resolve_plan
from tests.oracle import (
    SEVEN,
    Case,
    causal_lm,
    differing,
    full,
    lora_config,
    on_mesh,
    ranks_of,
    reference,
    relative_error,
    sharded,
    trained,
)
from tests.workers import Failure, attempt

ENDS = [*SEVEN, "embed_tokens", "lm_head"]
PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
TIED: dict[str, Any] = {"tie_word_embeddings": True}


def gpt2(**settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=131, n_positions=32, n_embd=40, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return GPT2LMHeadModel(config).double()


class Scaled(nn.Linear):
    """Factors of each input feature, of each output feature, and of all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fed = nn.Parameter(torch.rand(1, self.in_features) + 0.5)
        self.given = nn.Parameter(torch.rand(self.out_features) + 0.5)
        self.gain = nn.Parameter(torch.rand(1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.fed) * self.given * self.gain


class Branched(nn.Linear):
    """Modules beside the weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.down = nn.Linear(self.in_features, 2, bias=False)
        self.up = nn.Linear(2, self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class Unbiased(nn.Linear):
    """A bias without elements, as TransformerEngine's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bias = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias if self.bias.numel() else None)


class Normed(nn.Linear):
    """No slice of its output can be computed from a slice of its weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm = nn.LayerNorm(self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def llama_of(kind: type[nn.Linear], names: tuple[str, ...] = tuple(SEVEN), **sizes: Any) -> nn.Module:
    """A Llama of which these layers are of a subclass."""
    model = causal_lm(**sizes)
    for name, module in list(model.named_modules()):
        if name.rsplit(".", 1)[-1] in names:
            own = kind(module.in_features, module.out_features, bias=module.bias is not None).double()
            own.load_state_dict(module.state_dict(), strict=False)
            model.set_submodule(name, own)
    return model


class Picture(nn.Module):
    """A convolution, and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 4, 3, padding=1)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.look(x).mean((-1, -2)))))


def fill(model: nn.Module) -> nn.Module:
    """Give all that trains values of its own, DoRA's magnitudes some that are near those it starts from."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or "lora_" in name:
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            trained_already = "lora_" not in name or "magnitude" in name
            parameter.data = parameter.data.double() * (1 + values) if trained_already else values
    return model.train()


def biased(model: nn.Module) -> nn.Module:
    """Biases start as zeros."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model


@dataclass(frozen=True)
class Feature(Case):
    """A case of any base model, and what `parallelize` is told beside the mesh."""

    steps: int = 2
    base: Callable[..., nn.Module] = causal_lm
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    exact: bool = True
    """False: compared with our own single rank, as its dropout is not torch's."""

    meshes: tuple[str, ...] = ("2x1", "1x2", "2x2", "1x4")

    def model(self) -> nn.Module:
        """Base and non-zero adapters, in full."""
        family = {"family": self.family} if self.base is causal_lm else {}
        model = biased(self.base(**family, **self.sizes))
        return fill(get_peft_model(model, lora_config(**self.lora)) if self.adapters else model)


DORA: dict[str, Any] = {"use_dora": True}
FUSED = ["c_attn", "c_proj", "c_fc"]
FEATURES: dict[str, Feature] = {
    "dora": Feature(lora=DORA, sizes=BIASED, meshes=("2x1", "1x2", "2x2", "1x4", "2x2x2")),
    "dora, dropout": Feature(lora={**DORA, "lora_dropout": 0.3}, exact=False),
    "dora, fused": Feature(family="phi3", lora={**DORA, "target_modules": PHI3}),
    "dora, grouped": Feature(lora=DORA, sizes={**BIASED, **GROUPED}),
    "dora, Conv1D": Feature(base=gpt2, lora={**DORA, "target_modules": FUSED, "fan_in_fan_out": True}),
    "dora, ends": Feature(lora={**DORA, "target_modules": ENDS}),
    "dora, tied ends": Feature(lora={**DORA, "target_modules": ENDS}, sizes=TIED),
    "dora, any layer": Feature(
        lora=DORA,
        sizes=BIASED,
        config={"tp_plan": {"*_proj": "colwise_gather_output", "*[ok]_proj": "rowwise_split_input"}},
    ),
    "lora_bias": Feature(lora={"lora_bias": True}, sizes=BIASED, meshes=("2x1", "1x2", "2x2", "1x4", "2x2x2")),
    "lora_bias, grouped": Feature(lora={"lora_bias": True}, sizes={**BIASED, **GROUPED}),
    "lora_bias, fused": Feature(base=gpt2, lora={"lora_bias": True, "target_modules": FUSED, "fan_in_fan_out": True}),
    "tokens": Feature(lora={"trainable_token_indices": [1, 7, 130]}),
    "tokens, named": Feature(lora={"trainable_token_indices": {"embed_tokens": [0, 5]}}),
    "tokens, tied": Feature(lora={"trainable_token_indices": [1, 7, 130]}, sizes=TIED),
    "fused saved": Feature(family="phi3", lora={"target_modules": ["o_proj"], "modules_to_save": ["qkv_proj"]}),
    "norms saved": Feature(family="qwen3", lora={"modules_to_save": ["q_norm", "k_norm", "input_layernorm"]}),
    "grouped saved": Feature(
        lora={"target_modules": ["o_proj"], "modules_to_save": ["k_proj", "v_proj"]}, sizes={**BIASED, **GROUPED}
    ),
    "biases, fused": Feature(base=gpt2, lora={"target_modules": FUSED, "fan_in_fan_out": True, "bias": "all"}),
    "biases of LoRA, grouped": Feature(lora={"bias": "lora_only"}, sizes={**BIASED, **GROUPED}),
    "patterns": Feature(
        lora={
            "layers_to_transform": [1],
            "rank_pattern": {"q_proj": 5},
            "alpha_pattern": {"o_proj": 3},
            "use_rslora": True,
        }
    ),
    "subclass": Feature(base=partial(llama_of, Scaled), sizes=BIASED, lora={"bias": "all"}),
    "subclass, dora": Feature(base=partial(llama_of, Scaled), lora=DORA, sizes=BIASED),
    "subclass trains": Feature(
        base=partial(llama_of, Scaled), adapters=False, sizes=GROUPED, config={"require_adapters": False}
    ),
    "subclass of modules trains": Feature(
        base=partial(llama_of, Branched), adapters=False, sizes=BIASED, config={"require_adapters": False}
    ),
    "subclass of modules": Feature(base=partial(llama_of, Branched), sizes=GROUPED),
    "empty biases": Feature(base=partial(llama_of, Unbiased), meshes=("2x1", "1x2", "2x2")),
    "empty biases train": Feature(base=partial(llama_of, Unbiased), lora={"bias": "all"}, meshes=("2x1", "1x2", "2x2")),
    "subclass that is whole": Feature(base=partial(llama_of, Normed, ("k_proj", "up_proj"))),
    "a weight by its name": Feature(
        lora={"target_parameters": ["q_proj.weight"], "target_modules": []}, meshes=("2x1", "1x2", "2x2")
    ),
    "another variant": Feature(
        lora={"alora_invocation_tokens": [5], "target_modules": ["q_proj", "down_proj"]}, meshes=("2x1", "1x2", "2x2")
    ),
    "one of a flow is whole": Feature(
        family="qwen3", lora={"modules_to_save": ["q_norm"]}, config={"tp_plan": {"*.q_proj": "replicate"}}
    ),
}


@cache
def oracle(name: str) -> Any:
    return reference(FEATURES[name])


def run_features(mesh: str, names: list[str]) -> dict[str, Any]:
    return {name: attempt(sharded, FEATURES[name], mesh, **FEATURES[name].config) for name in names}


@cache
def own_oracle(pool: Any, name: str) -> Any:
    (found,) = pool.run(1, run_features, "1x1", [name])
    assert not isinstance(found[name], Failure), found[name].trace
    return found[name]


MESHES = ["2x1", "1x2", "2x2", "1x4", "2x2x2"]


@pytest.mark.parametrize(
    "mesh", [mesh if mesh == "2x2" else pytest.param(mesh, marks=pytest.mark.matrix) for mesh in MESHES]
)
def test_features_equal_one_process(pool, mesh):
    names = [name for name, feature in FEATURES.items() if mesh in feature.meshes]
    wanted = {name: oracle(name) if FEATURES[name].exact else own_oracle(pool, name) for name in names}
    failed = []
    for rank, found in enumerate(pool.run(ranks_of(mesh), run_features, mesh, names)):
        for name, run in found.items():
            if isinstance(run, Failure):
                failed.append((rank, name, run.trace[-1500:]))
                continue
            errors = (
                relative_error(run.gradients, wanted[name].gradients),
                relative_error(run.adapters, wanted[name].adapters),
            )
            if errors[0] > 1e-12 or errors[1] > 1e-10:
                failed.append((rank, name, errors))
    assert not failed, "\n".join(map(str, failed))


def picture(**lora: Any) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["look", "up", "down"], **lora)
    return fill(get_peft_model(Picture().double(), config))


PICTURES = torch.randn(8, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def picture_gradients(mesh_text: str, lora: dict[str, Any], plan: dict[str, str]) -> dict[str, Tensor]:
    mesh, config = on_mesh(mesh_text, tp_plan=plan)
    model = parallelize(picture(**lora), mesh, config)
    model(PICTURES.chunk(dp_size(mesh))[dp_rank(mesh)]).square().mean().backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}])
@pytest.mark.parametrize("mesh", ["2x1", "1x2", "2x2"])
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
    return get_peft_model(causal_lm(dtype=torch.float32), lora_config(**lora))


def initialised(mesh_text: str, kinds: list[Any], ours: bool) -> list[dict[str, Tensor]]:
    """The values and gradients of adapters of these initialisations."""
    found = []
    for kind in kinds:
        mesh, config = on_mesh(mesh_text, seed=3)
        if ours:
            model = parallelize(
                causal_lm(dtype=torch.float32), mesh, config, lora_config=lora_config(init_lora_weights=kind, r=4)
            )
        else:
            model = parallelize(float_model(init_lora_weights=kind, r=4), mesh, config)
        values = {f"{name} value": full(p) for name, p in trained(model).items()}
        (batch,) = Case(steps=1).batches()
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
        model(input_ids=mine, labels=mine).loss.backward()
        found.append({**values, **{name: full(p.grad) for name, p in trained(model).items()}})
    return found


INITS = [True, "gaussian", "orthogonal", "pissa", "pissa_niter_1", "olora"]


def one_process_inits(ours: bool) -> list[dict[str, Tensor]]:
    found = []
    for kind in INITS:
        base = causal_lm(dtype=torch.float32)
        torch.manual_seed(3)
        model = (
            get_peft_model(base, lora_config(init_lora_weights=kind, r=4))
            if ours
            else float_model(init_lora_weights=kind, r=4)
        )
        (batch,) = Case(steps=1).batches()
        model.train()(input_ids=batch, labels=batch).loss.backward()
        values = {f"{name} value": full(p) for name, p in trained(model).items()}
        found.append({**values, **{name: full(p.grad) for name, p in trained(model).items()}})
    return found


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("mesh", ["2x1", "1x2", "2x2"])
def test_initialisations_from_the_base_weights(pool, mesh, ours):
    wanted = one_process_inits(ours)
    for answers in pool.run(ranks_of(mesh), initialised, mesh, INITS, ours):
        for kind, found, want in zip(INITS, answers, wanted, strict=True):
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


def inside() -> nn.Module:
    return get_peft_model(llama_of(Branched, ("k_proj",)), lora_config(target_modules=["k_proj.down"]))


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
        causal_lm(**TIED), lora_config(trainable_token_indices=[1, 2], target_modules=["q_proj", "lm_head"])
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
        (partial(llama_of, Normed, ("up_proj",)), {}, {"*.up_proj": "colwise"}, "slices of its output"),
        (partial(llama_of, Normed, ("down_proj",)), {}, {"*.down_proj": "rowwise"}, "partial sums of its output"),
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
    model: Any = parallelize(Feature().model(), mesh, config)
    (batch,) = Case(steps=1).batches()
    inner = model.get_base_model()

    def asked_of_config() -> Any:
        inner.set_attn_implementation("eager")
        inner.config.output_attentions = True
        return model(input_ids=batch)

    def other_config_on_each_rank() -> Any:
        return parallelize(Feature().model(), mesh, replace(config, sequence_parallel=dist.get_rank() == 1))

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
        "other configs": "config is ParallelConfig.*sequence_parallel=True.* on rank 1",
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
        feature = FEATURES[name]
        _, config = on_mesh(mesh_text, **feature.config)
        model = parallelize(feature.model(), mesh, config)
        path = Path(folder) / f"{mesh_text} {name}"
        save_adapter(model, path)
        other = parallelize(feature.model(), mesh, config)
        with torch.no_grad():
            for parameter in trained(other).values():
                parameter.zero_()
        load_adapter(other, path)
        found[name] = differing(
            {n: full(p) for n, p in trained(other).items()}, {n: full(p) for n, p in trained(model).items()}
        )
    return found


SAVED = [
    "dora",
    "dora, fused",
    "dora, ends",
    "lora_bias, grouped",
    "tokens",
    "tokens, tied",
    "fused saved",
    "empty biases train",
]


@pytest.mark.parametrize("mesh", ["2x1", "1x2", "2x2", "1x4"])
def test_saved_adapters_are_peft_s(pool, tmp_path, mesh):
    for found in pool.run(ranks_of(mesh), saved_and_loaded, mesh, SAVED, str(tmp_path)):
        assert not any(found.values())
    for name in SAVED:
        FEATURES[name].model().save_pretrained(tmp_path / name)
        want = load_file(tmp_path / name / "adapter_model.safetensors")
        got = load_file(tmp_path / f"{mesh} {name}" / "adapter_model.safetensors")
        assert not differing(got, want), name


def loaded_elsewhere(mesh_text: str, name: str, path: str) -> list[str]:
    mesh, config = on_mesh(mesh_text)
    model = parallelize(FEATURES[name].model(), mesh, config)
    want = {n: full(p) for n, p in trained(model).items()}
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.zero_()
    load_adapter(model, path)
    return differing({n: full(p) for n, p in trained(model).items()}, want)


def test_dora_is_loaded_on_another_mesh(pool, tmp_path):
    FEATURES["dora, fused"].model().save_pretrained(tmp_path)
    for mesh in ("2x2", "1x4", "2x1"):
        assert not any(pool.run(ranks_of(mesh), loaded_elsewhere, mesh, "dora, fused", str(tmp_path)))


def merging(names: list[str]) -> dict[str, Any]:
    mesh, config = on_mesh("1x2")
    found = {}
    for name in names:
        model = parallelize(FEATURES[name].model(), mesh, config)
        found[name] = attempt(model.merge_adapter)
    return found


def test_merging_what_cannot_be_merged_under_tp_is_refused(pool):
    for found in pool.run(2, merging, ["dora", "dora, fused", "lora_bias, fused"]):
        for name, error in found.items():
            assert isinstance(error, Failure), name
            assert error.kind == "ValueError", error.trace
            assert "cannot be merged under tensor parallelism: save the adapter" in error.message


MERGED = {
    "whole": Feature(
        config={"tp_plan": {"*.q_proj": "replicate", "*.up_proj": "replicate", "*.down_proj": "replicate"}}
    ),
    "gathered": Feature(sizes=BIASED, config=FEATURES["dora, any layer"].config),
    "sliced": Feature(sizes=BIASED),
    "arranged": Feature(family="phi3", lora={"target_modules": PHI3}),
}


def merged_logits(model: Any) -> list[Tensor]:
    """With an adapter merged, and taken out again."""
    (batch,) = Case(steps=1).batches()
    found = []
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        with torch.no_grad():
            found.append(model.eval()(input_ids=batch).logits)
    return found


def merged_on(mesh_text: str) -> dict[str, Any]:
    mesh, _ = on_mesh(mesh_text)
    found = {}
    for name, feature in MERGED.items():
        _, config = on_mesh(mesh_text, **feature.config)
        found[name] = attempt(merged_logits, parallelize(feature.model(), mesh, config))
    return found


@pytest.mark.parametrize("mesh", ["1x2", "2x2"])
def test_an_adapter_is_merged_in_place(pool, mesh):
    for found in pool.run(ranks_of(mesh), merged_on, mesh):
        for name, logits in found.items():
            assert not isinstance(logits, Failure), f"{name}: {logits.trace}"
            for got, want in zip(logits, merged_logits(MERGED[name].model()), strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-10, msg=name)


def two_adapters() -> nn.Module:
    """The second one is not active. Both have copies of a fused projection."""
    model: Any = FEATURES["fused saved"].model()
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
    (batch,) = Case(steps=1).batches()
    with torch.no_grad():
        first = model(input_ids=batch).logits
        model.set_adapter("other")
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        second = model(input_ids=batch).logits
    return [first, second]


@pytest.mark.parametrize("mesh", ["1x2", "2x2"])
def test_an_adapter_that_is_not_active_is_whole_and_is_computed_with_later(pool, tmp_path, mesh):
    model: Any = two_adapters().eval()
    (batch,) = Case(steps=1).batches()
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
    model: Any = Feature().model()
    model.add_adapter("other", lora_config())
    return fill(model)


def mixed_logits(model: Any) -> Tensor:
    (batch,) = Case(steps=1).batches()
    with torch.no_grad():
        return model.eval()(input_ids=batch, adapter_names=["default", "other"] * 3 + ["__base__"] * 2).logits


@pytest.mark.parametrize("mesh", ["1x2", "2x1"])
def test_a_batch_of_several_adapters(pool, mesh):
    want = mixed_logits(mixed_model())
    for got in pool.run(ranks_of(mesh), mixed, mesh):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def cached(mesh_text: str) -> list[Tensor]:
    """In eval mode with PEFT's cache: a first forward, another, and one after a step of training."""
    mesh, config = on_mesh(mesh_text)
    return cached_logits(parallelize(FEATURES["dora"].model(), mesh, config), dp_size(mesh), dp_rank(mesh))


def cached_logits(model: nn.Module, ranks: int = 1, rank: int = 0) -> list[Tensor]:
    (batch,) = Case(steps=1).batches()
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


@pytest.mark.parametrize("mesh", ["1x2", "2x2"])
def test_peft_s_cache_of_dora(pool, mesh):
    want = cached_logits(FEATURES["dora"].model())
    assert not torch.equal(want[0], want[2])
    for found in pool.run(ranks_of(mesh), cached, mesh):
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-8)
