"""`parallelize`: what is refused on arrival, and the kinds of training beside plain LoRA, each against one process."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from peft import IA3Config, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from lora_parallel import clip_grad_norm_, parallelize
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.fsdp import unit_order
from lora_parallel.state import state_of
from tests.cases import cases
from tests.oracle import (
    SEVEN,
    Case,
    causal_lm,
    full,
    lora_config,
    on_mesh,
    ranks_of,
    reference,
    relative_error,
    sharded,
    trained,
)
from tests.oracle.workers import Failure, attempt

PHI3 = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
ENDS = [*SEVEN, "embed_tokens", "lm_head"]

# Case, and what `parallelize` is told beside the mesh.
KINDS = {
    "checkpointed": (Case(steps=2), {"activation_checkpointing": True}),
    "kept gathered": (Case(steps=2), {"reshard_after_forward": False}),
    "prefetched": (Case(steps=2, sizes={"num_hidden_layers": 4}), {"prefetch_blocks": 2}),
    "base not sharded": (Case(steps=2, lora={"modules_to_save": ["lm_head"]}), {"shard_base": False}),
    "base not sharded, all train": (
        Case(steps=2, adapters=False, clip=0.5),
        {"require_adapters": False, "shard_base": False},
    ),
    "phi3": (Case(family="phi3", steps=2, lora={"target_modules": PHI3}), {}),
    "embedding and head": (Case(steps=2, lora={"target_modules": ENDS, "r": 4}), {}),
    "rslora, ranks": (Case(steps=2, lora={"use_rslora": True, "rank_pattern": {"q_proj": 5}, "r": 2}), {}),
    "head saved": (Case(steps=2, lora={"modules_to_save": ["lm_head"]}), {}),
    "embedding saved": (Case(steps=2, lora={"modules_to_save": ["embed_tokens"]}), {}),
    "all train": (Case(steps=2, adapters=False, clip=0.5), {"require_adapters": False}),
    "all train, qwen3, tied": (
        Case(steps=2, adapters=False, family="qwen3", sizes={"tie_word_embeddings": True}),
        {"require_adapters": False},
    ),
    "one kv head, one layer whole": (
        Case(steps=2, sizes={"num_key_value_heads": 1}),
        {"tp_plan": {"model.layers.0.self_attn.k_proj": "replicate"}},
    ),
    "biases": (Case(steps=2, lora={"bias": "all"}, sizes={"attention_bias": True, "mlp_bias": True}), {}),
}
CUT_TWICE = ["kept gathered", "prefetched", "base not sharded", "embedding and head", "all train, qwen3, tied"]
"""Kinds that `make test` has on four ranks: tensors of their own that tp and FSDP2 both cut."""

oracle = cache(lambda kind: reference(KINDS[kind][0]))


def run_kinds(mesh, kinds):
    return {kind: attempt(sharded, KINDS[kind][0], mesh, **KINDS[kind][1]) for kind in kinds}


@pytest.mark.parametrize(
    ("mesh", "kinds"),
    cases(
        ("2x2", CUT_TWICE),
        ("1x2", [kind for kind in KINDS if kind not in CUT_TWICE]),
        matrix=[(mesh, list(KINDS)) for mesh in ("2x1", "1x2", "2x2")],
    ),
)
def test_other_kinds_of_training_equal_one_process(pool, mesh, kinds):
    for found in pool.run(ranks_of(mesh), run_kinds, mesh, kinds):
        for kind, run in found.items():
            assert not isinstance(run, Failure), f"{kind}:\n{run.trace}"
            want = oracle(kind)
            assert relative_error(run.gradients, want.gradients) <= 1e-12, kind
            assert relative_error(run.adapters, want.adapters) <= 1e-10, kind
            assert run.losses == pytest.approx(want.losses, abs=1e-6), kind
            assert run.norms == pytest.approx(want.norms, rel=1e-10), kind


def test_the_kinds_train_what_they_say():
    """What the comparison above rests on."""
    names = {kind: set(oracle(kind).gradients) for kind in KINDS}
    assert any("q_norm" in name for name in names["all train, qwen3, tied"])
    assert any("embed_tokens" in name for name in names["all train"])
    assert any("lm_head.modules_to_save" in name for name in names["head saved"])
    assert any("lora_embedding_A" in name for name in names["embedding and head"])
    assert any("base_layer.bias" in name for name in names["biases"])
    assert all("lora_" in name for name in names["phi3"])


def run_case(case, mesh, config):
    return sharded(case, mesh, **config)


BF16 = Case(dtype=torch.float32, steps=2)


def dtypes_of_reductions() -> set[torch.dtype]:
    model = parallelize(BF16.model(), *on_mesh("2x1", param_dtype=torch.bfloat16))
    ids = BF16.batches()[0]
    with patch.object(unit_order, "reduce_scatter_into", wraps=unit_order.reduce_scatter_into) as reduces:
        model(input_ids=ids, labels=ids).loss.backward()
    return {call.args[1].dtype for call in reduces.call_args_list}


def test_gradients_of_bfloat16_compute_are_added_up_in_float32(pool):
    for found in pool.run(2, dtypes_of_reductions):
        assert found == {torch.float32}


def test_bfloat16_compute_equals_our_own_single_rank(pool):
    config = {"param_dtype": torch.bfloat16}
    (own,) = pool.run(1, run_case, BF16, "1x1", config)
    exact = reference(BF16)
    assert own.losses != exact.losses  # else nothing was computed in bfloat16
    for run in pool.run(4, run_case, BF16, "2x2", config):
        assert run.losses == pytest.approx(own.losses, abs=1e-2)
        assert run.losses == pytest.approx(exact.losses, abs=5e-2)
        assert {t.dtype for t in [*run.adapters.values(), *run.gradients.values()]} == {torch.float32}
        assert relative_error(run.adapters, own.adapters) <= 0.1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"hidden": x + self.down(torch.tanh(self.up(x))) * scale}


class Unguessable(nn.Module):
    """Its inputs cannot be made up, so that nothing shows what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return self.down(self.up(x)) * scale


