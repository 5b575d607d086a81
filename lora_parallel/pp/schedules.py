"""Choose the blocks of each pipeline stage, and list the forwards and backwards of each rank.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from lora_parallel.layers.layer_parameters import name_of_block
from lora_parallel.layers.linear_classes import matrices
from lora_parallel.pp.stage_model import Bounds, StageLayers


def split_stages(
    layers: StageLayers,
    names: Mapping[nn.Module, str],
    stages: int,
    split: Literal["auto"] | Sequence[str],
    config: Any = None,
) -> Bounds:
    """Return the blocks of each stage: balanced, or such that each block in `split` begins one."""
    blocks = [name_of_block(block, names) for block in layers.blocks]
    if len(blocks) < stages:
        raise ValueError(
            f"the model has {len(blocks)} blocks ({blocks[0]}, ...), and pp x pp_stages_per_rank makes {stages} "
            f"stages, of which each needs one: use at most {len(blocks)} stages."
        )
    if not isinstance(split, str):
        return _named_bounds(blocks, split)
    costs = [layer_cost(block, config) for block in layers.blocks]
    before, after = ([layer_cost(layer, config) for layer in part] for part in (layers.before, layers.after))
    return balanced_bounds(costs, total_cost(before), total_cost(after), stages)


def _named_bounds(blocks: list[str], split: Sequence[str]) -> Bounds:
    starts = [0]
    for name in split:
        if name not in blocks:
            raise ValueError(
                f"pp_split: {name!r} is no block of the model; its blocks are {blocks[0]} to {blocks[-1]}."
            )
        starts.append(blocks.index(name))
    if starts != sorted(set(starts)):
        raise ValueError(
            f"pp_split={list(split)}: give the blocks that begin a stage in the model's order, without {blocks[0]}, "
            "which begins the first."
        )
    return list(zip(starts, [*starts[1:], len(blocks)], strict=True))


Cost = tuple[float, float]  # Bytes of the parameters, and multiplications of a token


def balanced_bounds(blocks: Sequence[Cost], before: Cost, after: Cost, stages: int) -> Bounds:
    """Divide blocks into stages such that the largest share of a stage is as small as can be."""
    # A stage's share is that of all bytes or of all multiplications, whichever is larger. Of equal divisions the one
    # whose stages differ least is taken.
    whole = total_cost([*blocks, before, after])
    sums = [(0.0, 0.0)]
    for block in blocks:
        sums.append(total_cost([sums[-1], block]))

    def share(first: int, last: int) -> float:
        more = [before] if first == 0 else []
        more += [after] if last == len(blocks) else []
        cost = [sums[last][kind] - sums[first][kind] + total_cost(more)[kind] for kind in (0, 1)]
        return max(part / total if total else 0.0 for part, total in zip(cost, whole, strict=True))

    count = len(blocks)
    # best[last] of a number of stages: the largest share, the sum of squares, and the bounds, of blocks 0 .. last - 1.
    best: dict[int, tuple[float, float, Bounds]] = {
        last: (share(0, last), share(0, last) ** 2, [(0, last)]) for last in range(1, count + 1)
    }
    for stage in range(2, stages + 1):
        best = {
            last: min(
                (max(most, added), squares + added**2, [*bounds, (first, last)])
                for first, (most, squares, bounds) in best.items()
                if stage - 1 <= first < last
                for added in [share(first, last)]
            )
            for last in range(stage, count + 1)
        }
    return best[count][2]


def total_cost(costs: Sequence[Cost]) -> Cost:
    """Return the cost of several layers."""
    return sum(bytes for bytes, _ in costs), sum(products for _, products in costs)


def layer_cost(module: nn.Module, config: Any) -> Cost:
    """Return the bytes of a module's parameters, and the multiplications that it does for a token."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return size, sum(products for _, products in matrices(module, config))


@dataclass(frozen=True)
class Action:
    """Describe one forward or backward of one micro-batch in one stage."""

    stage: int
    microbatch: int
    is_forward: bool


def check_held(pp: int, schedule: str, has_adapters: bool) -> None:
    """Refuse schedules that keep every gradient of a fully trained model in memory twice."""
    if pp > 1 and schedule != "gpipe" and not has_adapters:
        raise ValueError(
            f'pp={pp} without adapters, with pp_schedule="{schedule}", which holds the gradients of everything that '
            'trains twice: use pp_schedule="gpipe", or adapters.'
        )


def check_microbatches(pp: int, stages: int, microbatches: int) -> None:
    """Refuse a number of micro-batches that "interleaved" cannot divide into rounds."""
    rounds = max(1, microbatches // pp)
    if stages > 1 and microbatches % rounds:
        raise ValueError(
            f'pp_schedule="interleaved" computes micro-batches in {rounds} rounds of about pp={pp}, which do not '
            f"divide pp_microbatches={microbatches}: use a multiple of {pp}."
        )


def one_forward_one_backward(pp: int, rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return a rank's actions in which each backward follows as early as it can."""
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
    return [Action(local * pp + rank, number, True) for local in range(stages) for number in range(microbatches)]


def drained(pp: int, rank: int, stages: int, microbatches: int) -> list[Action]:
    """Return all backwards of a rank, the last stage first, and of each stage the last micro-batch first."""
    return [replace(forward, is_forward=False) for forward in reversed(filled(pp, rank, stages, microbatches))]
