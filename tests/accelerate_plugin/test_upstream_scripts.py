"""The checks of Accelerate's own test scripts, called as they are on a mesh: which hold, and why others cannot."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import PartialState
from accelerate.test_utils import RegressionDataset, RegressionModel
from packaging.version import Version
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from tests.accelerate_plugin.harness import environment, launched
from tests.oracle import full, ranks_of
from tests.oracle.workers import Failure, attempt

MESHES = ("2x1", "1x2", "2x2")
TWO_BATCHES = ("2x1", "2x2")
"""Meshes of two data-parallel processes."""

ONE_EACH = ("2x1",)
"""Meshes on which every process sees a batch of its own."""

SCRIPTS = {
    name: f"accelerate.test_utils.scripts.{name}"
    for name in ("test_script", "test_ops", "test_sync", "test_distributed_data_loop", "external_deps.test_metrics")
}


def script(name: str) -> ModuleType:
    """Import a script. One of them imports `evaluate`, which no check that is called here needs."""
    missing = find_spec("evaluate") is None
    if missing:
        sys.modules["evaluate"] = ModuleType("evaluate")
    try:
        return import_module(SCRIPTS[name])
    finally:
        if missing:
            del sys.modules["evaluate"]


# ---------------------------------------------------------------------- what stands in for parts of a script


class Regression(RegressionModel):
    """The scripts' model with parameters of shape (1,): a scalar cannot be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(self.a.detach().view(1))
        self.b = torch.nn.Parameter(self.b.detach().view(1))


