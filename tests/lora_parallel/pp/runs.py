"""Runs under pipeline parallelism, and the same in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_parallel import no_sync, parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.pp.pipeline import Pipeline
from lora_parallel.pp.schedules import Action
from tests.lora_parallel.cp.runs import (
    ROWS,
    counted,
    ids,
    language,
    mostly_ignored,
    of_both,
    of_logits,
    own_loss,
    packed,
    padded,
    shifted_by_hand,
)
from tests.oracle import SEVEN, full, on_mesh, over_stages, trained
from tests.oracle.rows import CLASSES, DECODER, GEMMA, GPT2, GPT2_TARGETS, LANGUAGE_LM, build

PP = {"pp_microbatches": 4}
GPIPE = {"pp_microbatches": 4, "pp_schedule": "gpipe"}
INTERLEAVED = {"pp_microbatches": 4, "pp_schedule": "interleaved", "pp_stages_per_rank": 2}
LAYERS = 4


@contextmanager
def actions() -> Iterator[list[Action]]:
    """Note the actions that this rank begins within the context, in order."""
    begun: list[Action] = []
    own = Pipeline.around

    @contextmanager
    def around(pipeline: Pipeline, action: Action, count: int) -> Iterator[None]:
        begun.append(action)
        with own(pipeline, action, count):
            yield

    with patch.object(Pipeline, "around", around):
        yield begun


def most_alive(begun: list[Action]) -> int:
    """The largest number of micro-batches whose activations are kept at a time."""
    return max(accumulate(1 if action.is_forward else -1 for action in begun))


def in_float64(*args: Any, **kwargs: Any) -> Tensor:
    """Transformers' loss without its cast to float32."""
    logits, labels = kwargs["logits"], kwargs["labels"]
    target = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), target)


