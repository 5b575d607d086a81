"""Let a StatefulDataLoader of torchdata go on at its position on another number of data-parallel ranks.

Its state has no public form: the private names of torchdata and Lightning that this needs are used in this file only,
and `tests/lightning_lora/test_loader_position.py` checks them.
See torchdata/stateful_dataloader, https://github.com/meta-pytorch/data.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import DistributedSampler

__all__ = ["moved_position", "seed_order"]

_HOLDERS = {"_snapshot", "_main_snapshot", "_sampler_iter_state", "_index_sampler_state"}
"""Keys in the state of a StatefulDataLoader under which the states of samplers are."""

_SAMPLERS = {"sampler_state", "sampler_iter_state"}
_ROWS = {"samples_yielded", "yielded"}
"""Keys of the numbers of rows that a rank's sampler has given out in the epoch."""

_SINCE = "_steps_since_snapshot"
"""Key of the number of batches after the snapshot, which are fetched again at a resume."""


def seed_order(dataloader: object) -> None:
    """Let the order of rows of a shuffling StatefulDataLoader follow from the seed and the epoch alone.

    Lightning's sampler takes the order from torchdata's, which draws another one each time that it is asked: first to
    begin and then to go to the position of a checkpoint. In its place comes the sampler that Lightning gives torch's
    DataLoader.

    Args:
        dataloader: The dataloader, with Lightning's sampler. Any other one stays as it is.
    """
    torchdata: Any = sys.modules.get("torchdata.stateful_dataloader.sampler")
    batches: Any = getattr(dataloader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    own = getattr(getattr(sampler, "dataset", None), "_sampler", None)  # of Lightning's DistributedSamplerWrapper
    if torchdata is None or not isinstance(sampler, DistributedSampler) or not isinstance(own, torchdata.RandomSampler):
        return
    if not own.replacement and own.num_samples == len(own.data_source):
        names = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
        batches.sampler = DistributedSampler(own.data_source, **{name: getattr(sampler, name) for name in names})


def moved_position(state: Any, before: int, after: int) -> Any:
    """Return the state of a dataloader for another number of data-parallel ranks.

    torchdata's samplers count the rows of one rank. A state of another form, from a loader of the user's own, is
    returned as it is.

    Args:
        state: What the loader's `state_dict` returned.
        before: The number of data-parallel ranks that saved it.
        after: The number of them that go on.

    Raises:
        ValueError: The ranks do not divide the rows that were given out, or the state counts batches of one rank too.
    """
    if not isinstance(state, dict) or before == after:
        return state
    if _HOLDERS & state.keys() and state.get(_SINCE):
        raise ValueError(
            f"the checkpoint was saved {state[_SINCE]} batches after a snapshot of the dataloader, which only "
            f"{before} data-parallel ranks can go on from: resume with {before}, or from a checkpoint of the end of an "
            "epoch; save with snapshot_every_n_steps=1 (torchdata's default) to resume with another number."
        )
    inside = {key: moved_position(value, before, after) for key, value in state.items() if key in _HOLDERS}
    return {**state, **{key: _moved(value, before, after) for key, value in inside.items()}}


def _moved(state: Any, before: int, after: int) -> Any:
    if not isinstance(state, dict):
        return state
    moved = {}
    for key, value in state.items():
        if key in _SAMPLERS:
            value = _moved(value, before, after)
        elif key in _ROWS and isinstance(value, int):
            rows, left = divmod(value * before, after)
            if left:
                raise ValueError(
                    f"the checkpoint was saved in mid-epoch, after {value * before} rows, which {after} data-parallel "
                    f"ranks do not divide: resume with {before}, or from a checkpoint of the end of an epoch."
                )
            value = rows
        moved[key] = value
    return moved
