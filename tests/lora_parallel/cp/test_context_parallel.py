"""Context parallelism: the same training on chunks of the tokens, its collectives, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lora_parallel import (
    TenantPool,
    clip_grad_norm_,
    load_checkpoint,
    parallelize,
    save_adapter,
    save_checkpoint,
)
from lora_parallel.adapters.dropout import TopologyInvariantDropout
from lora_parallel.cp import attention, regions
from lora_parallel.distributed import token_chunks
from lora_parallel.distributed.dtensors import tensors_in
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.distributed.token_chunks import TokenChunks
from lora_parallel.state import ForwardCount, state_of
from lora_parallel.tp import loss_parallel
from lora_parallel.tp.context import Tokens
from tests.cases import cases
from tests.lora_parallel.cp.runs import ROWS, RUNS, TOKENS, Run, ids, language
from tests.lora_parallel.traffic import Traffic
from tests.oracle import full, on_mesh, ranks_of, relative_error, trained
from tests.oracle.rows import DECODER, build
from tests.oracle.workers import Failure, attempt


def run_all(mesh: str, names: list[str]):
    return {name: attempt(RUNS[name].on, mesh) for name in names}


ELSEWHERE = [
    *("a token more than there are ranks", "right padding", "packed rows, eager", "a window longer than a chunk"),
    *("a kernel of the user's own, a window, recomputed", "a loss of labels that are shifted by hand"),
    *("loss_parallel, a loss of logits", "loss_parallel, sequence_parallel", "recomputed", "sinks, padding"),
    *("all_gather, tokens that cp does not divide", "all_gather, sequence_parallel"),
    *("all_gather, a loss of logits", "all_gather, five heads"),
]
"""Runs whose mechanisms others have one by one."""


@pytest.mark.parametrize(
    ("mesh", "names"),
    cases(
        ("1x1cp2", [name for name in RUNS if name not in ELSEWHERE]),
        matrix=[("1x1cp2", ELSEWHERE), *((mesh, list(RUNS)) for mesh in ("1x2cp2", "1x1cp4", "1x2cp4"))],
    ),
)
def test_gradients_equal_one_process(pool, mesh, names):
    answers = pool.run(ranks_of(mesh), run_all, mesh, names)
    problems = []
    for name in names:
        run = RUNS[name]
        want_loss, want = run.step(run.model())
        for rank, answer in enumerate(answers):
            found = answer[name]
            if isinstance(found, Failure):
                problems.append(f"{name}: {found.kind}: {found.message}")
                break
            loss, gradients = found
            error = relative_error(gradients, want)
            if error > 1e-12 or abs(loss - want_loss) > 1e-6:
                problems.append(f"{name}, rank {rank}: gradients {error:.1e}, loss {loss} for {want_loss}")
                break
    assert not problems, "\n".join(problems)


def test_key_heads_that_are_repeated_stay_with_their_queries():
    """Six query heads, of which each rank computes three, share three key heads two by two."""
    query, key = torch.zeros(1, 6, 1, 1), torch.arange(3).view(1, 3, 1, 1)
    _, keys, values = attention.with_repeated_heads((query, key, key + 10), 2)
    assert keys.flatten().tolist() == [0, 0, 1, 1, 2, 2]
    assert values.flatten().tolist() == [10, 10, 11, 11, 12, 12]


# ---------------------------------------------------------------------- training


def lengths_vary(mesh: str) -> tuple[list[float], dict[str, Any]]:
    """Eight steps of AdamW with LoRA dropout, of batches of 14, 13, 9 and 5 tokens in turn."""
    run = Run(lora={"lora_dropout": 0.3})
    model: Any = parallelize(run.model(), *on_mesh(mesh))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(8):
        batch = ids(seed=step, tokens=(14, 13, 9, 5)[step % 4])
        logits = model(input_ids=batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: full(p) for name, p in trained(model).items()}


@pytest.mark.parametrize("mesh", cases("1x2cp2", matrix=["1x1cp2", "1x1cp4"]))
def test_steps_with_dropout_equal_one_rank(pool, mesh):
    """A mesh of one rank drops what any other mesh drops; its own dropout is held against a formula elsewhere."""
    ((want_losses, want),) = pool.run(1, lengths_vary, "1x1")
    for losses, adapters in pool.run(ranks_of(mesh), lengths_vary, mesh):
        assert losses == pytest.approx(want_losses, rel=1e-10)
        assert relative_error(adapters, want) < 1e-10


def masks(mesh: str) -> dict[str, Any]:
    """The elements that each dropout drops, with the rows and tokens that they are of, from every rank."""
    model: Any = parallelize(Run(lora={"lora_dropout": 0.5}).model(), *on_mesh(mesh))
    found: dict[str, Any] = {}
    own = TopologyInvariantDropout.dropped

    def dropped(self: Any, shape: Any, device: Any, keys: Any = None) -> Any:
        found[self.name] = own(self, shape, device, keys)
        return found[self.name]

    with patch.object(TopologyInvariantDropout, "dropped", dropped):
        model(input_ids=ids(tokens=13), labels=ids(tokens=13)).loss.backward()
    return found


def test_dropout_drops_the_same_elements(pool):
    (want,) = pool.run(1, masks, "1x1")
    answers = pool.run(2, masks, "1x1cp2")
    for name, whole in want.items():
        assert torch.equal(torch.cat([found[name] for found in answers], 1), whole), name
        assert whole.any()


# ---------------------------------------------------------------------- messages and memory


def collectives_of(recompute: bool) -> tuple[int, int, int]:
    """All-to-alls over cp of a step, gathers of tokens, and the elements that one rank sends in the all-to-alls."""
    mesh, config = on_mesh("1x1cp2", activation_checkpointing=recompute)
    model: Any = parallelize(Run().model(), mesh, config)
    batch = language()
    model(**batch).loss.backward()
    sent = 0
    own = token_chunks.exchanged

    def exchanged(stacked: Any, *args: Any) -> Any:
        nonlocal sent
        sent += stacked.numel() - stacked[0].numel()
        return own(stacked, *args)

    gathering = patch.object(token_chunks, "stacked_over", wraps=token_chunks.stacked_over)
    with Traffic() as traffic, patch.object(token_chunks, "exchanged", exchanged), gathering as gathers:
        model(**batch).loss.backward()
    return traffic.count("alltoall", mesh.get_group("cp")), gathers.call_count, sent


@pytest.mark.parametrize("recompute", [False, True])
def test_four_messages_a_layer_and_their_bytes(pool, recompute):
    """LoRA on all layers adds none. The all-gather is that of the losses of all tokens, one number each."""
    layers, heads, kv_heads, features = 2, DECODER["num_attention_heads"], DECODER["num_key_value_heads"], 6
    for counts, gathers, sent in pool.run(2, collectives_of, recompute):
        assert (counts, gathers) == ((6 if recompute else 4) * layers, 1)
        # 2 (cp - 1) / cp^2 B S (2 Hq + 2 Hkv) d, forward and backward
        both = 2 * ROWS * TOKENS * (2 * heads + 2 * kv_heads) * features // 4
        assert sent == layers * (both * 3 // 2 if recompute else both)


def kept(mesh: str, **config: Any) -> int:
    """Bytes of activations that backward keeps of a forward on two rows of 256 tokens."""
    model: Any = parallelize(Run(settings=LONG).model(), *on_mesh(mesh, **config))
    tokens, ranks = 256, ranks_of(mesh)
    lengths = {count // share for count in (tokens, 2 * tokens) for share in (1, ranks)}
    storages: dict[int, int] = {}

    def pack(tensor: Any) -> Any:
        if type(tensor) is torch.Tensor and lengths.intersection(tensor.shape):  # else it is a weight
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = torch.arange(2 * tokens).view(2, tokens) % 100
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=batch, labels=batch).loss
    total = sum(storages.values())
    loss.backward()
    return total


LONG = {"num_hidden_layers": 4, "max_position_embeddings": 256, "intermediate_size": 108}
"""An MLP of 2.7 times the hidden size, as Llama's."""


