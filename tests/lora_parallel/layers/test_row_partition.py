"""Rows of each rank: arranged, restored, and what counts as a plain chunk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_parallel.layers.styles import RowPartition, partition_of, set_partition

FUSED = RowPartition.of([[0, 1, 4, 6], [2, 3, 5, 7]], 8)
SHARED = RowPartition.of([[0, 1], [0, 1], [2, 3], [2, 3]], 4)  # two key heads on four ranks


def test_ranges_are_what_the_indices_were():
    assert FUSED.ranks == (((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8)))
    assert [FUSED.rows(rank).tolist() for rank in range(2)] == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert (FUSED.width, SHARED.width) == (4, 2)


@pytest.mark.parametrize("partition", [FUSED, SHARED])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_arranged_is_restored(partition, dim):
    tensor = torch.randn(partition.size, partition.size, dtype=torch.float64)
    arranged = partition.arranged(tensor, dim)
    tp = len(partition.ranks)
    for rank, part in enumerate(arranged.chunk(tp, dim)):
        assert torch.equal(part, tensor.index_select(dim, partition.rows(rank)))
    assert torch.equal(partition.restored(arranged, dim), tensor)
    assert torch.equal(tensor.index_select(dim, partition.order), arranged)


def test_each_row_is_found_where_it_is_stored():
    assert SHARED.order.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert SHARED.inverse.tolist() == [0, 1, 4, 5]


def test_packed_parts_are_cut_one_by_one():
    packed = RowPartition.packed([4, 2, 2], 2)
    assert [packed.rows(rank).tolist() for rank in range(2)] == [[0, 1, 4, 6], [2, 3, 5, 7]]


def test_chunks_are_told_from_choices():
    assert RowPartition.of([[0, 1], [2, 3]], 4).is_chunked
    assert not FUSED.is_chunked
    assert not SHARED.is_chunked
    assert not RowPartition.of([[2, 3], [0, 1]], 4).is_chunked


def test_a_module_remembers_what_is_arranged():
    layer = nn.Linear(4, 8)
    assert partition_of(layer, "weight") is None
    set_partition(layer, "weight", FUSED, 0)
    assert partition_of(layer, "weight") == (FUSED, 0)
    assert partition_of(layer, "bias") is None