class Stack(nn.Module):
    """A model of the user's own: no plan, no block classes, dicts between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)["hidden"]
        return x


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "unused": "replicate"}


def stack():
    torch.manual_seed(0)
    model = get_peft_model(Stack().double(), LoraConfig(r=3, target_modules=["up", "down", "unused"]))
    for parameter in trained(model).values():
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
    return model.train()


def stack_gradients(mesh_text, checkpointing):
    mesh, config = on_mesh(mesh_text, tp_plan=PLAN, block_classes=["Block"], activation_checkpointing=checkpointing)
    model = parallelize(stack(), mesh, config)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    x = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x.chunk(dp_size(mesh))[dp_rank(mesh)]).square().mean().backward()
    calls = [module.calls for module in model.modules() if isinstance(module, Block)]
    norm = clip_grad_norm_(model.parameters(), 1e9).item()
    with torch.no_grad():
        model(x)
    calls_without_grad = [module.calls for module in model.modules() if isinstance(module, Block)]
    grads = {name: p.grad if p.grad is None else full(p.grad) for name, p in trained(model).items()}
    return units, calls, [b - a for a, b in zip(calls, calls_without_grad, strict=True)], norm, grads


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_of_the_users_own(pool, checkpointing):
    """Named block classes are FSDP2 units and are recomputed; a layer that a step does not use has no gradient."""
    model = stack()
    x = torch.randn(4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    want = {name: p.grad for name, p in trained(model).items() if p.grad is not None}
    want_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for units, calls, calls_without_grad, norm, grads in pool.run(4, stack_gradients, "2x2", checkpointing):
        assert units == ["", *(f"base_model.model.blocks.{i}" for i in range(3))]
        assert calls == [2 if checkpointing else 1] * 3
        assert calls_without_grad == [1] * 3
        assert norm == pytest.approx(want_norm, rel=1e-12)
        assert {name for name, grad in grads.items() if grad is None} == {n for n in grads if "unused" in n}
        assert relative_error({n: g for n, g in grads.items() if g is not None}, want) <= 1e-12


def layouts(mesh_text):
    """What parallelize leaves: names, kinds and placements of parameters, each in full, and the object itself."""
    mesh, config = on_mesh(mesh_text)
    given = get_peft_model(causal_lm(tie_word_embeddings=True), lora_config(r=4, target_modules=ENDS))
    names = [name for name, _ in given.named_parameters()]
    model = parallelize(given, mesh, config)
    described = {name: str(getattr(p, "placements", None)) for name, p in model.named_parameters()}
    plain = [name for name, p in trained(model).items() if not isinstance(p, DTensor)]
    meshes = {p.device_mesh.mesh_dim_names for p in trained(model).values() if isinstance(p, DTensor)}
    base = model.get_base_model()
    tied = base.lm_head.base_layer.weight is base.model.embed_tokens.base_layer.weight
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, described)
    whole = {name: full(p) for name, p in model.named_parameters()} if all(e == described for e in everyone) else {}
    return model is given, list(described) == names, plain, len(meshes), tied, everyone, whole


@pytest.mark.parametrize("mesh", ["2x2", "1x2", "2x1", "2x2x2"])
def test_parameters_keep_their_names_and_values_and_have_one_layout_on_all_ranks(pool, mesh):
    """Ranks that describe one tensor differently hang, or die, in the first collective over it."""
    torch.manual_seed(0)
    model = get_peft_model(causal_lm(tie_word_embeddings=True), lora_config(r=4, target_modules=ENDS))
    want = {name: full(p) for name, p in model.named_parameters()}
    for same, names, plain, meshes, tied, everyone, whole in pool.run(ranks_of(mesh), layouts, mesh):
        assert same
        assert names
        assert plain == []
        assert meshes == 1
        assert tied
        assert all(described == everyone[0] for described in everyone)
        assert all(torch.equal(whole[name], tensor) for name, tensor in want.items())


def test_one_rank_keeps_plain_tensors(pool):
    (plain,) = pool.run(1, plain_on_one_rank)
    assert plain


def plain_on_one_rank():
    mesh, config = on_mesh("1x1")
    model = parallelize(Case().model(), mesh, config)
    return all(type(p) is nn.Parameter for p in model.parameters()) and not any(
        isinstance(module, FSDPModule) for module in model.modules()
    )


# What cannot be parallelized: each refused on every rank, before anything is touched.


def refusals():
    """By case: the error, on this rank, and whether the model stayed as it was."""
    mesh, config = on_mesh("1x2")
    base = causal_lm

    def adapted(**changes):
        return get_peft_model(causal_lm(), lora_config(**changes))

    def compiled_block():
        model = adapted()
        model.get_base_model().model.layers[0] = torch.compile(model.get_base_model().model.layers[0])
        return model

    def compiled_in_place():
        model = adapted()
        model.get_base_model().model.layers[1].compile()
        return model

    def checkpointed_block():
        model = adapted()
        model.get_base_model().model.layers[0] = checkpoint_wrapper(model.get_base_model().model.layers[0])
        return model

    def with_dtensor():
        model = adapted()
        norm = model.get_base_model().model.norm
        norm.weight = nn.Parameter(distribute_tensor(norm.weight.data, mesh["tp"], [Replicate()]), requires_grad=False)
        return model

    def sharded_already():
        model = adapted()
        fully_shard(model.get_base_model().model.layers[0], mesh=mesh["dp_shard"])
        return model

    def on_meta():
        model = adapted()
        model.get_base_model().lm_head.to("meta")
        return model

    def only_rank_one(model):
        return model if dist.get_rank() == 1 else adapted()

    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    cases = {
        "ddp": (lambda: nn.parallel.DistributedDataParallel(adapted()), {}, None),
        "checkpoint_wrapper": (checkpointed_block, {}, None),
        "torch.compile": (lambda: torch.compile(adapted()), {}, None),
        "a compiled block": (compiled_block, {}, None),
        "a block compiled in place": (compiled_in_place, {}, None),
        "nothing to compile": (stack, {"tp_plan": PLAN, "compile": True}, None),
        "fully_shard": (sharded_already, {}, None),
        "DTensor": (with_dtensor, {}, None),
        "meta": (on_meta, {}, None),
        "no adapters": (base, {}, None),
        "adapters and lora_config": (adapted, {}, lora_config()),
        "ia3": (lambda: get_peft_model(base(), ia3), {}, None),
        "ia3 config": (base, {}, ia3),
        "eva": (base, {}, lora_config(init_lora_weights="eva")),
        "no style": (
            lambda: get_peft_model(Stack(), LoraConfig(target_modules=["up", "unused"])),
            {"tp_plan": {"*.up": "colwise"}},
            None,
        ),
        "no plan": (
            lambda: get_peft_model(Unguessable(), LoraConfig(target_modules=["up", "down"])),
            {},
            None,
        ),
        "unmatched": (adapted, {"tp_plan": {"*.q": "colwise"}}, None),
        "unknown style": (adapted, {"tp_plan": {"*.q_proj": "columns"}}, None),
        "block class": (adapted, {"block_classes": ["QwenBlock"]}, None),
        "no blocks": (stack, {"tp_plan": PLAN, "activation_checkpointing": True}, None),
        "width": (lambda: get_peft_model(causal_lm(intermediate_size=43), lora_config()), {}, None),
        "heads": (
            lambda: get_peft_model(
                causal_lm(num_attention_heads=9, num_key_value_heads=3, hidden_size=54), lora_config()
            ),
            {},
            None,
        ),
        "only rank 1": (lambda: only_rank_one(causal_lm()), {}, None),
    }
    found = {}
    for case, (build, changes, given) in cases.items():
        model = build()
        before = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
        _, config = on_mesh("1x2", **changes)
        error = attempt(parallelize, model, mesh, config, lora_config=given)
        after = {name: (id(p), p.requires_grad) for name, p in model.named_parameters()}
        found[case] = error, before == after and state_of(model) is None
    _, other = on_mesh("2x1")
    found["another mesh"] = attempt(parallelize, adapted(), mesh, other), True
    scaled = base()
    scaled.scale = nn.Parameter(torch.tensor(1.0))
    sharding, free = on_mesh("2x1", require_adapters=False)
    found["a scalar"] = attempt(parallelize, scaled, sharding, free), state_of(scaled) is None
    biased = get_peft_model(causal_lm(attention_bias=True, dtype=torch.bfloat16), lora_config(bias="lora_only"))
    of_a_dtype, computing = on_mesh("1x2", param_dtype=torch.bfloat16)
    found["two dtypes"] = attempt(parallelize, biased, of_a_dtype, computing), state_of(biased) is None
    twice = parallelize(adapted(), mesh, config)
    found["twice"] = attempt(parallelize, twice, mesh, config), True
    dist.barrier()  # no rank is out of step
    return found


REFUSED = {
    "ddp": ("ValueError", "DistributedDataParallel: pass the bare model"),
    "checkpoint_wrapper": ("ValueError", "activation_checkpointing=True"),
    "torch.compile": ("ValueError", "torch.compile: give the module itself, and ParallelConfig(compile=True)"),
    "a compiled block": ("ValueError", "torch.compile: give the module itself, and ParallelConfig(compile=True)"),
    "a block compiled in place": ("ValueError", "layers.1 was compiled by .compile()"),
    "nothing to compile": ("ValueError", "compile=True, but the model has no blocks: name their classes"),
    "fully_shard": ("ValueError", "fully_shard was already applied"),
    "DTensor": ("ValueError", "model.norm.weight is a DTensor already"),
    "meta": ("ValueError", "lm_head.weight is on the meta device"),
    "no adapters": ("ValueError", "no PEFT layers and no lora_config"),
    "adapters and lora_config": ("ValueError", "already has PEFT layers"),
    "ia3": ("ValueError", "PEFT type IA3: only LORA is supported. What works: LoRA, DoRA"),
    "ia3 config": ("TypeError", "IA3"),
    "eva": ("ValueError", "peft.initialize_lora_eva_weights"),
    "no style": ("ValueError", "'unused' has adapter layers"),
    "no plan": ("ValueError", "Unguessable carries no tp_plan"),
    "unmatched": ("ValueError", "'*.q' (colwise) matches no module"),
    "unknown style": ("ValueError", "'columns', which is not one of"),
    "block class": ("ValueError", "QwenBlock is no class of a module"),
    "no blocks": ("ValueError", "block_classes=[...]"),
    "width": ("ValueError", "tp=2 does not divide"),
    "heads": ("ValueError", "9 heads"),
    "only rank 1": ("ValueError", "LlamaForCausalLM"),
    "another mesh": ("ValueError", "the mesh has sizes (1, 1, 2)"),
    "a scalar": ("ValueError", "scale is a scalar that trains"),
    "two dtypes": ("ValueError", "q_proj trains in torch.bfloat16 and torch.float32, which FSDP2 and tp cannot"),
    "twice": ("ValueError", "parallelized already"),
}


def test_what_cannot_be_parallelized_is_refused_on_every_rank(pool):
    for rank, found in enumerate(pool.run(2, refusals)):
        assert found.keys() == REFUSED.keys()
        for case, (error, untouched) in found.items():
            kind, message = REFUSED[case]
            assert isinstance(error, Failure), case
            assert error.kind == kind, (case, error)
            assert message in error.message, (case, error.message)
            assert untouched, case
            assert ("on rank 1: " in error.message) == (case == "only rank 1" and rank == 0)


def random_states(mesh_text: str, own_dropout: float, settings: dict[str, Any]) -> tuple[bool, list[Tensor]]:
    """Return whether training forwards leave the shared random state alone, and the losses of three of one batch."""
    mesh, config = on_mesh(mesh_text, **settings)
    model = parallelize(Case(sizes={"attention_dropout": own_dropout}).model(), mesh, config)
    torch.manual_seed(7)
    before, ids = torch.get_rng_state(), Case().batches()[0]
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.detach().clone())
    return torch.equal(torch.get_rng_state(), before), losses


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [("1x2", {"sequence_parallel": True}), ("1x1cp2", {}), ("1x1pp2", {"pp_microbatches": 2})],
)
def test_forwards_leave_the_shared_random_state(pool, mesh, settings):
    """The order of the data may be drawn from it (`LengthGroupedSampler`); a model's own dropout draws anew."""
    for same, losses in pool.run(2, random_states, mesh, 0.0, settings):
        assert same
        assert torch.equal(losses[0], losses[1])
    for same, losses in pool.run(2, random_states, mesh, 0.5, settings):
        assert same
        assert len({loss.item() for loss in losses}) == 3
