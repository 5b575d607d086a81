"""The rows of the oracle table: model families and features, each held against one process of plain PEFT.

A row is data: a model with adapters, a global batch and what `parallelize` is told beside the mesh. It either equals
one process or is refused with the text that it names. `one_process` knows nothing of this project; `on_ranks` runs on
every rank of a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.oracle import SEVEN, full, on_mesh, over_stages, parse_mesh, ranks_of, relative_error, trained
from tests.oracle.caches import copied
from tests.oracle.workers import Failure, WorkerError, WorkerPool, attempt

ROWS_OF_BATCH, TOKENS, VOCABULARY, CLASSES = 8, 12, 131, 3

Batch = dict[str, Tensor]


# ---------------------------------------------------------------------- models


def base_model(name: str, settings: dict[str, Any], change: Callable[[Any], None] | None = None) -> nn.Module:
    """A model of this class with random weights, norms and biases too: what stays at one or zero hides mistakes.

    Embeddings are larger, or the blocks of these sizes make all tokens alike and gradients of attention vanish.
    """
    return _base_model(name, deeper(settings), change)


@copied
def _base_model(name: str, settings: dict[str, Any], change: Callable[[Any], None] | None) -> nn.Module:
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings))
    if change is not None:
        change(model)
    randomise(model, 0.3)
    return model


def randomise(model: Any, scale: float) -> None:
    """Give every parameter of a base model random values, but for `own_values` and for integers."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        of_module = 1.0 if isinstance(module, nn.Embedding) else scale
        for key, parameter in module.named_parameters(recurse=False):
            if key in getattr(module, "own_values", ()) or not parameter.is_floating_point():
                continue
            mean = 1.0 if key == "weight" and parameter.dim() == 1 else 0.0  # a norm's
            parameter.data = (mean + torch.randn(parameter.shape, generator=generator) * of_module).to(parameter.dtype)
    model.tie_weights()


DEEP = 8
"""Number of blocks of the models that are divided into pipeline stages; all others have two."""

_layers: int | None = None


@contextmanager
def deep_for(column: str) -> Iterator[None]:
    """Build models with more blocks within the context if the column's mesh has a pp axis."""
    global _layers
    before, _layers = _layers, DEEP if "pp" in column else None
    try:
        yield
    finally:
        _layers = before


