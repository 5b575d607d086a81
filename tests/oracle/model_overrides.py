"""Settings of small configs that no rule by names can know: by class of config.

By class of model there is "config", which makes the config that is made small.
"""

from __future__ import annotations

from typing import Any

import transformers


def gemma4() -> Any:
    """Return Gemma 4's config with a tower, which is left out by default."""
    kind = transformers.Gemma4Config
    return kind(vision_config=transformers.Gemma4VisionConfig(), audio_config=transformers.Gemma4AudioConfig())


GROUPED = (
    *("ApertusConfig", "ArceeConfig", "Cohere2Config", "CohereConfig", "DogeConfig", "Dots1Config", "Exaone4Config"),
    *("FlexOlmoConfig", "GemmaConfig", "GraniteConfig", "GraniteMoeConfig", "HeliumConfig", "HunYuanDenseV1Config"),
    *("LlamaConfig", "Olmo2Config", "Olmo3Config", "Phi3Config", "Qwen2Config", "Qwen2MoeConfig", "Qwen3Config"),
    *("Qwen3VLMoeTextConfig", "Qwen3VLTextConfig", "StableLmConfig"),
)
"""Configs with as many key-value heads as heads by default, whose published models have fewer. More are below."""

ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}

OVERRIDES: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 1} for name in GROUPED},
    # Number of patches of an image, and of queries that read them.
    "AriaConfig": {"projector_patch_to_query_dict": {16: 4}, "max_value_projector_patch_to_query_dict": 4},
    # The names of the words that stand for pieces of an image.
    "ChameleonConfig": {
        "vocabulary_map": {"<image>": 120, **{f"IMGIMG{letter}Z": 100 + n for n, letter in enumerate("ABCDEFGH")}}
    },
    # Rotary embeddings of 32 features or more.
    "ClvpEncoderConfig": {"num_attention_heads": 2},
    # Four stages, each of half the size.
    "ConvNextConfig": {"image_size": 32},
    # Its code reads a setting that its config lacks.
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    # The names of the words that stand for pieces of an image.
    "Emu3Config": {
        "vocabulary_map": {
            "<image>": 120,
            "<|extra_200|>": 119,
            **{f"<|visual token {n:06}|>": 100 + n for n in range(8)},
        }
    },
    # What it computes for short rows in any case; a first forward would change its blocks to that.
    "BigBirdConfig": {"attention_type": "original_full"},
    # Height and width have sections of equal size.
    "Ernie4_5_VLMoeTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    },
    # Reads frames in groups of four.
    "GlmAsrEncoderConfig": {"intermediate_size": 256},
    "VoxtralEncoderConfig": {"intermediate_size": 256},
    # A quarter of the hidden size.
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "Gemma4ForConditionalGeneration": {"config": gemma4},
    # Their code reads a token id that is None by default.
    "EsmConfig": {"pad_token_id": 0},
    "MoonshineConfig": {"pad_token_id": 0},
    # Four tokens of an image side by side.
    "Llama4VisionConfig": {"intermediate_size": 256},
    # Settings that are None by default, with which the class computes nothing.
    "NemotronConfig": {"num_key_value_heads": 1, "head_dim": 16},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "XmodConfig": {"default_language": "en_XX"},
    # Each kind of layer, where the defaults have one.
    "BambaConfig": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "GraniteMoeHybridConfig": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
    },
    "GraniteMoeSharedConfig": {"shared_intermediate_size": 24, "num_key_value_heads": 1},
    # With one expert a token, the default, weights of experts are 1, and gradients of the router rounding alone.
    "HunYuanMoEV1Config": {"moe_topk": 2, "num_key_value_heads": 1},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    "RecurrentGemmaConfig": {"num_hidden_layers": 6, "num_key_value_heads": 1},
    # Its code reads settings that its config lacks.
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 24},
    # By kind of layer.
    "CohereCompassTextConfig": {
        "rope_parameters": {
            kind: {**ROPE, "mrope_section": [2, 3, 3]} for kind in ("sliding_attention", "full_attention")
        }
    },
    # Numbers of layers of the tower, beyond those of the small one by default.
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "VipLlavaConfig": {"vision_feature_layer": [-1, -2]},
    # Layers of the tower, and those of the language model that they are added to.
    "Granite4VisionConfig": {
        "deepstack_layer_map": [[-1, 0]],
        "spatial_target_layers": [0, 1, 0, 1],
        "downsample_rate": "1/2",
    },
    # The width of four tokens side by side.
    "MuseGlimmerConfig": {"out_hidden_size": 256},
    "MuseSparkConfig": {"out_hidden_size": 256},
    # Settings that its default layers want, and that are None by default.
    "Step3p7TextConfig": {"sliding_window": 8},
    # Four stages with twice the width each.
    "SwinConfig": {
        "embed_dim": 16,
        "num_heads": [2, 4, 4, 4],
        "depths": [2, 2, 2, 2],
        "window_size": 4,
        "image_size": 64,
    },
    "Florence2VisionConfig": {
        **{
            "embed_dim": [16, 32, 64, 64],
            "num_heads": [2, 2, 4, 4],
            "num_groups": [2, 2, 4, 4],
            "depths": [1, 1, 1, 1],
        },
        **{"window_size": 2, "projection_dim": 64},
    },
    # Its code has sections of the published size.
    "PaddleOCRTextConfig": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    # As many codes as words for pieces of an image, and the width that its factors of channels give.
    "Emu3VQVAEConfig": {"codebook_size": 8, "hidden_size": 128},
    # Layers with a sliding window have heads of their own.
    "Dots3NoteTextConfig": {
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16},
        **{"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 16},
    },
    # In pixels: windows of one token of the text.
    "Qwen2_5_VLVisionConfig": {"window_size": 8},
    # Without norms, as by default, gradients of attention have no digits: a unit in the last place of the weights moves
    # them by 3e-12 in one process.
    "MobileBertConfig": {"normalization_type": "layer_norm"},
    # The last hidden states, and those of the two intermediate layers.
    "MllamaVisionConfig": {"vision_output_dim": 192},
}
