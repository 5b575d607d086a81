"""What we rely on upstream, and what we work around: an upgrade that changes either is to fail here."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor._dispatch import found_inf_reduce_handler
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lora_parallel.distributed import torch_private
from tests.oracle import mesh_of
from tests.oracle.workers import COLLECTIVE_TIMEOUT, Failure, attempt


def adapted():
    model = nn.Sequential()
    model.add_module("proj", nn.Linear(4, 6))
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["proj"]), model)


def stock_style_on_a_lora_layer():
    """Stock `ColwiseParallel` by `parallelize_module`, and its own partition function on the same module."""
    mesh = mesh_of("1x2")["tp"]
    by_type = attempt(parallelize_module, adapted(), mesh, {"proj": ColwiseParallel()})
    names = [name for name, _ in adapted().proj.named_parameters()]
    by_name = attempt(distribute_module, adapted().proj, mesh, ColwiseParallel()._partition_linear_fn)
    return by_type, by_name, names


@pytest.mark.matrix  # of upstream alone
def test_stock_colwise_still_fails_on_a_lora_layer(pool):
    """The day one of these works, our styles can be thinner."""
    for by_type, by_name, names in pool.run(2, stock_style_on_a_lora_layer):
        assert isinstance(by_type, Failure)
        assert by_type.kind == "NotImplementedError"
        assert "only support nn.Linear and nn.Embedding" in by_type.message
        assert isinstance(by_name, Failure)
        assert by_name.kind == "KeyError"
        assert 'parameter name can\'t contain "."' in by_name.message.replace("\\", "")
        assert "base_layer.weight" in names


def test_in_backward_tells_recomputation_from_a_call():
    seen = []

    def note(x):
        seen.append(torch_private.in_backward())
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    loss = checkpoint(note, x, use_reentrant=False).sum()
    x.register_hook(lambda grad: seen.append(torch_private.in_backward()))
    assert not torch_private.in_backward()
    loss.backward()
    note(x)
    assert seen == [False, True, True, False]


def test_a_queued_callback_runs_once_after_every_gradient():
    order = []
    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))

    def hook(grad):
        torch_private.queue_after_backward(lambda: order.append((a.grad is not None, b.grad is not None)))

    loss = (a * 3).sum() + (b * 4).sum()
    b.register_hook(hook)
    loss.backward()
    assert order == [(True, True)]
    (a * 1).sum().backward()
    assert len(order) == 1
    with pytest.raises(RuntimeError):
        torch_private.queue_after_backward(lambda: None)


def callback_after_fsdp():
    """What a callback sees that is queued by the time FSDP2's own is."""
    layer = fully_shard(nn.Linear(3, 4), mesh=mesh_of("2x1")["dp_shard"])
    seen = []

    def hook(grad):
        torch_private.queue_after_backward(lambda: seen.append(layer.weight.grad.full_tensor().tolist()))
        return grad

    x = torch.full((2, 3), 1.0 + dist.get_rank())
    y = layer(x)
    assert y.requires_grad
    y.register_hook(hook)
    y.sum().backward()
    return seen


def test_a_callback_queued_after_fsdps_sees_reduced_gradients(pool):
    """FSDP2 queues its own as the gradient of the output arrives; hooks run in the order of registration."""
    for seen in pool.run(2, callback_after_fsdp):
        assert seen == [[[3.0] * 3] * 4]  # the mean over dp of 2 rows of 1 and 2 rows of 2


