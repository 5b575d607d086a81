"""Run one training step as the first rank of a mesh would, and return what it takes as numbers that add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lora_parallel.config import ParallelConfig
from lora_parallel.cost.blocks import Stack
from lora_parallel.cost.described_model import DescribedModel
from lora_parallel.cost.simulated_step import SimulatedStep, simulated_step
from lora_parallel.distributed.fsdp_private import parameters_on_meta
from lora_parallel.distributed.gather import local
from lora_parallel.distributed.mesh import build_mesh
from lora_parallel.distributed.pytree import tensors_in
from lora_parallel.distributed.torch_private import fake_process_group, in_backward
from lora_parallel.parallelize import parallelize

__all__ = ["PHASES", "Numbers", "cost_of_a_step"]

Numbers = dict[str, float]
"""What a step of a rank takes: bytes, operations and messages by name. Each is a constant and a share of each block."""

PHASES = ("forward", "head", "last blocks", "other blocks", "optimizer")
"""Phases of a step, each with a peak of its own: a longer model adds the same bytes to a phase with each block.

The head's phase is from the end of the last block's forward to the beginning of its backward.
"""


def cost_of_a_step(
    model: DescribedModel, stack: Stack, config: ParallelConfig, ranks: int, rows: int, tokens: int, optimizer: str
) -> Numbers:
    """Return what a step takes of the first rank of a mesh, which holds the largest shards.

    The step is run for a short model, and once more for each kind of block with one block more.

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

    def run(keep: list[int]) -> Numbers:
        with fake_process_group(ranks, 0):
            return _run(model, stack, keep, config, rows, tokens, optimizer)

    total = run(stack.few)
    short = dict(total)
    for kind, keep in stack.one_more().items():
        longer = run(keep)
        for name in {*longer, *short}:
            more = longer.get(name, 0) - short.get(name, 0)
            total[name] = total.get(name, 0) + stack.missing(kind) * more
    return total


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
    with parameters_on_meta(), simulated_step(held) as step:
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
    """Return the bytes that a rank holds between steps, and those that FSDP2 gathers for what lies around the blocks."""
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    held = {"base": 0, "trained": 0, "around": 0, "gathered around": 0, "first around": 0}
    for parameter in model.parameters():
        size = _bytes([parameter])
        held["trained" if parameter.requires_grad else "base"] += size
        if id(parameter) not in in_blocks:
            held["around"] += size
    embedding = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    held["first around"] = _bytes({p for m in embedding for p in m.parameters()})
    held["buffers"] = _bytes(model.buffers())
    return dict(held)


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
