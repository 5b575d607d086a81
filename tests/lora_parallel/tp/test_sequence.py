"""Sequence parallelism: the same training, two gathers and two scatters a layer, and what is refused."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from lora_parallel import TenantPool, parallelize
from lora_parallel.distributed.token_chunks import TokenChunks
from lora_parallel.planning.plan import resolve_plan
from lora_parallel.state import ForwardCount
from lora_parallel.tp.sequence import OwnDraws
from tests.cases import cases
from tests.lora_parallel.traffic import Traffic
from tests.oracle import (
    Case,
    causal_lm,
    differing,
    fill_adapters,
    full,
    lora_config,
    mesh_of,
    on_mesh,
    ranks_of,
    reference,
    relative_error,
    sharded,
)
from tests.oracle.rows import base_model
from tests.oracle.workers import Failure, attempt

ON = {"sequence_parallel": True}
BIASED = {"attention_bias": True, "mlp_bias": True}
KINDS = {
    "plain": (Case(steps=2, clip=0.5, accumulate=2), ON),
    "one key head": (Case(steps=2, sizes={"num_key_value_heads": 1}), ON),
    "recomputed": (Case(steps=2), {**ON, "activation_checkpointing": True}),
    "norms between heads": (Case(family="qwen3", steps=2), ON),
    "fused": (
        Case(family="phi3", steps=2, lora={"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}),
        ON,
    ),
    "biases": (Case(steps=2, lora={"bias": "all"}, sizes=BIASED), ON),
    "all train": (Case(steps=2, adapters=False, sizes=BIASED), {**ON, "require_adapters": False}),
    "norms trained": (Case(steps=2, lora={"modules_to_save": ["input_layernorm", "lm_head"]}), ON),
}


def run_kinds(mesh, kinds):
    return {kind: attempt(sharded, KINDS[kind][0], mesh, **KINDS[kind][1]) for kind in kinds}


EVERY = list(KINDS)


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(("1x2", EVERY), ("2x2", ["norms trained"]), matrix=[("2x2", EVERY), ("1x4", EVERY)]),
)
def test_training_equals_one_process(pool, mesh, kinds):
    """Twelve tokens; what trains on chunks (norms, biases after a sum) has gradients from all of them."""
    for found in pool.run(ranks_of(mesh), run_kinds, mesh, kinds):
        for kind, run in found.items():
            assert not isinstance(run, Failure), f"{kind}:\n{run.trace}"
            want = reference(KINDS[kind][0])
            assert relative_error(run.gradients, want.gradients) <= 1e-12, kind
            assert relative_error(run.adapters, want.adapters) <= 1e-10, kind
            assert run.losses == pytest.approx(want.losses, abs=1e-6), kind


SIZE = 7  # four ranks have 1, 2, 2 and 2 of it


def functions():
    """Each function's output and input gradient."""
    group = mesh_of("1x4").get_group("tp")
    rank = dist.get_rank(group)
    chunks = TokenChunks(4, rank, group)
    every = torch.arange(1.0, SIZE + 1).view(1, SIZE, 1).expand(2, -1, 3).clone()
    ours = torch.full((2, SIZE, 3), rank + 1.0)

    def run(function, x, grad, *args):
        x = x.clone().requires_grad_()
        y = function(x, *args, "here")
        y.backward(grad)
        return y.detach(), x.grad

    return {
        "gather": run(chunks.gather, chunks.mine(every), ours, SIZE),
        "whole": run(chunks.whole, chunks.mine(every), every, SIZE),
        "cut": run(chunks.cut, every, chunks.mine(every)),
        "reduce_scatter": run(chunks.reduce_scatter, ours, chunks.mine(every)),
    }


def test_forward_and_backward_of_each_collective(pool):
    every = torch.arange(1.0, SIZE + 1).view(1, SIZE, 1).expand(2, -1, 3)
    ten = torch.full((2, SIZE, 3), 10.0)
    for rank, found in enumerate(pool.run(4, functions)):
        start, end = rank * SIZE // 4, (rank + 1) * SIZE // 4
        mine, sums = every[:, start:end], ten[:, start:end]
        want = {"gather": (every, sums), "whole": (every, mine), "cut": (mine, every), "reduce_scatter": (sums, every)}
        for name, (output, gradient) in want.items():
            assert torch.equal(found[name][0], output), name
            assert torch.equal(found[name][1], gradient), name