@pytest.mark.parametrize("mesh", cases("1x1cp2", matrix=["1x1cp4"]))
def test_what_backward_keeps_is_divided_by_cp(pool, mesh):
    """The kernel keeps its output, of a share of the heads, beside the exchanged one: hence the tenth."""
    (want,) = pool.run(1, kept, "1x1")
    for found in pool.run(ranks_of(mesh), kept, mesh):
        assert found <= 1.1 * want / ranks_of(mesh), found * ranks_of(mesh) / want
    for found in pool.run(ranks_of(mesh), kept_with_gathered_keys, mesh):  # they are gathered again
        assert found <= 1.0 * want / ranks_of(mesh), found * ranks_of(mesh) / want


def kept_with_gathered_keys(mesh: str) -> int:
    return kept(mesh, cp_method="all_gather")


class Sizes(TorchDispatchMode):
    """Note the last two sizes of every tensor that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        self.seen |= {tuple(each.shape[-2:]) for each in tensors_in(output)}
        return output


def masks_built(tokens: int = 256) -> dict[str, set[tuple[int, ...]]]:
    """Sizes of tensors whose last two dims are tokens: of causal rows, of padded ones, and with gathered keys."""
    found = {}
    ids = torch.arange(2 * tokens).view(2, tokens) % 100
    padding = torch.ones_like(ids)
    padding[0, -3:] = 0
    whole = {"input_ids": ids, "labels": ids}
    for name, method, batch in (
        ("causal", "ulysses", whole),
        ("padded", "ulysses", {**whole, "attention_mask": padding}),
        ("gathered keys", "all_gather", whole),
    ):
        model: Any = parallelize(Run(settings=LONG).model(), *on_mesh("1x1cp2", cp_method=method))
        with Sizes() as sizes:
            model(**batch).loss.backward()
        lengths = {tokens // 4 * count for count in (1, 2, 3, 4)}
        found[name] = {each for each in sizes.seen if len(each) == 2 and lengths.issuperset(each)}
    return found


def test_no_mask_is_built_where_the_kernel_needs_none(pool):
    """With gathered keys a rank has two chunks of 64 tokens, whose queries see the tokens up to their end."""
    for rank, found in enumerate(pool.run(2, masks_built)):
        assert found["causal"] == set()
        assert found["padded"] == {(256, 256)}
        assert found["gathered keys"] == ([{(64, 64), (64, 256)}, {(64, 128), (64, 192)}][rank])


# ---------------------------------------------------------------------- beside training


def checkpoints(meshes: list[str], folder: str) -> list[Any]:
    """Two steps on the first of some meshes of one size, and two more from its checkpoint on the others."""
    found: list[Any] = []
    for mesh in meshes:
        model: Any = parallelize(Run().model(), *on_mesh(mesh))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        if found:
            load_checkpoint(model, optimizer, folder)
        losses = []
        for _ in range(2):
            batch = ids(seed=len(losses)).chunk(dp_size(state_of(model).mesh))[dp_rank(state_of(model).mesh)]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if not found:
            save_checkpoint(model, optimizer, folder)
            save_adapter(model, f"{folder}-adapter")
        found.append({name: full(p) for name, p in trained(model).items()})
    return found


def beside_training() -> dict[str, Any]:
    """Evaluation, generation and a merged model on cp 2, against the model as it was."""
    plain: Any = Run().model().eval()
    model: Any = parallelize(Run().model(), *on_mesh("1x1cp2")).eval()
    batch, found = ids(), {}
    with torch.no_grad():
        found["logits"] = (model(input_ids=batch).logits - plain(input_ids=batch).logits).abs().max().item()
        with_loss = model(input_ids=batch, labels=batch)
        found["loss"] = abs(with_loss.loss - plain(input_ids=batch, labels=batch).loss).item()
        found["read"] = (with_loss.logits * 1 - plain(input_ids=batch).logits).abs().max().item()
        found["cache"] = with_loss.past_key_values
        written = [each.generate(input_ids=batch, max_new_tokens=5, do_sample=False) for each in (model, plain)]
        found["generated"] = torch.equal(*written)
    return found


def test_evaluation_and_generation(pool):
    for found in pool.run(2, beside_training):
        assert max(found["logits"], found["loss"], found["read"]) < 1e-6
        assert found["generated"]
        assert found["cache"] is None


@pytest.mark.parametrize("meshes", cases(["1x1cp2", "2x1", "1x1cp2"], matrix=[["1x2cp2", "2x2", "1x1cp4"]]))
def test_checkpoints_go_on_with_and_without_cp(pool, tmp_path, meshes):
    """Two steps on a mesh, then the same two on meshes with and without cp; and the adapter in plain PEFT."""
    answers = pool.run(ranks_of(meshes[0]), checkpoints, meshes, str(tmp_path / "step-2"))
    for _, without, other in answers:
        assert relative_error(other, without) < 1e-10
    base: Any = Run().model().unload()
    loaded = PeftModel.from_pretrained(base, f"{tmp_path / 'step-2'}-adapter")
    got = {name: p.detach() for name, p in loaded.named_parameters() if "lora_" in name}
    assert relative_error(got, {name: answers[0][0][name] for name in got}) < 1e-15


# ---------------------------------------------------------------------- refusals


def refused(kind: str, settings: dict[str, Any], change: dict[str, Any], config: dict[str, Any]) -> Any:
    names = ["q_proj", "out_proj", "c_attn", "query_key_value"]
    lora = {"target_modules": f".*({'|'.join(names)})", "task_type": None}
    model: Any = build(kind, settings, **lora)
    for key, value in change.items():
        setattr(model.get_base_model().config, key, value)
    before = dict(model.named_parameters())
    answer = attempt(parallelize, model, *on_mesh("1x1cp2", **config))
    same = all(p is before[name] and not isinstance(p, DTensor) for name, p in model.named_parameters())
    return [answer, same and "forward" not in model.__dict__]


MIXTRAL = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
LINEAR: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
REFUSED: dict[str, Any] = {
    "convolutions": (
        "Lfm2ForCausalLM",
        {**DECODER, "hidden_size": 48, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        {},
        {},
        "tokens of Lfm2ForCausalLM cannot be cut: .*its own code fails on a chunk",
    ),
    "linear attention": (
        "Qwen3NextForCausalLM",
        {
            **DECODER,
            **LINEAR,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "layer_types": ["linear_attention", "full_attention"],
            "experts_implementation": "eager",
        },
        {},
        {},
        "tokens of Qwen3NextForCausalLM cannot be cut",
    ),
    "router loss": ("MixtralForCausalLM", MIXTRAL, {"output_router_logits": True}, {}, "output_router_logits=True"),
    "hidden states": ("LlamaForCausalLM", DECODER, {"output_hidden_states": True}, {}, "output_hidden_states=True"),
    "attention of its own": ("BloomForCausalLM", {"hidden_size": 48, "n_head": 8, "n_layer": 2}, {}, {}, "registry"),
    "heads": (
        "LlamaForCausalLM",
        {**DECODER, "num_attention_heads": 5, "num_key_value_heads": 5},
        {},
        {},
        '^cp=2 with cp_method="ulysses" .* has 5 of them .*cp_method="all_gather".$',
    ),
    "a kernel": (
        "LlamaForCausalLM",
        DECODER,
        {"_attn_implementation": "flex_attention"},
        {"cp_method": "all_gather"},
        'all_gather" needs .*sdpa.* or use cp_method="ulysses"',
    ),
}


def all_refused() -> dict[str, Any]:
    found: dict[str, Any] = {name: refused(*case[:-1]) for name, case in REFUSED.items()}
    mesh, config = on_mesh("1x1cp2")
    model: Any = parallelize(Run().model(), mesh, config)
    found["a cache"] = [attempt(model, input_ids=ids(), use_cache=True), True]
    found["hidden states of a forward"] = [attempt(model, input_ids=ids(), output_hidden_states=True), True]
    found["a block"] = [attempt(model.get_base_model().model, input_ids=ids()), True]
    embeds = torch.zeros(2, 8, 40, dtype=torch.float64, requires_grad=True)
    found["embeddings that train"] = [attempt(model, inputs_embeds=embeds), True]
    found["one token"] = [attempt(model, input_ids=ids(tokens=1)), True]
    bare = build("LlamaForCausalLM", DECODER, target_modules=["q_proj"]).unload()
    found["tenants"] = [attempt(TenantPool, parallelize(bare, mesh, replace(config, require_adapters=False))), True]
    return found


def test_what_would_be_wrong_is_refused(fake_pool):
    reasons = {name: case[-1] for name, case in REFUSED.items()}
    reasons |= {
        "a cache": "was given use_cache=True or a cache",
        "hidden states of a forward": "output_hidden_states=True",
        "a block": "was called with gradients, but not by the parallelized model",
        "embeddings that train": "an input of the model requires a gradient",
        "one token": "a batch has 1 tokens a row, and cp=2 needs 2",
        "tenants": "cp=2",
    }
    for found in fake_pool.run(2, all_refused):
        for name, reason in reasons.items():
            failure, untouched = found[name]
            assert isinstance(failure, Failure), name
            assert failure.kind == "ValueError", failure.trace
            assert re.search(reason, failure.message, re.DOTALL), (name, failure.message)
            assert untouched, name


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, is_causal: bool | None = None) -> Any:
    causal = module.is_causal if is_causal is None else is_causal
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal and mask is None).transpose(
        1, 2
    ), None


@pytest.mark.parametrize("of_module", [True, False])
@pytest.mark.parametrize("of_call", [None, True, False])
def test_attention_of_gathered_keys_looks_where_that_of_all_tokens_does(of_call, of_module):
    module: Any = torch.nn.Module()
    module.is_causal = of_module
    query, key, value = torch.randn(3, 1, 2, 9, 4).double()
    call = attention.AttentionCall.of(attend, module, query, key, value, None, is_causal=of_call)
    for rank in range(2):
        chunks = TokenChunks(2, rank, balanced=True)
        part = attention.attend_from_tokens(call, (chunks.mine(query, 2), key, value), chunks)
        torch.testing.assert_close(part, chunks.mine(call.compute()), rtol=1e-12, atol=1e-12)


def test_an_attention_that_is_set_afterwards_is_refused():
    context = attention.CPContext(TokenChunks(2, 1), Tokens(ForwardCount()), "all_gather")
    context.running = True
    own = attention.attend_to_all_tokens(context, "self_attn")
    with pytest.raises(ValueError, match="attn_implementation is 'flash_attention_2': set_attn_implementation"):
        own(attend, "flash_attention_2", torch.nn.Module(), *torch.ones(3, 1, 2, 4, 4))


def test_a_table_that_changes_between_blocks_is_cut_anew():
    context = attention.CPContext(TokenChunks(2, 1), Tokens(ForwardCount()), "ulysses")
    context.cuts = True
    table = torch.arange(8.0).view(1, 4, 2)
    assert context.part(table) is context.part(table)
    table += 1
    assert torch.equal(context.part(table), table[:, 2:])


# ---------------------------------------------------------------------- mistakes made on purpose


def labels_as_they_are(patch: pytest.MonkeyPatch) -> None:
    own = loss_parallel._cross_entropy_of_chunks
    patch.setattr(loss_parallel, "_cross_entropy_of_chunks", lambda x, p, t, *a: own(x, p, t.roll(1), *a))


def mean_over_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(regions, "scale_gradient", lambda x, factor: x)


def other_rows_of_the_mask(patch: pytest.MonkeyPatch) -> None:
    own = attention.attend_from_tokens
    patch.setattr(attention, "attend_from_tokens", lambda call, *a: own(replace(call, mask=call.mask.flip(2)), *a))


def another_causal_mask(patch: pytest.MonkeyPatch) -> None:
    own = attention.causal_mask
    patch.setattr(attention, "causal_mask", lambda positions, keys: own(positions + 1, keys))


def other_order(patch: pytest.MonkeyPatch) -> None:
    own = TokenChunks.ranges

    def ranges(self: Any, tokens: int, rank: int | None = None) -> Any:
        found = own(self, tokens, rank)
        return found[::-1] if self.balanced and rank is None else found

    patch.setattr(TokenChunks, "ranges", ranges)


def other_tokens(patch: pytest.MonkeyPatch) -> None:
    own = TokenChunks.mine
    patch.setattr(TokenChunks, "mine", lambda self, x, dim=1: own(self, x, dim).flip(dim))


MISTAKES = {
    labels_as_they_are: "ignored labels",
    mean_over_chunks: "a loss of logits",
    other_rows_of_the_mask: "all_gather, left padding",
    another_causal_mask: "all_gather",
    other_order: "all_gather",
    other_tokens: "a window shorter than a chunk",
}


def with_mistakes() -> dict[str, Any]:
    found = {}
    for mistake, name in MISTAKES.items():
        with pytest.MonkeyPatch.context() as patched:
            mistake(patched)
            found[mistake.__name__] = attempt(RUNS[name].on, "1x1cp2")
    return found


def test_mistakes_do_not_pass(pool):
    for found in pool.run(2, with_mistakes):
        for mistake, name in MISTAKES.items():
            answer = found[mistake.__name__]
            if not isinstance(answer, Failure):
                _, want = RUNS[name].step(RUNS[name].model())
                assert relative_error(answer[1], want) > 1e-3, mistake.__name__
