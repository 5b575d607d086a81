"""Say which layers of a model belong to which pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from lora_parallel.pp.other_stages import OutputShape

__all__ = ["Bounds", "StageLayers"]

Bounds = list[tuple[int, int]]
"""First and last + 1 block of each stage."""


@dataclass
class StageLayers:
    """List the blocks of a model, and the layers around them that hold parameters."""

    stack: nn.Module
    """Module whose children are the blocks."""

    blocks: list[nn.Module]
    """The blocks in order."""

    outputs: list[int | None]
    """Number of values that each block returns in a tuple; None if it returns the hidden states."""

    before: dict[nn.Module, OutputShape] = field(default_factory=dict)
    """Layers that are called before the first block, each with the shape of its output."""

    after: list[nn.Module] = field(default_factory=list)
    """Layers that are called after the last block. A layer may be in `before` too."""

    def of_stage(self, stage: int, bounds: Bounds) -> list[nn.Module]:
        """Return the modules that a stage computes."""
        first, last = bounds[stage]
        found = list(self.blocks[first:last])
        found += self.before if stage == 0 else []
        found += [layer for layer in self.after if layer not in found] if stage == len(bounds) - 1 else []
        return found

    def homes(self, bounds: Bounds) -> dict[nn.Module, frozenset[int]]:
        """Map each module that only some stages compute, and those in it, to these stages."""
        stages: dict[nn.Module, set[int]] = {}
        for stage in range(len(bounds)):
            for module in self.of_stage(stage, bounds):
                for inner in module.modules():
                    stages.setdefault(inner, set()).add(stage)
        return {module: frozenset(each) for module, each in stages.items()}
