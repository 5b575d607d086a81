"""Run one training step as the first rank of a mesh would, and return what it takes as numbers that add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lora_parallel.config import ParallelConfig
from lora_parallel.cost.blocks import Stack
from lora_parallel.cost.described_model import DescribedModel
from lora_parallel.cost.simulated_step import SimulatedStep, simulated_step
from lora_parallel.distributed.fsdp_private import parameters_on_meta
from lora_parallel.distributed.gather import local
from lora_parallel.distributed.mesh import build_mesh, groups_of_axes
from lora_parallel.distributed.pytree import tensors_in
from lora_parallel.distributed.torch_private import fake_process_group, in_backward
from lora_parallel.parallelize import parallelize

__all__ = ["PHASES", "Numbers", "StepCost", "cost_of_a_step"]

Numbers = dict[str, float]
"""Type of what a step takes of a rank: bytes, operations and messages by name. Each is a constant and a share of each
block."""

HELD = ("base", "trained", "embedding", "head", "buffers")
"""Bytes that a rank holds between steps: frozen parameters, those that train, and of both those around the blocks."""

PHASES = ("forward", "head", "last blocks", "other blocks", "optimizer")
"""Phases of a step, each with a peak of its own: a longer model adds the same bytes to a phase with each block.

The head's phase is from the end of the last block's forward to the beginning of its backward.
"""


@dataclass(frozen=True)
class StepCost:
    """Hold what a step takes of a rank, as shares that add up."""

    around: Numbers
    """Numbers of the parts around the blocks, and of what a step takes once, however many blocks there are."""

    blocks: list[Numbers]
    """Numbers that each block adds."""

    def total(self, first: int = 0, last: int | None = None) -> Numbers:
        """Return what a model with the blocks `first` to `last` (left out) takes."""
        return _added([(self.around, 1), *((each, 1) for each in self.blocks[first:last])])


def _added(parts: Iterable[tuple[Numbers, float]]) -> Numbers:
    """Return the sum of numbers, each times a factor."""
    total: Numbers = {}
    for numbers, factor in parts:
        for name, value in numbers.items():
            total[name] = total.get(name, 0.0) + factor * value
    return total


def cost_of_a_step(
    model: DescribedModel, stack: Stack, config: ParallelConfig, ranks: int, rows: int, tokens: int, optimizer: str
) -> StepCost:
    """Return what a step takes of the first rank of a mesh, which holds the largest shards.

    The step is run for a short model, and once more for each kind of block with one block more or less.

    Args:
        model: The model.
        stack: The model's blocks.
        config: The mesh and the options of the run, without pipeline parallelism.
        ranks: The size of the mesh.
        rows: Rows of a rank's batch.
        tokens: Tokens of a row.
        optimizer: Name of a class of `torch.optim`.

    Raises:
        ValueError: The model cannot be cut in this way; the text is that of the run itself.
    """

    @cache
    def run(keep: tuple[int, ...]) -> Numbers:
        with fake_process_group(ranks, 0):
            return _run(model, stack, [*keep], config, rows, tokens, optimizer)

    shares = {
        kind: _added([(run(tuple(longer)), 1), (run(tuple(shorter)), -1)])
        for kind, (longer, shorter) in stack.pairs().items()
    }
    blocks = [shares.get(kind, {}) for kind in stack.kinds]
    around = _added([(run(tuple(stack.few)), 1), *((blocks[index], -1) for index in stack.few)])
    return StepCost(around, blocks)


def _run(
    described: DescribedModel,
    stack: Stack,
    keep: list[int],
    config: ParallelConfig,
    rows: int,
    tokens: int,
    optimizer_name: str,
) -> Numbers:
    mesh = build_mesh(config, "cpu")
    model, blocks = described.build(stack, keep)
    parallelize(model, mesh, config, materialize=False)
    model.train()
    numbers = _held(model, blocks)
    held = [*map(local, (*model.parameters(), *model.buffers()))]
    ids = torch.zeros(rows, tokens, dtype=torch.long)
    with parameters_on_meta(), simulated_step(held, groups_of_axes(mesh)) as step:
        _note_phases(blocks, step)
        model(input_ids=ids, labels=ids).loss.backward()
        step.enter("optimizer")
        optimizer = getattr(torch.optim, optimizer_name)([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        optimizer.step()
    states = [each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor)]
    numbers["states"] = _bytes(states)
    for phase in PHASES:
        numbers[f"peak {phase}"] = step.counts.peaks.get(phase, 0)
    numbers["flops"] = step.counts.flops
    for axis, count in step.counts.messages.items():
        numbers[f"messages {axis}"] = count
        numbers[f"sent {axis}"] = step.counts.sent[axis]
    return numbers


def _held(model: nn.Module, blocks: Sequence[nn.Module]) -> Numbers:
    """Return the bytes that a rank holds between steps."""
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    numbers = dict.fromkeys(HELD, 0.0)
    for parameter in model.parameters():
        size = _bytes([parameter])
        numbers["trained" if parameter.requires_grad else "base"] += size
        if id(parameter) not in in_blocks:
            numbers["embedding" if id(parameter) in embeddings else "head"] += size
    numbers["buffers"] = _bytes(model.buffers())
    return numbers


def _note_phases(blocks: Sequence[nn.Module], step: SimulatedStep) -> None:
    """Let the step enter a phase as the model comes to it."""

    def at_output(phase: str, forward_phase: str | None) -> Any:
        def hook(block: nn.Module, args: Any, output: Any) -> None:
            if in_backward():  # recomputed
                return
            if forward_phase is not None:
                step.enter(forward_phase)
            next(tensors_in(output)).register_hook(lambda grad: step.enter(phase))

        return hook

    blocks[-1].register_forward_hook(at_output("last blocks", "head"))
    if len(blocks) > 2:
        blocks[-3].register_forward_hook(at_output("other blocks", None))


def _bytes(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in map(local, tensors))
