"""Runs under context parallelism, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from lora_parallel import parallelize
from tests.oracle import SEVEN, full, on_mesh, trained
from tests.oracle.rows import DECODER, LANGUAGE_LM, SPLIT, build

TOKENS, ROWS = 14, 4


def ids(seed: int = 5, tokens: int = TOKENS, rows: int = ROWS) -> Tensor:
    return torch.randint(4, 131, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def lengths(left: bool = False) -> Tensor:
    """An attention mask of rows of 14, 12, 10 and 8 tokens."""
    mask = (torch.arange(TOKENS) < TOKENS - 2 * torch.arange(ROWS)[:, None]).long()
    return mask.flip(1) if left else mask


def padded(left: bool) -> dict[str, Tensor]:
    mask = lengths(left)
    return {"input_ids": ids(), "attention_mask": mask, "labels": ids(6).masked_fill(mask == 0, -100)}


def packed() -> dict[str, Tensor]:
    """Rows of three documents each, which only their position ids tell apart."""
    parts = [torch.arange(each) for each in (5, 3, 6)]
    return {"input_ids": ids(), "labels": ids(), "position_ids": torch.cat(parts).expand(ROWS, -1).contiguous()}


def language(tokens: int = TOKENS) -> dict[str, Tensor]:
    return {"input_ids": ids(tokens=tokens), "labels": ids(tokens=tokens)}


def mostly_ignored() -> dict[str, Tensor]:
    """All labels of the first half, and of the last row, are ignored."""
    labels = ids()
    labels[:, : TOKENS // 2] = -100
    labels[-1] = -100
    return {"input_ids": ids(), "labels": labels}


def own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def of_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A loss of the user's own: of log-probabilities of pairs of rows, as DPO's."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).sum((1, 2))
    return -F.logsigmoid(chosen[:2] - chosen[2:]).mean()


def of_both(model: Any, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output.loss + output.logits.square().mean() + output.logits[:, 3].logsumexp(-1).mean()


def shifted_by_hand(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(**batch).logits[..., :-1, :].contiguous()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), batch["labels"][..., 1:].reshape(-1), label_smoothing=0.1)


def in_float64(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The cross entropy from all logits, as transformers' own in float64."""
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())


def counted(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Call the model as Trainer does, with the number of labels of all accumulated batches."""
    return model(**batch, num_items_in_batch=torch.tensor(100)).loss


def by_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute attention with the arguments of transformers' flash attention, whose backward needs a GPU.

    A mask is [rows, tokens] or None. A row of documents is told by `position_ids`, if there is one row only.
    """
    rows, _, tokens, _ = query.shape
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    places = torch.arange(tokens)
    seen = (places[:, None] >= places).expand(rows, 1, -1, -1)
    if (window := kwargs.get("sliding_window")) is not None:
        seen = seen & (places[:, None] - places < window)
    if attention_mask is not None:
        assert attention_mask.shape == (rows, tokens)
        seen = seen & attention_mask[:, None, None].bool()
    elif rows == 1 and (positions := kwargs.get("position_ids")) is not None:
        assert positions.shape == (1, tokens)
        document = (positions[0] == 0).cumsum(0)
        seen = seen & (document[:, None] == document)
    scores = query @ key.transpose(2, 3) * kwargs["scaling"]
    weights = scores.masked_fill(~seen, -1e30).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


DOCUMENTS = "by_documents"
AttentionInterface.register(DOCUMENTS, by_documents)
AttentionMaskInterface.register(DOCUMENTS, flash_attention_mask)


def one_packed_row() -> dict[str, Tensor]:
    return {name: each[:1] for name, each in packed().items()}


@dataclass(frozen=True)
class Run:
    """A model, its batch and its loss."""

    kind: str = "LlamaForCausalLM"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    batch: Callable[[], dict[str, Tensor]] = language
    loss: Callable[[Any, dict[str, Tensor]], Tensor] = own_loss
    lora: dict[str, Any] = field(default_factory=dict, hash=False)
    config: dict[str, Any] = field(default_factory=dict, hash=False)
    attention: str | None = None

    def model(self) -> nn.Module:
        lora = {"target_modules": SEVEN, "task_type": LANGUAGE_LM, **self.lora}
        model: Any = build(self.kind, {**DECODER, "use_cache": True, **self.settings}, **lora)
        if "num_local_experts" in self.settings:
            model.get_base_model().set_experts_implementation("eager")  # others compute in float32
        if self.attention is not None:
            model.get_base_model().set_attn_implementation(self.attention)
        return model

    def step(self, model: nn.Module) -> tuple[float, dict[str, Tensor]]:
        """The loss and all gradients, in full."""
        loss = self.loss(model, self.batch())
        loss.backward()
        return loss.item(), {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}

    def on(self, mesh: str) -> tuple[float, dict[str, Tensor]]:
        """The same on a mesh whose ranks all have this batch."""
        return self.step(parallelize(self.model(), *on_mesh(mesh, **self.config)))


WINDOWS = {"kind": "MistralForCausalLM"}
SINKS: dict[str, Any] = {
    "kind": "GptOssForCausalLM",
    "settings": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 6, "sliding_window": 4},
    "lora": {"target_modules": SEVEN[:4]},
}
UNCACHED = {"use_cache": False}
"""transformers looks for packed rows only where there is no cache."""

