"""The rows of the oracle table that are features: what can be asked of LoRA and of this project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.oracle import SEVEN
from tests.oracle.rows import (
    DECODER,
    FUSED_SEVEN,
    GPT2,
    GPT2_TARGETS,
    LANGUAGE_LM,
    SPLIT,
    Batch,
    Row,
    base_model,
    build,
    families,
    language,
)

ENDS = [*SEVEN, "embed_tokens", "lm_head"]
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
GROUPED: dict[str, Any] = {**BIASED, "num_key_value_heads": 2}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
PHI3: dict[str, Any] = {**SPLIT, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
CONV1D: dict[str, Any] = {"target_modules": GPT2_TARGETS, "fan_in_fan_out": True}
ANY_LAYER = {"tp_plan": {"*_proj": "colwise_gather_output", "*[ok]_proj": "rowwise_split_input"}}


class Scaled(nn.Linear):
    """Factors of each input feature, of each output feature, and of all."""

    own_values = ("fed", "given", "gain")

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


class Gained(nn.Linear):
    """One parameter more, for each output feature."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Normed(nn.Linear):
    """No slice of its output can be computed from a slice of its weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.norm = nn.LayerNorm(self.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def layers_of(kind: type[nn.Linear], names: Sequence[str] = SEVEN) -> Callable[[Any], None]:
    """Changes a model: its linear layers of these names are of this class."""

    def change(model: Any) -> None:
        for name, module in list(model.named_modules()):
            if name.rsplit(".", 1)[-1] in names:
                own = kind(module.in_features, module.out_features, bias=module.bias is not None)
                model.set_submodule(name, own)

    return change


def invoking() -> Batch:
    """Rows that contain aLoRA's token, each at another place."""
    ids = language()["input_ids"]
    ids[torch.arange(len(ids)), torch.arange(len(ids))] = 5
    return {"input_ids": ids, "labels": ids}


def _feature(
    name: str,
    sizes: dict[str, Any] | None = None,
    change: Callable[[Any], None] | None = None,
    keep: bool = False,
    row: dict[str, Any] | None = None,
    kind: str = "LlamaForCausalLM",
    **lora: Any,
) -> Row:
    """LoRA on all seven linear layers of a Llama, and what the feature changes about it."""
    settings = {**DECODER, **(sizes or {})} if kind in ("LlamaForCausalLM", "Qwen3ForCausalLM") else dict(sizes or {})
    lora = {"target_modules": SEVEN, "task_type": LANGUAGE_LM, **lora}
    return Row(name, "feature", lambda: build(kind, settings, change, keep, **lora), **(row or {}))


def _without_adapters(name: str, sizes: dict[str, Any], change: Callable[[Any], None]) -> Row:
    """A whole Llama that trains."""

    def whole() -> nn.Module:
        torch.manual_seed(2)
        return base_model("LlamaForCausalLM", {**DECODER, **sizes}, change).double().train()

    return Row(name, "feature", whole, config={"require_adapters": False})


def _variant(of: Row, name: str, refused: dict[str, str] | None = None, **config: Any) -> Row:
    """A family with more settings of `ParallelConfig`."""
    return replace(of, name=name, group="feature", config=config, refused=refused or of.refused)


