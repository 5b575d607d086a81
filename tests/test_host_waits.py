"""In a training step no line of the product waits for the device, and nothing that it needs is left on the CPU.

A step that runs ahead of its GPU hides the host's time; one wait for the GPU in it shows all of that time. Here rank 0
of each mesh trains on a device that has no values, and notes who waits (tests/oracle/fake_device.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FunctionType, MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_parallel import ParallelConfig, build_mesh, clip_grad_norm_, parallelize
from lora_parallel.distributed.dtensors import local, tensor_on
from tests import oracle
from tests.oracle import Case, fake_device
from tests.oracle.fake_device import DEVICE, Event, Wait
from tests.oracle.workers import FAKE, WorkerPool

ONE_BLOCK = {"num_hidden_layers": 1}
DROPOUT: dict[str, Any] = {"lora": {"lora_dropout": 0.1}}

JOBS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tp": ("1x2", {}, {}),
    "dp": ("2x1", {"sizes": {"num_hidden_layers": 2}}, {}),
    "dp and tp": ("2x2", {}, {}),
    "cp by ulysses": ("1x1cp2", DROPOUT, {}),
    "cp by all_gather": ("2x1cp2", {}, {"cp_method": "all_gather"}),
    "sequence parallel, sliced loss, dropout": ("2x2", DROPOUT, {"sequence_parallel": True, "loss_parallel": True}),
    "fused layers": ("1x2", {"family": "phi3", "lora": {"target_modules": "all-linear"}}, {}),
    "recomputation, dropout": ("2x2", DROPOUT, {"activation_checkpointing": True}),
    "whole base": ("2x2", {}, {"shard_base": False}),
    "DoRA": ("2x2", {"lora": {"use_dora": True}}, {}),
    "bfloat16": ("2x2", {}, {"param_dtype": torch.bfloat16}),
}
"""The mesh of a case, what it is and its configuration."""

WAITS = {
    # For the message of the forward before, which the device has sent a whole step ago.
    ("lora_parallel.runtime.same_batch", "begin_forward", "synchronize"),
}
"""Where the host may wait."""

ON_CPU = {
    "SameBatch._sent",  # the copy of a message, in pinned memory, to be read a step later
    "RowPartition.order",  # which are read as slices, at set-up and by a save
    "RowPartition.inverse",
}
"""Tensors that may be in the CPU's memory."""


@pytest.fixture(scope="module")
def own_pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool(backend=FAKE, prepare=fake_device.register)) as workers:
        yield workers


def refused(waits: set[Wait]) -> set[Wait]:
    """Return the waits of the product, without those of libraries that it has called, and those of `WAITS`."""
    ours = {wait for wait in waits if not wait.module or wait.module.partition(".")[0] == "lora_parallel"}
    return {wait for wait in ours if (wait.module, wait.function, wait.why) not in WAITS}


