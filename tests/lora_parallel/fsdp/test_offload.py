"""Offloading to the CPU, refused until it has run over NCCL: that it is wired, and changes no number on a CPU."""

from __future__ import annotations

from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from lora_parallel import ParallelConfig, clip_grad_norm_, parallelize
from lora_parallel.fsdp import wrapping
from tests.cases import cases
from tests.oracle import Case, mesh_of, parse_mesh, ranks_of, reference, relative_error, trained


class Offloading(ParallelConfig):
    """A config that takes cpu_offload."""

    REFUSED: ClassVar = {}


def offloaded(case: Case, mesh_text: str):
    """The policies that FSDP2 was given, and the gradients and adapters of a run, in full."""
    from lora_parallel.distributed.mesh import dp_rank, dp_size

    mesh = mesh_of(mesh_text)
    with mock.patch.object(wrapping, "fully_shard", wraps=wrapping.fully_shard) as shard:
        model = parallelize(
            case.model(), mesh, Offloading(**parse_mesh(mesh_text), timeout_seconds=60, cpu_offload=True)
        )
    policies = [call.kwargs["offload_policy"] for call in shard.call_args_list]
    parameters = trained(model)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, fused=True)
    gradients = None
    for batch in case.batches():
        optimizer.zero_grad()
        mine = batch.chunk(dp_size(mesh))[dp_rank(mesh)]
        model(input_ids=mine, labels=mine).loss.backward()
        clip_grad_norm_(parameters.values(), case.clip)
        gradients = gradients or {name: p.grad.full_tensor() for name, p in parameters.items()}
        optimizer.step()
    return policies, gradients, {name: p.detach().full_tensor() for name, p in parameters.items()}


@pytest.mark.parametrize("mesh", cases("1x1", "2x1", matrix=["2x2"]))
def test_each_unit_is_offloaded_and_trains_as_one_process(pool, mesh):
    case = Case(clip=0.05)
    want = reference(case)
    for policies, gradients, adapters in pool.run(ranks_of(mesh), offloaded, case, mesh):
        assert len(policies) == 3  # two blocks and the rest
        assert all(isinstance(policy, CPUOffloadPolicy) for policy in policies)
        assert relative_error(gradients, want.gradients) <= 1e-12
        assert relative_error(adapters, want.adapters) <= 1e-10


def test_only_what_fsdp_does_not_hold_goes_to_the_device():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    held = model[0].weight
    moved = set()

    def to(tensor: torch.Tensor, device: str) -> torch.Tensor:
        assert device == "accelerator"
        moved.add(tensor.data_ptr())
        return tensor

    with (
        mock.patch.object(wrapping, "is_at_rest", lambda tensor: tensor is held),
        mock.patch.object(torch.Tensor, "to", to),
    ):
        wrapping.move_to_device(model, mock.Mock(device_type="accelerator"), Offloading(cpu_offload=True))
    tensors = {*model.parameters(), *model.buffers()}
    assert moved == {tensor.data_ptr() for tensor in tensors - {held}}
