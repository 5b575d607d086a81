"""Make a row of the oracle table of any class of transformers: a tiny config by rules, a batch, and adapters.

- A config is made from the default values of the class's own config and of the configs in it. Each setting gets a small
  value by its name and its role: `SIZES` has the rules, `OVERRIDES` what no rule can know.
- Of the layers those are kept that show every kind of layer, twice if there are two of it. A layer's kind is what the
  lists of one value a layer, the lists of layer numbers and the counts of first or last layers say of it.
- The name of a row is "<class> <inputs> <dtype>": inputs are those of `tests.oracle.model_inputs`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from tests.oracle.caches import copied
from tests.oracle.model_inputs import make_batch, own_or_mean
from tests.oracle.model_overrides import OVERRIDES
from tests.oracle.rows import VOCABULARY, Batch, Row, fill, randomise, rows_of_rank

HIDDEN, HEADS, HEAD_DIM, WIDE, NARROW = 64, 4, 16, 88, 24
KEPT_LAYERS = 2
"""Number of layers of each kind that a model has, where the class's own config has as many."""

MOST_LAYERS = 8

FLOAT32_BOUND = 1e-5
MIXED = "mixed"
"""The dtype of a model in float64 whose own code casts to float32 in places: see `WithoutFloat32`."""

Settings = dict[str, Any]

# Names of settings that count layers, and those that say that every n-th layer differs.
_LAYERS = re.compile(
    r"(num_|n_)?((encoder|decoder|hidden|speech_encoder|t2u_encoder|t2u_decoder|conf_num_hidden|encoder_num_hidden"
    r"|decoder_num_hidden|global)_)?layers?|depth|num_blocks|resampler_depth|num_layers_per_stack|num_mel_attn_blocks"
)
_PERIODS = re.compile(
    r"(attn|expert)_layer_period|(encoder|decoder)_sparse_step|interleave_moe_layer_step|cross_attention_frequency"
    r"|global_attn_every_n_layers|no_rope_layer_interval|layer_group_size|.*sliding_window_pattern|insert_layer_id"
    r"|n_layers_per_attn_res_block"
)
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_LAST = ("num_kv_shared_layers",)
_HEADS = re.compile(r"(\w+_)?(num|n)_((\w+_)?attention_)?heads?|(\w+_)?attention_heads|num_heads|num_query_groups")
_KV_HEADS = re.compile(r"(\w+_)?num_key_value_heads|kv_n_heads|num_kv_heads")

# The size of each setting by its name, the first pattern that matches the whole name. "keep" leaves it as it is.
SIZES: list[tuple[str, int | str]] = [
    # mixtures of experts
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|moe_k|top_k_experts|moe_top_?k", "at most 2"),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"zero_expert_num", 2),
    (r"(moe_|shared_|share_|expert_).*(intermediate_size|hidden_size|dim)", NARROW),
    # state space models and linear attention; the inner width of these is twice the hidden size
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"n_mamba_heads", "at most 8"),
    (r"mamba_d_head|mamba_head_?dim", 16),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"(mamba_d_|ssm_)?state(_size)?", 8),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"(mamba_)?chunk_size", 8),
    (r"mamba_n_?groups|n_groups", "at most 2"),
    (r"linear_num_key_heads", 2),
    (r"linear_num_(value_)?heads", 4),
    (r"linear_(key_|value_)?head_dim", 16),
    # attention with keys and values of low rank, and chosen tokens
    (r"qk_rope_head_dim", "at most 8"),
    (r"qk_nope_head_dim", 8),
    (r"qk_head_dim", "rope and nope"),
    (r"v_head_dim", 16),
    (r"\w+_lora_rank|laurel_rank|gated_norm_rank|adapter_rank|hc_lowrank", 16),
    (r"o_groups", 2),
    (r"index_n_heads|indexer_n_heads", 4),
    (r"index_head_dim|indexer_head_dim", 16),
    (r"index_topk", 8),
    (r"index_topk_blocks", 2),
    (r"index_block_size|index_kpool", 4),
    (r"(\w+_)?(head_dim|d_kv|dim_head|kv_channels)", HEAD_DIM),
    # windows and lengths
    (r"sliding_window(_size)?|attention_chunk_size|local_attention|attention_window(_size)?|local_radius", 8),
    (r"local_attention_window_len", 8),
    (r"max_source_positions", 12),
    (r"max_pos_emb", "keep"),
    (r"(original_)?max_\w*position\w*|n_positions|n_ctx|max_seq_len|seq_len|context_length|max_target_positions", 64),
    (r"rotary_dim", 8),
    # words
    (r"type_vocab_size|segment_types|prompt_types|num_logits_to_keep", "keep"),
    (r"\w*vocab_size\w*|\w*_vocab|encoder_hash_byte_group_size", "at most the vocabulary"),
    # images and sound
    (r"codebook_size|upsample_groups", 64),
    (r"num_embeddings", 8),
    (r"base_channels", 32),
    (r"num_filters", 4),
    (r"n_window", 4),
    (r"n_window_infer", 8),
    (r"image_size|crop_size|resolution", 16),
    (r"patch_size", "at most 4"),
    (r"num_patches|num_position_embeddings|image_seq_length", 16),
    (r"pos_emb_(height|width)|posemb_grid_size|mm_tokens_per_image", 4),
    (r"num_mel_bins|n_mel_bins|input_feat_size|input_feat_per_channel|feature_size", 16),
    (r"num_query_tokens|latent_query_num|resampler_n_latents|num_image_tokens", 4),
    (r"num_channels|in_channels|audio_channels|input_channels|out_channels|channels|image_channels", "keep"),
    # widths
    (r"attention_hidden_size", "as the hidden size"),
    (r"\w*(intermediate|ffn_hidden)_size\w*|\w*ffn_dim|d_ff|dim_ff|n_inner|mlp_dim|intermediate_dim", WIDE),
    (r"(block_)?multiple_of|\w*round_up_to_multiple_of", 8),
    (r"\w*kernel_size\w*|conv_\w+|\w*stride\w*|\w*factor\w*|\w*group\w*|hop_length|sampling_rate|\w*merge\w*", "keep"),
    (r"\w*(_dim|d_model|n_embd|embed_dim|hidden_dim|_width)\w*|dim", "narrow"),
    (r"\w*(hidden|embedding|output|input|bottleneck)_size\w*", "narrow"),
]


