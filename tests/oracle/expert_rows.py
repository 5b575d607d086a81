"""The rows of the oracle table that are mixtures of experts: LoRA on the fused stacks, and on attention around them."""

from __future__ import annotations

from typing import Any

from tests.oracle.rows import DECODER, SPLIT, Row, build

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
BY_EXPERTS = {"tp_plan": {"*.experts": "ep_dispatch_experts"}}
ROUTED_IN_FLOAT32: dict[str, Any] = {
    "tolerance": 1e-6,
    # DeepSeek-V2 of eight blocks in one process, its embeddings moved by 1e-9: gradients differ by 1.7e-6.
    "deep_tolerance": 5e-6,
    "note": "the router computes in float32.",
}

MIXTRAL = {**DECODER, "num_local_experts": 8, "num_experts_per_tok": 2}
EAGER = {**MIXTRAL, "experts_implementation": "eager"}
QWEN3 = {
    **DECODER,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
OLMOE = {**SPLIT, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": None, "eos_token_id": 2}
GPT_OSS = {
    **DECODER,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
LATENT = {
    **{key: value for key, value in DECODER.items() if key != "head_dim"},
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 8,
}
DEEPSEEK2 = {**LATENT, "n_shared_experts": 1, "topk_method": "greedy"}
DEEPSEEK3 = {**LATENT, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
LLAMA4 = {
    **DECODER,
    "intermediate_size_mlp": 44,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "moe_layers": [0, 1],
}


def _row(name: str, kind: str, settings: dict[str, Any], targets: list[str], **row: Any) -> Row:
    settings = {**settings, "experts_implementation": "eager"}  # others take no float64
    lora = {"target_modules": targets, "target_parameters": STACKS, "task_type": "CAUSAL_LM"}
    return Row(name, "experts", lambda: build(kind, settings, **lora), **{**ROUTED_IN_FLOAT32, **row})


def experts() -> list[Row]:
    """Each family by slices of all experts; some by experts, too."""
    return [
        _row("mixtral", "MixtralForCausalLM", MIXTRAL, ATTENTION),
        Row(
            "mixtral, all-linear",
            "experts",
            lambda: build("MixtralForCausalLM", EAGER, target_modules="all-linear", task_type="CAUSAL_LM"),
            **ROUTED_IN_FLOAT32,
        ),
        _row("mixtral, by experts", "MixtralForCausalLM", MIXTRAL, ATTENTION, config=BY_EXPERTS),
        _row("qwen3-moe", "Qwen3MoeForCausalLM", QWEN3, ATTENTION),
        _row("olmoe", "OlmoeForCausalLM", OLMOE, ATTENTION),
        _row("gpt-oss", "GptOssForCausalLM", GPT_OSS, ATTENTION),
        _row("gpt-oss, by experts", "GptOssForCausalLM", GPT_OSS, ATTENTION, config=BY_EXPERTS),
        _row("deepseek-v2", "DeepseekV2ForCausalLM", DEEPSEEK2, ["o_proj", "gate_proj", "up_proj", "down_proj"]),
        _row("deepseek-v3", "DeepseekV3ForCausalLM", DEEPSEEK3, ["o_proj", "gate_proj", "up_proj", "down_proj"]),
        _row("llama4", "Llama4ForCausalLM", LLAMA4, ATTENTION),
    ]
