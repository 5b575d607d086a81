"""Context parallelism: models and losses that compute with all tokens before, between or after the blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)

from lora_parallel import parallelize
from tests.cases import cases
from tests.lora_parallel.cp.runs import ids
from tests.oracle import full, half_sum_of_squares, on_mesh, ranks_of, relative_error, trained
from tests.oracle.rows import fill
from tests.oracle.workers import Failure, attempt

SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "vocab_size": 131, "max_position_embeddings": 64}
TOKENS = 12
ONE_ROW = [0, 3, 7, TOKENS]
"""Documents of one packed row: as many lengths as there are heads."""


class OnTop(LlamaPreTrainedModel):
    """Compute something of all tokens after the trunk."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.gate, self.head = nn.Linear(16, 16), nn.Linear(16, 5)
        self.post_init()

    def forward(self, input_ids: Tensor | None = None) -> Any:
        return self.head(self.of_tokens(self.model(input_ids=input_ids).last_hidden_state))

    def of_tokens(self, hidden: Tensor) -> Tensor:
        """Mix tokens."""
        return hidden + hidden.mean(1, keepdim=True)


class Attending(OnTop):
    """Attend to other tokens by code of its own."""

    def of_tokens(self, hidden: Tensor) -> Tensor:
        gate = self.gate(hidden)
        return F.scaled_dot_product_attention(gate, gate, hidden) + hidden


class Gated(OnTop):
    """Use embeddings before and after the blocks."""

    def forward(self, input_ids: Tensor | None = None) -> Any:
        embeds = self.model.embed_tokens(input_ids)
        embeds += 1  # in place, as RoCBert does
        hidden = self.model(inputs_embeds=embeds).last_hidden_state
        return self.head(hidden * torch.sigmoid(self.gate(embeds)) + embeds.mean(1, keepdim=True))


class Masked(OnTop):
    """Add a bias to the scores of attention that a layer computes from the embeddings."""

    def forward(self, input_ids: Tensor | None = None) -> Any:
        embeds = self.model.embed_tokens(input_ids)
        tokens = embeds.shape[1]
        causal = torch.full((tokens, tokens), -1e30, dtype=embeds.dtype).triu(1)
        bias = self.gate(embeds).mean(-1)[:, None, None] + causal
        return self.head(self.model(inputs_embeds=embeds, attention_mask=bias).last_hidden_state)


class WithPrompt(OnTop):
    """Add a parameter of the model itself before the blocks, and multiply by one after them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.prompt, self.scale = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))

    def forward(self, input_ids: Tensor | None = None) -> Any:
        embeds = self.model.embed_tokens(input_ids) + self.prompt
        return self.head(self.model(inputs_embeds=embeds).last_hidden_state * self.scale)


class ByKeyword(OnTop):
    """Call the head with an argument by name."""

    def forward(self, input_ids: Tensor | None = None) -> Any:
        return self.head(input=self.model(input_ids=input_ids).last_hidden_state)


class Scaled(nn.Module):
    """Compute with layers and with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.scale = nn.Linear(16, 16), nn.LayerNorm(16), nn.Parameter(torch.ones(16))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(self.dense(hidden).tanh()) * self.scale


class WithScale(OnTop):
    """Call a head before the blocks and after them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scaled = Scaled()

    def forward(self, input_ids: Tensor | None = None) -> Any:
        embeds = self.scaled(self.model.embed_tokens(input_ids))
        return self.head(self.scaled(self.model(inputs_embeds=embeds).last_hidden_state))


class Layered(OnTop):
    """Call a head of several layers, of which PEFT saves all."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layered = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16))

    def of_tokens(self, hidden: Tensor) -> Tensor:
        return self.layered(hidden)


class MixedTrunk(LlamaModel):
    """Mix tokens behind the blocks, by layers of the trunk."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mix, self.scaled = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids=input_ids, **kwargs)
        hidden = output.last_hidden_state
        output.last_hidden_state = self.scaled(self.mix(hidden + hidden.mean(1, keepdim=True)))
        return output


class OnMixed(OnTop):
    """Call a head on what a trunk has mixed."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = MixedTrunk(config)

    def of_tokens(self, hidden: Tensor) -> Tensor:
        return hidden


class Inside(nn.Module):
    """Hold a language model in a module that is no model of transformers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.lm = LlamaForCausalLM(config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Continue rows by a model that runs without gradients, and compute their logits."""
        with torch.no_grad():
            rows = self.lm.generate(input_ids=input_ids[:, :6], max_new_tokens=6, do_sample=False, pad_token_id=0)
        return self.lm(input_ids=rows).logits


class Hidden(Inside):
    """Read what is between blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm(input_ids=input_ids, output_hidden_states=True).hidden_states[1]


class Prefix(Inside):
    """Compute a row in two parts."""

    def forward(self, input_ids: Tensor) -> Tensor:
        past = self.lm(input_ids=input_ids[:, :5]).past_key_values
        return self.lm(input_ids=input_ids[:, 5:], past_key_values=past).logits


class TwoLengths(Inside):
    """Compute rows of two lengths in one forward."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.lm(input_ids=input_ids).logits.mean(1) * self.lm(input_ids=input_ids[:, :5]).logits.mean(1)


