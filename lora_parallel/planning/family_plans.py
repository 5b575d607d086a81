"""List plans for model families that transformers has no plan for: their colwise and rowwise layers.

The keys are globs over module names, relative to the base model (without the prefix of the task's class). A star
matches one component of a name, as in transformers' own plans. The tables say nothing of attention heads, fused
projections and the sizes that a module keeps: these are found, and every plan is checked, by running the model (see
`lora_parallel.tracing.structure`).
"""

from __future__ import annotations

from typing import Any

__all__ = ["family_plan"]

_BERT = {
    "encoder.layer.*.attention.self.query": "colwise",
    "encoder.layer.*.attention.self.key": "colwise",
    "encoder.layer.*.attention.self.value": "colwise",
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}

_GPT2 = {
    "h.*.attn.c_attn": "colwise",
    "h.*.attn.c_proj": "rowwise",
    "h.*.mlp.c_fc": "colwise",
    "h.*.mlp.c_proj": "rowwise",
}

_T5_STACK = {
    "block.*.layer.*.*.q": "colwise",
    "block.*.layer.*.*.k": "colwise",
    "block.*.layer.*.*.v": "colwise",
    "block.*.layer.*.*.o": "rowwise",
    "block.*.layer.*.SelfAttention.relative_attention_bias": "embedding_colwise",
    "block.*.layer.*.DenseReluDense.wi": "colwise",
    "block.*.layer.*.DenseReluDense.wi_0": "colwise",
    "block.*.layer.*.DenseReluDense.wi_1": "colwise",
    "block.*.layer.*.DenseReluDense.wo": "rowwise",
}

_PLANS: dict[str, dict[str, str]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "gpt2": _GPT2,
    "opt": {
        "decoder.layers.*.self_attn.q_proj": "colwise",
        "decoder.layers.*.self_attn.k_proj": "colwise",
        "decoder.layers.*.self_attn.v_proj": "colwise",
        "decoder.layers.*.self_attn.out_proj": "rowwise",
        "decoder.layers.*.fc1": "colwise",
        "decoder.layers.*.fc2": "rowwise",
    },
    "falcon": {
        "h.*.self_attention.query_key_value": "colwise",
        "h.*.self_attention.dense": "rowwise",
        "h.*.mlp.dense_h_to_4h": "colwise",
        "h.*.mlp.dense_4h_to_h": "rowwise",
    },
    "t5": {f"{stack}.{key}": style for stack in ("encoder", "decoder") for key, style in _T5_STACK.items()},
    "modernbert": {
        "layers.*.attn.Wqkv": "colwise",
        "layers.*.attn.Wo": "rowwise",
        "layers.*.mlp.Wi": "colwise",
        "layers.*.mlp.Wo": "rowwise",
    },
    "vit": {
        "layers.*.attention.q_proj": "colwise",
        "layers.*.attention.k_proj": "colwise",
        "layers.*.attention.v_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.fc1": "colwise",
        "layers.*.mlp.fc2": "rowwise",
    },
}


def family_plan(config: Any) -> dict[str, str]:
    """Return the plan for the family of a transformers config, or an empty dict if there is none.

    Its globs match module names of the base model.
    """
    return _PLANS.get(getattr(config, "model_type", ""), {})
