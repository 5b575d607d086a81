"""Simulates the orders of actions of pipeline schedules: when each runs if a forward takes 1 and a backward 2.

An action begins when its rank has ended the one before and its input is there: the hidden states of the stage before,
or the gradient of the stage behind. A message takes no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_parallel.pp.schedules import Action, drained, filled, one_forward_one_backward

__all__ = ["Simulation", "bubble_formula", "order_of", "simulate"]


def order_of(schedule: str, pp: int, stages: int, microbatches: int) -> list[list[Action]]:
    """Return the actions of each rank: "gpipe", or what "1f1b" and "interleaved" run."""
    if schedule != "gpipe":
        return [one_forward_one_backward(pp, rank, stages, microbatches) for rank in range(pp)]
    return [filled(pp, rank, stages, microbatches) + drained(pp, rank, stages, microbatches) for rank in range(pp)]


def bubble_formula(pp: int, stages: int, microbatches: int) -> float:
    """Return the share of the time that a rank waits, with `stages` on each rank."""
    return (pp - 1) / (stages * microbatches + pp - 1)


@dataclass
class Simulation:
    """When each action begins and ends."""

    times: Mapping[Action, tuple[float, float]]
    orders: Sequence[Sequence[Action]]

    @property
    def length(self) -> float:
        """The time from the first action's begin to the last one's end, of all ranks."""
        return max(end for _, end in self.times.values()) - min(begin for begin, _ in self.times.values())

    @property
    def bubble(self) -> float:
        """The share of that time in which a rank computes nothing, over all ranks."""
        busy = sum(end - begin for begin, end in self.times.values())
        return 1 - busy / (self.length * len(self.orders))

    def most_alive(self, rank: int) -> int:
        """The largest number of forwards on a rank whose backward is still to come."""
        alive = most = 0
        for action in self.orders[rank]:
            alive += 1 if action.is_forward else -1
            most = max(most, alive)
        return most


def simulate(orders: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0) -> Simulation:
    """Return when each action runs.

    Raises:
        RuntimeError: The ranks wait for each other for ever.
    """
    last = max(action.stage for order in orders for action in order)
    times: dict[Action, tuple[float, float]] = {}
    done = [0] * len(orders)
    free = [0.0] * len(orders)

    def needed(action: Action) -> Action | None:
        """The action whose result this one is given."""
        if action.is_forward:
            return Action(action.stage - 1, action.microbatch, True) if action.stage else None
        return Action(action.stage + (action.stage < last), action.microbatch, action.stage == last)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                action = order[done[rank]]
                before = needed(action)
                if before is not None and before not in times:
                    break
                begin = max(free[rank], times[before][1] if before is not None else 0.0)
                free[rank] = begin + (forward if action.is_forward else backward)
                times[action] = begin, free[rank]
                done[rank] += 1
                moved = True
    if len(times) != sum(map(len, orders)):
        waiting = {rank: order[done[rank]] for rank, order in enumerate(orders) if done[rank] < len(order)}
        raise RuntimeError(f"the ranks wait for each other, with these actions: {waiting}")
    return Simulation(times, orders)
