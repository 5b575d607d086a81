"""Choose the blocks that begin a pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from lora_parallel.layers.products import matrices
from lora_parallel.pp.stage_layers import Bounds, StageLayers

__all__ = ["balanced_bounds", "layer_cost", "split_stages", "total_cost"]


def split_stages(
    layers: StageLayers,
    names: Mapping[nn.Module, str],
    stages: int,
    split: Literal["auto"] | Sequence[str],
    config: Any = None,
) -> Bounds:
    """Return the blocks of each stage.

    Args:
        layers: The model's layers.
        names: Names of the model's modules.
        stages: The number of stages.
        split: "auto", or the names of the blocks that begin a stage, from the second stage on.
        config: The model's own config, which says how many experts of how many a token uses; or None.

    Raises:
        ValueError: There are fewer blocks than stages, or `split` does not name blocks in their order.
    """
    blocks = [names[block] for block in layers.blocks]
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


Cost = tuple[float, float]
"""Bytes of the parameters, and multiplications of a token."""


def balanced_bounds(blocks: Sequence[Cost], before: Cost, after: Cost, stages: int) -> Bounds:
    """Divide blocks into stages such that the largest share of a stage is as small as can be.

    The share of a stage is that of all bytes, or that of all multiplications, whichever is larger. Of the divisions
    with the same largest share the one whose stages differ least is returned.

    Args:
        blocks: The cost of each block.
        before: The cost of what the first stage has besides blocks.
        after: The cost of what the last stage has besides blocks.
        stages: The number of stages, of which each has one block at least.
    """
    whole = total_cost([*blocks, before, after])
    sums = [(0.0, 0.0)]
    for block in blocks:
        sums.append(total_cost([sums[-1], block]))

    def share(first: int, last: int) -> float:
        more = [before] if first == 0 else []
        more += [after] if last == len(blocks) else []
        held = [sums[last][kind] - sums[first][kind] + total_cost(more)[kind] for kind in (0, 1)]
        return max(part / total if total else 0.0 for part, total in zip(held, whole, strict=True))

    count = len(blocks)
    # best[last] of a number of stages: the largest share, the sum of squares, and the bounds, of blocks 0 .. last - 1.
    best: dict[int, tuple[float, float, Bounds]] = {
        last: (share(0, last), share(0, last) ** 2, [(0, last)]) for last in range(1, count + 1)
    }
    for stage in range(2, stages + 1):
        found = {}
        for last in range(stage, count + 1):
            found[last] = min(
                (max(most, own), squares + own**2, [*bounds, (first, last)])
                for first, (most, squares, bounds) in best.items()
                if stage - 1 <= first < last
                for own in [share(first, last)]
            )
        best = found
    return best[count][2]


def total_cost(costs: Sequence[Cost]) -> Cost:
    """Return the cost of several layers."""
    return sum(bytes for bytes, _ in costs), sum(products for _, products in costs)


def layer_cost(module: nn.Module, config: Any) -> Cost:
    """Return the bytes of a module's parameters, and the multiplications that it does for a token.

    Args:
        module: A block, or a layer around the blocks.
        config: As in `split_stages`.
    """
    size = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    return size, sum(products for _, products in matrices(module, config))
