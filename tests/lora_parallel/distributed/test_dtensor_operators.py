"""What torch computes from DTensor gradients in a user's code is one process's, or refused; all ranks step or none."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lora_parallel import parallelize
from lora_parallel.distributed.dtensors import guard_dtensor_operators
from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.distributed.torch_private import local_region
from tests.cases import cases
from tests.oracle import Case, full, mesh_of, on_mesh, ranks_of, relative_error, trained
from tests.oracle.workers import Failure, attempt

MESHES = cases("2x2", matrix=["2x1", "1x2", "2x2x1"])
CASE = Case(steps=4, sizes={"num_hidden_layers": 1})
LIMIT = 1e-3


def built(mesh_text):
    """The model, sharded where a mesh is given, and this rank's part of each batch."""
    if mesh_text is None:
        return CASE.model(), CASE.batches()
    mesh, config = on_mesh(mesh_text)
    mine = [batch.chunk(dp_size(mesh))[dp_rank(mesh)] for batch in CASE.batches()]
    return parallelize(CASE.model(), mesh, config), mine


# Clipping by hand, on the gradients of all parameters.
def by_item(grads):
    total = math.sqrt(sum(grad.norm().item() ** 2 for grad in grads))
    for grad in grads:
        grad.mul_(LIMIT / total)


def by_tensors(grads):
    total = sum(grad.pow(2).sum() for grad in grads).sqrt()
    for grad in grads:
        grad.mul_(torch.clamp(LIMIT / (total + 1e-6), max=1.0))


def by_stack(grads):
    total = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_(LIMIT / (total + 1e-6))


def by_foreach(grads):
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, LIMIT / total)


def by_total_norm(grads):
    total = torch.nn.utils.get_total_norm(grads)
    for grad in grads:
        grad.div_(total)


def by_each_norm(grads):
    for grad in grads:
        if grad.norm() > LIMIT:
            grad.mul_(LIMIT / grad.norm())


def by_largest(grads):
    largest = max(grad.abs().max() for grad in grads)
    for grad in grads:
        grad.div_(largest)


def around_the_mean(grads):  # torch 2.11 refuses .std() of a shard that dp and tp cut along one dim
    for grad in grads:
        grad.sub_(grad.mean())


def in_place_norm(grads):
    for grad in grads:
        grad.div_(grad.norm().add_(1e-6))


def into_a_plain_sum(grads):
    total = torch.zeros((), dtype=grads[0].dtype)
    for grad in grads:
        total += grad.norm() ** 2


RIGHT = [by_tensors, by_stack, by_foreach, by_total_norm, by_each_norm, by_largest, around_the_mean]
LOUD = [by_item, in_place_norm, into_a_plain_sum]


def of_torch(parameters):
    torch.nn.utils.clip_grad_norm_(parameters, LIMIT, error_if_nonfinite=True)


def looked_at(mesh_text):
    """The gradients after each way of clipping; then what single numbers give."""
    model, batches = built(mesh_text)
    parameters = trained(model)
    model(input_ids=batches[0], labels=batches[0]).loss.backward()
    original = {name: p.grad.clone() for name, p in parameters.items()}
    clipped = {}
    for way in [*RIGHT, *LOUD, of_torch]:
        for name, p in parameters.items():
            p.grad = original[name].clone()
        failure = attempt(way, list(parameters.values()) if way is of_torch else [p.grad for p in parameters.values()])
        failed = isinstance(failure, Failure)
        clipped[way.__name__] = failure if failed else {name: full(p.grad) for name, p in parameters.items()}
    numbers = {}
    for name, grad in original.items():
        whole = all(p.is_replicate() for p in grad.placements) if isinstance(grad, DTensor) else True
        norm, value = grad.norm(), full(grad)
        asked = [attempt(norm.item), attempt(float, grad.sum()), attempt(bool, grad.max()), attempt(int, grad.min())]
        numbers[name] = whole, asked, [value.norm().item(), value.sum().item(), True, int(value.min())]
    return clipped, numbers


@pytest.mark.parametrize("mesh", MESHES)
def test_clipping_by_hand_is_one_processs_or_refused(pool, mesh):
    want, _ = looked_at(None)
    for clipped, numbers in pool.run(ranks_of(mesh), looked_at, mesh):
        for way in [*RIGHT, of_torch]:
            assert not isinstance(clipped[way.__name__], Failure), clipped[way.__name__].trace
            assert relative_error(clipped[way.__name__], want[way.__name__]) <= 1e-12, way.__name__
        for way in LOUD:
            assert isinstance(clipped[way.__name__], Failure), way.__name__
        assert "clip_grad_norm_" in clipped["by_item"].message
        assert any(not whole for whole, _, _ in numbers.values())
        for whole, asked, values in numbers.values():
            if whole:
                assert asked == pytest.approx(values, rel=1e-12)
            else:
                assert all(isinstance(answer, Failure) for answer in asked)
                assert "Call .full_tensor().item() on every rank" in asked[0].message


