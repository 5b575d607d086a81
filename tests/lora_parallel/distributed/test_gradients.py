"""Gradients are finished when backward returns, whatever was accumulated; norms count each element once."""

from __future__ import annotations

import contextlib
import math
from collections import UserDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lora_parallel import clip_grad_norm_, no_sync, parallelize
from lora_parallel.distributed import torch_private
from lora_parallel.distributed.gradients import clip_grad_value_
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.runtime import step
from tests.cases import cases
from tests.oracle import (
    SEVEN,
    Case,
    differing,
    full,
    half_sum_of_squares,
    lora_config,
    mesh_of,
    on_mesh,
    ranks_of,
    reference,
    relative_error,
    trained,
)
from tests.oracle.workers import Failure, attempt

PENALTY = 0

# Gradient contract. A scenario is a list of events on one model; "1" to "3" are backward passes of these batches.
SCENARIOS = {
    "once": ["1"],
    "twice": ["1", "2"],
    "no_sync, sync": ["no_sync 1", "2"],
    "no_sync, no_sync, sync": ["no_sync 1", "no_sync 2", "3"],
    "sync, no_sync, sync": ["1", "no_sync 2", "3"],
    "retained graph": ["forward 1", "retain 1", "backward 1"],
    "joint": ["1 + 2"],
    "two forwards, two backwards": ["forward 1", "forward 2", "backward 1", "backward 2"],
    "evaluated before backward": ["forward 1", "evaluate 3", "backward 1"],
    "evaluated between": ["1", "evaluate 3", "2"],
    "inference mode first": ["infer 3", "1", "infer 3", "2"],
    "failed": ["failed 1", "zero", "2"],
    "failed after a sum": ["1", "failed 2", "zero", "3"],
    "failed in no_sync": ["failed no_sync 1", "zero", "2", "3"],
    "failed after no_sync": ["no_sync 1", "failed 2", "zero", "3"],
    "failed forward": ["failed forward 1", "zero", "2"],
    "zeroed in place": ["1", "zero in place", "2"],
    "a term of the parameters": ["penalty 1"],
    "a term of the parameters in no_sync": ["no_sync penalty 1", "2"],
}
SUMS: dict[str, tuple[int, ...]] = {
    "once": (1,),
    "twice": (1, 2),
    "no_sync, sync": (1, 2),
    "no_sync, no_sync, sync": (1, 2, 3),
    "sync, no_sync, sync": (1, 2, 3),
    "retained graph": (1, 1),
    "joint": (1, 2),
    "two forwards, two backwards": (1, 2),
    "evaluated before backward": (1,),
    "evaluated between": (1, 2),
    "inference mode first": (1, 2),
    "failed": (2,),
    "failed after a sum": (3,),
    "failed in no_sync": (2, 3),
    "failed after no_sync": (3,),
    "failed forward": (2,),
    "zeroed in place": (2,),
    "a term of the parameters": (PENALTY, 1),
    "a term of the parameters in no_sync": (PENALTY, 1, 2),
}
CASE = Case(steps=3)
WITH_HEAD = Case(steps=3, lora={"target_modules": [*SEVEN, "lm_head"]})
"""Adapt the head: a gradient reaches its adapter, which is in the root unit, before it reaches a block."""

RETURNED: dict[str, Callable[[Tensor], Any]] = {
    "a tuple": lambda loss: (loss,),
    "UserDict": lambda loss: UserDict(loss=loss),  # as transformers' BatchEncoding
    "an object": lambda loss: SimpleNamespace(loss=loss),
    "a function": lambda loss: lambda: loss,
    "nothing": lambda loss: None,
}
"""List objects in which a model may return its loss. FSDP2 finds tensors in tuples, lists, dicts and dataclasses."""


