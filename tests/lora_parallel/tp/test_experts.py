"""Experts: LoRA by its factors, shares of tp ranks, routers, gradients of experts that saw no token, saving."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MixtralConfig, MixtralForCausalLM

from lora_parallel import load_adapter, load_checkpoint, meta_init, parallelize, save_adapter, save_checkpoint
from lora_parallel.adapters.low_rank_weight import Factors, LowRankWeight
from lora_parallel.adapters.peft_private import keep_factored
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.layers.styles import RowPartition
from lora_parallel.planning.experts import share_experts
from lora_parallel.planning.plan import resolve_plan
from lora_parallel.runtime import step as step_parts
from lora_parallel.tp.experts import ExpertSharing
from tests.cases import cases
from tests.lora_parallel.traffic import Traffic
from tests.oracle import differing, full, lora_config, on_mesh, ranks_of, relative_error, trained
from tests.oracle.expert_rows import ATTENTION, BY_EXPERTS, MIXTRAL, STACKS
from tests.oracle.rows import build, language, rows
from tests.oracle.workers import Failure, attempt

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about target_parameters
BY_FEATURES = {"tp_plan": {"*.experts": "moe_tp_experts"}}
WAYS = {"by features": BY_FEATURES, "by experts": BY_EXPERTS}


def mixtral(implementation: str = "eager", targets: list[str] = ATTENTION, stacks: Any = STACKS, **sizes: Any) -> Any:
    settings = {**MIXTRAL, "experts_implementation": implementation, **sizes}
    lora = {"target_modules": targets, "target_parameters": stacks, "task_type": "CAUSAL_LM"}
    return build("MixtralForCausalLM", settings, **lora)


# ---------------------------------------------------------------------- factors


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


OPERATIONS: dict[str, tuple[Callable[[Any, Tensor], Any], tuple[int, ...], bool]] = {
    "linear of one": (lambda w, x: F.linear(x, w[1]), (5, 6), True),
    "linear of an index": (lambda w, x: F.linear(x, w[torch.tensor(2)], torch.ones(4).double()), (5, 6), True),
    "@ transposed": (lambda w, x: x @ w[0].T, (5, 6), True),
    "matmul": (lambda w, x: torch.matmul(x, w[0].transpose(0, 1)), (2, 5, 6), True),
    "weight @ x": (lambda w, x: w[1] @ x, (6, 5), True),
    "bmm": (lambda w, x: torch.bmm(x, w.transpose(1, 2)), (3, 5, 6), True),
    "bmm of chosen": (lambda w, x: torch.bmm(w[torch.tensor([0, 2, 2, 1])], x), (4, 6, 1), True),
    "mT": (lambda w, x: torch.matmul(x, w.mT), (3, 5, 6), True),
    "another dtype": (lambda w, x: F.linear(x.float(), w[1].to(torch.float32)), (5, 6), True),
    "einsum": (lambda w, x: torch.einsum("eoi,ni->eno", w, x), (5, 6), False),
    "slices": (lambda w, x: F.linear(x, w[1, ::2]), (5, 6), False),
    "arithmetic": (lambda w, x: F.linear(x, 2 * w[0] / 3 - w[1] * x.sum() + 1), (5, 6), False),
    "a vector": (lambda w, x: torch.matmul(w, x), (6,), False),
    "a vector first": (lambda w, x: x @ w, (4,), False),
    "keywords": (lambda w, x: F.linear(input=x, weight=w[0].transpose(dim0=0, dim1=1).mT), (5, 6), True),
    "a mask": (lambda w, x: x @ w[torch.tensor([True, False, True])].sum(0).T, (5, 6), False),
    "a method": (lambda w, x: x @ w[1].t().contiguous().clone(), (5, 6), False),
}


class Products(TorchDispatchMode):
    """Notes whether a stack or one expert's weight is written."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.shapes, self.seen = shapes, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        view = isinstance(out, Tensor) and any(isinstance(x, Tensor) and x._is_view() for x in (out,))
        sums = func.overloadpacket.__name__ in ("add", "mul", "bmm", "mm", "baddbmm")
        self.seen |= isinstance(out, Tensor) and sums and not view and tuple(out.shape) in self.shapes
        return out


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_factors_is_that_on_their_sum(name):
    operation, shape, factored = OPERATIONS[name]
    base, left, right, x = numbers(3, 4, 6), numbers(3, 4, 2), numbers(3, 2, 6), numbers(*shape)
    inputs = [left, right, x]
    want = operation(base + 0.5 * left @ right, x)
    wanted = torch.autograd.grad(want.sum(), inputs)
    with Products((3, 4, 6), (4, 6), (6, 4)) as products:
        got = operation(LowRankWeight(base.detach(), [Factors(left, right, 0.5)]), x)
    torch.testing.assert_close(got, want)
    assert products.seen is not factored
    for grad, wanted_grad in zip(torch.autograd.grad(got.sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(grad.to(want.dtype), wanted_grad.to(want.dtype))  # computed in the output's dtype


@pytest.mark.parametrize("r", [3, 4])  # 4 is aligned as it is
def test_grouped_products_take_factors_of_any_rank(r):
    base, right = numbers(3, 4, 8).float(), numbers(3, r, 8).float()
    left = numbers(4, r, 3).float().permute(2, 0, 1)  # as PEFT keeps B: the experts innermost
    x, ends = numbers(6, 8).float(), torch.tensor([1, 1, 6], dtype=torch.int32)
    weight = LowRankWeight(base, [Factors(left, right, 2.0)]).transpose(-2, -1)
    got = F.grouped_mm(x, weight, offs=ends)
    want = F.grouped_mm(x, (base + 2 * left @ right).mT, offs=ends)
    torch.testing.assert_close(got, want)


def test_no_forward_or_backward_multiplies_the_factors():
    """PEFT's own does, in every forward."""
    seen = []
    for ours in (False, True):
        model = mixtral()
        if ours:
            keep_factored(model)
        inner = model.get_submodule("base_model.model.model.layers.0.mlp.experts").get_base_layer()
        shapes = [tuple(p.shape) for p in inner.parameters()]
        with Products(*shapes) as products:
            model(**language()).loss.backward()
        seen.append(products.seen)
    assert seen == [True, False]


# ---------------------------------------------------------------------- implementations, routers, losses


def gradients(mesh_text: str, implementation: str, config: dict[str, Any]) -> dict[str, Tensor]:
    mesh, settings = on_mesh(mesh_text, **config)
    model = parallelize(mixtral(implementation, intermediate_size=1024).float(), mesh, settings)
    batch = {key: value.chunk(dp_size(mesh))[dp_rank(mesh)] for key, value in language().items()}
    model(**batch).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_the_other_implementations_of_experts(pool, mesh, implementation, way):
    model = mixtral(implementation, intermediate_size=1024).float()  # larger than what a stand-in holds in full
    model(**language()).loss.backward()
    want = {name: p.grad for name, p in trained(model).items()}
    for found in pool.run(ranks_of(mesh), gradients, mesh, implementation, WAYS[way]):
        assert relative_error(found, want) <= 1e-5


def routed(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """Every tensor that every router gives."""
    found: list[Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda module, args, output: found.extend(t.detach() for t in output))
    model(**batch)
    return found


def routed_on(config: dict[str, Any]) -> list[Tensor]:
    mesh, settings = on_mesh("1x4", **config)
    return routed(parallelize(mixtral(), mesh, settings), language())


@pytest.mark.parametrize("way", WAYS)
def test_routers_are_bit_equal_over_tp(pool, way):
    first, *others = pool.run(4, routed_on, WAYS[way])
    assert len(first) == len(routed(mixtral(), language())) >= 4
    for other in others:
        assert all(map(torch.equal, first, other))


def auxiliary(mesh_text: str) -> dict[str, Tensor]:
    mesh, config = on_mesh(mesh_text)
    model = parallelize(mixtral(output_router_logits=True, router_aux_loss_coef=10.0), mesh, config)
    batch = {key: value.chunk(dp_size(mesh))[dp_rank(mesh)] for key, value in language().items()}
    model(**batch).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


@pytest.mark.parametrize("mesh", ["1x2", "2x2"])
def test_the_auxiliary_loss_counts_once(pool, mesh):
    """Of each data parallel rank's tokens, as of each microbatch: it is no sum over tokens."""
    model = mixtral(output_router_logits=True, router_aux_loss_coef=10.0)
    parts = ranks_of(mesh) // 2
    for part in range(parts):
        batch = {key: value.chunk(parts)[part] for key, value in language().items()}
        (model(**batch).loss / parts).backward()
    want = {name: p.grad for name, p in trained(model).items()}
    for found in pool.run(ranks_of(mesh), auxiliary, mesh):
        assert relative_error(found, want) <= 1e-6  # float32 in the router


# ---------------------------------------------------------------------- experts that saw no token


def few_tokens() -> dict[str, Tensor]:
    """Each row reaches two of eight experts, or three."""
    ids = torch.tensor([[5, 5], [7, 7]])
    return {"input_ids": ids, "labels": ids}


def train_on_few(model: nn.Module, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in trained(model).values())
    found = {name: full(p.grad) for name, p in trained(model).items()}
    optimizer.step()
    return found, optimizer


def few_on(mesh_text: str, config: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    mesh, settings = on_mesh(mesh_text, **config)
    model = parallelize(mixtral(), mesh, settings)
    batch = {key: value.chunk(dp_size(mesh))[dp_rank(mesh)] for key, value in few_tokens().items()}
    found, optimizer = train_on_few(model, batch)
    save_checkpoint(model, optimizer, folder)
    return found, {name: full(p) for name, p in trained(model).items()}


def goes_on(mesh_text: str, config: dict[str, Any], folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters and first moments, from a checkpoint."""
    mesh, settings = on_mesh(mesh_text, **config)
    model = parallelize(mixtral(), mesh, settings)
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    load_checkpoint(model, optimizer, folder)
    moments = {name: full(optimizer.state[p]["exp_avg"]) for name, p in trained(model).items()}
    return {name: full(p) for name, p in trained(model).items()}, moments


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("meshes", cases(["1x4", "2x1"], matrix=[["1x4", "2x2"]]))
def test_experts_that_saw_no_token_have_zeros_that_are_kept(pool, tmp_path, meshes, way):
    model = mixtral()
    want, optimizer = train_on_few(model, few_tokens())
    averages = {name: optimizer.state[p]["exp_avg"] for name, p in trained(model).items()}
    unseen = [name for name, grad in want.items() if "experts" in name and "lora_A" in name and not grad.all(1).all()]
    assert unseen
    path = str(tmp_path / "checkpoint")
    for found, values in pool.run(ranks_of(meshes[0]), few_on, meshes[0], WAYS[way], path):
        assert relative_error(found, want) <= 1e-6
        assert relative_error(values, trained(model)) <= 1e-6
    other = WAYS["by features" if way == "by experts" else "by experts"]
    for mesh in meshes[1:]:
        for values, moments in pool.run(ranks_of(mesh), goes_on, mesh, other, path):
            assert relative_error(values, trained(model)) <= 1e-6
            assert relative_error(moments, averages) <= 1e-6


# ---------------------------------------------------------------------- traffic


def collectives(config: dict[str, Any], stacks: list[str]) -> tuple[int, int]:
    mesh, settings = on_mesh("1x2", **config)
    model = parallelize(mixtral(stacks=stacks, num_hidden_layers=4), mesh, settings)
    batch = language()
    model(**batch).loss.backward()  # the first batch is compared between ranks
    group = mesh["tp"].get_group()
    with Traffic() as traffic:
        loss = model(**batch).loss
        forward = traffic.count("all_reduce", group)
        loss.backward()
    assert traffic.count("all_reduce", group) == len(traffic.calls) - traffic.count("all_gather", group)
    return forward, traffic.count("all_reduce", group) - forward


@pytest.mark.parametrize("way", WAYS)
def test_lora_on_experts_adds_no_collective(pool, way):
    """The inputs' comparison, embedding and two a layer; two a layer, and one for all partial gradients."""
    for stacks in ([], STACKS):
        assert pool.run(2, collectives, WAYS[way], stacks) == [(1 + 1 + 2 * 4, 2 * 4 + 1)] * 2


# ---------------------------------------------------------------------- saving, loading


def saved(mesh_text: str, config: dict[str, Any], folder: str) -> list[str]:
    mesh, settings = on_mesh(mesh_text, **config)
    model = parallelize(mixtral(), mesh, settings)
    save_adapter(model, folder)
    want = {name: full(p) for name, p in trained(model).items()}
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.zero_()
    load_adapter(model, folder)
    return differing({name: full(p) for name, p in trained(model).items()}, want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", ["2x1", "1x4", "2x2"])
def test_saved_adapters_are_peft_s(pool, tmp_path, mesh, way):
    assert not any(pool.run(ranks_of(mesh), saved, mesh, WAYS[way], str(tmp_path / "ours")))
    mixtral().save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert not differing(ours, theirs)


def read_late(mesh_text: str, config: dict[str, Any], path: str) -> tuple[list[float], list[str]]:
    """The largest difference of outputs to a normal load, and what a rank read of each expert."""
    mesh, settings = on_mesh(mesh_text, seed=0, **config)
    lora = lora_config(target_modules=ATTENTION, target_parameters=STACKS)
    want = MixtralForCausalLM.from_pretrained(path, experts_implementation="eager")
    torch.manual_seed(0)
    want = get_peft_model(want, lora)
    with meta_init():
        model = MixtralForCausalLM.from_pretrained(path, experts_implementation="eager")
    model = parallelize(model, mesh, settings, lora_config=lora)
    ids = language()["input_ids"]
    with torch.no_grad():
        error = (model.eval()(ids).logits - want.eval()(ids).logits).abs().max().item()
        drawn = {name: full(p) for name, p in model.named_parameters() if "lora_" in name}
    wanted = {name.removeprefix("base_model.model."): p for name, p in want.named_parameters() if "lora_" in name}
    assert drawn.keys() == wanted.keys()
    same = [name for name, p in wanted.items() if torch.equal(drawn[name], p)]
    return [error], sorted(set(wanted) - set(same))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", cases("2x2", matrix=["1x2"]))
def test_experts_stored_one_by_one_are_read_by_slices(pool, tmp_path, mesh, way):
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**MIXTRAL)).save_pretrained(tmp_path)
    assert any("experts.0.w1" in key for key in load_file(tmp_path / "model.safetensors"))
    for (error,), different in pool.run(ranks_of(mesh), read_late, mesh, WAYS[way], str(tmp_path)):
        assert error <= 2e-5
        assert different == []


# ---------------------------------------------------------------------- mistakes, refusals


def step(config: dict[str, Any], mistake: str | None = None) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            MISTAKES[mistake](patch)
        mesh, settings = on_mesh("1x2", **config)
        model = attempt(parallelize, mixtral(), mesh, settings)
        if isinstance(model, Failure):
            return [model]
        loss = attempt(lambda: model(**language()).loss.backward())
        return [loss if isinstance(loss, Failure) else {n: full(p.grad) for n, p in trained(model).items()}]


def changed(patch: pytest.MonkeyPatch, change: Callable[[ExpertSharing], ExpertSharing]) -> None:
    from lora_parallel.planning import experts

    own = experts.share_experts

    def share(*args: Any) -> Any:
        return change(own(*args))

    patch.setattr(experts, "share_experts", share)


def cut_in_chunks(patch: pytest.MonkeyPatch) -> None:
    size = 2 * MIXTRAL["intermediate_size"]
    halves = RowPartition.of([range(size // 2), range(size // 2, size)], size)
    changed(patch, lambda found: replace(found, cuts={**found.cuts, "gate_up_proj": (1, halves)}))


def cut_the_next_dim(patch: pytest.MonkeyPatch) -> None:
    size = MIXTRAL["hidden_size"]
    halves = RowPartition.of([range(size // 2), range(size // 2, size)], size)
    changed(patch, lambda found: replace(found, cuts={**found.cuts, "down_proj": (1, halves)}))


def drop_the_gradients_of_an_adapter(patch: pytest.MonkeyPatch) -> None:
    own = step_parts.PartialSums
    patch.setattr(step_parts, "PartialSums", lambda gradients, partial, *args: own(gradients, partial[:-1], *args))


def drop_the_routing_gradient(patch: pytest.MonkeyPatch) -> None:
    from lora_parallel.tp import layer

    own = layer.copy_all_to_tp
    patch.setattr(layer, "copy_all_to_tp", lambda xs, *args: (*own(xs[:-1], *args), xs[-1]))


MISTAKES = {
    "gate and up in chunks": cut_in_chunks,
    "the next dim": cut_the_next_dim,
    "an adapter's gradient": drop_the_gradients_of_an_adapter,
    "the gradient of routing": drop_the_routing_gradient,
}


@cache
def right() -> dict[str, Tensor]:
    model = mixtral()
    model(**language()).loss.backward()
    return {name: p.grad for name, p in trained(model).items()}


def test_the_comparison_or_a_failure_shows_a_mistake(pool):
    for mistake in [None, *MISTAKES]:
        for (found,) in pool.run(2, step, BY_FEATURES, mistake):
            if mistake is None:
                assert relative_error(found, right()) <= 1e-6
            elif not isinstance(found, Failure):
                assert relative_error(found, right()) > 1e-3, mistake
            else:
                assert mistake == "the next dim", found.trace


def test_the_trial_refuses_wrong_shares(monkeypatch):
    module = mixtral().get_submodule("base_model.model.model.layers.0.mlp.experts").get_base_layer()
    ids = torch.tensor([[0, 3], [7, 1], [2, 2]])
    fed = ((torch.randn(3, MIXTRAL["hidden_size"]), ids, torch.rand(3, 2)), {})
    assert isinstance(share_experts(module, fed, 2, "features"), ExpertSharing)
    told = {"_is_expert_parallel": True} if hasattr(module, "_is_expert_parallel") else {}  # transformers 5.17 has none
    assert share_experts(module, fed, 2, "experts").attributes == {"num_experts": 4, **told}
    unrouted = ((fed[0][0], torch.zeros_like(ids), torch.full((3, 2), torch.nan)), {})
    for by in ("features", "experts"):
        assert isinstance(share_experts(module, unrouted, 2, by), ExpertSharing)
    module.is_concatenated = False  # a wrong declaration
    assert "does not add up to the whole" in share_experts(module, fed, 2, "features")
    del module.is_concatenated  # none
    assert isinstance(share_experts(module, fed, 2, "features"), ExpertSharing)
    # Nor an index for experts of other ranks: they are the first, with weights of 0.
    module.__dict__.pop("_is_expert_parallel", None)
    shared = share_experts(module, fed, 2, "experts")
    assert (shared.attributes, shared.absent_expert) == ({"num_experts": 4}, 0)
    monkeypatch.setattr(ExpertSharing, "local_arguments", lambda self, values, rank: values)
    assert isinstance(share_experts(module, fed, 2, "experts"), str)


def planned(**settings: Any) -> nn.Module:
    model = mixtral(**settings)
    keep_factored(model)
    return model


@pytest.mark.parametrize(
    ("sizes", "plan", "reason"),
    [
        (
            {"num_local_experts": 3, "intermediate_size": 45},
            None,
            r"experts 'model\.layers\.0\.mlp\.experts' .* and tp=2 divides.*it has 3 experts, no multiple of tp=2",
        ),
        ({"num_local_experts": 3}, BY_EXPERTS["tp_plan"], "it has 3 experts, no multiple of tp=2"),
        ({}, {"*.mlp": "ep_dispatch_experts"}, "holds no stacks of experts"),
        ({}, {"*.q_proj": "moe_tp_experts"}, "holds no stacks of experts"),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(sizes, plan, reason):
    with pytest.raises(ValueError, match=reason):
        resolve_plan(planned(**sizes), plan, 2)


def test_experts_without_adapters_that_cannot_be_shared_are_whole(caplog):
    model = planned(stacks=[], num_local_experts=3, intermediate_size=45)
    plan = resolve_plan(model, None, 2)
    assert plan.sharings == {}
    assert "mlp.experts (2 layers) is computed in full on every tp rank" in caplog.text


def with_sequence_parallel(mesh_text: str, stacks: Any, config: dict[str, Any]) -> Any:
    mesh, settings = on_mesh(mesh_text, sequence_parallel=True, **config)
    model = attempt(parallelize, mixtral(stacks=stacks), mesh, settings)
    if isinstance(model, Failure):
        return [model]
    batch = {key: value.chunk(dp_size(mesh))[dp_rank(mesh)] for key, value in language().items()}
    model(**batch).loss.backward()
    return [{name: full(p.grad) for name, p in trained(model).items()}]


def test_with_sequence_parallelism_each_rank_has_all_experts_for_its_tokens(pool):
    """Shared experts would be sums over other tokens."""
    model = mixtral(stacks=[])
    model(**language()).loss.backward()
    want = {name: p.grad for name, p in trained(model).items()}
    for (found,) in pool.run(2, with_sequence_parallel, "1x2", [], {}):
        assert not isinstance(found, Failure), found.trace
        assert relative_error(found, want) <= 1e-6
    for stacks, config in ((STACKS, {}), ([], BY_EXPERTS), ([], BY_FEATURES)):
        for (found,) in pool.run(2, with_sequence_parallel, "1x2", stacks, config):
            assert isinstance(found, Failure)
            assert "with sequence_parallel=True each rank has the tokens of its own only" in found.message


def test_an_entry_for_experts_leaves_the_plan_of_other_layers(caplog):
    """DeepSeek carries none for its attention."""
    model = rows()["deepseek-v3"].build()
    keep_factored(model)
    plan = resolve_plan(model, {"*.experts": "ep_dispatch_experts"}, 2)
    assert {sharing.split_by for sharing in plan.sharings.values()} == {"experts"}
    names = {name for name, _ in plan.styles.values()}
    assert "model.layers.1.self_attn.o_proj" in names


def test_copies_of_experts_are_shared_and_what_several_layers_hold_is_not():
    settings = {**MIXTRAL, "experts_implementation": "eager"}
    model = build("MixtralForCausalLM", settings, target_modules=["q_proj"], modules_to_save=["experts"])
    plan = resolve_plan(model, {"*.experts": "ep_dispatch_experts"}, 2)
    assert len(plan.sharings) == 2
    tied = planned()
    layers = tied.get_submodule("base_model.model.model.layers")
    layers[1].mlp.experts = layers[0].mlp.experts.get_base_layer()
    with pytest.raises(ValueError, match="several layers share them"):
        resolve_plan(tied, None, 2)


def merging() -> Any:
    mesh, config = on_mesh("1x2")
    return [attempt(parallelize(mixtral(), mesh, config).merge_adapter)]


def test_merging_is_refused_under_tp(pool):
    for (found,) in pool.run(2, merging):
        assert "an adapter of experts cannot be merged under tensor parallelism" in found.message