def single_values():
    """Of a mesh whose other axes have one rank, where nothing is missing from a part."""
    guard_dtensor_operators()
    mesh = mesh_of("1x2")
    placements = [[Partial(), Partial(), Replicate()], [Replicate(), Replicate(), Partial("max")]]
    sums = [DTensor.from_local(torch.tensor(3.0), mesh, each, run_check=False) for each in placements]
    return [attempt(each.item) for each in sums]


def test_a_value_that_a_rank_has_in_full_is_given(pool):
    for given, refused in pool.run(2, single_values):
        assert given == 3.0
        assert "Partial(max) over the mesh axis tp" in refused.message


def scaled(mesh_text, fused):
    """Train with a GradScaler, where one element of one gradient overflows in the second step."""
    model, batches = built(mesh_text)
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, fused=fused, foreach=not fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        scaler.scale(model(input_ids=batch, labels=batch).loss).backward()
        if step == 1:  # the last row of a lora_B: of the last tp rank, and of one dp rank
            grad = next(p.grad for name, p in parameters.items() if "q_proj.lora_B" in name)
            local, region = grad, [slice(0, size) for size in grad.shape]
            if isinstance(grad, DTensor):
                local, region = grad.to_local(), local_region(grad)
            if local.numel() and region[0].stop == grad.shape[0]:
                local[-1, -1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: full(p) for name, p in parameters.items()}


def scaled_both(mesh_text):
    return [scaled(mesh_text, fused) for fused in (False, True)]


@pytest.mark.parametrize("mesh", cases("1x2", "2x1", matrix=["2x2", "2x2x1"]))
def test_all_ranks_skip_a_step_together(pool, mesh):
    wanted = [scaled(None, fused) for fused in (False, True)]
    assert wanted[0][0] == [256, 128, 128, 256]
    for found in pool.run(ranks_of(mesh), scaled_both, mesh):
        for (scales, adapters), (want_scales, want) in zip(found, wanted, strict=True):
            assert scales == want_scales
            assert relative_error(adapters, want) <= 1e-10


def overflows_anywhere():
    """Whether each rank learns of an inf, by which rank has it and in which gradient: of two meshes and none."""
    guard_dtensor_operators()
    mesh = mesh_of("2x2")
    found = []
    for culprit in range(4):
        for which in range(3):
            grads = [
                distribute_tensor(torch.ones(4, 4), mesh["tp"], [Replicate()], src_data_rank=None),
                distribute_tensor(torch.ones(4, 4), mesh["dp_shard"], [Shard(0)], src_data_rank=None),
                torch.ones(2),
            ]
            if torch.distributed.get_rank() == culprit:
                of_rank = grads[which].to_local() if which < 2 else grads[which]
                of_rank.view(-1)[0] = math.inf
            seen, scale = torch.zeros(()), torch.full((), 0.5)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, seen, scale)
            found.append((seen.item(), grads[0].to_local()[-1, -1].item(), grads[2][-1].item()))
    return found


def test_an_overflow_in_any_gradient_of_any_rank_is_all_ranks(pool):
    for found in pool.run(4, overflows_anywhere):
        assert found == [(1.0, 0.5, 0.5)] * 12


def test_a_torch_without_the_table_is_told(monkeypatch, caplog):
    monkeypatch.setattr("lora_parallel.distributed.dtensors.compute_for_dtensors", lambda operator, function: False)
    guard_dtensor_operators()
    assert "use ShardedGradScaler" in caplog.text


def under_anomaly_detection(mesh_text):
    """The gradients of a step with and without it, by kind of run, and on which ranks it finds a NaN of rank 0's."""
    mesh, config = on_mesh(mesh_text)
    kinds = {"plain": {}, "full": {"require_adapters": False}}
    if mesh["tp"].size() > 1:
        kinds |= {"sequence": {"sequence_parallel": True}, "loss": {"loss_parallel": True}}
    batch = CASE.batches()[0].chunk(dp_size(mesh))[dp_rank(mesh)]
    found = {}
    for kind, options in kinds.items():
        _, config = on_mesh(mesh_text, **options)
        model = CASE.model() if kind != "full" else CASE.model().unload()
        model = parallelize(model.requires_grad_(True) if kind == "full" else model, mesh, config)
        gradients = []
        for detect in (False, True):
            with torch.autograd.set_detect_anomaly(detect):
                model(input_ids=batch, labels=batch).loss.backward()
            gradients.append({name: full(p.grad) for name, p in trained(model).items()})
            model.zero_grad()
        found[kind] = gradients
    axis = "tp" if mesh["tp"].size() > 1 else "dp_shard"
    values = torch.ones(4 * mesh[axis].size())
    values[1] = math.nan
    found["nan"] = bool(torch._is_any_true(torch.isnan(distribute_tensor(values, mesh[axis], [Shard(0)]))))
    return found


@pytest.mark.parametrize("mesh", cases("1x2", "2x1", matrix=["2x2", "2x2x1"]))
def test_anomaly_detection_changes_nothing_and_finds_a_nan(pool, mesh):
    for rank, found in enumerate(pool.run(ranks_of(mesh), under_anomaly_detection, mesh)):
        assert found.pop("nan") == (rank % 2 == 0)
        for kind, (without, with_detection) in found.items():
            assert without.keys() == with_detection.keys()
            for name, gradient in without.items():
                assert gradient.equal(with_detection[name]), (kind, name)