class Hiding(nn.Module):
    """A model of one layer, which is an FSDP unit, whose output FSDP2 does not find in that of the model."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x):
        return UserDict(y=self.layer(x))


def ends_behind_fsdps(queue):
    """Queue a callback before FSDP2 queues its own; return what the callback sees and what `check_fsdp_end` raises."""
    model, mesh = Hiding(), mesh_of("2x1")["dp_shard"]
    fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = []

    def hook(grad):
        if queue:
            torch_private.queue_fsdp_end(model)
        torch_private.queue_after_backward(
            lambda: seen.append((attempt(torch_private.check_fsdp_end, model), model.layer.weight.grad))
        )

    y = model(torch.full((2, 3), 1.0 + dist.get_rank()))["y"].clone()
    y.register_hook(hook)  # before that of FSDP2, which is on the layer's output
    y.sum().backward()
    return [(error, isinstance(grad, DTensor) and grad.full_tensor().tolist()) for error, grad in seen]


def test_a_callback_behind_fsdps_end_sees_reduced_gradients_whoever_came_first(pool):
    for seen in pool.run(2, ends_behind_fsdps, True):
        assert seen == [(None, [[3.0] * 3] * 4)]
    for ((failure, grad),) in pool.run(2, ends_behind_fsdps, False):
        assert failure.kind == "RuntimeError"
        assert grad is False  # the gathered weight's own gradient: the day it is a sharded one, ours can be thinner


def gathered_for_backward(gathers):
    """Return the gradient of the input of a unit whose output FSDP2 does not find."""
    model = fully_shard(Hiding(), mesh=mesh_of("2x1")["dp_shard"])
    x = torch.ones(2, 3, requires_grad=True)
    y = model(x)["y"]
    model.reshard()
    if gathers:
        torch_private.gather_for_backward(model, y)
        torch_private.gather_for_backward(model, y)
    found = attempt(y.sum().backward), len(y._backward_hooks or ())
    return found, x.grad


def test_a_unit_is_gathered_as_a_gradient_reaches_a_tensor_of_it(pool):
    for found, grad in pool.run(2, gathered_for_backward, True):
        assert found == (None, 1)  # one hook, also if FSDP2 has found the tensor itself
        assert grad is not None
    for (failure, _), _ in pool.run(2, gathered_for_backward, False):
        assert isinstance(failure, Failure)


def regions():
    """Values by region against the local tensor, for uneven, empty, two-dim and strided shards."""
    mesh = mesh_of("2x2")
    found = []
    for shape, placements in [
        ((7, 5), [Replicate(), Shard(0), Replicate()]),
        ((7, 5), [Replicate(), Shard(0), Shard(1)]),
        ((1, 5), [Replicate(), Shard(0), Shard(1)]),
        ((5, 3), [Replicate(), Replicate(), Replicate()]),
        ((3,), [Replicate(), Replicate(), Shard(0)]),
        ((), [Replicate(), Replicate(), Replicate()]),
    ]:
        full = torch.arange(torch.Size(shape).numel()).view(shape)
        shard = distribute_tensor(full, mesh, placements, src_data_rank=None)
        region = torch_private.local_region(shard)
        found.append((full[region].tolist(), shard.to_local().tolist(), [s.stop - s.start for s in region]))
    for rows in (8, 7, 3, 1):
        full = torch.arange(rows * 2.0).view(rows, 2)
        layer = nn.Linear(2, rows, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(full, mesh["tp"], [Shard(0)], src_data_rank=None))
        fully_shard(layer, mesh=mesh["dp_shard"])
        region, local = torch_private.local_region(layer.weight), layer.weight.to_local().detach()
        found.append((full[region].tolist(), local.tolist(), [s.stop - s.start for s in region]))
    return found


def test_the_local_region_is_what_the_shard_holds(pool):
    answers = pool.run(4, regions)
    for found in answers:
        for of_region, local, sizes in found:
            assert of_region == local
            assert torch.tensor(local).numel() == torch.Size(sizes).numel()
    empty = [0 in sizes for found in answers for _, _, sizes in found]
    assert any(empty)
    assert not all(empty)


def named():
    group = mesh_of("2x2").get_group("tp")
    return [torch_private.group_named(group.group_name) is group, torch_private.group_named("there is none")]


def test_a_process_group_is_found_by_its_name(pool):
    assert pool.run(4, named) == [[True, None]] * 4


def functional_collectives():
    group = mesh_of("2x2").get_group("tp")
    mine = torch.full((2, 3), float(dist.get_rank()))
    stacked, summed = torch_private.all_gather_stacked(mine, group), torch_private.all_reduce_sum(mine, group)
    scattered = torch_private.reduce_scatter_sum(torch.stack([mine, mine + 10]), group)
    kinds = [type(stacked), type(summed), type(scattered)]
    return kinds, stacked, summed, scattered, mine


@pytest.mark.matrix  # of upstream alone
def test_functional_collectives_are_out_of_place(pool):
    for rank, (kinds, stacked, summed, scattered, mine) in enumerate(pool.run(4, functional_collectives)):
        first = rank // 2 * 2
        assert torch.equal(mine, torch.full((2, 3), float(rank)))
        assert torch.equal(stacked, torch.stack([torch.full((2, 3), float(r)) for r in (first, first + 1)]))
        assert torch.equal(summed, torch.full((2, 3), 2.0 * first + 1))
        assert torch.equal(scattered, torch.full((2, 3), 2.0 * first + 1 + 20 * (rank - first)))
        assert kinds == [torch.Tensor] * 3  # plain and waited for


def waiting_alone():
    """Rank 0 enters a collective that rank 1 does not."""
    group = dist.new_group(timeout=dist.distributed_c10d.default_pg_timeout)
    torch_private.set_timeout(group, 1)
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), group=group)


def test_a_timeout_can_be_set_afterwards(pool):
    first, second = pool.try_run(2, waiting_alone)
    assert isinstance(first, Failure)
    assert second is None


def through_the_store():
    store = torch_private.default_store()
    if dist.get_rank() == 0:
        store.set("written by rank 0", "text")
    return store.get("written by rank 0"), store.timeout.total_seconds()


def test_the_default_store_is_one_for_all_ranks_and_knows_the_timeout_of_the_group(pool):
    assert pool.run(2, through_the_store) == [(b"text", COLLECTIVE_TIMEOUT)] * 2


def test_a_writer_of_checkpoints_tells_the_file_of_each_tensor(tmp_path):
    found = []

    class Listening(dcp.FileSystemWriter):
        def finish(self, metadata, results):
            found.extend(torch_private.file_of(each) for of_rank in results for each in of_rank)
            super().finish(metadata, results)

    dcp.save({"a": torch.ones(2), "b": torch.ones(3)}, storage_writer=Listening(tmp_path), no_dist=True)
    assert len(found) == 2
    assert {*found, ".metadata"} == {path.name for path in tmp_path.iterdir()}


def placed():
    """A DTensor with the place of a parameter, made the public way and by `placed_as`, of uneven and whole tensors."""
    mesh = mesh_of("1x2")["tp"]
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(5, 3), mesh, [placement], src_data_rank=None))
        values = torch.randn(parameter.to_local().shape)
        own = torch_private.placed_as(parameter)(values)
        public = DTensor.from_local(
            values, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        for each in (own, public):
            where = each.device_mesh, each.placements, each.shape, each.stride(), each.dtype, each.requires_grad
            found.append((str(where), each.full_tensor().tolist()))
        assert own.to_local().data_ptr() == values.data_ptr()
    return found


def test_a_dtensor_is_made_as_the_public_way_makes_it(pool):
    for found in pool.run(2, placed):
        assert found[::2] == found[1::2]


def stock_check_for_infs():
    """What torch's own handler finds, and another put in its place and taken away again."""
    table = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    ours = table.get(operator)
    mesh, rank = mesh_of("1x2")["tp"], dist.get_rank()
    grads = [
        distribute_tensor(torch.ones(2, 2), mesh, [Replicate()], src_data_rank=None),
        DTensor.from_local(torch.full((1, 2), [1.0, torch.inf][rank]), mesh, [Shard(0)], run_check=False),
    ]
    found = torch.zeros(())
    try:
        table[operator] = found_inf_reduce_handler
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.ones(()))
        replaced = torch_private.compute_for_dtensors(
            operator, lambda operator, args, kwargs: (args[1].fill_(7), None)[1]
        )
        seven = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_(grads, seven, torch.ones(()))
    finally:
        table[operator] = ours or found_inf_reduce_handler
    return found.item(), replaced, seven.item()