def of_documents(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """Attend within documents whose lengths are given, as flash attention does, with a bias for each key."""
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    tokens = torch.arange(query.shape[2])
    seen = tokens[:, None] >= tokens
    if (lengths := kwargs.get("cu_seq_lens_q")) is not None:
        document = torch.bucketize(tokens, lengths.long(), right=True)
        seen = seen & (document[:, None] == document)
    scores = query @ key.transpose(2, 3) * kwargs["scaling"]
    if (bias := kwargs.get("token_bias")) is not None:
        scores = scores + bias[:, None, None]
    return (scores.masked_fill(~seen, -1e30).softmax(-1) @ value).transpose(1, 2).contiguous(), None


def by_index_of_head(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    slopes = torch.linspace(0.1, 1, query.shape[1], dtype=query.dtype)[:, None, None]
    return of_documents(module, query * slopes, *args, **kwargs)


AttentionInterface.register("of_documents", of_documents)
AttentionInterface.register("by_index_of_head", by_index_of_head)


def squares(model: Any) -> Tensor:
    output = model(ids(tokens=TOKENS))
    return (output if isinstance(output, Tensor) else output.logits).square().mean()


def with_penalty(model: Any) -> Tensor:
    """Add a loss term of the parameters outside of the blocks, which FSDP2 leaves gathered by the forward."""
    loss = squares(model)
    outside = [p for name, p in model.named_parameters() if p.requires_grad and "layers" not in name]
    return loss + sum(half_sum_of_squares(p) for p in outside)


def permuted(model: Any) -> Tensor:
    """A loss of logits in another order, which the model's own argument chooses."""
    order = torch.arange(TOKENS).flip(0)
    logits = model(input_ids=ids(tokens=TOKENS), logits_to_keep=order).logits
    return F.cross_entropy(logits.flatten(0, 1), ids(6, TOKENS)[:, order].flatten())


def with_lengths(model: Any) -> Tensor:
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(ONE_ROW)])[None]
    lengths = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(ONE_ROW, dtype=torch.int32))
    row = ids(tokens=TOKENS, rows=1)
    return model(input_ids=row, labels=row, position_ids=positions, use_cache=False, **lengths).loss


def with_bias(model: Any) -> Tensor:
    bias = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)[None]
    return model(input_ids=ids(tokens=TOKENS), labels=ids(tokens=TOKENS), token_bias=bias).loss


def with_encoder(model: Any) -> Tensor:
    """A loss with cross-attention to as many states as there are tokens."""
    states = torch.linspace(-1, 1, 4 * TOKENS * 16, dtype=torch.float64).sin().view(4, TOKENS, 16)
    return model(input_ids=ids(tokens=TOKENS), labels=ids(tokens=TOKENS), encoder_hidden_states=states).loss


def llama(kind: Any = LlamaForCausalLM, attention: str = "sdpa") -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = LlamaConfig(**LLAMA)
        config._attn_implementation = attention
        return kind(config)

    return make


def decoder() -> nn.Module:
    sizes = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 131}
    return BertLMHeadModel(BertConfig(**sizes, is_decoder=True, add_cross_attention=True))


def masked() -> nn.Module:
    sizes = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "vocab_size": 131}
    return BertForMaskedLM(BertConfig(**sizes))


def labelled(model: Any) -> Tensor:
    return model(input_ids=ids(tokens=TOKENS), labels=ids(tokens=TOKENS)).loss


def by_trunk(model: Any) -> Tensor:
    return model(input_ids=ids(tokens=TOKENS)).last_hidden_state.square().mul(torch.arange(16)).mean()


