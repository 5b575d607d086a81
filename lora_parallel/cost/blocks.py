"""Shorten a model to few of its blocks, such that those left out are like some that are left in."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from lora_parallel.config import ParallelConfig
from lora_parallel.fsdp.wrapping import fsdp_blocks

__all__ = ["Stack", "find_stack", "shorten"]

_LAST = 3
"""Number of last blocks that stay in: FSDP2 holds up to two gathered blocks, and the first of backward are the last."""


@dataclass(frozen=True)
class Stack:
    """Describe a model's blocks, which lie in one list of modules."""

    name: str
    """Name of the list in the model."""

    kinds: tuple[int, ...]
    """Kind of each block: those of one number have equal parameters and equal settings in the model's config."""

    @property
    def few(self) -> list[int]:
        """Return the blocks of the shortest model: the first of each kind and the last of all."""
        first = {kind: index for index, kind in reversed([*enumerate(self.kinds)])}
        return sorted({*first.values(), *range(max(0, len(self.kinds) - _LAST), len(self.kinds))})

    def pairs(self) -> dict[int, tuple[list[int], list[int]]]:
        """Map each kind to the blocks of two models, of which the first has one more of that kind: one is `few`."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for index, kind in enumerate(self.kinds):
            if index not in self.few:
                found.setdefault(kind, (sorted([*self.few, index]), self.few))
        for index in self.few if len(self.few) > 1 else ():
            found.setdefault(self.kinds[index], (self.few, [each for each in self.few if each != index]))
        return found


def find_stack(model: nn.Module) -> Stack:
    """Return the model's blocks and their kinds.

    Raises:
        ValueError: The model has no blocks, or they do not lie in one list of modules.
    """
    blocks = fsdp_blocks(model, ParallelConfig())
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    held = [name for name, each in lists.items() if set(blocks) & set(each)]
    if len(held) != 1 or list(lists[held[0]]) != blocks:
        raise ValueError(
            f"{type(model).__name__} has {len(blocks)} blocks in {len(held)} lists of modules: a plan can be made for "
            "models whose blocks lie in one list."
        )
    kinds: dict[Any, int] = {}
    numbers = []
    for index, block in enumerate(blocks):
        shapes = tuple((name, tuple(p.shape), p.dtype) for name, p in block.named_parameters())
        settings = tuple(str(value[index]) for _, _, value in _settings_of_blocks(model, len(blocks)))
        numbers.append(kinds.setdefault((type(block), shapes, settings), len(kinds)))
    return Stack(held[0], tuple(numbers))


def shorten(model: nn.Module, stack: Stack, keep: Collection[int]) -> None:
    """Leave only the blocks `keep` in a model, in place. Lists in its config with an entry for each block follow."""
    settings = list(_settings_of_blocks(model, len(stack.kinds)))
    parent, _, name = stack.name.rpartition(".")
    blocks = model.get_submodule(stack.name)
    assert isinstance(blocks, nn.ModuleList)
    setattr(model.get_submodule(parent), name, nn.ModuleList(blocks[index] for index in sorted(keep)))
    for config, key, value in settings:
        setattr(config, key, [value[index] for index in sorted(keep)])


def _settings_of_blocks(model: nn.Module, count: int) -> Iterator[tuple[Any, str, Any]]:
    """Yield the config, the name and the value of each list in the model's configs with an entry for each block."""
    configs = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
    for config in configs.values():
        for key, value in vars(config).items():
            if isinstance(value, (list, tuple)) and len(value) == count:
                yield config, key, value