def in_a_graph():
    group = mesh_of("1x2").get_group("tp")
    chunks = TokenChunks(2, dist.get_rank(group), group)
    whole = torch.arange(2.0 * SIZE).view(1, SIZE, 2)
    compiled = torch.compile(chunks.reduce_scatter, backend="aot_eager", fullgraph=True)
    mine = compiled(whole * (dist.get_rank(group) + 1), "")
    compiled = torch.compile(chunks.gather, backend="aot_eager", fullgraph=True)
    return mine, chunks.mine(whole) * 3, compiled(mine, SIZE, ""), whole * 3


def test_sums_and_gathers_of_tokens_are_the_same_in_a_graph(pool):
    for mine, want, everyone, all_tokens in pool.run(2, in_a_graph):
        assert torch.equal(mine, want)
        assert torch.equal(everyone, all_tokens)


def traffic(layers, lora):
    mesh, config = on_mesh("1x2", require_adapters=lora, **ON)
    model = causal_lm(num_hidden_layers=layers)
    if lora:
        model = get_peft_model(model, lora_config())
        fill_adapters(model)
    model = parallelize(model.train(), mesh, config)
    ids = torch.arange(24).view(2, 12)
    embeds = torch.randn(2, 12, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    model(inputs_embeds=embeds, labels=ids)  # the first compares batches
    with Traffic() as forward:
        loss = model(inputs_embeds=embeds, labels=ids).loss
    with Traffic() as backward:
        loss.backward()
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return [[calls.count(kind) for kind in kinds] for calls in (forward, backward)]


def every_traffic():
    return {(layers, lora): traffic(layers, lora) for layers in (1, 3) for lora in (True, False)}


def test_two_gathers_and_two_scatters_a_layer_each_way_with_adapters_or_without(pool):
    for found in pool.run(2, every_traffic):
        for (layers, lora), (forward, backward) in found.items():
            # Beside the layers: the stack's end and the head's output; back: the stack's start, the head's input, and
            # one message for all partial gradients (without adapters everything trains: norms' are partial too).
            # The one all-reduce of a forward compares its inputs between tp peers.
            assert forward == [2 * layers + 2, 2 * layers, 1], (layers, lora)
            assert backward == [2 * layers + 1, 2 * layers, 2], (layers, lora)


def masked(mesh_text):
    """Padding on the left, an odd number of tokens, fewer tokens than ranks: outputs with and without."""
    found = []
    for settings in ({}, ON):
        mesh, config = on_mesh(mesh_text, **settings)
        model = get_peft_model(causal_lm(), lora_config())
        fill_adapters(model)
        model = parallelize(model.eval(), mesh, config)
        ids = torch.arange(22).view(2, 11)
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with torch.no_grad():
            logits = [
                model(input_ids=ids, attention_mask=mask).logits[mask.bool()],
                model(input_ids=ids[:, :3]).logits,
                model(input_ids=ids[:, :1]).logits,
            ]
            text = model.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
        found.append((logits, text))
    return found


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["1x4"]))
def test_masks_and_any_number_of_tokens(pool, mesh):
    for (plain, words), (split, same_words) in pool.run(ranks_of(mesh), masked, mesh):
        for want, got in zip(plain, split, strict=True):
            assert (got - want).abs().max() <= 1e-12 * want.abs().max()
        assert torch.equal(words, same_words)


def dropped(mesh_text, settings):
    return sharded(Case(steps=3, lora={"lora_dropout": 0.2}), mesh_text, **settings)


def test_lora_dropout_drops_the_same(pool):
    (want,) = pool.run(1, dropped, "1x1", {})
    for run in pool.run(4, dropped, "2x2", ON):
        assert relative_error(run.gradients, want.gradients) <= 1e-12
        assert relative_error(run.adapters, want.adapters) <= 1e-10


def hidden_states():
    mesh, config = on_mesh("1x2", **ON)
    model = parallelize(get_peft_model(causal_lm(), lora_config()), mesh, config)
    return [attempt(model, input_ids=torch.arange(12).view(1, 12), output_hidden_states=True)]


def test_hidden_states_that_would_be_chunks_are_refused(pool):
    for (error,) in pool.run(2, hidden_states):
        assert isinstance(error, Failure)
        assert "output_hidden_states=True" in error.message


def tenants():
    mesh, config = on_mesh("1x2", require_adapters=False, **ON)
    return [attempt(TenantPool, parallelize(causal_lm().requires_grad_(False), mesh, config))]