def language_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """The loss of transformers, which casts logits to float32, without that cast: its rounding would be compared."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].flatten())


def _loss_parallel(of: Row) -> Row:
    """A row with `loss_parallel`."""

    def build() -> nn.Module:
        model: Any = of.build()
        model.get_base_model().loss_function = language_loss
        return model

    config = {**of.config, "loss_parallel": True}
    return replace(of, name=f"loss_parallel, {of.name}", group="feature", build=build, config=config)


def features() -> list[Row]:
    """What can be asked of LoRA and of this project, on a tiny Llama unless the row says otherwise."""
    by_name = {row.name: row for row in families()}
    sequence_parallel = [
        _variant(by_name[name], f"sequence_parallel, {name}", sequence_parallel=True)
        for name in ("llama", "qwen3", "gemma2", "gpt-neox", "gpt2")
    ]
    ends = _feature("embeddings and head", target_modules=ENDS)
    tied_ends = _feature("embeddings and head, tied", TIED, target_modules=ENDS)
    saved_head = _feature("modules_to_save: head", modules_to_save=["lm_head"])
    return [
        ends,
        tied_ends,
        _feature(
            "rsLoRA, rank_pattern, alpha_pattern",
            use_rslora=True,
            rank_pattern={"q_proj": 5, "down_proj": 1},
            alpha_pattern={"up_proj": 11, r"layers\.1\.self_attn\.v_proj": 3},
        ),
        _feature("DoRA", use_dora=True),
        _feature("DoRA, embeddings and head", use_dora=True, target_modules=ENDS),
        _feature("lora_bias", BIASED, lora_bias=True),
        _feature("bias='all'", BIASED, bias="all"),
        _feature("bias='lora_only'", BIASED, bias="lora_only", target_modules=["q_proj", "o_proj", "down_proj"]),
        _feature("biases everywhere, frozen", BIASED),
        saved_head,
        _feature("modules_to_save: norms", modules_to_save=["norm", "input_layernorm"]),
        _feature("layers_to_transform", layers_to_transform=[1]),
        _feature(
            "target_parameters",
            target_modules=["q_proj"],
            target_parameters=["mlp.down_proj.weight"],
        ),
        _feature(
            "trainable_token_indices",
            trainable_token_indices={"embed_tokens": [1, 5, 64, 130]},
        ),
        _feature("gaussian", keep=True, init_lora_weights="gaussian"),
        _feature("orthogonal", keep=True, init_lora_weights="orthogonal", r=4),
        _feature("PiSSA", keep=True, init_lora_weights="pissa"),
        _feature("OLoRA", keep=True, init_lora_weights="olora"),
        _feature("a Linear with one parameter more, colwise", change=layers_of(Gained, ["up_proj"])),
        _feature(
            "a Linear with one parameter more, rowwise",
            change=layers_of(Gained, ["down_proj"]),
        ),
        _feature("a Linear with a norm in it", change=layers_of(Normed, ["up_proj"])),
        _feature("DoRA, embeddings and head, tied", TIED, use_dora=True, target_modules=ENDS),
        _feature("DoRA, grouped", GROUPED, use_dora=True),
        _feature("DoRA, phi3", PHI3, kind="Phi3ForCausalLM", use_dora=True, target_modules=FUSED_SEVEN),
        _feature("DoRA, gpt2", GPT2, kind="GPT2LMHeadModel", use_dora=True, **CONV1D),
        _feature("DoRA, styles for any layer", BIASED, row={"config": ANY_LAYER}, use_dora=True),
        _feature("lora_bias, grouped", GROUPED, lora_bias=True),
        _feature("lora_bias, gpt2", GPT2, kind="GPT2LMHeadModel", lora_bias=True, **CONV1D),
        _feature("bias='all', gpt2", GPT2, kind="GPT2LMHeadModel", bias="all", **CONV1D),
        _feature("bias='lora_only', grouped", GROUPED, bias="lora_only"),
        _feature("trainable_token_indices, tied", TIED, trainable_token_indices=[1, 7, 130]),
        _feature(
            "modules_to_save: fused",
            PHI3,
            kind="Phi3ForCausalLM",
            target_modules=["o_proj"],
            modules_to_save=["qkv_proj"],
        ),
        _feature("modules_to_save: grouped", GROUPED, target_modules=["o_proj"], modules_to_save=["k_proj", "v_proj"]),
        _feature("modules_to_save: norms of heads", kind="Qwen3ForCausalLM", modules_to_save=["q_norm", "k_norm"]),
        _feature(
            "one layer of a group is whole",
            kind="Qwen3ForCausalLM",
            row={"config": {"tp_plan": {"*.q_proj": "replicate"}}},
            modules_to_save=["q_norm"],
        ),
        _feature("target_parameters: a weight", target_modules=[], target_parameters=["q_proj.weight"]),
        _feature("aLoRA", row={"batch": invoking}, alora_invocation_tokens=[5], target_modules=["q_proj", "down_proj"]),
        _feature("a Linear with factors, bias='all'", BIASED, layers_of(Scaled), bias="all"),
        _feature("a Linear with factors, DoRA", BIASED, layers_of(Scaled), use_dora=True),
        _without_adapters("a Linear with factors, without adapters", GROUPED, layers_of(Scaled)),
        _feature("a Linear with layers in it", GROUPED, layers_of(Branched)),
        _without_adapters("a Linear with layers in it, without adapters", BIASED, layers_of(Branched)),
        _feature("a Linear with an empty bias", change=layers_of(Unbiased)),
        _feature("a Linear with an empty bias, bias='all'", change=layers_of(Unbiased), bias="all"),
        _variant(by_name["llama"], "activation_checkpointing", activation_checkpointing=True),
        *sequence_parallel,
        *map(_loss_parallel, [by_name["llama"], by_name["gemma2"], by_name["cohere"], by_name["gpt2"]]),
        *map(_loss_parallel, [ends, tied_ends, saved_head, sequence_parallel[0]]),
    ]