class Returning(nn.Module):
    """Return the loss in one of these objects, and keep it too."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind, self.loss = model, kind, torch.zeros(())

    def forward(self, **inputs: Tensor) -> Any:
        self.loss = self.model(**inputs).loss
        return RETURNED[self.kind](self.loss)


class InjectedError(Exception):
    """Raised by a hook, in the middle of a backward or forward pass."""


def play(events, model, mesh):
    """Run one scenario; the gradients in full."""
    batches = [batch.chunk(dp_size(mesh))[dp_rank(mesh)] for batch in CASE.batches()]
    kept = {}

    def loss_of(number):
        mine = batches[int(number) - 1]
        output = model(input_ids=mine, labels=mine)
        return model.loss if isinstance(model, Returning) else output.loss

    def penalised(number):
        """With half the sum of squares of all that trains."""
        return sum(half_sum_of_squares(parameter) for parameter in trained(model).values()) + loss_of(number)

    def fail(*args):
        raise InjectedError

    block = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    for event in events:
        *words, number = event.split()
        if event == "zero":
            model.zero_grad()
        elif event == "zero in place":
            model.zero_grad(set_to_none=False)
        elif words == ["forward"]:
            kept[number] = loss_of(number)
        elif words in (["backward"], ["retain"]):
            kept[number].backward(retain_graph=words == ["retain"])
        elif event == "1 + 2":
            (loss_of(1) + loss_of(2)).backward()
        elif words in (["evaluate"], ["infer"]):
            model.eval()
            with torch.no_grad() if words == ["evaluate"] else torch.inference_mode():
                loss_of(number)
            model.train()
        elif words == ["penalty"]:
            penalised(number).backward()
        elif words[:1] == ["no_sync"]:
            with no_sync(model):
                (penalised if words[1:] else loss_of)(number).backward()
        elif words == ["failed", "forward"]:
            handle = block.register_forward_pre_hook(fail)
            assert isinstance(attempt(loss_of, number), Failure)
            handle.remove()
        elif words[:1] == ["failed"]:
            handle = block.register_full_backward_hook(fail)
            loss = loss_of(number)
            if words[1:]:
                with no_sync(model):
                    failure = attempt(loss.backward)
            else:
                failure = attempt(loss.backward)
            assert failure.kind == "InjectedError", failure
            handle.remove()
        else:
            loss_of(number).backward()
    return {name.removeprefix("model."): full(p.grad) for name, p in trained(model).items()}


def play_all(mesh_text, scenarios, checkpointing=False, returned=None, case=WITH_HEAD, **config):
    """By scenario: the gradients, or what went wrong; one after the other on one model."""
    mesh, config = on_mesh(mesh_text, activation_checkpointing=checkpointing, **config)
    model = CASE.model() if returned is None else Returning(case.model(), returned)
    model, found = parallelize(model, mesh, config), {}
    for name in scenarios:
        found[name] = attempt(play, SCENARIOS[name], model, mesh)
        model.zero_grad()
    return found


@cache
def one_process(case, number):
    model = case.model()
    if number == PENALTY:
        return {name: full(p) for name, p in trained(model).items()}
    batch = case.batches()[number - 1]
    model(input_ids=batch, labels=batch).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def check_scenarios(answers, case=CASE):
    for found in answers:
        for scenario, got in found.items():
            assert not isinstance(got, Failure), f"{scenario}:\n{got.trace}"
            parts = [one_process(case, number) for number in SUMS[scenario]]
            want = {name: sum(part[name] for part in parts) for name in parts[0]}
            assert relative_error(got, want) <= 1e-12, scenario


FAILING = [name for name in SCENARIOS if name.startswith("failed")]
INFERRING = ["inference mode first"]
USUAL = [name for name in SCENARIOS if name not in FAILING + INFERRING]


@pytest.mark.parametrize(
    ("mesh", "checkpointing"),
    cases(("1x2", False), ("2x1", False), ("2x2", True), matrix=[("2x2", False), ("1x1", False)]),
)
def test_gradients_are_finished_when_backward_returns(pool, mesh, checkpointing):
    check_scenarios(pool.run(ranks_of(mesh), play_all, mesh, USUAL, checkpointing))


@pytest.mark.parametrize(
    ("mesh", "scenarios"),
    cases(
        ("1x2", ["failed after no_sync"]),  # with dp it is FSDP2 that keeps what no_sync accumulates
        ("2x2", FAILING),
        matrix=[("1x1", FAILING), ("1x2", FAILING), ("2x1", FAILING)],
    ),
)
def test_an_error_in_a_step_leaves_nothing_behind(pool, mesh, scenarios):
    """After zero_grad the next step's gradients are its own, whatever the failed one had got to."""
    check_scenarios(pool.run(ranks_of(mesh), play_all, mesh, scenarios))


HIDDEN = [*(name for name in USUAL if "term" not in name and name != "twice"), "failed", "failed in no_sync"]
FEW = ["once", "joint", "evaluated before backward", "failed"]