def test_tenants_of_chunks_are_refused(pool):
    for (error,) in pool.run(2, tenants):
        assert isinstance(error, Failure)
        assert "leave sequence_parallel=False" in error.message


def with_images():
    """Qwen3-VL adds features of images to the tokens behind its first blocks."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {
        "hidden_size": 48,
        "intermediate_size": 44,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 131,
        "rope_parameters": rope,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 40,
        "num_heads": 4,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    tokens = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **tokens))
    ids = torch.arange(28).view(2, 14) + 10
    mesh, config = on_mesh("1x2", **ON)
    model = parallelize(model, mesh, config, lora_config=lora_config(target_modules=["q_proj", "down_proj"]))
    plain = model(input_ids=ids, labels=ids).loss.item()
    ids[:, 1:7] = torch.tensor([5, 3, 3, 3, 3, 6])
    images = {"pixel_values": torch.randn(2 * 16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    return [plain, attempt(model, input_ids=ids, mm_token_type_ids=(ids == 3).int(), **images)]


def test_features_of_images_between_blocks_are_refused_by_name(pool):
    for plain, refused in pool.run(2, with_images):
        assert plain > 0
        assert refused.kind == "ValueError"
        assert "deepstack_visual_embeds: features of images are added" in refused.message
        assert "Leave images out, or use sequence_parallel=False." in refused.message


def asking_its_tower():
    """LLaVA asks its vision tower for hidden states, whatever the user leaves out."""
    text = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
    tower = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 3, "image_size": 16, "patch_size": 4}
    heads = {"num_attention_heads": 4}
    parts = {"text_config": LlamaConfig(**text, **heads), "vision_config": CLIPVisionConfig(**tower, **heads)}
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(LlavaConfig(**parts, image_token_id=3, image_seq_length=16))
    ids = torch.arange(24).view(1, 24) + 10
    ids[:, 2:18] = 3
    images = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    found = [model(**images).logits]
    for settings in (ON, {}):
        mesh, config = on_mesh("1x2", **settings)
        sharded_model = parallelize(deepcopy(model), mesh, config, lora_config=lora_config(target_modules=["q_proj"]))
        found.append(attempt(lambda model: model(**images).logits, sharded_model))
    return found


def test_a_model_that_asks_its_tower_gets_a_remedy_that_works(pool):
    for want, refused, got in pool.run(2, asking_its_tower):
        assert "output_hidden_states=True is asked of CLIPVision" in refused.message
        assert "Use sequence_parallel=False, or" in refused.message
        assert (got - want).abs().max() < 1e-5 * want.abs().max()


class Mixing(nn.Module):
    """A block that looks at the token before, outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.roll(1, 1) + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Mixing(), Mixing()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return x