def a_third(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss / 3


def squared(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch).loss
    return loss**2 + loss


def of_squares(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A loss of the user's own, of the rows of the logits."""
    return model(input_ids=batch["input_ids"]).logits.square().mean()


def classified() -> dict[str, Tensor]:
    return {"input_ids": ids(), "labels": torch.arange(ROWS) % CLASSES}


def mean_of_classes(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


@dataclass(frozen=True)
class Run:
    """A model, its batch and its loss."""

    kind: str = "LlamaForCausalLM"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    batch: Callable[[], dict[str, Tensor]] = language
    loss: Callable[[Any, dict[str, Tensor]], Tensor] = own_loss
    lora: dict[str, Any] = field(default_factory=dict, hash=False)
    config: dict[str, Any] = field(default_factory=lambda: PP, hash=False)
    accumulate: int = 1
    tolerance: float = 1e-12
    """Of gradients. 1e-6: a factor on the loss comes after what the model computes in float32."""

    own_loss_function: Any = None

    def model(self) -> nn.Module:
        lora = {"target_modules": SEVEN, "task_type": LANGUAGE_LM, **self.lora}
        model: Any = build(self.kind, {**DECODER, "num_hidden_layers": LAYERS, **self.settings}, **lora)
        if "num_local_experts" in self.settings:
            model.get_base_model().set_experts_implementation("eager")  # others compute in float32
        if self.own_loss_function is not None:
            model.get_base_model().loss_function = self.own_loss_function
        return model

    def step(self, model: nn.Module, share: int = 0, shares: int = 1) -> tuple[float, dict[str, Tensor]]:
        """The loss and the gradients that this rank has, in full."""
        batch = {name: tensor.chunk(shares)[share] for name, tensor in self.batch().items()}
        for last in [False] * (self.accumulate - 1) + [True]:
            with no_sync(model) if shares > 1 and not last else torch.enable_grad():
                loss = self.loss(model, batch)
                loss.backward()
        return loss.item(), {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}

    def on(self, mesh: str) -> tuple[float, dict[str, Tensor]]:
        """The same on a mesh; the gradients of all stages."""
        device_mesh, config = on_mesh(mesh, **self.config)
        model = parallelize(self.model(), device_mesh, config)
        loss, mine = self.step(model, dp_rank(device_mesh), dp_size(device_mesh))
        return loss, over_stages(mine, mesh)


UNCACHED = {"use_cache": False}
MIXTRAL: dict[str, Any] = {
    "kind": "MixtralForCausalLM",
    "settings": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 6},
    "lora": {"target_modules": SEVEN[:4]},
    "tolerance": 1e-6,  # the router is float32, and tp sums in another order
}
GPT: dict[str, Any] = {
    "kind": "GPT2LMHeadModel",
    "settings": {**GPT2, "n_layer": LAYERS},
    "lora": {"target_modules": GPT2_TARGETS},
}
RUNS = {
    "1f1b": Run(),
    "one micro-batch": Run(config={"pp_microbatches": 1}),
    "two micro-batches": Run(config={"pp_microbatches": 2}),
    "tokens vary": Run(batch=partial(language, 13)),
    "right padding": Run(batch=partial(padded, False)),
    "left padding": Run(batch=partial(padded, True)),
    "packed rows": Run(batch=packed, settings=UNCACHED),
    "ignored labels": Run(batch=mostly_ignored),
    "a given number of labels": Run(loss=counted),
    "a loss of logits": Run(loss=of_logits),
    "a third of the loss, three times": Run(loss=a_third, accumulate=3, tolerance=1e-6),
    "a third of the loss, three times, without float32": Run(loss=a_third, accumulate=3, own_loss_function=in_float64),
    "a function of the loss": Run(loss=squared, tolerance=1e-6),
    "gpipe": Run(config=GPIPE, batch=partial(padded, False)),
    "gpipe, a third of the loss, three times": Run(config=GPIPE, loss=a_third, accumulate=3),
    "gpipe, a function of the loss": Run(config=GPIPE, loss=squared, tolerance=1e-6),
    "gpipe, loss and logits": Run(config=GPIPE, loss=of_both),
    "gpipe, labels shifted by hand": Run(config=GPIPE, loss=shifted_by_hand),
    "tied": Run(settings={"tie_word_embeddings": True}),
    "head, norm and embedding train": Run(
        lora={"target_modules": [*SEVEN, "lm_head", "embed_tokens"], "modules_to_save": ["norm"]}
    ),
    "a saved block": Run(lora={"modules_to_save": ["layers.1"]}),
    "gpipe, a saved block": Run(config=GPIPE, lora={"modules_to_save": ["layers.1"]}),
    "gemma 3": Run(
        kind="Gemma3ForCausalLM",
        settings={
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
            "num_hidden_layers": LAYERS,
        },
        batch=partial(padded, False),
    ),
    "gpt-2": Run(**GPT, batch=partial(padded, False)),
    "mixtral": Run(**MIXTRAL),
    "classes": Run(
        kind="LlamaForSequenceClassification",
        settings={"num_labels": CLASSES, "pad_token_id": 0},
        batch=classified,
        lora={"task_type": "SEQ_CLS"},
    ),
    "recomputed": Run(config={**PP, "activation_checkpointing": True}),
    "recomputed, a loss of logits": Run(config={**PP, "activation_checkpointing": True}, loss=of_squares),
    "loss_parallel": Run(config={**PP, "loss_parallel": True}, tolerance=1e-6),
    "stages by name": Run(config={**PP, "pp_split": ["model.layers.1"]}),
}
"""On two stages."""

LOOPED = {
    "interleaved": Run(config=INTERLEAVED),
    "interleaved, two micro-batches": Run(config={**INTERLEAVED, "pp_microbatches": 2}),
    "interleaved, a loss of logits": Run(config=INTERLEAVED, loss=of_logits),
    "interleaved, tied, recomputed": Run(
        config={**INTERLEAVED, "activation_checkpointing": True}, settings={"tie_word_embeddings": True}
    ),
    "interleaved, gpt-2": Run(**GPT, config=INTERLEAVED),
    "interleaved, a saved block": Run(config=INTERLEAVED, lora={"modules_to_save": ["layers.1"]}),
}
"""On four stages of two ranks."""

_TWO: dict[str, Any] = {
    **{name: RUNS[name] for name in ("1f1b", "gpipe", "tied", "recomputed", "gpt-2", "mixtral")},
    "a third of the loss, three times": RUNS["a third of the loss, three times"],
    "gpipe, a third of the loss, three times": RUNS["gpipe, a third of the loss, three times"],
    "a loss of logits": Run(loss=of_squares),
    "interleaved": LOOPED["interleaved"],
    "sequence_parallel": Run(config={**PP, "sequence_parallel": True}),
    "sequence_parallel, interleaved": Run(config={**INTERLEAVED, "sequence_parallel": True}),
    "head, norm and embedding train": RUNS["head, norm and embedding train"],
    "weights stay gathered": Run(config={**PP, "reshard_after_forward": False}),
}
COMBINED = {
    name: replace(run, config={**run.config, "pp_microbatches": 2}, batch=language) for name, run in _TWO.items()
}
"""With another axis beside pp; every token has a label, so that the mean over a share of the rows is that of all."""