def trained(name: str) -> tuple[set[Wait], set[str]]:
    """Return where the host waits in the last of three steps, and what the model then holds on the CPU."""
    mesh_text, case, settings = JOBS[name]
    with fake_device.rank_on_device(oracle.ranks_of(mesh_text)):
        config = ParallelConfig(**oracle.parse_mesh(mesh_text), **settings)
        mesh = build_mesh(config, DEVICE)
        model = Case(**{"dtype": torch.float32, "sizes": ONE_BLOCK, **case}).model()
        parallelize(model, mesh, config)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for _ in range(3):
            ids = torch.randint(0, 131, (8 // oracle.dp_of(mesh_text), 12), device=DEVICE)
            fake_device.WAITS.clear()
            model(input_ids=ids, labels=ids).loss.backward()
            clip_grad_norm_(parameters, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        assert all(p.grad is None for p in parameters)
        return set(fake_device.WAITS), on_cpu(model)


def on_cpu(model: nn.Module) -> set[str]:
    """Return the attributes of modules, and of the product's objects that they hold, that are tensors on the CPU."""
    found, seen, waiting = set(), set(), [("", model)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner: list[tuple[str, Any]] = []
        if isinstance(value, Tensor):
            if local(value).device.type == "cpu":
                found.add(name)
        elif isinstance(value, dict):
            inner = [(name, each) for each in value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            inner = [(name, each) for each in value]
        elif isinstance(value, partial):
            inner = [(name, each) for each in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, MethodType):
            inner = [(name, value.__self__)]
        elif isinstance(value, FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            inner = [(f"{value.__qualname__}.{key}", cell.cell_contents) for key, cell in cells]
        elif isinstance(value, nn.Module) or type(value).__module__.startswith("lora_parallel."):
            slots = {key: getattr(value, key, None) for key in getattr(value, "__slots__", ())}
            inner = [
                (f"{type(value).__name__}.{key}", each)
                for key, each in {**getattr(value, "__dict__", {}), **slots}.items()
            ]
        waiting.extend(inner)
    return found


@pytest.fixture(scope="module", params=JOBS)
def found(own_pool, request) -> tuple[set[Wait], set[str]]:
    return own_pool.run(1, trained, request.param)[0]


def test_the_host_waits_for_nothing(found):
    assert refused(found[0]) == set()


def test_nothing_that_a_step_needs_is_on_the_cpu(found):
    assert found[1] - ON_CPU == set()


OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str]]] = {
    "fill": (lambda there, here: torch.full((2,), 3, device=DEVICE), []),
    "tensor_on": (lambda there, here: tensor_on(DEVICE, [1, 2], torch.int64), []),
    "from pinned memory": (lambda there, here: there.copy_(here.pin_memory(), non_blocking=True), []),
    "to pinned memory": (lambda there, here: torch.empty(2, pin_memory=True).copy_(there, non_blocking=True), []),
    "a number of the CPU": (lambda there, here: there * torch.tensor(2.0), []),
    "places": (lambda there, here: there[torch.zeros(1, dtype=torch.int64, device=DEVICE)], []),
    "mask": (lambda there, here: torch.where(there > 0, there, 0.0).masked_fill(there < 0, 1.0), []),
    "data": (lambda there, here: torch.tensor([1, 2], device=DEVICE), ["copy from cpu to gpu"]),
    "to": (lambda there, here: here.to(DEVICE, non_blocking=True), ["copy from cpu to gpu"]),
    "blocking copy": (lambda there, here: there.copy_(here.pin_memory()), ["copy from cpu to gpu"]),
    "cpu": (lambda there, here: there.cpu(), ["copy from gpu to cpu"]),
    "tolist": (lambda there, here: there.tolist(), ["_local_scalar_dense"] * 2),
    "to unpinned memory": (lambda there, here: here.copy_(there, non_blocking=True), ["copy from gpu to cpu"]),
    "item": (lambda there, here: there.sum().item(), ["_local_scalar_dense"]),
    "if": (lambda there, here: bool((there > 0).all()), ["_local_scalar_dense"]),
    "equal": (lambda there, here: torch.equal(there, there), ["equal"]),
    "nonzero": (lambda there, here: there.nonzero(), ["nonzero"]),
    "truths": (lambda there, here: there[there > 0], ["index of truths"]),
    "set by truths": (lambda there, here: there.index_put_((there > 0,), there), ["index of truths"]),
    "places on the CPU": (lambda there, here: there[torch.tensor([1])], ["index on the CPU"]),
    "repeat": (lambda there, here: there.repeat_interleave(there.long()), ["repeat_interleave"]),
    "repeat to a size": (lambda there, here: there.repeat_interleave(there.long(), output_size=3), []),
    "synchronize": (lambda there, here: (Event().synchronize(), torch.gpu.synchronize()), ["synchronize"] * 2),
    "barrier": (lambda there, here: torch.distributed.barrier(), ["barrier"]),
}
"""Operations with two numbers on the device and two on the CPU, and what the host waits for in them."""


def noted(name: str) -> list[str]:
    with fake_device.rank_on_device(2):
        there, here = torch.ones(2, device=DEVICE), torch.ones(2)
        fake_device.WAITS.clear()
        OPERATIONS[name][0](there, here)
        assert {wait.module for wait in fake_device.WAITS} <= {__name__}
        return [wait.why for wait in fake_device.WAITS]


def all_noted() -> dict[str, list[str]]:
    return {name: noted(name) for name in OPERATIONS}


def test_the_device_tells_which_operations_wait(own_pool):
    assert own_pool.run(1, all_noted)[0] == {name: whys for name, (_, whys) in OPERATIONS.items()}


BREAKAGES = {
    "runtime.same_batch:SameBatch._message": (
        "torch.full((), described, device",
        "torch.tensor(described, device",
        "copy from cpu to gpu",
    ),
    "distributed.gradients:_total": ("else total.sum()", "else total[0].item() * total.sum()", "_local_scalar_dense"),
    "distributed.gradients:_power_sum": (
        "norm(filled, norm",
        "norm([filled[0][filled[0] > 0]], norm",
        "index of truths",
    ),
    "distributed.collectives:_CopyToTP.backward": (  # in autograd's thread
        "if len(grads) == 1:",
        "if len(grads[0].cpu()) and len(grads) == 1:",
        "copy from gpu to cpu",
    ),
}
"""Functions, a text of each, another in its place, and what the host waits for then."""


def code_in(code: CodeType, like: CodeType) -> CodeType | None:
    """Return the code that is in `code`, of the function at the place of another one."""
    if (code.co_name, code.co_firstlineno) == (like.co_name, like.co_firstlineno):
        return code
    inner = (code_in(each, like) for each in code.co_consts if isinstance(each, CodeType))
    return next(filter(None, inner), None)


def trained_broken() -> tuple[set[Wait], set[Wait]]:
    """Return the waits of a step in which each function of `BREAKAGES` has its other text, and those texts' places."""
    places = set()
    with ExitStack() as stack:
        for name, (old, new, why) in BREAKAGES.items():
            function = inspect.unwrap(resolve_name(f"lora_parallel.{name}"))
            own = function.__code__
            text = Path(own.co_filename).read_text()
            assert text.count(old) == 1, name
            stack.callback(setattr, function, "__code__", own)
            function.__code__ = code_in(compile(text.replace(old, new), own.co_filename, "exec"), own)
            line = text[: text.index(old)].count("\n") + 1
            places.add(Wait(why, function.__module__, function.__name__, line))
        return trained("tp")[0], places


def test_a_wait_is_reported_with_its_line(own_pool):
    waits, places = own_pool.run(1, trained_broken)[0]
    assert refused(waits) == places


class Holder(nn.Linear):
    """Holds tensors in the CPU's memory, and on meta, in the ways in which modules do."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False, device="meta")
        self.register_buffer("buffer", torch.ones(1))
        self.sizes = {"first": (torch.ones(1), torch.ones(1, device="meta"))}
        index = torch.zeros(1)
        self.register_forward_hook(lambda *_: index)
        self.register_forward_pre_hook(partial(lambda index, *_: None, torch.zeros(1)))


def test_a_tensor_on_the_cpu_is_reported_with_its_holder():
    assert on_cpu(Holder()) == {
        "Holder._buffers",
        "Holder.sizes",
        "Holder.__init__.<locals>.<lambda>.index",
        "Holder._forward_pre_hooks",
    }