def reentrant() -> nn.Module:
    model = llama()()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor] = squares
    targets: list[str] = field(default_factory=lambda: ["q_proj", "v_proj", "down_proj"])  # none: all parameters train
    config: dict[str, Any] = field(default_factory=dict)
    saved: list[str] | None = None  # modules_to_save

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model: Any = self.make().double()
        if self.targets:
            lora = LoraConfig(r=3, target_modules=self.targets, modules_to_save=self.saved)
            model = get_peft_model(model, lora).double()
        fill(model)
        return model.train()

    def step(self, model: Any) -> tuple[float, dict[str, Tensor]]:
        loss = self.loss(model)
        loss.backward()
        return loss.item(), {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


CASES = {
    "tokens mixed before a frozen head": Case(llama(OnTop)),
    "tokens mixed before a head": Case(llama(OnTop), targets=["q_proj", "head"]),
    "attention of its own": Case(llama(Attending), targets=["q_proj", "gate", "head"]),
    "embeddings past the blocks": Case(llama(Gated), targets=["q_proj", "embed_tokens", "gate"]),
    "embeddings past the blocks, recomputed": Case(
        llama(Gated), targets=["q_proj", "embed_tokens", "gate"], config={"activation_checkpointing": True}
    ),
    "a head called by keyword": Case(llama(ByKeyword)),
    "tokens in another order": Case(llama(), permuted, ["q_proj", "lm_head", "embed_tokens"]),
    "lengths of documents": Case(llama(attention="of_documents"), with_lengths),
    "a bias of tokens": Case(llama(attention="of_documents"), with_bias),
    "cross-attention": Case(decoder, with_encoder, ["query", "value", "dense"]),
    "generate in a forward": Case(llama(Inside)),
    "two lengths": Case(llama(TwoLengths)),
    "a saved head of several layers": Case(llama(Layered), targets=["q_proj"], saved=["layered", "head"]),
    "a norm of a saved head, labels": Case(masked, labelled, ["query"], saved=["transform"]),
    "a bias of a saved head that its decoder has too": Case(masked, labelled, ["query"], saved=["cls"]),
    "a saved head with a parameter of its own": Case(llama(WithScale), targets=["q_proj", "head"], saved=["scaled"]),
    "tokens mixed in the trunk": Case(llama(OnMixed), targets=["q_proj", "mix"], saved=["scaled", "head"]),
    "a bias of attention that trains": Case(llama(Masked), targets=["q_proj", "gate"]),
    "parameters in no layer": Case(llama(WithPrompt), targets=[], config={"require_adapters": False}),
    "a loss of gathered parameters": Case(llama(OnTop), with_penalty, ["q_proj", "head"], saved=["norm"]),
    "tokens mixed in the trunk, no head": Case(llama(MixedTrunk), by_trunk, ["q_proj"], saved=["mix", "scaled"]),
}
REFUSED = {
    "heads by their index": (Case(llama(attention="by_index_of_head")), "share of its heads is not what it is"),
    "hidden states inside": (Case(llama(Hidden)), "^output_hidden_states=True"),
    "a cache inside": (Case(llama(Prefix)), "was given use_cache=True or a cache"),
    "reentrant": (Case(reentrant), "use_reentrant"),
    "two lengths, recomputed": (Case(llama(TwoLengths), config={"activation_checkpointing": True}), "several lengths"),
    "images between blocks": (
        Case(llama(), lambda model: model(ids(), deepstack_visual_embeds=[torch.ones(1)]).logits.sum()),
        "^deepstack_visual_embeds",
    ),
}


def on_ranks(case: Case, mesh: str) -> tuple[float, dict[str, Tensor]]:
    return case.step(parallelize(case.model(), *on_mesh(mesh, **case.config)))


def all_cases(mesh: str, names: list[str]) -> dict[str, Any]:
    return {name: attempt(on_ranks, CASES[name], mesh) for name in names} | {
        name: attempt(on_ranks, case, mesh) for name, (case, _) in REFUSED.items()
    }


ELSEWHERE = ["tokens mixed before a frozen head", "embeddings past the blocks, recomputed", "a bias of tokens"]
"""Cases whose mechanisms others have one by one."""


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(
        ("1x1cp2", [name for name in CASES if name not in ELSEWHERE]),
        matrix=[("1x1cp2", ELSEWHERE), ("1x2cp2", list(CASES)), ("1x1cp4", list(CASES))],
    ),
)
def test_what_is_around_the_blocks_equals_one_process_or_is_refused(pool, mesh, names):
    answers = pool.run(ranks_of(mesh), all_cases, mesh, names)
    problems = []
    for name in names:
        case = CASES[name]
        want_loss, want = case.step(case.model())
        for found in answers:
            if isinstance(found[name], Failure):
                problems.append(f"{name}: {found[name].message}")
                continue
            loss, gradients = found[name]
            if abs(loss - want_loss) > 1e-6 or relative_error(gradients, want) > 1e-12:
                problems.append(f"{name}: {loss} for {want_loss}, {relative_error(gradients, want):.1e}")
    for name, (_, reason) in REFUSED.items():
        for found in answers:
            if not isinstance(found[name], Failure) or found[name].kind != "ValueError":
                problems.append(f"{name}: {found[name]}")
            elif not re.search(reason, found[name].message):
                problems.append(f"{name}: {found[name].message}")
    assert not problems, "\n".join(problems)


OUTSIDE = LoraConfig(r=3, target_modules=["q_proj", "embed_tokens", "gate"])


def of_injected(mesh_text: str) -> dict[str, Tensor]:
    """The gradients of an adapter that `parallelize` injects, from one process's seed."""
    torch.manual_seed(0)
    model = parallelize(llama(Gated)().double(), *on_mesh(mesh_text), OUTSIDE)
    squares(model).backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def test_an_injected_adapter_around_the_blocks_equals_one_process(pool):
    torch.manual_seed(0)
    model = llama(Gated)().double()
    torch.manual_seed(0)
    get_peft_model(model, OUTSIDE)
    squares(model).backward()
    want = {name: p.grad for name, p in trained(model).items()}
    for found in pool.run(2, of_injected, "1x1cp2"):
        assert relative_error(found, want) <= 1e-12
