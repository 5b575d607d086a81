"""Small models of many families, from a config, saved as checkpoints and loaded back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,  # no multiple of 2: uneven shards
    "pad_token_id": 0,
}
ENCODER = {key: SIZES[key] for key in SIZES if key not in ("num_key_value_heads", "pad_token_id")}


@dataclass(frozen=True)
class Family:
    """One model."""

    name: str
    """Of the model class."""

    config: str
    settings: dict[str, Any] = field(hash=False)
    targets: Any = field(default="all-linear", hash=False)

    def model_class(self) -> Any:
        return getattr(transformers, self.name)

    def save(self, path: Path, seed: int = 0) -> Path:
        """A checkpoint of random weights, in several files."""
        if not path.exists():
            torch.manual_seed(seed)
            model = self.model_class()(getattr(transformers, self.config)(**self.settings))
            for parameter in model.parameters():
                parameter.data.normal_(0, 0.3)  # norms and biases too: what stays at one or zero hides mistakes
            model.save_pretrained(path, max_shard_size="60KB")
        return path


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    common = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    return {"rope_parameters": {**common, **settings}}


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", SIZES),
    "llama-tied": Family("LlamaForCausalLM", "LlamaConfig", {**SIZES, "tie_word_embeddings": True}),
    "llama-llama3": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SIZES, **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    "llama-yarn": Family("LlamaForCausalLM", "LlamaConfig", {**SIZES, **_rope("yarn", factor=4.0)}),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", SIZES),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**SIZES, "head_dim": 8}),
    "mistral": Family("MistralForCausalLM", "MistralConfig", SIZES),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {**SIZES, "head_dim": 8}),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**SIZES, "head_dim": 8}),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", SIZES),
    "gpt-neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", ENCODER, targets=["query_key_value", "dense"]),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 64},
        targets=["c_attn", "c_proj"],
    ),
    "falcon": Family(
        "FalconForCausalLM",
        "FalconConfig",
        {
            **{key: SIZES[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")},
            "num_kv_heads": 1,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
        targets=["query_key_value", "dense"],
    ),
    "bert": Family("BertModel", "BertConfig", ENCODER, targets=["query", "value"]),
    "mixtral": Family(
        "MixtralForCausalLM", "MixtralConfig", {**SIZES, "num_local_experts": 4}, targets=["q_proj", "v_proj"]
    ),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**SIZES, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        targets=["q_proj", "o_proj"],
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {**SIZES, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        targets=["q_proj", "o_proj"],
    ),
}
