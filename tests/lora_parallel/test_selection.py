"""Rows of each rank: arranged, restored, and what counts as a plain chunk."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_parallel.selection import Selection, selection_of, set_selection

FUSED = Selection.of([[0, 1, 4, 6], [2, 3, 5, 7]], 8)
SHARED = Selection.of([[0, 1], [0, 1], [2, 3], [2, 3]], 4)  # two key heads on four ranks


def test_ranges_are_what_the_indices_were():
    assert FUSED.ranks == (((0, 2), (4, 5), (6, 7)), ((2, 4), (5, 6), (7, 8)))
    assert [FUSED.rows(rank).tolist() for rank in range(2)] == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert (FUSED.width, SHARED.width) == (4, 2)


@pytest.mark.parametrize("selection", [FUSED, SHARED])
@pytest.mark.parametrize("dim", [0, 1])
def test_what_is_arranged_is_restored(selection, dim):
    tensor = torch.randn(selection.size, selection.size, dtype=torch.float64)
    arranged = selection.arranged(tensor, dim)
    tp = len(selection.ranks)
    for rank, part in enumerate(arranged.chunk(tp, dim)):
        assert torch.equal(part, tensor.index_select(dim, selection.rows(rank)))
    assert torch.equal(selection.restored(arranged, dim), tensor)
    assert torch.equal(tensor.index_select(dim, selection.order), arranged)


def test_each_row_is_found_where_it_is_stored():
    assert SHARED.order.tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert SHARED.inverse.tolist() == [0, 1, 4, 5]


def test_packed_parts_are_cut_one_by_one():
    packed = Selection.packed([4, 2, 2], 2)
    assert [packed.rows(rank).tolist() for rank in range(2)] == [[0, 1, 4, 6], [2, 3, 5, 7]]


def test_chunks_are_told_from_choices():
    assert Selection.of([[0, 1], [2, 3]], 4).is_chunked
    assert not FUSED.is_chunked
    assert not SHARED.is_chunked
    assert not Selection.of([[2, 3], [0, 1]], 4).is_chunked


def test_a_module_remembers_what_is_arranged():
    layer = nn.Linear(4, 8)
    assert selection_of(layer, "weight") is None
    set_selection(layer, "weight", FUSED, 0)
    assert selection_of(layer, "weight") == (FUSED, 0)
    assert selection_of(layer, "bias") is None
