"""Each attribute and method of Accelerate's states counts data-parallel processes, or all of them, as decided here.

`num_processes`, `process_index` and what splits inputs go over data-parallel processes: peers of one batch are one.
What picks one process, to print or to write, goes over all of them, so that exactly one is picked.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, PartialState
from transformers import TrainingArguments

from tests.accelerate_plugin.harness import environment, launched, plugin
from tests.oracle import ranks_of
from tests.oracle.workers import attempt

INPUTS = list(range(5))


@dataclass(frozen=True)
class Place:
    """Where a process is: its rank among all, and its data-parallel rank."""

    rank: int
    world: int
    dp_rank: int
    dp_size: int

    @property
    def share(self) -> list[int]:
        most = -(-len(INPUTS) // self.dp_size)
        return INPUTS[self.dp_rank * most : (self.dp_rank + 1) * most]

    @property
    def padded(self) -> list[int]:
        most = -(-len(INPUTS) // self.dp_size)
        return [*self.share, *[INPUTS[-1]] * (most - len(self.share))]


def split(owner: Any) -> tuple[list[int], list[int]]:
    with owner.split_between_processes(INPUTS) as share, owner.split_between_processes(INPUTS, True) as padded:
        return share, padded


def picked(name: str, **index: int) -> Callable[[Any], bool]:
    """Return a function that says whether a decorator of its argument lets this process run a function."""

    def is_picked(owner: Any) -> bool:
        ran: list[int] = []
        getattr(owner, name)(lambda: ran.append(1), **index)()
        return bool(ran)

    return is_picked


def read(name: str) -> Callable[[Any], Any]:
    return lambda owner: getattr(owner, name)


# What a process should find: (how it is read, what it is), by name.
EVERYWHERE: dict[str, tuple[Callable[[Any], Any], Callable[[Place], Any]]] = {
    "local_process_index": (read("local_process_index"), lambda at: at.rank),
    "is_main_process": (read("is_main_process"), lambda at: at.rank == 0),
    "is_local_main_process": (read("is_local_main_process"), lambda at: at.rank == 0),
    "is_last_process": (read("is_last_process"), lambda at: at.rank == at.world - 1),
    "use_distributed": (read("use_distributed"), lambda at: True),
    "split_between_processes": (split, lambda at: (at.share, at.padded)),
}
DATA_PARALLEL = {
    "num_processes": (read("num_processes"), lambda at: at.dp_size),
    "process_index": (read("process_index"), lambda at: at.dp_rank),
}
ALL = {
    "num_processes": (read("num_processes"), lambda at: at.world),
    "process_index": (read("process_index"), lambda at: at.rank),
}
PICKED = {
    "on_main_process": (picked("on_main_process"), lambda at: at.rank == 0),
    "on_local_main_process": (picked("on_local_main_process"), lambda at: at.rank == 0),
    "on_last_process": (picked("on_last_process"), lambda at: at.rank == at.world - 1),
    "on_process": (picked("on_process", process_index=1), lambda at: at.rank == 1),
    "on_local_process": (picked("on_local_process", local_process_index=1), lambda at: at.rank == 1),
}
ROWS: dict[str, dict[str, tuple[Callable[[Any], Any], Callable[[Place], Any]]]] = {
    "Accelerator": {**EVERYWHERE, **DATA_PARALLEL, **PICKED},
    "AcceleratorState": {**EVERYWHERE, **DATA_PARALLEL},
    "PartialState": {**EVERYWHERE, **ALL, **PICKED},
}
# What of the two states counts no process, or all of them at one barrier.
OTHERS = {
    *("backend", "debug", "default_device", "destroy_process_group", "device", "distributed_type", "fork_launched"),
    *("initialized", "local_main_process_first", "main_process_first", "print", "set_device", "wait_for_everyone"),
    *("deepspeed_plugin", "deepspeed_plugins", "dynamo_plugin", "fsdp_plugin", "get_deepspeed_plugin", "is_fsdp2"),
    *("megatron_lm_plugin", "mixed_precision", "parallelism_config", "select_deepspeed_plugin", "torch_tp_plugin"),
}


def test_every_attribute_of_the_states_is_decided():
    """An attribute that a later Accelerate adds needs a row, or a place in `OTHERS`."""
    for kind in (PartialState, AcceleratorState):
        names = {name for name in dir(kind) if not name.startswith("_")}
        known = {name for name in kind._known_attrs if not name.startswith("_")}
        assert names | known <= OTHERS | ROWS[kind.__name__].keys(), kind


def states(mesh: str) -> tuple[Place, dict[str, dict[str, Any]]]:
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin(mesh))
        parallelism = accelerator.state.parallelism_config
        place = Place(dist.get_rank(), dist.get_world_size(), parallelism.dp_rank, parallelism.dp_size)
        owners = {"Accelerator": accelerator, "AcceleratorState": accelerator.state, "PartialState": PartialState()}
        return place, {
            owner: {name: how(owners[owner]) for name, (how, _) in rows.items()} for owner, rows in ROWS.items()
        }


@pytest.mark.parametrize("mesh", ["1x2", "2x2", "2x1"])
def test_each_attribute_counts_what_was_decided(pool, mesh):
    tp = 1 if mesh == "2x1" else 2
    for rank, (place, found) in enumerate(pool.run(ranks_of(mesh), states, mesh)):
        assert place == Place(rank, ranks_of(mesh), rank // tp, ranks_of(mesh) // tp)
        for owner, rows in ROWS.items():
            for name, (_, want) in rows.items():
                assert found[owner][name] == want(place), (owner, name, place)


def in_turn(place: Path) -> bool:
    """Prepare a data set with the main process first; return True if another one has done so already."""
    with launched(**environment("1x2")):
        arguments = TrainingArguments(str(place), report_to=[])
        with arguments.main_process_first():
            time.sleep(0.3 if dist.get_rank() == 0 else 0)
            there = (place / "prepared").exists()
            (place / "prepared").touch()
    return there


def test_the_main_process_goes_first_among_peers_of_one_batch(pool, tmp_path):
    assert pool.run(2, in_turn, tmp_path) == [False, True]


def later_accelerators(mesh: str) -> list[Any]:
    """Accelerators after the first, which has the plugin: one that dispatches batches, one that says nothing."""
    with launched():
        first = Accelerator(fsdp_plugin=plugin(mesh))
        refused = attempt(dispatching)
        second = Accelerator()
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2)
        shares = [[batch.tolist() for batch in each.prepare(loader)] for each in (first, second)]
        dispatches = second.dataloader_config.dispatch_batches
        joins = [attempt(joined, first, even) for even in (False, None)]
        AcceleratorState._reset_state()
        joins.append(attempt(first.prepare, torch.nn.Linear(1, 1)))
        return [refused, dispatches, shares, joins]


def dispatching() -> Any:
    return Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)).num_processes


def joined(accelerator: Accelerator, even_batches: bool | None) -> list[str]:
    """The warnings that it gives, as stock Accelerate does under FSDP."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([], even_batches):
            pass
    return [str(each.message) for each in heard]


@pytest.mark.parametrize("mesh", ["1x2", "2x1"])
def test_a_later_accelerator_is_checked_like_the_first(pool, mesh):
    for refused, dispatches, (first, second), (uneven, even, reset) in pool.run(2, later_accelerators, mesh):
        assert first == second
        assert "`join_uneven_inputs` will have no effect" in even[0]
        assert reset.kind == "AttributeError"
        assert "This happens if `AcceleratorState._reset_state()` was called" in reset.message
        if mesh == "1x2":
            assert refused.kind == "ValueError"
            assert "dispatch_batches=True is not supported" in refused.message
            assert dispatches is False
            assert uneven == even, "a single data-parallel process has no uneven share"
        else:
            assert refused == 2
            assert "join_uneven_inputs with even_batches=False" in uneven.message
