"""Shards of any placement, gathered in full on rank 0 and nowhere else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import lora_parallel.distributed.dtensors
from lora_parallel import parallelize
from lora_parallel.distributed.dtensors import gather_on_rank_zero, reshard
from tests.oracle import Case, mesh_of, on_mesh


def full_tensors():
    """Uneven rows, fewer rows than ranks, odd bytes, no dims, and nothing."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return (torch.randn(shape, generator=generator) * 9).to(dtype)

    return {
        "whole": draw(3, 5),
        "rows": draw(7, 4, dtype=torch.float64),
        "columns": draw(4, 5),
        "few": draw(1, 6, dtype=torch.bfloat16),
        "bytes": draw(5, 3, dtype=torch.int8),
        "scalar": draw(),
        "none": draw(0, 4),
        "plain": draw(3, 3, dtype=torch.bfloat16).t(),
    }


def distributed(mesh):
    placements = {
        "whole": [Replicate(), Replicate(), Replicate()],
        "rows": [Replicate(), Shard(0), Replicate()],
        "columns": [Replicate(), Shard(0), Shard(1)],
        "few": [Replicate(), Replicate(), Shard(0)],
        "bytes": [Replicate(), Shard(1), Shard(0)],
        "scalar": [Replicate(), Replicate(), Replicate()],
        "none": [Replicate(), Shard(0), Replicate()],
    }
    tensors = full_tensors()
    return {
        name: distribute_tensor(tensor, mesh, placements[name], src_data_rank=None) if name in placements else tensor
        for name, tensor in tensors.items()
    }


def gathered(mesh_text, bucket_bytes):
    before = lora_parallel.distributed.dtensors._BUCKET_BYTES
    lora_parallel.distributed.dtensors._BUCKET_BYTES = bucket_bytes
    try:
        return gather_on_rank_zero(distributed(mesh_of(mesh_text)))
    finally:
        lora_parallel.distributed.dtensors._BUCKET_BYTES = before


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
def test_any_placement_is_put_together_on_rank_zero_only(pool, bucket_bytes):
    found, *others = pool.run(4, gathered, "2x2", bucket_bytes)
    assert others == [{}, {}, {}]
    want = full_tensors()
    assert list(found) == list(want)
    for name, tensor in want.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def strided():
    """FSDP2 over tp: what torch calls a strided shard, with rows that the ranks do not divide."""
    mesh = mesh_of("2x2")
    weight = torch.arange(5 * 6.0).view(5, 6)
    layer = nn.Linear(6, 5, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(weight, mesh["tp"], [Shard(0)], src_data_rank=None))
    fully_shard(layer, mesh=mesh["dp_shard"])
    kind = type(layer.weight.placements[0]).__name__
    return kind, gather_on_rank_zero({"w": layer.weight})


def test_fsdp_over_tp_is_put_together(pool):
    answers = pool.run(4, strided)
    assert {kind for kind, _ in answers} == {"_StridedShard"}
    assert torch.equal(answers[0][1]["w"], torch.arange(30.0).view(5, 6))


def test_one_process_copies():
    tensor = torch.ones(3)
    copy = gather_on_rank_zero({"t": tensor})["t"]
    tensor.zero_()
    assert copy.tolist() == [1, 1, 1]


def after_an_evaluation():
    """FSDP2 leaves the root's weights whole after a forward without backward."""
    mesh, config = on_mesh("2x1")
    case = Case()
    model = parallelize(case.model(), mesh, config)
    model(input_ids=case.batches()[0][:2])
    whole = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    reshard(model)
    dist.barrier()
    return len(whole), [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def test_reshard_puts_sharded_parameters_back(pool):
    for whole, left in pool.run(2, after_an_evaluation):
        assert whole > 0  # else the test shows nothing
        assert left == []