@pytest.mark.matrix  # of upstream alone
def test_torchs_own_check_for_infs_still_lets_ranks_part(pool):
    """The day it does not, `dtensor_operators` needs none."""
    assert pool.run(2, stock_check_for_infs) == [(0.0, True, 7.0), (1.0, True, 7.0)]


def test_hooks_on_a_parameter_are_found():
    parameter = nn.Parameter(torch.ones(2))
    assert not torch_private.gradient_hooks(parameter)
    assert not torch_private.post_accumulate_hooks(parameter)
    first = parameter.register_hook(lambda grad: None)
    parameter.register_post_accumulate_grad_hook(print)
    assert torch_private.gradient_hooks(parameter) == 1
    assert list(torch_private.post_accumulate_hooks(parameter).values()) == [print]
    first.remove()
    assert not torch_private.gradient_hooks(parameter)


def test_passes_for_given_tensors_are_seen(monkeypatch):
    monkeypatch.setattr(torch.autograd, "_engine_run_backward", torch.autograd._engine_run_backward)
    seen = []

    def asked(inputs, accumulate):
        seen.append((inputs[0] is x, len(inputs), accumulate))
        return [y if len(inputs) == 1 else tensor for tensor in inputs]

    torch_private.on_gradients_of(asked)
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (x * y).sum().backward()
    x.grad = y.grad = None
    (x * y).sum().backward(inputs=[x])
    assert x.grad is None
    assert y.grad is not None  # what was given in its place
    torch.autograd.grad((x * y).sum(), [x, y])
    torch.autograd.grad((x * y).sum(), x)
    assert seen == [(True, 1, True), (True, 2, False), (True, 1, False)]


