"""In a training step no line of the product waits for the device, and nothing that it needs is left on the CPU.

A step that runs ahead of its GPU hides the host's time, and one wait for the GPU in it shows all of that time. Here one
rank of each mesh trains on a device that has no values (tests/oracle/fake_device.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import CodeType, FunctionType, MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lora_parallel import ParallelConfig, TenantPool, build_mesh, clip_grad_norm_, parallelize
from lora_parallel.distributed.dtensors import local, tensor_on
from lora_parallel.distributed.rank_checks import begin_gather
from tests import oracle
from tests.cases import cases
from tests.oracle import Case, fake_device
from tests.oracle.expert_rows import ATTENTION, BY_EXPERTS, MIXTRAL, STACKS
from tests.oracle.fake_device import DEVICE, Event, Wait
from tests.oracle.rows import build
from tests.oracle.tenant_rows import add, loss_of
from tests.oracle.workers import FAKE, WorkerPool

Step = Callable[[Tensor], None]


def model_of(blocks: int = 1, family: str = "llama", **lora: Any) -> nn.Module:
    lora = {"target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"], **lora}
    return Case(family, torch.float32, lora=lora, sizes={"num_hidden_layers": blocks}).model()


def base() -> nn.Module:
    return oracle.causal_lm(dtype=torch.float32, num_hidden_layers=1).train()


def mixtral() -> nn.Module:
    # transformers' grouped products need bfloat16 and rows of 16 bytes.
    sizes = {**MIXTRAL, "num_hidden_layers": 1, "intermediate_size": 64}
    lora = {"r": 8, "target_modules": ATTENTION, "target_parameters": STACKS}
    return build("MixtralForCausalLM", sizes, **lora).bfloat16()


def adapter_step(model: nn.Module) -> Step:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    def step(ids: Tensor) -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        clip_grad_norm_(parameters, 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tenants_step(model: nn.Module) -> Step:
    pool, names = TenantPool(model), ["ada", "bea"]
    for name in names:
        add(pool, name)

    def step(ids: Tensor) -> None:
        with pool.route([name for name in names for _ in range(len(ids) // 2)]):
            loss_of(model(input_ids=ids).logits, ids).backward()
        for name in names:
            pool.step(name)

    return step


@dataclass(frozen=True)
class Job:
    """A rank of a mesh that trains a model."""

    mesh: str
    config: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = model_of
    rank: int = 0
    step_of: Callable[[nn.Module], Step] = adapter_step


dropout = partial(model_of, lora_dropout=0.1)
fused = partial(model_of, family="phi3", target_modules="all-linear")
JOBS = {
    "tp": Job("1x2"),
    "dp": Job("2x1", model=partial(model_of, blocks=2)),
    "dp and tp": Job("2x2"),
    "cp by ulysses": Job("1x1cp2", model=dropout),
    "cp by all_gather": Job("2x1cp2", {"cp_method": "all_gather"}),
    "sequence parallel, sliced loss": Job("2x2", {"sequence_parallel": True, "loss_parallel": True}, dropout),
    "fused layers": Job("1x2", model=fused),
    "recomputation": Job("2x2", {"activation_checkpointing": True}, dropout),
    "whole base": Job("2x2", {"shard_base": False}),
    "DoRA": Job("2x2", model=partial(model_of, use_dora=True)),
    "bfloat16": Job("2x2", {"param_dtype": torch.bfloat16}),
    "slices of experts": Job("1x2", model=mixtral),
    "some of the experts": Job("1x2", BY_EXPERTS, mixtral),
    "tenants": Job("1x2", {"require_adapters": False}, base, step_of=tenants_step),
    # The others read what the last stage sends them, and here it has no values.
    "last pipeline stage": Job("1x1pp2", {"pp_microbatches": 2}, partial(model_of, blocks=2), rank=1),
}

WAITS = {
    # For the message of the forward before, which the device has sent a whole step ago.
    ("lora_parallel.runtime.same_batch", "begin_forward", "synchronize"),
    # Once a backward, under 1f1b: gradients that ranks have multiplied by unlike factors must reach no optimizer.
    ("lora_parallel.pp.loss", "check", "_local_scalar_dense"),
}
"""Where the host may wait."""

ON_CPU = {
    "SameBatch._sent",  # pinned memory, into which the device copies a message that is read a step later
    "RowPartition.order",  # read as numbers, when weights are cut and saved
    "RowPartition.inverse",
}
"""Tensors that may be in the CPU's memory."""