@contextmanager
def regression(upstream: ModuleType) -> Iterator[None]:
    """Let a script train `Regression`, and compare whole tensors where it compares a sharded one with its own.

    Its data come from one seed: without, every process draws others, and peers of one batch may not.
    """
    close, assert_close = torch.allclose, torch.testing.assert_close

    def all_close(mine: Tensor, sharded: Tensor | None, **settings: Any) -> bool:
        # FSDP2 puts no gradient in place before it is reduced, where DDP has the one of this process.
        return sharded is not None and close(full(mine), full(sharded), **settings)

    def assert_all_close(mine: Tensor, sharded: Tensor, **settings: Any) -> None:
        assert_close(full(mine), full(sharded), **settings)

    with ExitStack() as stack:
        for owner, name, instead in (
            (upstream, "RegressionModel", Regression),
            (upstream, "RegressionDataset", partial(RegressionDataset, seed=5)),
            (torch, "allclose", all_close),
            (torch.testing, "assert_close", assert_all_close),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def one_precision(upstream: ModuleType) -> AbstractContextManager[Any]:
    """Leave out float16, which is refused, and bfloat16, in which FSDP2 adds and multiplies and autocast does not."""
    return mock.patch.multiple(upstream, is_bf16_available=lambda: False, is_fp16_available=lambda: False)


def one_folder(upstream: ModuleType) -> AbstractContextManager[Any]:
    """Give all processes the same folder, where each would make one: they write a checkpoint together."""
    return mock.patch.object(upstream.tempfile, "TemporaryDirectory", partial(nullcontext, "checkpoint"))


@contextmanager
def warned(upstream: ModuleType) -> Iterator[None]:
    """Let the script hear warnings, which `launched` ignores."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


# ---------------------------------------------------------------------- arguments of the checks


def nothing() -> tuple[Any, ...]:
    """A script has made an Accelerator before it calls the check."""
    Accelerator()
    return ()


def accelerator(**loading: Any) -> tuple[Any, ...]:
    return (Accelerator(dataloader_config=DataLoaderConfiguration(**loading)),)


def state() -> tuple[Any, ...]:
    """The state that counts data-parallel processes."""
    return (Accelerator().state,)


def partial_state() -> tuple[Any, ...]:
    """The state that counts all processes, and has the flag `debug`."""
    Accelerator()
    return (PartialState(),)


def datasets_class() -> tuple[Any, ...]:
    Accelerator()
    return (import_module("datasets").Dataset,)


def loader(sampled_by: str | None = None, **settings: Any) -> tuple[Any, ...]:
    """A dataloader as the script makes it, without workers: the ranks of the pool may start no processes."""
    made = Accelerator()
    torch.manual_seed(made.process_index)
    dataset = script("test_distributed_data_loop").DummyDataset()
    if sampled_by is not None:
        settings[sampled_by] = BatchSampler(RandomSampler(dataset), batch_size=4, drop_last=False)
    return DataLoader(dataset, **settings), made


# ---------------------------------------------------------------------- the tables


@dataclass(frozen=True)
class Holds:
    """Describe how a check is called, and on which meshes."""

    given: tuple[Callable[[], tuple[Any, ...]], ...] = (nothing,)
    """Functions that make its positional arguments: it is called with those of each."""

    settings: tuple[dict[str, Any], ...] = ({},)
    """Keyword arguments: it is called with each of these."""

    instead: tuple[Callable[[ModuleType], AbstractContextManager[Any]], ...] = ()
    """Replace parts of the script while the check runs."""

    meshes: tuple[str, ...] = MESHES
    why: str = ""
    """The reason why it cannot hold on the other meshes."""


def all_of(*names: str, row: Holds) -> dict[str, tuple[Holds, ...]]:
    return dict.fromkeys(names, (row,))


COUNTS_ALL = "it compares what all processes do with num_processes, which counts data-parallel ones"
FOR_TWO = "it is for two processes, or more"
DISPATCHES = "dispatch_batches=True is refused where several processes see one batch"
UNEVEN = "join_uneven_inputs with even_batches=False is refused"
PART = "it is a part of other checks, which call it"

EITHER = (True, False)


def accumulating(dispatched: bool) -> tuple[dict[str, bool], ...]:
    return tuple(
        {"split_batches": split, "dispatch_batches": dispatched, "sync_each_batch": each}
        for split in EITHER
        for each in EITHER
    )


HOLDS: dict[str, dict[str, tuple[Holds, ...]]] = {
    "test_script": {
        **all_of(
            *("init_state_check", "rng_sync_check", "dl_preparation_check", "custom_sampler_check"),
            *("check_seedable_sampler", "check_seedable_sampler_with_data_seed", "test_split_between_processes_list"),
            *("test_split_between_processes_nested_dict", "test_split_between_processes_tensor"),
            *("test_split_between_processes_evenly", "test_trigger", "test_reinstantiated_state"),
            row=Holds(),
        ),
        "process_execution_check": (Holds(meshes=ONE_EACH, why=COUNTS_ALL),),
        "test_split_between_processes_dataset": (Holds((datasets_class,), meshes=ONE_EACH, why=COUNTS_ALL),),
        "central_dl_preparation_check": (Holds(meshes=ONE_EACH, why=DISPATCHES),),
        "check_seedable_sampler_in_batch_sampler_shard": (Holds(meshes=TWO_BATCHES, why=FOR_TWO),),
        "training_check": (
            Holds(
                settings=({"use_seedable_sampler": False}, {"use_seedable_sampler": True}),
                instead=(regression, one_precision),
            ),
        ),
    },
    "test_ops": {
        **all_of(
            *("test_gather", "test_gather_object", "test_gather_non_contiguous", "test_broadcast"),
            *("test_pad_across_processes", "test_reduce_sum", "test_reduce_mean"),
            *(["test_reduce_max"] if Version(accelerate.__version__) >= Version("1.14") else []),
            row=Holds((state,)),
        ),
        "test_op_checker": (
            Holds((partial_state,), meshes=TWO_BATCHES, why="there is no other data-parallel process to differ from"),
        ),
    },
    "test_sync": {
        "test_dataloader_break": (Holds(),),
        "test_distributed_sync": (Holds((accelerator,), instead=(regression,), meshes=TWO_BATCHES, why=FOR_TWO),),
        "test_distributed_sync_multiple_fwd": (Holds((accelerator,), instead=(regression,)),),
        "test_gradient_accumulation": (
            Holds(settings=accumulating(False), instead=(regression,), meshes=TWO_BATCHES, why=FOR_TWO),
            Holds(settings=accumulating(True), instead=(regression,), meshes=ONE_EACH, why=DISPATCHES),
        ),
        "test_gradient_accumulation_with_opt_and_scheduler": (
            Holds(settings=accumulating(False), instead=(regression,)),
            Holds(settings=accumulating(True), instead=(regression,), meshes=ONE_EACH, why=DISPATCHES),
        ),
    },
    "test_distributed_data_loop": {
        **all_of(
            *("test_default_ensures_even_batch_sizes", "test_can_disable_even_batches", "test_pickle_accelerator"),
            row=Holds(meshes=TWO_BATCHES, why=FOR_TWO),
        ),
        "test_join_raises_warning_for_non_ddp_distributed": (Holds((accelerator,), instead=(warned,)),),
        "test_data_loader": (
            Holds(
                (
                    partial(loader, batch_size=4),
                    partial(loader, batch_size=4, shuffle=True),
                    partial(loader, "batch_sampler"),
                )
            ),
            Holds(
                (partial(loader, "sampler", batch_size=None, collate_fn=default_collate),),
                meshes=TWO_BATCHES,
                why="Accelerate passes batch_size twice where num_processes is 1",
            ),
        ),
        "test_stateful_dataloader": (Holds((accelerator,)),),
        "test_stateful_dataloader_save_state": (Holds((accelerator,), instead=(one_folder,)),),
    },
    "external_deps.test_metrics": {
        "test_torch_metrics": tuple(
            Holds(
                tuple(partial(accelerator, split_batches=split, dispatch_batches=dispatched) for split in EITHER),
                ({"num_samples": 99}, {"num_samples": 512}),
                (regression,),
                ONE_EACH if dispatched else MESHES,
                DISPATCHES if dispatched else "",
            )
            for dispatched in EITHER
        ),
        "test_gather_for_metrics_with_non_tensor_objects_iterable_dataset": (Holds(),),
        "test_gather_for_metrics_with_iterable_dataset": (
            Holds(meshes=ONE_EACH, why="it asserts that the dataloader dispatches batches"),
        ),
        "test_gather_for_metrics_drop_last": (Holds(),),
    },
}

LEFT_OUT: dict[str, dict[str, str]] = {
    "test_script": {},
    "test_ops": {"test_copy_tensor_to_devices": "it does nothing where the distributed type is FSDP"},
    "test_sync": {
        "check_model_parameters": PART,
        "test_noop_sync": "it is for one process: on a mesh `.grad` is unspecified until a backward outside of no_sync",
    },
    "test_distributed_data_loop": {
        "test_can_join_uneven_inputs": UNEVEN,
        "test_join_can_override_even_batches": UNEVEN,
        "test_join_can_override_for_mixed_type_dataloaders": UNEVEN,
        "test_join_raises_warning_for_iterable_when_overriding_even_batches": UNEVEN,
        "verify_dataloader_batch_sizes": PART,
    },
    "external_deps.test_metrics": {"test_mrpc": "it needs a model, a data set and a metric from the network"},
}


# ---------------------------------------------------------------------- tests


def is_check(name: str) -> bool:
    return name.startswith(("test_", "check_", "verify_")) or name.endswith("_check")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_check_of_a_script_is_in_one_table(name):
    """A check that a later Accelerate adds needs a row, or a reason."""
    spec = find_spec(SCRIPTS[name])
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    checks = [each.name for each in tree.body if isinstance(each, ast.FunctionDef) and is_check(each.name)]
    assert sorted([*HOLDS[name], *LEFT_OUT[name]]) == sorted(checks)
    for rows in HOLDS[name].values():
        assert all(bool(row.why) == (row.meshes != MESHES) for row in rows)


def everyone(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def call(upstream: ModuleType, name: str, row: Holds, mesh: str) -> Iterator[str]:
    """Call a check in each of its ways, by Accelerators that the environment asks for; yield how it failed."""
    asked = environment(mesh, PARALLELISM_CONFIG_REQUIRE_ADAPTERS="false", PARALLELISM_CONFIG_TP_PLAN="{}")
    for given in row.given:
        for settings in row.settings:
            with launched(**asked), ExitStack() as stack:
                for instead in row.instead:
                    stack.enter_context(instead(upstream))
                mine = attempt(lambda: getattr(upstream, name)(*given(), **settings))  # noqa: B023 - called at once
            answers = attempt(everyone, mine)
            if isinstance(answers, Failure):  # no other check can be called: a process is inside of this one, or gone
                raise AssertionError(f"{upstream.__name__}.{name} {settings}: {mine or answers}")
            for rank, failure in enumerate(answers):
                if failure is not None:
                    yield f"{upstream.__name__}.{name} {settings} on rank {rank}: {failure.trace}"


def call_all(folder: Path, mesh: str) -> list[str]:
    """Call the checks that hold on a mesh, in a folder that they may write into; return how some failed."""
    before = os.getcwd()
    os.chdir(folder)
    failures: list[str] = []
    try:
        for place, checks in HOLDS.items():
            upstream = script(place)
            for name, rows in checks.items():
                for row in rows:
                    if mesh in row.meshes:
                        failures.extend(call(upstream, name, row, mesh))
    finally:
        os.chdir(before)
    return failures


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", MESHES)
def test_what_accelerate_checks_holds_on_a_mesh(pool, tmp_path, mesh):
    failures, *_ = pool.run(ranks_of(mesh), call_all, tmp_path, mesh)
    assert not failures, "\n".join(failures)
