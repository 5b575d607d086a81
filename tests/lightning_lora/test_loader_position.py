"""The position of torchdata's StatefulDataLoader: the private names that it is read by, and how it moves."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DistributedSampler

pytest.importorskip("torchdata")

from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_lora.data import moved_position

SAMPLERS = (DistributedSampler, StatefulDistributedSampler)


def loader(rank: int, ranks: int, kind: type, workers: int, snapshots: int = 1) -> StatefulDataLoader[int]:
    sampler = kind(range(24), ranks, rank, shuffle=False)
    fork: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    return StatefulDataLoader(
        range(24), 12 // ranks, sampler=sampler, num_workers=workers, snapshot_every_n_steps=snapshots, **fork
    )


def rows_of(loaders: list[StatefulDataLoader[int]]) -> list[list[int]]:
    """Return the rows of each step over all ranks."""
    return [
        sorted(row for batch in batches for row in batch.tolist()) for batches in zip(*map(iter, loaders), strict=True)
    ]


@pytest.mark.parametrize("kind", SAMPLERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("after", [1, 3, 4])
def test_the_next_rows_are_those_that_no_rank_has_seen(kind, workers, after):
    before = loader(0, 2, kind, workers)
    next(iter(before))
    moved = moved_position(before.state_dict(), 2, after)
    ranks = [loader(rank, after, kind, workers) for rank in range(after)]
    for each in ranks:
        each.load_state_dict(moved)
    assert rows_of(ranks) == [list(range(12, 24))]


def test_a_state_of_another_form_stays_as_it_is():
    for state in ({"position": 3, "yielded": 4}, [1, 2], None):
        assert moved_position(state, 2, 1) == state


def test_ranks_that_do_not_divide_the_rows_are_refused():
    before = loader(0, 2, DistributedSampler, 0)
    next(iter(before))
    with pytest.raises(ValueError, match="after 12 rows, which 5 data-parallel ranks do not divide: resume with 2"):
        moved_position(before.state_dict(), 2, 5)


def test_batches_after_a_snapshot_cannot_move():
    before = loader(0, 2, DistributedSampler, 1, snapshots=2)
    next(iter(before))
    state = before.state_dict()
    assert moved_position(state, 2, 2) is state
    with pytest.raises(ValueError, match=r"1 batches after a snapshot.*resume with 2, .*snapshot_every_n_steps=1"):
        moved_position(state, 2, 1)
