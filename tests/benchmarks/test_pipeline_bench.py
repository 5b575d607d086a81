"""The orders of pipeline schedules, simulated: no deadlock, the formula's bubble, and the orders of torch and books."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from benchmarks.schedule_simulation import bubble_formula, order_of, simulate
from lora_parallel import parallelize
from lora_parallel.pp.schedules import Action, check_microbatches, one_forward_one_backward
from tests.lora_parallel.cp.runs import language
from tests.lora_parallel.pp.runs import GPIPE, INTERLEAVED, PP, Run, actions
from tests.oracle import on_mesh

SIZES = [(pp, microbatches) for pp in range(2, 9) for microbatches in range(1, 17)]
KINDS = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)]


def allowed(pp: int, stages: int, microbatches: int) -> bool:
    try:
        check_microbatches(pp, stages, microbatches)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("schedule", "stages"), KINDS)
def test_every_action_runs_once_and_no_rank_waits_for_ever(schedule, stages):
    for pp, microbatches in SIZES:
        if not allowed(pp, stages, microbatches):
            continue
        orders = order_of(schedule, pp, stages, microbatches)
        simulate(orders)  # raises if an action's input never comes, a backward's own forward included
        for rank, order in enumerate(orders):
            mine = range(rank, pp * stages, pp)
            every = [Action(s, m, kind) for s in mine for m in range(microbatches) for kind in (True, False)]
            assert Counter(order) == Counter(every), (pp, microbatches, rank)
            at = {action: place for place, action in enumerate(order)}
            assert all(at[Action(a.stage, a.microbatch, True)] < at[a] for a in order if not a.is_forward)


@pytest.mark.parametrize(("schedule", "stages"), KINDS)
def test_the_bubble_is_that_of_the_formula(schedule, stages):
    for pp, microbatches in [(pp, m) for pp in (2, 4, 8) for m in (4, 8, 16, 32)]:
        if schedule == "interleaved" and microbatches % pp:
            continue
        bubble = simulate(order_of(schedule, pp, stages, microbatches)).bubble
        assert bubble == pytest.approx(bubble_formula(pp, stages, microbatches), rel=0.05), (pp, microbatches)


@pytest.mark.parametrize(("schedule", "stages"), KINDS)
def test_messages_are_received_in_the_order_in_which_they_are_sent(schedule, stages):
    """As between two ranks nothing says which micro-batch a message is of."""
    for pp, microbatches in SIZES:
        if not allowed(pp, stages, microbatches):
            continue
        orders = order_of(schedule, pp, stages, microbatches)
        for rank, order in enumerate(orders):
            for kind, step in ((True, 1), (False, -1)):
                end = pp * stages - 1 if kind else 0
                sent = [(a.stage + step, a.microbatch) for a in order if a.is_forward is kind and a.stage != end]
                start = 0 if kind else pp * stages - 1
                others = orders[(rank + step) % pp]
                awaited = [(a.stage, a.microbatch) for a in others if a.is_forward is kind and a.stage != start]
                assert sent == awaited, (pp, microbatches, rank)


def test_micro_batches_alive():
    for pp, microbatches in SIZES:
        simulation = simulate(order_of("1f1b", pp, 1, microbatches))
        for stage in range(pp):
            assert simulation.most_alive(stage) <= min(microbatches, pp - stage), (pp, microbatches, stage)
        assert simulate(order_of("gpipe", pp, 1, microbatches)).most_alive(0) == microbatches
        for stages in (2, 3):
            if microbatches % pp == 0:
                simulation = simulate(order_of("interleaved", pp, stages, microbatches))
                for rank in range(pp):
                    bound = (stages - 1) * pp + 2 * (pp - 1 - rank) + 1
                    assert simulation.most_alive(rank) == min(stages * microbatches, bound)


def torchs(pp: int, rank: int, stages: int, microbatches: int) -> list[Action]:
    """The order of torch's own schedule, without the pauses in it."""
    rounds = max(1, microbatches // pp)
    held = SimpleNamespace(
        n_local_stages=stages,
        pp_group_size=pp,
        number_of_rounds=rounds,
        microbatches_per_round=microbatches // rounds,
        _n_microbatches=microbatches,
    )
    found = ScheduleInterleaved1F1B._calculate_single_rank_operations(held, rank)  # type: ignore[arg-type]
    return [
        Action(each.stage_index, each.microbatch_index, each.computation_type.name == "FORWARD")
        for each in found
        if each is not None
    ]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_interleaved_order_is_torchs(stages):
    for pp, microbatches in SIZES:
        if allowed(pp, stages, microbatches):
            for rank in range(pp):
                want = torchs(pp, rank, stages, microbatches)
                assert one_forward_one_backward(pp, rank, stages, microbatches) == want, (pp, microbatches, rank)


def test_one_forward_one_backward_is_that_of_textbooks():
    """P - 1 - s forwards, then a forward and a backward in turn, then the backwards that are left."""
    for pp, microbatches in SIZES:
        for rank in range(pp):
            ahead = min(microbatches, pp - 1 - rank)
            text = "F" * ahead + "FB" * (microbatches - ahead) + "B" * ahead
            order = one_forward_one_backward(pp, rank, 1, microbatches)
            assert "".join("F" if action.is_forward else "B" for action in order) == text
            for kind in (True, False):
                numbers = [action.microbatch for action in order if action.is_forward is kind]
                assert numbers == list(range(microbatches))


def test_a_deadlock_is_seen():
    """Break the order on purpose: the second rank runs a backward before its forward."""
    first, second = order_of("1f1b", 2, 1, 2)
    at = [second.index(Action(1, m, True)) for m in (0, 1)]
    second[at[0]], second[at[1]] = second[at[1]], second[at[0]]
    with pytest.raises(RuntimeError, match="wait for each other"):
        simulate([first, second])


def traced(config: dict[str, Any]) -> list[Action]:
    """The actions that this rank begins in a step, in order."""
    model: Any = parallelize(Run().model(), *on_mesh("1x1pp2", **config))
    with actions() as begun:
        model(**language()).loss.backward()
    return begun


@pytest.mark.parametrize("config", [PP, GPIPE, INTERLEAVED])
def test_a_step_runs_the_order_of_its_schedule(pool, config):
    want = order_of(config.get("pp_schedule", "1f1b"), 2, config.get("pp_stages_per_rank", 1), 4)
    assert pool.run(2, traced, config) == want