MUST_BE = {
    **{"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": NARROW},
    **{"head_dim": HEAD_DIM, "vocab_size": VOCABULARY, "mask_token_id": 4},
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
    "indexer_compress_ratio": 2,
}
"""Sizes of settings that are None by default, with which the class computes nothing."""


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config of the same class with small sizes, and with small configs in it."""
    return type(config)(**small_settings(config))


def small_settings(config: PretrainedConfig) -> Settings:
    """Return the settings that make a config of this class small, those of inner configs as configs."""
    values = {key: value for key, value in vars(config).items() if not key.startswith("_")}
    settings: Settings = {"use_cache": False} if "use_cache" in values else {}
    if getattr(config, "is_encoder_decoder", False):
        settings["is_encoder_decoder"] = True
    for key, value in values.items():
        if isinstance(value, PretrainedConfig):
            settings[key] = small_config(value)
        elif (size := _small(key, value, values)) is not None:
            settings[key] = size
    known = getattr(config, "ignore_keys_at_rope_validation", None) or ()
    if values.get("rope_parameters") and "mrope_section" in known:
        settings["rope_parameters"] = _with_sections(values["rope_parameters"])
    return settings | _layers(values) | OVERRIDES.get(type(config).__name__, {})


def _small(key: str, value: Any, values: Settings) -> Any:
    """Return the small value of a setting that is not about layers, or None to leave it."""
    if isinstance(value, dict):
        return _rope(value)
    if re.fullmatch(r"\w*(drop|pdrop|jitter|mask_time_prob|mask_feature_prob)\w*", key) and isinstance(value, float):
        return 0.0
    if re.fullmatch(r"\w*(_token_(id|index)|_id)", key) or key.endswith("token_ids"):
        return _special(key, value)
    if key == "image_grid_pinpoints":
        return [[16, 16]]
    if key == "ctc_loss_reduction":  # a sum over rows is no mean of sums over shares of them
        return "mean"
    if isinstance(value, (list, tuple)) and re.fullmatch(r"image_size|patch_size|crop_size", key):
        return [_number(key, one, values) for one in value]
    if value is None and key in MUST_BE:
        return MUST_BE[key]
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return _number(key, value, values)


def _number(key: str, value: int, values: Settings) -> int | None:
    """Return the small value of a number by the rule for its name, or None to leave it."""
    if _KV_HEADS.fullmatch(key):
        return max(1, HEADS * value // _query_heads(key, values))
    if key == "head_dim" and value == values.get("qk_rope_head_dim"):  # with keys of low rank: of their rotary part
        key = "qk_rope_head_dim"
    rule = next((rule for pattern, rule in SIZES if re.fullmatch(pattern, key)), None)
    is_state_space = "expand" in values and "state_size" in values
    if key == "num_heads" and is_state_space:
        return 8
    if rule is None:
        return HEADS if _HEADS.fullmatch(key) and value >= HEADS else None
    if rule == "keep":
        return None
    if rule == "as the hidden size":
        return HIDDEN * value // max(values.get("hidden_size", value), 1)
    if rule == "rope and nope":
        return 8 + min(values["qk_rope_head_dim"], 8)
    if rule == "at most the vocabulary":
        return min(value, VOCABULARY)
    if rule == "narrow":
        return HIDDEN if value >= HIDDEN else None
    if isinstance(rule, str):
        return min(value, int(rule.removeprefix("at most ")))
    return rule if value > 0 else None


def _query_heads(key: str, values: Settings) -> int:
    """Return the default number of heads that a number of key-value heads goes with."""
    prefix = key.removesuffix("num_key_value_heads")
    for name in (f"{prefix}num_attention_heads", "num_attention_heads", "n_heads", "num_heads"):
        if isinstance(values.get(name), int):
            return values[name]
    return HEADS


def _special(key: str, value: Any) -> Any:
    """Return a token id within the vocabulary: those of padding and ends below 4, others above 100, by their name."""
    low = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    if isinstance(value, (list, tuple)) and all(isinstance(one, int) for one in value):
        if key in low:
            return [low[key]]
        return [100 + (zlib.crc32(key.encode()) + index) % 20 for index in range(len(value))] if value else None
    kinds = {"image": 120, "video": 121, "audio": 122}
    by_kind = re.fullmatch(r"(image|video|audio)_token_(id|index)", key)
    if (not isinstance(value, int) or isinstance(value, bool)) and not by_kind:
        return None
    return low.get(key) if key in low else kinds[by_kind[1]] if by_kind else 100 + zlib.crc32(key.encode()) % 20


def _rope(value: dict[Any, Any]) -> dict[Any, Any] | None:
    """Return settings of rotary embeddings with sections that fit the small heads, by kind of layer if they are so."""
    if value and all(isinstance(one, dict) for one in value.values()):
        return {key: _rope(one) or one for key, one in value.items()}
    if not {"rope_type", "rope_theta", "mrope_section"} & value.keys():
        return None
    changed = dict(value)
    if isinstance(share := changed.get("partial_rotary_factor"), float):
        changed["partial_rotary_factor"] = max(0.5, share)
    if sections := changed.get("mrope_section"):
        half = int(HEAD_DIM * changed.get("partial_rotary_factor", 1.0)) // 2
        scaled = [half * size // sum(sections) for size in sections]
        changed["mrope_section"] = [half - sum(scaled[1:]), *scaled[1:]]
    return changed


def _with_sections(value: dict[Any, Any]) -> dict[Any, Any] | None:
    """Return settings of rotary embeddings with sections for time, height and width: the class's code knows of them."""
    if all(isinstance(one, dict) for one in value.values()):
        return {key: _with_sections(one) for key, one in value.items()}
    return _rope({"mrope_section": [16, 24, 24], **value})