@pytest.fixture(scope="module")
def own_pool() -> Iterator[WorkerPool]:
    with closing(WorkerPool(backend=FAKE, prepare=fake_device.register)) as workers:
        yield workers


def trained(name: str) -> tuple[set[Wait], set[str]]:
    """Return where the host waits in the last of three steps, and what the model holds on the CPU then."""
    job = JOBS[name]
    with fake_device.rank_on_device(oracle.ranks_of(job.mesh), job.rank):
        config = ParallelConfig(**oracle.parse_mesh(job.mesh), **job.config)
        model = parallelize(job.model(), build_mesh(config, DEVICE), config)
        step = job.step_of(model)
        for _ in range(3):
            ids = torch.randint(0, 131, (8 // oracle.dp_of(job.mesh), 12), device=DEVICE)
            fake_device.WAITS.clear()
            step(ids)
        return set(fake_device.WAITS), on_cpu(model)


def refused(waits: set[Wait]) -> set[Wait]:
    """Return the waits of the product, without those of libraries that it has called, and those of `WAITS`."""
    ours = {wait for wait in waits if not wait.module or wait.module.startswith("lora_parallel.")}
    return {wait for wait in ours if (wait.module, wait.function, wait.why) not in WAITS}


def on_cpu(model: nn.Module) -> set[str]:
    """Return the attributes of modules, and of the product's objects that they hold, that are tensors on the CPU."""
    found, seen, left = set(), {}, [("", model)]
    while left:
        name, value = left.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value  # kept: another object would get its number
        if isinstance(value, Tensor) and local(value).device.type == "cpu":
            found.add(name)
        left += inside(name, value)
    return found


def inside(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return what is in a container, in a hook's closure and arguments, or in an object of the product."""
    if isinstance(value, dict):
        return [(name, each) for each in value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(name, each) for each in value]
    if isinstance(value, partial):
        return [(name, each) for each in (value.func, *value.args, *value.keywords.values())]
    if isinstance(value, MethodType):
        return [(name, value.__self__)]
    if isinstance(value, FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [(f"{value.__qualname__}.{key}", cell.cell_contents) for key, cell in cells]
    if isinstance(value, nn.Module) or type(value).__module__.startswith("lora_parallel."):
        slots = {key: getattr(value, key) for key in getattr(value, "__slots__", ())}
        return [(f"{type(value).__name__}.{key}", each) for key, each in (slots or vars(value)).items()]
    return []


MORE = ["dp and tp", "cp by all_gather", "recomputation", "DoRA", "some of the experts"]
"""Jobs whose lines others have too."""


@pytest.fixture(scope="module", params=cases(*(name for name in JOBS if name not in MORE), matrix=MORE))
def found(own_pool, request) -> tuple[set[Wait], set[str]]:
    return own_pool.run(1, trained, request.param)[0]


def test_the_host_waits_for_nothing(found):
    assert refused(found[0]) == set()


def test_nothing_that_a_step_needs_is_on_the_cpu(found):
    assert found[1] - ON_CPU == set()


def gathered() -> tuple[set[str], set[tuple[str, str]]]:
    """Return what the host waits for as numbers of all ranks are asked for, and where as they are read."""
    with fake_device.rank_on_device(2):
        fake_device.WAITS.clear()
        result = begin_gather([1, 2], "a step")
        asked = {wait.why for wait in fake_device.WAITS}
        fake_device.WAITS.clear()
        assert result().shape == (2, 2)
        return asked, {(wait.function, wait.why) for wait in fake_device.WAITS}


def test_an_answer_that_is_read_a_step_later_waits_for_its_own_message_alone(own_pool):
    """Lightning's ranks ask each other after each step whether one has received SIGTERM."""
    assert own_pool.run(1, gathered)[0] == (set(), {("copied_result", "synchronize")})


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
    "barrier": (lambda there, here: dist.barrier(), ["barrier"]),
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