GATHER = {"cp_method": "all_gather"}
RUNS = {
    "tokens that cp does not divide": Run(batch=partial(language, 13)),
    "a token more than there are ranks": Run(batch=partial(language, 5)),
    "right padding": Run(batch=partial(padded, False)),
    "left padding": Run(batch=partial(padded, True)),
    "packed rows": Run(batch=packed, settings=UNCACHED),
    "packed rows, eager": Run(batch=packed, settings=UNCACHED, attention="eager"),
    "packed rows with a cache, which hides them": Run(batch=packed),
    "a window shorter than a chunk": Run(**WINDOWS, settings={"sliding_window": 3}),
    "a window longer than a chunk": Run(**WINDOWS, settings={"sliding_window": 11}, batch=partial(padded, True)),
    "sinks and windows": Run(**SINKS),
    "sinks, padding": Run(**SINKS, batch=partial(padded, False), attention="eager"),
    "a kernel of the user's own": Run(attention=DOCUMENTS, batch=partial(padded, True)),
    "a kernel of the user's own, documents": Run(attention=DOCUMENTS, batch=one_packed_row),
    "a kernel of the user's own, a window, recomputed": Run(
        **WINDOWS, settings={"sliding_window": 3}, attention=DOCUMENTS, config={"activation_checkpointing": True}
    ),
    "heads that are repeated": Run(settings={"num_key_value_heads": 1}),
    "ignored labels": Run(batch=mostly_ignored),
    "a given number of labels": Run(loss=counted),
    "a loss of logits": Run(loss=of_logits),
    "loss and logits": Run(loss=of_both),
    "a loss of labels that are shifted by hand": Run(loss=shifted_by_hand),
    "head and embedding": Run(lora={"target_modules": [*SEVEN, "lm_head", "embed_tokens"]}),
    "tied, all copies train": Run(
        settings={"tie_word_embeddings": True},
        lora={"target_modules": SEVEN, "modules_to_save": ["input_layernorm", "norm"]},
    ),
    "sequence_parallel": Run(config={"sequence_parallel": True}, batch=partial(padded, False)),
    "loss_parallel": Run(config={"loss_parallel": True}, batch=mostly_ignored, loss=in_float64),
    "loss_parallel, a loss of logits": Run(config={"loss_parallel": True}, loss=of_logits),
    "loss_parallel, sequence_parallel": Run(config={"loss_parallel": True, "sequence_parallel": True}, loss=in_float64),
    "recomputed": Run(config={"activation_checkpointing": True}, batch=packed, settings=UNCACHED),
    "all_gather": Run(config=GATHER),
    "all_gather, tokens that cp does not divide": Run(config=GATHER, batch=partial(language, 13)),
    "all_gather, few tokens": Run(config=GATHER, batch=partial(language, 9)),
    "all_gather, left padding": Run(config=GATHER, batch=partial(padded, True)),
    "all_gather, packed rows": Run(config=GATHER, batch=packed, settings=UNCACHED),
    "all_gather, a window": Run(**WINDOWS, settings={"sliding_window": 3}, config=GATHER),
    "all_gather, sinks": Run(**SINKS, config=GATHER, attention="eager"),
    "all_gather, recomputed": Run(config={**GATHER, "activation_checkpointing": True}, batch=packed, settings=UNCACHED),
    "all_gather, sequence_parallel": Run(config={**GATHER, "sequence_parallel": True}, batch=partial(padded, True)),
    "all_gather, a loss of logits": Run(config=GATHER, loss=of_logits),
    "all_gather, five heads": Run(
        settings={**SPLIT, "hidden_size": 40, "num_attention_heads": 10, "num_key_value_heads": 2}, config=GATHER
    ),
}
