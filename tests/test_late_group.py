"""The engine waits for each result before it reads it, as a GPU needs, on every mesh axis and pipeline schedule.

On gloo a wait that is left out often changes nothing. Here the ranks communicate over `late_group`, where it gives NaN,
and run backward in a thread of its own; what they compute is held against one process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lora_parallel.distributed.mesh import dp_rank, dp_size
from lora_parallel.distributed.torch_private import default_store, one_gloo_thread, set_timeout
from tests import oracle
from tests.cases import cases
from tests.oracle import Case, Run, late_group
from tests.oracle.feature_rows import language_loss
from tests.oracle.workers import Failure, WorkerPool, attempt


@dataclass(frozen=True)
class DoubleLoss(Case):
    """A case whose model computes its loss in float64, as it is computed from slices; transformers takes float32."""

    def model(self) -> Any:
        model: Any = super().model()
        model.get_base_model().loss_function = language_loss
        return model


PLAIN = Case(steps=1)
TWICE = Case(steps=2)
CLIPPED = Case(steps=2, accumulate=2, clip=0.1, rows=4)
DEEP = Case(steps=1, sizes={"num_hidden_layers": 4})

Job = tuple[Case, str, dict[str, Any]]
"""A case, its mesh and the configuration."""

TWO_RANKS: dict[str, Job] = {
    "tp": (PLAIN, "1x2", {}),
    "sequence parallel": (PLAIN, "1x2", {"sequence_parallel": True}),
    "dp": (TWICE, "2x1", {}),
    "dp, base whole": (TWICE, "2x1", {"shard_base": False}),
    "dp, gathered ahead": (DEEP, "2x1", {"prefetch_blocks": 2}),
    "replicas": (PLAIN, "2x1x1", {}),
    "accumulation and clipping": (CLIPPED, "2x1", {}),
    "cp": (PLAIN, "1x1cp2", {}),
    "cp by all_gather": (PLAIN, "1x1cp2", {"cp_method": "all_gather"}),
    "pp 1f1b": (TWICE, "1x1pp2", {"pp_microbatches": 4}),
    "pp gpipe": (PLAIN, "1x1pp2", {"pp_microbatches": 4, "pp_schedule": "gpipe"}),
    "pp interleaved": (
        DEEP,
        "1x1pp2",
        {"pp_microbatches": 4, "pp_schedule": "interleaved", "pp_stages_per_rank": 2},
    ),
}
ORDERED = ["accumulation and clipping", "cp", "pp 1f1b", "pp interleaved"]
"""Jobs of `make test` in which ranks could wait for each other, which is where modes differ: the lazy one has all."""

FOUR_RANKS: dict[str, Job] = {
    "dp and tp": (CLIPPED, "2x2", {}),
    "sequence parallel, sliced loss, recomputation": (
        DoubleLoss(steps=2),
        "2x2",
        {"sequence_parallel": True, "loss_parallel": True, "activation_checkpointing": True},
    ),
    "dp and tp, base whole": (CLIPPED, "2x2", {"shard_base": False}),
    "dp and tp, gathered ahead": (replace(DEEP, steps=2), "2x2", {"prefetch_blocks": 2}),
    "replicas and tp": (PLAIN, "2x1x2", {}),
    "dp and cp": (PLAIN, "2x1cp2", {}),
    "tp and pp": (DEEP, "1x2pp2", {"pp_microbatches": 4}),
    "dp and pp, base whole": (TWICE, "2x1pp2", {"pp_microbatches": 2, "shard_base": False}),
    "pp 1f1b": (DEEP, "1x1pp4", {"pp_microbatches": 8}),
    "pp gpipe": (DEEP, "1x1pp4", {"pp_microbatches": 8, "pp_schedule": "gpipe"}),
}


@pytest.fixture(scope="module", params=late_group.MODES)
def mode(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def own_pool(mode) -> Iterator[WorkerPool]:
    with closing(WorkerPool(timeout=20, backend="cpu:late", prepare=partial(late_group.prepare, mode))) as workers:
        yield workers


in_lazy_mode = pytest.mark.parametrize("mode", ["lazy"], indirect=True)


def trained(job: Job) -> Run:
    case, mesh, config = job
    run = oracle.sharded(case, mesh, **config)
    run.gradients, run.adapters = (oracle.over_stages(each, mesh) for each in (run.gradients, run.adapters))
    return run


def threads_of_backward() -> set[threading.Thread]:
    threads = set()
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda _: threads.add(threading.current_thread()))
    weight.sum().backward()
    torch.autograd.grad(weight.sum(), weight)
    return threads


def all_trained(jobs: list[Job]) -> list[Run]:
    runs = [trained(job) for job in jobs]
    threads = threads_of_backward()
    assert len(threads) == 1, threads
    assert threading.current_thread() not in threads, "backward ran in the caller's thread: see run_backward_in_thread"
    return runs


reference = cache(oracle.reference)


BOUNDS = {"gradients": 1e-12, "adapters": 1e-10, "losses": 1e-6, "norms": 1e-12}
"""The bounds of docs/fidelity.md for float64; transformers computes losses in float32."""


def errors(run: Run, case: Case) -> dict[str, float]:
    """Return the relative errors that are too large, or NaN."""
    want = reference(case)
    found = {
        "gradients": oracle.relative_error(run.gradients, want.gradients),
        "adapters": oracle.relative_error(run.adapters, want.adapters),
    }
    for name in ("losses", "norms"):
        numbers, wanted = (torch.tensor(getattr(each, name), dtype=torch.float64) for each in (run, want))
        found[name] = oracle.relative_error({name: numbers}, {name: wanted})
    return {name: error for name, error in found.items() if not error <= BOUNDS[name]}


def check(own_pool: WorkerPool, ranks: int, jobs: dict[str, Job]) -> None:
    runs = own_pool.run(ranks, all_trained, list(jobs.values()))[0]
    wrong = {name: errors(run, case) for (name, (case, *_)), run in zip(jobs.items(), runs, strict=True)}
    assert wrong == {name: {} for name in jobs}


@pytest.mark.parametrize("mode", cases("eager", "lazy", matrix=["blocking"]), indirect=True)
def test_training_equals_one_process(own_pool, mode):
    check(own_pool, 2, TWO_RANKS if mode == "lazy" else {name: TWO_RANKS[name] for name in ORDERED})


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "jobs"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["2", "4"])
def test_more_training_equals_one_process(own_pool, ranks, jobs):
    check(own_pool, ranks, jobs)


def saved_and_resumed(mesh_text: str, folder: str) -> list[str]:
    """Return the names of tensors that a run which is saved and resumed in another model has otherwise than before."""
    from lora_parallel import load_checkpoint, parallelize, save_checkpoint

    mesh, config = oracle.on_mesh(mesh_text)

    def begun() -> tuple[Any, Any]:
        model = parallelize(PLAIN.model(), mesh, config)
        return model, torch.optim.AdamW(oracle.trained(model).values(), lr=1e-2)

    model, optimizer = begun()
    ids = PLAIN.batches()[0].chunk(dp_size(mesh))[dp_rank(mesh)]
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    save_checkpoint(model, optimizer, folder)
    want = {name: oracle.full(p) for name, p in oracle.trained(model).items()}
    again, optimizer = begun()
    load_checkpoint(again, optimizer, folder)
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert len(moments) == len(want)
    return oracle.differing({name: oracle.full(p) for name, p in oracle.trained(again).items()}, want)


@in_lazy_mode
def test_a_run_is_saved_and_resumed(own_pool, tmp_path):
    assert own_pool.run(2, saved_and_resumed, "2x1", str(tmp_path / "checkpoint")) == [[], []]


def without_tp_sum() -> AbstractContextManager[Any]:
    def all_reduce_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return torch.ops._c10d_functional.all_reduce(tensor, "sum", group.group_name)

    return mock.patch("lora_parallel.distributed.collectives.all_reduce_sum", all_reduce_sum)


def without_step(kind: str) -> AbstractContextManager[Any]:
    from lora_parallel.fsdp.unit_order import UnitOrder

    wait = UnitOrder.wait

    def wait_for_others(self: UnitOrder, work: dist.Work, step: str, group: dist.ProcessGroup) -> None:
        if not step.startswith(kind):
            wait(self, work, step, group)

    return mock.patch.object(UnitOrder, "wait", wait_for_others)


def without_pp_receive() -> AbstractContextManager[Any]:
    from lora_parallel.pp.links import Links

    return mock.patch.object(Links, "receive", lambda self, is_hidden: self._awaited[is_hidden].popleft()[1])


def trained_without(wait: Callable[[], AbstractContextManager[Any]], job: Job) -> Run:
    with wait():
        return trained(job)


@in_lazy_mode
@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (without_tp_sum, "tp"),
        (partial(without_step, "gather"), "dp"),
        (partial(without_step, "reduction"), "dp"),
        (without_pp_receive, "pp 1f1b"),
    ],
    ids=["tp", "gather", "reduction", "pp"],
)
def test_a_wait_that_is_left_out_gives_nan(own_pool, wait, name):
    run = own_pool.run(2, trained_without, wait, TWO_RANKS[name])[0]
    assert any(gradient.isnan().any() for gradient in run.gradients.values())


gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[Any]]] = {
    "all_reduce": (lambda given, out: dist.all_reduce(out.copy_(given), async_op=True), [3, 3]),
    "broadcast": (lambda given, out: dist.broadcast(out.copy_(given), 1, async_op=True), [2, 2]),
    "all_gather": (lambda given, out: dist.all_gather([*out], given, async_op=True), [[11, 11], [12, 12]]),
    "all_gather_single": (lambda given, out: gather_single(out, given, async_op=True), [11, 11, 12, 12]),
    "reduce_scatter_single": (lambda given, out: reduce_scatter_single(out, given, async_op=True), [23]),
    "all_to_all_single": (lambda given, out: dist.all_to_all_single(out, given, async_op=True), [11, 12]),
    "gather": (
        lambda given, out: dist.gather(given, None if dist.get_rank() else [*out], async_op=True),
        [[11, 11], [12, 12]],
    ),
    "scatter": (
        lambda given, out: dist.scatter(out, None if dist.get_rank() else [given, given], async_op=True),
        [11, 11],
    ),
    "recv": (lambda given, out: dist.isend(given, 0) if dist.get_rank() else dist.irecv(out, 1), [12, 12]),
}
"""Operations on [1, 1] of rank 0 and [2, 2] of rank 1, to which 10 is added as soon as the operation is issued, and
what rank 0 gets: those in place have read their input by then, and no others.
"""


def before_and_after(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    issue, want = OPERATIONS[name]
    given = torch.full((2,), dist.get_rank() + 1, dtype=dtype)
    out = torch.zeros(torch.tensor(want).shape, dtype=dtype)
    with mock.patch.object(late_group, "DELAY", 0.1):
        work = issue(given, out)
        given += 10
        while not work.is_completed():
            time.sleep(0.01)
        before = out.clone()  # the operation has run, and was not waited for
        work.wait()
    after = out.clone()
    out.zero_()
    work.wait()
    assert not out.any(), "a second wait has written the output once more"
    return before, after


@in_lazy_mode
def test_an_output_has_its_value_after_wait_and_not_before(own_pool):
    for name, (_, want) in OPERATIONS.items():
        before, after = own_pool.run(2, before_and_after, name, torch.float32)[0]
        assert before.isnan().all(), name
        assert after.tolist() == want, name
    before, after = own_pool.run(2, before_and_after, "all_reduce", torch.int64)[0]
    assert before.tolist() == [2**63 - 1] * 2
    assert after.tolist() == [3, 3]


def gathered_in_place() -> list[list[float]]:
    out = torch.full((2,), float(dist.get_rank()))
    work = gather_single(out, out[dist.get_rank()].view(1), async_op=True)
    before = out.tolist()
    work.wait()
    return [before, out.tolist()]


@in_lazy_mode
def test_a_rank_has_its_own_part_of_what_is_gathered_in_place(own_pool):
    first, second = own_pool.run(2, gathered_in_place)
    assert repr(first) == "[[0.0, nan], [0.0, 1.0]]"
    assert repr(second) == "[[nan, 1.0], [0.0, 1.0]]"


def sent_before_it_is_received() -> bool:
    message, store = torch.ones(1), dist.PrefixStore("late", default_store())
    if dist.get_rank() == 1:
        dist.recv(message, 0)
        store.wait(["looked"])
        dist.recv(message, 0)
        return False
    dist.send(message, 1)  # in lazy mode the first message of a pair waits for the peer in any case
    work = dist.isend(message, 1)
    time.sleep(0.1)
    is_sent = work.is_completed()
    store.set("looked", "")
    work.wait()
    return is_sent


@in_lazy_mode
def test_a_message_is_sent_when_it_is_received(own_pool):
    assert own_pool.run(2, sent_before_it_is_received) == [False, False]


ORDERS: dict[str, tuple[list[str], list[str], set[str]]] = {
    "collectives": (["all_reduce 0", "all_reduce 1"], ["all_reduce 1", "all_reduce 0"], {"blocking"}),
    "message and collective": (["recv 0", "all_reduce 0"], ["all_reduce 0", "send 0"], {"eager", "blocking"}),
    "messages": (["recv 0", "send 1"], ["recv 1", "send 0"], {"lazy", "blocking"}),
}
"""Operations that rank 0 and rank 1 issue in two groups, and the modes in which they wait for each other for ever."""


def error_of(orders: tuple[list[str], ...], seconds: float) -> str | None:
    with one_gloo_thread():
        groups = [dist.new_group() for _ in range(2)]
    for group in groups:
        set_timeout(group, seconds)

    def issue(step: str) -> Any:
        kind, _, index = step.partition(" ")
        group, tensor, peer = groups[int(index)], torch.ones(1), 1 - dist.get_rank()
        if kind == "all_reduce":
            return dist.all_reduce(tensor, group=group, async_op=True)
        return dist.isend(tensor, peer, group) if kind == "send" else dist.irecv(tensor, peer, group)

    def run() -> None:
        for work in [issue(step) for step in orders[dist.get_rank()]]:
            work.wait()

    answer = attempt(run)
    return answer.message if isinstance(answer, Failure) else None


@pytest.mark.parametrize("order", ORDERS)
def test_the_modes_differ_in_what_waits_for_what(own_pool, mode, order):
    *orders, deadlocks = ORDERS[order]
    told = own_pool.run(2, error_of, tuple(orders), 0.5 if mode in deadlocks else 20)
    assert all(told) if mode in deadlocks else told == [None, None]


def refusals() -> list[str]:
    tensor = torch.zeros(2, 3)
    failures = [
        attempt(dist.all_reduce, tensor.to(torch.int16)),
        attempt(dist.broadcast, tensor.T, 0),
        attempt(dist.all_reduce, tensor.int(), dist.ReduceOp.BAND),
        attempt(dist.reduce, tensor, 0),
    ]
    return [failure.message for failure in failures]


@in_lazy_mode
def test_what_nccl_lacks_is_refused_by_name(own_pool):
    assert own_pool.run(2, refusals)[0] == [
        "late: all_reduce of a tensor [2, 3] of torch.int16: NCCL has no such dtype.",
        "late: broadcast of a tensor [3, 2] of torch.float32 with strides (1, 3): NCCL takes contiguous tensors only.",
        "late: all_reduce of a tensor [2, 3] of torch.int32 by RedOpType.BAND: NCCL has no such reduction.",
        "No backend type associated with device type cpu",
    ]


def test_a_mode_that_is_none_is_refused():
    with pytest.raises(ValueError, match="mode is 'eagre': it is one of"):
        late_group.register("eagre")