def gathered_and_sharded():
    layer = fully_shard(nn.Linear(3, 4), mesh=mesh_of("2x1")["dp_shard"])
    before = torch_private.gathered_parameters(layer)
    layer.unshard()
    found = {id(parameter) for parameter in torch_private.gathered_parameters(layer)}
    return before, found == {id(parameter) for parameter in layer.parameters()}


def test_what_fsdp_gathers_is_known(pool):
    assert pool.run(2, gathered_and_sharded) == [([], True)] * 2


def gathered_around_a_method():
    """Whether weights are whole in a model's forward, and in a method that FSDP2 is to gather for in its place."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[1], mesh=mesh_of("2x1")["dp_shard"])
    fully_shard(model, mesh=mesh_of("2x1")["dp_shard"])
    seen = []

    def inside(x):
        seen.append(not isinstance(model[0].weight, DTensor))
        return model[1](model[0](x))

    model.inside = inside
    torch_private.forward_by_method(model, "inside")
    torch_private.make_root(model)
    model.forward = lambda x: seen.append(not isinstance(model[0].weight, DTensor))
    model(torch.ones(2, 4))
    outputs = [model.inside(torch.ones(2, 4)) for _ in range(2)]
    for last, output in zip((False, True), outputs, strict=True):
        model.set_requires_gradient_sync(last)
        with torch_private.last_backward(model, last, keeps_gathered=True):
            output.sum().backward()
    return seen, model[1].weight.grad.full_tensor()


def test_fsdp_gathers_around_a_method_in_place_of_forward(pool):
    """Two forwards are alive at a time, as in a pipeline, and their gradients are reduced once, after the last."""
    for seen, gradient in pool.run(2, gathered_around_a_method):
        assert seen == [False, True, True]
        assert gradient.shape == (4, 4)
        assert gradient.abs().sum() > 0