@pytest.mark.parametrize(
    ("mesh", "returned", "scenarios", "config"),
    cases(
        ("2x2", "UserDict", [*FEW, "two forwards, two backwards", "no_sync, sync"], {}),
        ("2x2", "nothing", [*FEW, "retained graph"], {}),
        ("2x2", "a function", FEW, {"checkpointing": True}),
        ("1x2cp2", "UserDict", FEW, {}),
        ("1x2cp2", "an object", FEW, {"checkpointing": True}),
        ("2x1", "nothing", ["once"], {"shard_base": False}),  # one unit, of whose outputs FSDP2 finds none
        matrix=[
            (mesh, kind, HIDDEN, config)
            for mesh in ("2x2", "1x2cp2", "2x1", "1x2", "2x1x2", "2x1cp2")
            for kind in RETURNED
            for config in ({}, {"checkpointing": True}, {"shard_base": False}, {"reshard_after_forward": False})
        ],
    ),
)
def test_gradients_are_finished_whatever_a_model_returns(pool, mesh, returned, scenarios, config):
    """Finish a pass behind FSDP2's own end, also if FSDP2 sees no output, or sees one after others did."""
    answers = pool.run(ranks_of(mesh), partial(play_all, mesh, scenarios, returned=returned, **config))
    check_scenarios(answers, WITH_HEAD)


def loss_inside_of_a_block(model, batch):
    """Compare gradients of a loss that is computed from what a hook in a block has kept, and from nothing else."""
    kept = []
    block = next(module for name, module in model.named_modules() if name.endswith("layers.0.mlp"))
    block.register_forward_hook(lambda module, args, output: kept.append(output))
    model(input_ids=batch)
    kept[0].pow(2).mean().backward()
    return {name: full(p.grad) for name, p in trained(model).items() if p.grad is not None}


def loss_inside_on_mesh(mesh_text):
    mesh, config = on_mesh(mesh_text, reshard_after_forward=False)
    batch = CASE.batches()[0].chunk(dp_size(mesh))[dp_rank(mesh)]
    return loss_inside_of_a_block(parallelize(CASE.model(), mesh, config), batch)


@pytest.mark.parametrize("mesh", cases("2x2", matrix=["1x2", "2x1"]))
def test_a_loss_from_inside_of_a_block_has_one_processs_gradients(pool, mesh):
    want = loss_inside_of_a_block(CASE.model(), CASE.batches()[0])
    for got in pool.run(ranks_of(mesh), loss_inside_on_mesh, mesh):
        assert relative_error(got, want) <= 1e-12


def recomputed_masks(returned):
    case = replace(WITH_HEAD, lora={**WITH_HEAD.lora, "lora_dropout": 0.4})
    return play_all("1x2", ["two forwards, two backwards"], checkpointing=True, returned=returned, case=case)


def test_a_block_is_recomputed_with_the_masks_of_its_forward_whatever_a_model_returns(pool):
    seen, hidden = (next(iter(pool.run(2, recomputed_masks, kind)[0].values())) for kind in ("a tuple", "nothing"))
    assert differing(hidden, seen) == []


def an_end_of_fsdps_that_comes_late():
    step.queue_fsdp_end = lambda *_: None
    try:
        return play_all("2x2", ["once", "twice"], returned="UserDict")
    finally:
        step.queue_fsdp_end = torch_private.queue_fsdp_end


def test_sums_are_refused_that_would_miss_what_fsdp_has_not_reduced(pool):
    for found in pool.run(4, an_end_of_fsdps_that_comes_late):
        for failure in found.values():
            assert failure.kind == "RuntimeError"
            assert "FSDP2 has not ended this backward pass" in failure.message


@pytest.mark.parametrize("mesh", ["1x1", "1x2"])
def test_inference_mode_leaves_nothing_behind(pool, mesh):
    """FSDP2 itself does not run under torch.inference_mode."""
    check_scenarios(pool.run(ranks_of(mesh), play_all, mesh, INFERRING))


def no_sync_of_a_plain_model():
    return no_sync(torch.nn.Linear(2, 2))


def test_no_sync_wants_a_parallelized_model():
    with pytest.raises(ValueError, match="Linear was not parallelized"):
        no_sync_of_a_plain_model()


def sync_after_an_error_in_no_sync():
    """An error leaves the context, and with it accumulation."""
    mesh, config = on_mesh("2x2")
    model = parallelize(CASE.model(), mesh, config)
    mine = CASE.batches()[0].chunk(2)[dp_rank(mesh)]

    def accumulate():
        with no_sync(model):
            raise InjectedError

    attempt(accumulate)
    model(input_ids=mine, labels=mine).loss.backward()
    return {name: full(p.grad) for name, p in trained(model).items()}