def _layers(values: Settings) -> Settings:
    """Return the settings about layers: so many that every kind of layer is there, and lists that fit."""
    counts = {key: value for key, value in values.items() if _LAYERS.fullmatch(key) and _is_count(value)}
    depth = next((counts[key] for key in ("num_hidden_layers", "depth") if key in counts), None)
    depth = depth or max(counts.values(), default=None)
    by_period = {key: 2 for key, value in values.items() if _PERIODS.fullmatch(key) and _is_count(value) and value > 1}
    offsets = {key: 1 for key, value in values.items() if key.endswith("_layer_offset") and value}
    if depth is None:
        return by_period | offsets
    lists = {key: value for key, value in values.items() if _has_one_a_layer(key, value, depth)}
    numbers = {key: value for key, value in values.items() if _has_layer_numbers(key, value, depth)}
    first = {key: values[key] for key in _FIRST if _is_count(values.get(key))}
    last = {key: values[key] for key in _LAST if _is_count(values.get(key))}
    kinds = [
        repr(
            [
                *(value[layer] for value in lists.values()),
                *(layer in value for value in numbers.values()),
                *(layer < value for value in first.values()),
                *(layer >= depth - value for value in last.values()),
            ]
        )
        for layer in range(depth)
    ]
    chosen = [layer for layer, kind in enumerate(kinds) if kinds[:layer].count(kind) < KEPT_LAYERS]
    if len(chosen) > MOST_LAYERS:
        chosen = [layer for layer, kind in enumerate(kinds) if kind not in kinds[:layer]]
    if by_period and not lists:
        chosen = list(range(2 * KEPT_LAYERS))
    total = len(chosen)
    made: Settings = {key: min(value, total if value == depth else KEPT_LAYERS) for key, value in counts.items()}
    made |= by_period | offsets
    for key, value in lists.items():
        kept = [value[layer] for layer in chosen]
        made[key] = type(value)(_number(key, one, values) or one if _is_count(one) else one for one in kept)
    made |= {
        key: type(value)(chosen.index(layer) for layer in value if layer in chosen) for key, value in numbers.items()
    }
    made |= {key: sum(layer < value for layer in chosen) for key, value in first.items()}
    made |= {key: sum(layer >= depth - value for layer in chosen) for key, value in last.items()}
    if "moe_layer_end_index" in values:
        made["moe_layer_end_index"] = total - 1
    return made


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _has_one_a_layer(key: str, value: Any, depth: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == depth and not _has_layer_numbers(key, value, depth)


def _has_layer_numbers(key: str, value: Any, depth: int) -> bool:
    """Return True for a list of the numbers of some layers."""
    if not (isinstance(value, (list, tuple)) and value and re.search(r"layer|index|idx|_ids", key)):
        return False
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < depth for one in value):
        return False
    return all(one < other for one, other in pairwise(value))


