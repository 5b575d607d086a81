"""Settings of small configs that no rule by names can know, by class of config or, under "config", of model."""

from __future__ import annotations

from typing import Any

import transformers


def gemma4() -> Any:
    """Return Gemma 4's config with a tower, which is left out by default."""
    kind = transformers.Gemma4Config
    return kind(vision_config=transformers.Gemma4VisionConfig(), audio_config=transformers.Gemma4AudioConfig())


OVERRIDES: dict[str, dict[str, Any]] = {
    # Number of patches of an image, and of queries that read them.
    "AriaConfig": {"projector_patch_to_query_dict": {16: 4}, "max_value_projector_patch_to_query_dict": 4},
    # The names of the words that stand for pieces of an image.
    "ChameleonConfig": {"vocabulary_map": {"<image>": 120, **{f"IMGIMG{letter}Z": 100 + n for n, letter in enumerate("ABCDEFGH")}}},
    # Rotary embeddings of 32 features or more.
    "ClvpEncoderConfig": {"num_attention_heads": 2},
    # Four stages, each of half the size.
    "ConvNextConfig": {"image_size": 32},
    # Its code reads a setting that its config lacks.
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "Emu3Config": {"vocabulary_map": {"<image>": 120, "<|extra_200|>": 119, **{f"<|visual token {n:06}|>": 100 + n for n in range(8)}}},
    "Emu3VQVAEConfig": {"codebook_size": 8},
    "Ernie4_5_VLMoeTextConfig": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}},
    # Reads frames in groups of four.
    "GlmAsrEncoderConfig": {"intermediate_size": 256},
    "VoxtralEncoderConfig": {"intermediate_size": 256},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "Gemma4ForConditionalGeneration": {"config": gemma4},
    # The last hidden states, and those of the two intermediate layers.
    "MllamaVisionConfig": {"vision_output_dim": 192},
}