_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (Stack, "the tokens of Stack cannot be split: run on a chunk of them, it does not compute the same"),
        (lambda: base_model("BertModel", {**_ENCODER, "vocab_size": 131}), "the tokens of BertModel cannot be split"),
        (
            lambda: base_model(
                "Olmo2ForCausalLM", {**_ENCODER, "vocab_size": 131, "num_key_value_heads": 4, "pad_token_id": 0}
            ),
            "self_attn.k_proj' is colwise_gather_output",
        ),
    ],
)
def test_what_does_not_work_token_by_token_is_refused(build, reason):
    with pytest.raises(ValueError, match="sequence_parallel=True") as caught:
        resolve_plan(build().requires_grad_(False), None, 2, sequence_parallel=True)
    assert reason in str(caught.value)
    assert "sequence_parallel=False" in str(caught.value)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class TiedNorms(nn.Module):
    """The norm of a block and the one behind all blocks have the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Normed(), Normed())
        self.norm = nn.LayerNorm(8)
        self.norm.weight = self.blocks[0].norm.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(x))


def test_a_weight_that_trains_on_chunks_and_on_all_tokens_is_refused():
    model = TiedNorms()
    resolve_plan(model.requires_grad_(False), None, 2, sequence_parallel=True)
    model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"norm\.weight trains, and is used on all tokens elsewhere"):
        resolve_plan(model, None, 2, sequence_parallel=True)


def test_it_has_no_effect_without_tp(pool):
    (run,) = pool.run(1, dropped, "1x1", ON)
    (want,) = pool.run(1, dropped, "1x1", {})
    assert not differing(run.adapters, want.adapters)


def with_dropout(mesh_text):
    """Two steps of a model with dropout of its own, of an odd number of tokens; with and without recomputation."""
    found = []
    for recompute in (False, True):
        mesh, config = on_mesh(mesh_text, activation_checkpointing=recompute, **ON)
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 131, "n_positions": 64, "use_cache": False}
        torch.manual_seed(3)
        model = base_model("GPT2LMHeadModel", {**sizes, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.0})
        model = get_peft_model(model.double(), LoraConfig(r=3, target_modules=["c_attn", "c_proj", "c_fc"])).double()
        fill_adapters(model)
        model = parallelize(model.train(), mesh, config)
        torch.manual_seed(5)
        losses, grads = [], []
        for _ in range(3):
            model.zero_grad()
            ids = torch.arange(22).view(2, 11)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            grads.append({name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        found.append((losses, grads, torch.get_rng_state()))
    return found


def test_dropout_of_the_model_keeps_peers_in_step(pool):
    """Peers agree in every step, each step drops anew, and a recomputation drops what was dropped."""
    ranks = pool.run(2, with_dropout, "1x2")
    for (losses, grads, state), (again, recomputed, _) in ranks:
        assert len(set(losses)) == 3
        assert again == pytest.approx(losses, rel=1e-12)
        for one, other in zip(grads, recomputed, strict=True):
            assert relative_error(one, other) <= 1e-12
        assert torch.equal(state, ranks[0][0][2])
        assert losses == ranks[0][0][0]


def test_each_rank_draws_numbers_of_its_own_in_each_forward():
    count, model, cpu = ForwardCount(), nn.Module().train(), torch.device("cpu")
    shared, drawn = torch.get_rng_state(), []
    for _ in range(2):
        count.advance(training=True)
        for rank in range(2):
            draws = OwnDraws(rank, model, count)
            draws.begin(cpu)
            drawn.append(torch.rand(()).item())
            draws.end(cpu)
            assert torch.equal(torch.get_rng_state(), shared)
    assert len(set(drawn)) == 4


def several_lengths():
    """Two forwards before their backward passes, of other lengths, and an evaluation between, recomputed."""
    grads = []
    for settings in ({}, ON):
        mesh, config = on_mesh("1x2", activation_checkpointing=True, **settings)
        model = get_peft_model(causal_lm(), lora_config())
        fill_adapters(model)
        model = parallelize(model.train(), mesh, config)
        losses = [model(input_ids=ids, labels=ids).loss for ids in (torch.arange(12)[None], torch.arange(7)[None])]
        with torch.no_grad():
            model(input_ids=torch.arange(9)[None])
        sum(losses).backward()
        grads.append({name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None})
    return grads


def test_recomputation_of_forwards_of_several_lengths(pool):
    for want, got in pool.run(2, several_lengths):
        assert relative_error(got, want) <= 1e-12


def calls_in_a_step(mesh_text):
    """How often each block's activation function runs in a step."""
    mesh, config = on_mesh(mesh_text, activation_checkpointing=True, **ON)
    model = parallelize(Case(sizes={"num_hidden_layers": 3}).model(), mesh, config)
    calls = []
    for number, block in enumerate(model.get_base_model().model.layers):
        block.mlp.act_fn.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    ids = torch.arange(12)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    return calls


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_every_block_is_recomputed(pool, mesh):
    """The first and the last block of a stack, which split and gather the tokens, too."""
    for calls in pool.run(ranks_of(mesh), calls_in_a_step, mesh):
        assert calls == [0, 1, 2, 2, 1, 0]


_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 131,
}


def test_several_stacks_are_refused():
    """Whose cross attention takes activations from the other."""
    model = base_model("BartForConditionalGeneration", _SEQ2SEQ).requires_grad_(False)
    with pytest.raises(ValueError, match="more than one stack of blocks"):
        resolve_plan(model, None, 2, sequence_parallel=True)


class NormedTwice(nn.Module):
    """A norm that trains, in the blocks and on the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList([Pair(self.norm), Pair(self.norm)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Pair(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def test_what_trains_on_chunks_and_on_all_tokens_is_refused():
    frozen = NormedTwice().requires_grad_(False)
    assert len(resolve_plan(frozen, None, 2, sequence_parallel=True).sequences) == 1
    with pytest.raises(ValueError, match="trains, and is used on all tokens elsewhere"):
        resolve_plan(NormedTwice(), None, 2, sequence_parallel=True)