def test_an_error_in_no_sync_ends_accumulation(pool):
    for got in pool.run(4, sync_after_an_error_in_no_sync):
        assert relative_error(got, one_process(CASE, 1)) <= 1e-12


# Norms. Gradients with rows that the ranks do not divide, with less rows than ranks, and with nothing in them.
SHAPES = [(6, 4), (7, 5), (1, 8), (3,), (5, 2, 4), (0, 3), ()]
PLACEMENTS = {
    "replicated": lambda shape: [Replicate(), Replicate(), Replicate()],
    "dp rows": lambda shape: [Replicate(), Shard(0), Replicate()],
    "tp rows": lambda shape: [Replicate(), Replicate(), Shard(0)],
    "tp last, dp rows": lambda shape: [Replicate(), Shard(0), Shard(len(shape) - 1)],
    "rows by both": lambda shape: [Replicate(), Shard(0), Shard(0)],
    "all": lambda shape: [Shard(0), Shard(0), Shard(0)],
}


def gradients():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def parameters_on(mesh, layout):
    """Zeros with the gradients above, placed so; `mixed`: every layout in turn, sub-meshes and plain tensors too."""
    owners = []
    for index, grad in enumerate(gradients()):
        kind = layout
        if layout == "mixed":
            kind = ["plain", *PLACEMENTS, "tp mesh", "dp mesh"][index % 9]
        if kind == "plain" or grad.dim() == 0:
            shard = grad
        elif kind == "tp mesh":
            shard = distribute_tensor(grad, mesh["tp"], [Shard(0)], src_data_rank=None)
        elif kind == "dp mesh":
            shard = distribute_tensor(grad, mesh["dp_shard"], [Shard(0)], src_data_rank=None)
        else:
            shard = distribute_tensor(grad, mesh, PLACEMENTS[kind](grad.shape), src_data_rank=None)
        owner = torch.nn.Parameter(torch.zeros_like(shard))
        owner.grad = shard.clone()
        owners.append(owner)
    owners.insert(2, torch.nn.Parameter(torch.ones(2)))  # one without a gradient
    return owners


NORM_TYPES = [1, 2.0, 3, math.inf]
LIMITS = [0.1, 1e6]
LAYOUTS = [*PLACEMENTS, "plain", "tp mesh", "dp mesh", "mixed"]


def clipped(mesh_text):
    """By layout, p and limit: the norm, what kind of tensor it is, and for p = 2 the clipped gradients in full."""
    mesh = mesh_of(mesh_text)
    found = {}
    for layout in LAYOUTS:
        for norm_type in NORM_TYPES:
            for limit in LIMITS:
                owners = parameters_on(mesh, layout)
                norm = clip_grad_norm_(iter(owners), limit, norm_type)
                grads = [full(o.grad) for o in owners if o.grad is not None] if norm_type == 2 else None
                found[layout, norm_type, limit] = norm.item(), (type(norm), norm.dim()), grads
    return found


@cache
def clipped_by_torch(norm_type, limit):
    owners = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in gradients()]
    for owner, grad in zip(owners, gradients(), strict=True):
        owner.grad = grad
    # torch's has no infinity norm of nothing
    norm = torch.nn.utils.clip_grad_norm_([owner for owner in owners if owner.numel()], limit, norm_type)
    return norm.item(), [owner.grad for owner in owners]


@pytest.mark.parametrize("mesh", ["2x2", "1x4", "4x1", "2x2x2"])
def test_clipping_equals_torchs_in_one_process(pool, mesh):
    for found in pool.run(ranks_of(mesh), clipped, mesh):
        for (layout, norm_type, limit), (norm, kind, grads) in found.items():
            want_norm, want_grads = clipped_by_torch(norm_type, limit)
            assert kind == (torch.Tensor, 0)
            assert norm == pytest.approx(want_norm, rel=1e-12), (layout, norm_type)
            if grads is not None:
                for got, want in zip(grads, want_grads, strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


ROUNDED = 1e-9  # by which the kernels of a tp rank may have rounded otherwise than those of its peer
WITH_A_NORM = Case(steps=1, lora={"modules_to_save": ["norm"]})


def of_ranks_that_round_otherwise(mesh_text: str, hooked: bool, adapter: str):
    """The gradients after one pass in `no_sync` and one that is finished, and those that a user's hook was given."""
    mesh, config = on_mesh(mesh_text)
    model = WITH_A_NORM.model()
    model.add_adapter("other", lora_config(**WITH_A_NORM.lora))
    model = parallelize(model.to(WITH_A_NORM.dtype), mesh, config)
    model.set_adapter(adapter)
    ending = f"model.norm.modules_to_save.{adapter}"
    (norm,) = [module for name, module in model.named_modules() if name.endswith(ending)]
    factor = 1 + ROUNDED * mesh.get_local_rank("tp")
    norm.register_full_backward_pre_hook(lambda module, grads: tuple(grad * factor for grad in grads))
    seen = []
    if hooked:
        norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(full(p.grad)))
    for part, batch in enumerate(WITH_A_NORM.batches()[0].chunk(2)):
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
        with no_sync(model) if part == 0 else contextlib.nullcontext():
            (model(input_ids=mine, labels=mine).loss / 2).backward()
    gradients = {name: full(p.grad) for name, p in trained(model).items()}
    return gradients, seen