def model_classes() -> list[str]:
    """Return the names of the classes that the table has: all that generate, and usual encoders."""
    from transformers.models.auto import modeling_auto

    generating = {
        name
        for name in dir(transformers)
        if re.search(r"(?<!PreTrainedModel)For(CausalLM|ConditionalGeneration)$", name) and not name.startswith("Auto")
    }
    generating |= {name for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if "Head" in name}
    known = generating | set(ENCODERS)
    return sorted(name for name in known if hasattr(getattr(transformers, name, None), "config_class"))


ENCODERS = (
    *("AlbertForMaskedLM", "BertForMaskedLM", "BigBirdForMaskedLM", "CamembertForMaskedLM", "ConvBertForMaskedLM"),
    *("DebertaForMaskedLM", "DebertaV2ForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM", "EsmForMaskedLM"),
    *("EuroBertForMaskedLM", "FNetForMaskedLM", "LongformerForMaskedLM", "MPNetForMaskedLM", "MobileBertForMaskedLM"),
    *("ModernBertForMaskedLM", "NomicBertForMaskedLM", "RoFormerForMaskedLM", "RobertaForMaskedLM"),
    *("XLMRobertaForMaskedLM", "BeitForImageClassification", "ConvNextForImageClassification"),
    *("DeiTForImageClassification", "Dinov2ForImageClassification", "DINOv3ViTModel", "SiglipForImageClassification"),
    *("SwinForImageClassification", "ViTForImageClassification", "HubertForCTC", "Wav2Vec2ForCTC", "WavLMForCTC"),
    *("CLIPModel", "SiglipModel", "CLIPVisionModel", "SiglipVisionModel"),
)


# ---------------------------------------------------------------------- models


@copied
def small_model(name: str) -> nn.Module:
    """Build a model of a class with random weights, norms and biases too: ones and zeros would hide errors."""
    kind: Any = getattr(transformers, name)
    override = OVERRIDES.get(name, {})
    config = small_config(override["config"]() if "config" in override else kind.config_class())
    torch.manual_seed(3)
    model = kind(config)
    for module in model.modules():  # other implementations take no float64
        inner = getattr(module, "config", None)
        if getattr(inner, "_experts_implementation", None) is not None:
            inner._experts_implementation = "eager"  # type: ignore[union-attr]
    randomise(model, 0.15)
    return model


def _build(name: str, dtype: torch.dtype) -> nn.Module:
    """Build the PEFT model in full: adapters that are zero nowhere on every linear layer but the head."""
    torch.manual_seed(2)
    model: Any = small_model(name).to(dtype)
    config = LoraConfig(r=3, lora_alpha=6, target_modules=targets(model), exclude_modules=not_adapted(model) or None)
    model = get_peft_model(model, config).to(dtype)
    fill(model)
    model.train()
    for module in model.modules():  # statistics of a batch are those of the rows that a rank has
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def targets(model: Any) -> str | list[str]:
    """Return "all-linear", or the names of the same layers if one has a number for a name, as in `nn.Sequential`.

    PEFT matches "all-linear" by the last parts of names, and a number is the last part of a block's name too.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))]
    if not any(name.rsplit(".", 1)[-1].isdigit() for name in layers):
        return "all-linear"
    try:
        heads = {model.get_output_embeddings()}
    except NotImplementedError:
        heads = set()
    return [name for name in layers if model.get_submodule(name) not in heads]


NO_OUT_PROJ = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Types of models whose layers of this name PEFT refuses."""


