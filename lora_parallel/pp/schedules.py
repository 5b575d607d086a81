"""List the forwards and backwards of micro-batches that each pipeline rank computes, in its order.

- "1f1b" (PipeDream-flush, https://arxiv.org/abs/2006.09503): after a few forwards a rank computes one forward and one
  backward in turn. Stage s of P keeps the activations of P - s micro-batches at most.
- "interleaved" (https://arxiv.org/abs/2104.04473): the same with several stages on a rank, which shortens the time in
  which ranks wait for each other.
- "gpipe" (https://arxiv.org/abs/1811.06965): all forwards, then all backwards. The activations of all micro-batches are
  kept, and the loss may be anything that is computed from the outputs of all of them.

With M micro-batches and v stages on a rank, a rank waits for (P - 1) / (v M + P - 1) of the time; longer if M < P and
v > 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["Action", "check_held", "check_microbatches", "drained", "filled", "one_forward_one_backward"]


@dataclass(frozen=True)
class Action:
    """Describe one forward or backward of one micro-batch in one stage."""

    stage: int
    microbatch: int
    is_forward: bool


def check_held(pp: int, schedule: str, has_adapters: bool) -> None:
    """Check that a schedule need not hold the gradients of a whole model.

    Args:
        pp: The number of pipeline ranks.
        schedule: The name of the schedule.
        has_adapters: True if adapters train, False if parameters of the model itself do.

    Raises:
        ValueError: It would have to.
    """
    if pp > 1 and schedule != "gpipe" and not has_adapters:
        raise ValueError(
            f'pp={pp} without adapters, with pp_schedule="{schedule}", which holds the gradients of everything that '
            'trains twice: use pp_schedule="gpipe", or adapters.'
        )


def check_microbatches(pp: int, stages: int, microbatches: int) -> None:
    """Check that micro-batches can be computed in the order of `one_forward_one_backward`.

    Args:
        pp: The number of pipeline ranks.
        stages: The number of stages of each rank.
        microbatches: The number of micro-batches.

    Raises:
        ValueError: With several stages on a rank, the micro-batches do not divide into rounds.
    """
    rounds = max(1, microbatches // pp)
    if stages > 1 and microbatches % rounds:
        raise ValueError(
            f'pp_schedule="interleaved" computes micro-batches in {rounds} rounds of about pp={pp}, which do not '
            f"divide pp_microbatches={microbatches}: use a multiple of {pp}."
        )


def one_forward_one_backward(pp: int, rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return a rank's actions in which each backward follows as early as it can.

    Args:
        pp: The number of pipeline ranks.
        rank: The rank.
        stages: The number of stages of each rank; stage k is on rank k modulo pp.
        microbatches: The number of micro-batches.
    """
    total = stages * microbatches
    group = microbatches // max(1, microbatches // pp)  # micro-batches of a stage before the rank's next stage
    hops = pp - 1 - rank
    ahead = min(total, hops if stages == 1 else (stages - 1) * group + 2 * hops)
    counts: Counter[tuple[int, bool]] = Counter()

    def action(step: int, is_forward: bool) -> Action:
        local = step // group % stages if stages > 1 else 0
        stage = (local if is_forward else stages - 1 - local) * pp + rank
        counts[stage, is_forward] += 1
        return Action(stage, counts[stage, is_forward] - 1, is_forward)

    order = [action(step, True) for step in range(ahead)]
    for step in range(total - ahead):
        order += [action(ahead + step, True), action(step, False)]
    return order + [action(step, False) for step in range(total - ahead, total)]


def filled(pp: int, rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return all forwards of a rank, stage by stage."""
    return [Action(local * pp + rank, each, True) for local in range(stages) for each in range(microbatches)]


def drained(pp: int, rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return all backwards of a rank, the last stage first, and of each stage the last micro-batch first."""
    forwards = filled(pp, rank, stages, microbatches)
    return [Action(each.stage, each.microbatch, False) for each in reversed(forwards)]