def test_a_second_adapters_gradients_are_equal_too(pool):
    found = [gradients for gradients, _ in pool.run(2, of_ranks_that_round_otherwise, "1x2", False, "other")]
    assert any(".model.norm.modules_to_save.other" in name for name in found[0])
    assert not differing(*found)


@pytest.mark.parametrize("mesh", cases("1x2", matrix=["2x2"]))
def test_tp_ranks_have_equal_gradients_of_what_each_has_whole(pool, mesh):
    want = reference(WITH_A_NORM).gradients
    assert any("modules_to_save" in name for name in want)
    hooked = mesh == "1x2"  # a gradient that FSDP2 reduces is not there in the first pass
    found = pool.run(ranks_of(mesh), of_ranks_that_round_otherwise, mesh, hooked, "default")
    for gradients, seen in found:
        assert not differing(gradients, found[0][0])
        assert relative_error(gradients, want) < 1e-6
        (gradient,) = (gradient for name, gradient in gradients.items() if ".model.norm." in name)
        assert not hooked or [each.tolist() for each in seen] == [gradient.tolist()]


def bad_clips():
    mesh = mesh_of("1x2")
    owner = torch.nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Replicate()] * 3, src_data_rank=None))
    owner.grad = DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Replicate(), Partial()], run_check=False)
    plain = torch.nn.Parameter(torch.zeros(2))
    plain.grad = torch.ones(2)
    return attempt(clip_grad_norm_, [plain, owner], 1.0), plain.grad.tolist()


def test_a_partial_gradient_is_refused(pool):
    for failure, untouched in pool.run(2, bad_clips):
        assert isinstance(failure, Failure)
        assert failure.kind == "ValueError"
        assert "shape (2, 2) is a partial sum" in failure.message
        assert untouched == [1, 1]


@pytest.mark.parametrize("norm_type", [0, -1, -math.inf, math.nan])
def test_a_norm_type_that_is_not_positive_is_refused(norm_type):
    with pytest.raises(ValueError, match="norm_type="):
        clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0, norm_type)


def test_no_gradients_have_norm_zero():
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(torch.nn.Parameter(torch.ones(2)), 1.0) == 0


def test_narrow_gradients_are_summed_in_float32():
    """1000 times 0.1 in bfloat16 would stop growing at 32."""
    owner = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    owner.grad = torch.full_like(owner, 0.1)
    norm = clip_grad_norm_(owner, 1e6, 1)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(1000 * torch.tensor(0.1, dtype=torch.bfloat16).item(), rel=1e-5)


def clipped_values():
    owners = parameters_on(mesh_of("2x2"), "mixed")
    clip_grad_value_(owners, 0.3)
    dist.barrier()
    return [full(owner.grad) for owner in owners if owner.grad is not None]


def test_clipping_by_value_equals_torchs(pool):
    for found in pool.run(4, clipped_values):
        assert all(torch.equal(got, grad.clamp(-0.3, 0.3)) for got, grad in zip(found, gradients(), strict=True))


def moved(mesh_text=None):
    """The gradients after a step in float64, and one in float32 of the same model."""
    model, batch = CASE.model(), CASE.batches()[0]
    if mesh_text is not None:
        model = parallelize(model, *on_mesh(mesh_text))
    model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad()
    model.to(torch.float32)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss.item(), {name: full(p.grad) for name, p in trained(model).items()}


def test_a_model_that_is_moved_trains_as_in_one_process(pool):
    """`model.to` gives the parameters other local tensors, with which layers that tp cuts compute from then on."""
    loss, want = moved()
    for found, gradients in pool.run(2, moved, "1x2"):
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        assert abs(found - loss) <= 1e-5 * loss
        assert relative_error(gradients, want) <= 1e-5