def not_adapted(model: nn.Module) -> list[str]:
    """Return the names of the linear layers that PEFT refuses, or cannot compute: routers with several outputs."""
    refused = ("out_proj",) if model.config.model_type in NO_OUT_PROJ else ()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (name.rsplit(".", 1)[-1] in refused or not _returns_features(module))
    ]


def _returns_features(module: nn.Linear) -> bool:
    """Return True if a linear layer returns one tensor, of its own number of features."""
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        found = module(torch.zeros(2, module.in_features, dtype=module.weight.dtype))
    except Exception:  # whatever a class makes of two tokens
        return False
    return isinstance(found, Tensor) and found.shape == (2, module.out_features)


def _batch(name: str, inputs: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return make_batch(small_model(name), inputs, dtype)


class WithoutFloat32(TorchFunctionMode):
    """Computes in float64 what a class's own code casts to float32: scores of experts, rotations, sums of weights.

    Each rank rounds its part of a sum there, so that no bound but that of float32 would hold.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        if any(one is torch.float32 for one in args):
            args = tuple(torch.float64 if one is torch.float32 else one for one in args)
        if kwargs and kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return function(*args, **(kwargs or {}))


def model_row(name: str) -> Row:
    """Return the row of this name: a class, the kind of its inputs, and the dtype that it computes in."""
    kind, inputs, precision = name.split() if name.count(" ") == 2 else (name, "", "")
    if not hasattr(transformers, kind):
        raise KeyError(name)
    dtype = torch.float64 if precision == MIXED else getattr(torch, precision)
    return Row(
        name,
        "family",
        partial(_build, kind, dtype),
        batch=partial(_batch, kind, inputs, dtype),
        loss=own_or_mean,
        tolerance=1e-12 if dtype == torch.float64 else FLOAT32_BOUND,
        around=WithoutFloat32 if precision == MIXED else nullcontext,
    )


MECHANISMS = {
    "llava, images": "LlavaForConditionalGeneration full float64",
    "qwen2.5-vl, patches and their grid": "Qwen2_5_VLForConditionalGeneration full float64",
    "gemma3, images that see both ways": "Gemma3ForConditionalGeneration full mixed",
    "recurrent-gemma, linear recurrences": "RecurrentGemmaForCausalLM full float64",
    "voxtral, sound": "VoxtralForConditionalGeneration full float64",
    "qwen3.5, gated delta net": "Qwen3_5ForCausalLM full mixed",
    "bamba, Mamba 2 and attention": "BambaForCausalLM full float64",
    "lfm2, short convolutions": "Lfm2ForCausalLM full mixed",
    "minicpm3, keys of low rank": "MiniCPM3ForCausalLM full float64",
    "qwen2-moe, shared experts": "Qwen2MoeForCausalLM full mixed",
}
"""Rows of the table of every model that are in the oracle table too: one for each mechanism."""


def mechanisms() -> list[Row]:
    """Return the rows of `MECHANISMS`, and one whose images are all on the first data-parallel rank."""
    made = [replace(model_row(row), name=name) for name, row in MECHANISMS.items()]
    images = replace(
        made[0],
        name="llava, images on one rank",
        batch=partial(_images_in_half, made[0].batch),
        part=_images_first,
        config={"shard_base": False},  # a sharded tower would have to be gathered by all ranks that share it
    )
    return [*made, images]


def _images_in_half(batch: Callable[[], Batch]) -> Batch:
    """Return a batch in which the second half of the rows has no image."""
    made = batch()
    half = len(made["input_ids"]) // 2
    words = made["input_ids"][:half, :4].repeat(1, made["input_ids"].shape[1] // 4)
    ids = torch.cat([made["input_ids"][:half], words])
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": made["pixel_values"][:half]}


def _images_first(batch: Batch, share: int, shares: int) -> Batch:
    """Return a rank's rows, with the images that they have."""
    per_rank = len(batch["input_ids"]) // shares
    mine = rows_of_rank({key: batch[key] for key in ("input_ids", "labels")}, share, shares)
    images = batch["pixel_values"][share * per_rank : (share + 1) * per_rank]
    return {**mine, "pixel_values": images} if len(images) else mine