def deeper(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model of this context's depth (see `deep_for`)."""
    if _layers is None:
        return settings
    more = {key: _layers for key in ("num_hidden_layers", "n_layer", "n_layers") if settings.get(key) == 2}
    kinds = settings.get("layer_types")
    return {**settings, **more, **({"layer_types": kinds * (_layers // len(kinds))} if kinds else {})}


def fill(model: nn.Module, zeros_only: bool = False) -> None:
    """Random adapters: with B = 0 most errors are invisible. What PEFT takes from the base is moved away from it."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad or "lora_" in name) or (zeros_only and parameter.any()):
            continue
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2
        if "lora_" in name and "magnitude" not in name:
            parameter.data = noise
        elif "magnitude" in name or "trainable_tokens" in name:
            parameter.data = parameter.data * (1 + noise)


def build(name: str, settings: dict[str, Any], change: Any = None, keep: bool = False, **lora: Any) -> nn.Module:
    """The whole PEFT model in float64; `keep` leaves PEFT's initial values where they are not zero."""
    torch.manual_seed(2)  # of initial adapters
    model: Any = base_model(name, settings, change)
    if not keep:
        model = model.double()  # PEFT takes some initial values from a float32 base only
    model = get_peft_model(model, LoraConfig(**{"r": 3, "lora_alpha": 6, **lora})).double()
    fill(model, zeros_only=keep)
    return model.train()


# ---------------------------------------------------------------------- batches


def _ids(seed: int = 5, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(seed)  # from 4 on: no padding, no other special token
    return torch.randint(4, VOCABULARY, (ROWS_OF_BATCH, tokens), generator=generator)


def _padded() -> Tensor:
    """An attention mask: rows of other lengths."""
    lengths = TOKENS - torch.arange(ROWS_OF_BATCH) % 5
    return (torch.arange(TOKENS) < lengths[:, None]).long()


def _classes() -> Tensor:
    return torch.arange(ROWS_OF_BATCH) % CLASSES


def language() -> Batch:
    """Every token has a label, so that the mean over a share of the rows is as good as over another."""
    return {"input_ids": _ids(), "labels": _ids()}


def masked_language() -> Batch:
    return {"input_ids": _ids(), "labels": _ids(6), "attention_mask": _padded()}


def classified() -> Batch:
    return {"input_ids": _ids(), "labels": _classes(), "attention_mask": _padded()}


def translated() -> Batch:
    return {"input_ids": _ids(), "labels": _ids(6, 7), "attention_mask": _padded()}


def images() -> Batch:
    generator = torch.Generator().manual_seed(7)
    pixels = torch.randn(ROWS_OF_BATCH, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": _classes()}


def speech() -> Batch:
    generator = torch.Generator().manual_seed(8)
    features = torch.randn(ROWS_OF_BATCH, 8, 24, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": _ids(6, 7)}


def text() -> Batch:
    return {"input_ids": _ids(), "attention_mask": _padded()}


# ---------------------------------------------------------------------- rows


def own_loss(outputs: Any) -> Tensor:
    return outputs.loss


def mean_square(outputs: Any) -> Tensor:
    """For a model without a loss."""
    return outputs.last_hidden_state.square().mean() + outputs.pooler_output.square().mean()


def rows_of_rank(batch: Batch, share: int, shares: int) -> Batch:
    """Return the rows that are a rank's share, of every tensor."""
    return {name: tensor.chunk(shares)[share] for name, tensor in batch.items()}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    group: Literal["family", "experts", "quantised", "feature"]
    build: Callable[[], nn.Module]
    """The PEFT model in full, float64, in training mode, with adapters that are zero nowhere."""

    batch: Callable[[], Batch] = language
    """One global batch, rows along dim 0 of every tensor."""

    loss: Callable[[Any], Tensor] = own_loss
    """Of the outputs; a mean over rows."""

    part: Callable[[Batch, int, int], Batch] = rows_of_rank
    """Return the rows of a batch that one of so many data-parallel ranks has."""

    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A context for the step, on both sides."""

    config: dict[str, Any] = field(default_factory=dict)
    """What `ParallelConfig` gets beside the mesh."""

    tolerance: float = 1e-12
    """Of a gradient's relative error. Above 1e-12: the model's own code computes in float32, which `note` says."""

    deep_tolerance: float = 0.0
    """The same for the deeper models of a column with pp, whose blocks amplify rounding; 0: `tolerance`."""

    note: str = ""

    refused: dict[str, str] = field(default_factory=dict)
    """Part of the message of each refusal, by "any", "tp", "cp" or "pp" (a mesh where the axis is > 1) or a mesh."""

    def bound(self, column: str) -> float:
        """The largest relative error of a gradient that is rounding, in this column of the table."""
        return self.deep_tolerance or self.tolerance if "pp" in column else self.tolerance

    def refusal(self, mesh: str) -> str | None:
        """What this row's refusal on this mesh says, if it is to be refused there."""
        sizes = parse_mesh(mesh_in(mesh))
        kinds = {"any", mesh, *(axis for axis in ("tp", "cp", "pp") if sizes.get(axis, 1) > 1)}
        return next((text for kind, text in self.refused.items() if kind in kinds), None)


@cache
def rows() -> dict[str, Row]:
    """All rows by name, families first."""
    from tests.oracle.expert_rows import experts  # which are made of what is here
    from tests.oracle.feature_rows import features
    from tests.oracle.model_rows import mechanisms
    from tests.oracle.quantised_rows import quantised_rows

    found = [*families(), *mechanisms(), *experts(), *quantised_rows(), *features()]
    assert len({row.name for row in found}) == len(found)
    return {row.name: row for row in found}


def row_named(name: str) -> Row:
    """Return a row by name: of the oracle table, or of the table of every model, whose rows are made when asked for."""
    from tests.oracle.model_rows import model_row  # which is made of what is here

    return rows()[name] if name in rows() else model_row(name)


# As in decoder-only models since Llama. The vocabulary is no multiple of 2: uneven shards.
DECODER: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
# The same for those that split their hidden size into heads.
SPLIT = {**{key: value for key, value in DECODER.items() if key != "head_dim"}, "hidden_size": 48}
ENCODER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
    "num_labels": CLASSES,
}
GPT2: dict[str, Any] = {
    "n_embd": 48,
    "n_inner": 44,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 64,
    "vocab_size": VOCABULARY,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
FALCON: dict[str, Any] = {
    "hidden_size": 48,
    "ffn_hidden_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "alibi": False,
}
BART: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 44,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
GEMMA = {**DECODER, "sliding_window": 8, "query_pre_attn_scalar": 6, "hidden_activation": "gelu_pytorch_tanh"}
FUSED_SEVEN = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
NEOX_TARGETS = ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"]
GPT2_TARGETS = ["c_attn", "c_proj", "c_fc"]
BERT_TARGETS = ["query", "key", "value", "dense"]
BART_TARGETS = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"]
NEOX = {**{key: SPLIT[key] for key in SPLIT if key != "num_key_value_heads"}, "hidden_dropout": 0.0}
NEOX["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.67}
LANGUAGE_LM = "CAUSAL_LM"


def _family(
    name: str, kind: str, settings: dict[str, Any], targets: list[str], task: str | None = LANGUAGE_LM, **row: Any
) -> Row:
    return Row(name, "family", lambda: build(kind, settings, target_modules=targets, task_type=task), **row)


def families() -> list[Row]:
    """Every linear layer of the blocks has an adapter, fused ones too."""
    classes: dict[str, Any] = {"task": "SEQ_CLS", "batch": classified}
    masked: dict[str, Any] = {"task": None, "batch": masked_language}
    seq2seq: dict[str, Any] = {"task": "SEQ_2_SEQ_LM", "batch": translated}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return [
        _family("llama", "LlamaForCausalLM", DECODER, SEVEN),
        _family(
            "llama, one kv head",
            "LlamaForCausalLM",
            {**DECODER, "num_key_value_heads": 1},
            SEVEN,
        ),
        _family(
            "llama, two kv heads",
            "LlamaForCausalLM",
            {**DECODER, "num_key_value_heads": 2},
            SEVEN,
        ),
        _family("qwen2", "Qwen2ForCausalLM", SPLIT, SEVEN),
        _family("qwen3", "Qwen3ForCausalLM", DECODER, SEVEN),
        _family("mistral", "MistralForCausalLM", {**DECODER, "sliding_window": 8}, SEVEN),
        _family("gemma2", "Gemma2ForCausalLM", GEMMA, SEVEN),
        _family(
            "gemma3",
            "Gemma3ForCausalLM",
            {**GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
            SEVEN,
        ),
        _family("phi3", "Phi3ForCausalLM", {**SPLIT, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, FUSED_SEVEN),
        _family("olmo2", "Olmo2ForCausalLM", SPLIT, SEVEN),
        _family(
            "glm4",
            "Glm4ForCausalLM",
            {**DECODER, "head_dim": 8, "rope_parameters": {**rope, "partial_rotary_factor": 0.5}},
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
        ),
        _family("cohere", "CohereForCausalLM", {**SPLIT, "logit_scale": 0.5}, SEVEN),
        _family(
            "starcoder2",
            "Starcoder2ForCausalLM",
            {**SPLIT, "residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": 8},
            ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"],
        ),
        _family(
            "stablelm",
            "StableLmForCausalLM",
            {
                **SPLIT,
                "hidden_dropout": 0.0,
                "use_qkv_bias": True,
                "rope_parameters": {**rope, "partial_rotary_factor": 0.67},
            },
            SEVEN,
        ),
        _family("gpt-neox", "GPTNeoXForCausalLM", NEOX, NEOX_TARGETS),
        _family(
            "gptj",
            "GPTJForCausalLM",
            {**GPT2, "rotary_dim": 4},
            ["q_proj", "k_proj", "v_proj", "out_proj", "fc_in", "fc_out"],
        ),
        _family("gpt2", "GPT2LMHeadModel", GPT2, GPT2_TARGETS),
        _family("gpt-bigcode", "GPTBigCodeForCausalLM", GPT2, GPT2_TARGETS),
        _family(
            "bloom",
            "BloomForCausalLM",
            {
                "hidden_size": 48,
                "n_layer": 2,
                "n_head": 8,
                "vocab_size": VOCABULARY,
                "hidden_dropout": 0.0,
                "attention_dropout": 0.0,
                "use_cache": False,
            },
            NEOX_TARGETS,
        ),
        _family(
            "falcon, one kv head",
            "FalconForCausalLM",
            {**FALCON, "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False},
            NEOX_TARGETS,
        ),
        _family(
            "falcon, grouped",
            "FalconForCausalLM",
            {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4, "bias": False},
            NEOX_TARGETS,
        ),
        _family(
            "falcon, per head",
            "FalconForCausalLM",
            {**FALCON, "multi_query": False, "new_decoder_architecture": False, "parallel_attn": False, "bias": True},
            NEOX_TARGETS,
        ),
        _family(
            "opt",
            "OPTForCausalLM",
            {
                "hidden_size": 48,
                "word_embed_proj_dim": 48,
                "ffn_dim": 44,
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 64,
                "dropout": 0.0,
                "use_cache": False,
            },
            BART_TARGETS,
        ),
        _family(
            "mpt",
            "MptForCausalLM",
            {
                "d_model": 48,
                "n_heads": 8,
                "n_layers": 2,
                "vocab_size": VOCABULARY,
                "max_seq_len": 64,
                "use_cache": False,
            },
            ["Wqkv", "out_proj", "up_proj", "down_proj"],
        ),
        _family("bert, classes", "BertForSequenceClassification", ENCODER, BERT_TARGETS, **classes),
        _family("bert, masked", "BertForMaskedLM", ENCODER, BERT_TARGETS, **masked),
        _family("roberta", "RobertaForMaskedLM", {**ENCODER, "pad_token_id": 1}, BERT_TARGETS, **masked),
        _family(
            "distilbert",
            "DistilBertForSequenceClassification",
            {
                "dim": 48,
                "hidden_dim": 44,
                "n_layers": 2,
                "n_heads": 8,
                "vocab_size": VOCABULARY,
                "max_position_embeddings": 64,
                "dropout": 0.0,
                "attention_dropout": 0.0,
                "seq_classif_dropout": 0.0,
                "num_labels": CLASSES,
            },
            ["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"],
            **classes,
        ),
        _family("electra", "ElectraForMaskedLM", {**ENCODER, "embedding_size": 40}, BERT_TARGETS, **masked),
        _family(
            "deberta-v2",
            "DebertaV2ForSequenceClassification",
            {
                **ENCODER,
                "relative_attention": True,
                "position_buckets": 8,
                "pos_att_type": ["p2c", "c2p"],
                "share_att_key": True,
                "norm_rel_ebd": "layer_norm",
                "position_biased_input": False,
                "pooler_dropout": 0.0,
                "cls_dropout": 0.0,
            },
            ["query_proj", "key_proj", "value_proj", "dense"],
            **classes,
        ),
        _family(
            "modernbert",
            "ModernBertForMaskedLM",
            {
                **{key: ENCODER[key] for key in ENCODER if not key.endswith("_prob")},
                "local_attention": 8,
                "global_attn_every_n_layers": 2,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "cls_token_id": 1,
                "sep_token_id": 2,
            },
            ["Wqkv", "Wo", "Wi"],
            **masked,
        ),
        _family(
            "t5, tied",
            "T5ForConditionalGeneration",
            {
                "d_model": 48,
                "d_kv": 6,
                "d_ff": 44,
                "num_layers": 2,
                "num_heads": 8,
                "vocab_size": VOCABULARY,
                "dropout_rate": 0.0,
                "use_cache": False,
                "pad_token_id": 0,
                "decoder_start_token_id": 0,
                "tie_word_embeddings": True,
            },
            ["q", "k", "v", "o", "wi", "wo"],
            **seq2seq,
        ),
        _family("bart", "BartForConditionalGeneration", BART, BART_TARGETS, **seq2seq),
        _family(
            "vit",
            "ViTForImageClassification",
            {
                **{key: ENCODER[key] for key in ENCODER if key not in ("vocab_size", "pad_token_id")},
                "image_size": 16,
                "patch_size": 4,
            },
            [*BART_TARGETS[:3], "o_proj", "fc1", "fc2"],
            task=None,
            batch=images,
        ),
        _family(
            "clip text",
            "CLIPTextModel",
            {
                **{key: ENCODER[key] for key in ENCODER if not key.endswith("_prob")},
                "attention_dropout": 0.0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "pad_token_id": 0,
            },
            BART_TARGETS,
            task=None,
            batch=text,
            loss=mean_square,
        ),
        _family(
            "whisper",
            "WhisperForConditionalGeneration",
            {
                **{key: BART[key] for key in BART if key != "max_position_embeddings"},
                "num_mel_bins": 8,
                "max_source_positions": 12,
                "max_target_positions": 16,
                "begin_suppress_tokens": None,
            },
            BART_TARGETS,
            task=None,
            batch=speech,
        ),
    ]


# ---------------------------------------------------------------------- both sides


@dataclass
class Step:
    """What one step of a row computed."""

    loss: float
    gradients: dict[str, Tensor]
    """By PEFT's parameter names, in full."""


def mesh_in(column: str) -> str:
    """The mesh of a column of the table: "1x1pp2 gpipe 2" is the mesh 1x1pp2."""
    return column.split()[0]


def options_in(column: str) -> dict[str, Any]:
    """Return what `ParallelConfig` is told beside the mesh: a schedule and micro-batches, "whole" or "sequence"."""
    if column.endswith(" whole"):  # the base is not sharded
        return {"shard_base": False}
    if column.endswith(" sequence"):
        return {"sequence_parallel": True}
    if "pp" not in column:
        return {}
    _, schedule, microbatches = [*column.split(), *("1f1b", "4")[len(column.split()) - 1 :]]
    more = {"pp_stages_per_rank": 2} if schedule == "interleaved" else {}
    return {"pp_schedule": schedule, "pp_microbatches": int(microbatches), **more}


def _step(row: Row, model: nn.Module, share: int = 0, shares: int = 1) -> Step:
    batch = row.part(row.batch(), share, shares)
    with row.around():
        loss = row.loss(model(**batch))
        loss.backward()
    gradients = {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}
    return Step(loss.item(), gradients)


def one_process(name: str, column: str = "1x1") -> Step:
    """Plain PEFT over the global batch, of a model as deep as in this column."""
    row = row_named(name)
    with deep_for(column):
        return _step(row, row.build())


def on_ranks(name: str, column: str) -> list[Step | Failure]:
    """The same on a mesh, on every rank; a `Failure` where it is refused. Any other error is raised.

    It is refused by `parallelize`, or by the first forward, which tells what a model is called with.
    In a list, so that the pool keeps the group after a refusal: ranks that refuse together are in step.
    """
    from lora_parallel import parallelize
    from lora_parallel.distributed.mesh import dp_rank, dp_size

    row = row_named(name)
    with deep_for(column):
        model = row.build()
    settings = attempt(on_mesh, mesh_in(column), **{**row.config, **options_in(column)})
    if not isinstance(settings, Failure):
        mesh, config = settings
        model = attempt(parallelize, model, mesh, config)
    refusal = next((found for found in (settings, model) if isinstance(found, Failure)), None)
    if refusal is None:
        share = dp_rank(mesh), dp_size(mesh)
        step = attempt(_step, row, model, *share)
        if not isinstance(step, Failure):
            return [replace(step, gradients=over_stages(step.gradients, mesh_in(column)))]
        refusal = step
    raised_in = refusal.trace.rsplit('File "', 1)[-1].split('"')[0]
    if refusal.kind not in ("TypeError", "ValueError") or "/lora_parallel/" not in raised_in:
        raise RuntimeError(refusal.trace)
    return [refusal]


@dataclass
class Cell:
    """What a row came to on a mesh: one of the three."""

    error: float | None = None
    """The largest relative error of a gradient, rounding included."""

    refusal: str | None = None
    failure: str | None = None


def compare(pool: WorkerPool, row: Row, mesh: str, want: Step) -> Cell:
    """Run a row on a mesh and hold every rank's gradients against those of one process."""
    try:
        answers = pool.try_run(ranks_of(mesh_in(mesh)), on_ranks, row.name, mesh)
    except WorkerError as error:
        return Cell(failure=str(error))
    raised = [each for each in answers if isinstance(each, Failure)]
    if raised:
        return Cell(failure=f"{raised[0].kind}: {raised[0].message}\n{raised[0].trace}")
    return judge(row, mesh, [each for (each,) in answers], want)


def all_on_ranks(names: list[str], column: str) -> list[Step | Failure]:
    """Several rows, one after the other, on every rank."""
    return [found for name in names for found in on_ranks(name, column)]


def compare_all(pool: WorkerPool, chosen: list[Row], mesh: str, want: Callable[[str], Step]) -> dict[str, Cell]:
    """Compare rows in one call of the pool; one by one, if one of them raises what is no refusal."""
    try:
        answers = pool.run(ranks_of(mesh_in(mesh)), all_on_ranks, [row.name for row in chosen], mesh)
    except WorkerError:
        return {row.name: compare(pool, row, mesh, want(row.name)) for row in chosen}
    by_row = zip(chosen, zip(*answers, strict=True), strict=True)
    return {row.name: judge(row, mesh, list(found), want(row.name)) for row, found in by_row}


def judge(row: Row, mesh: str, found: list[Step | Failure], want: Step) -> Cell:
    """Hold what every rank found against one process."""
    refusals = [each.message for each in found if isinstance(each, Failure)]
    if refusals:
        return Cell(refusal=refusals[0]) if len(refusals) == len(found) else Cell(failure="refused on some ranks only")
    try:
        error = max(relative_error(step.gradients, want.gradients) for step in found)
        told = max(relative_error(step.gradients, want.gradients, rounding_counts=True) for step in found)
    except AssertionError as wrong:
        return Cell(failure=f"other gradients: {wrong}")
    loss = sum(step.loss for step in found) / len(found)
    if not error <= row.bound(mesh):
        return Cell(failure=f"gradients differ by {error:.1e}")
    if abs(loss - want.loss) > 1e-5:
        return Cell(failure=f"loss {loss} in place of {want.loss}")
    return Cell(error=told)
