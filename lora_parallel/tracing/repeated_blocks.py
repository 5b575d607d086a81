"""Leave out blocks that others stand for, so that a proof costs two blocks of each kind, however many the model has.

Blocks are of a kind if their modules have the same classes, shapes and settings. That says nothing of what a model's
code does with a block's number: `planning/proven_plans.py` lists the classes whose plan is known to be the same.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lora_parallel.layers.layer_parameters import name_of_block
from lora_parallel.tracing.inputs import TraceError

_KEPT = 2  # Blocks of each kind that are run. The second one stands for those that are left out
_NUMBER = re.compile(r"(layer|block)_?(idx|index|id|number)$")


@dataclass
class RepeatedBlocks:
    """Hold the blocks of a model that are left out of a run, and what stands for them."""

    # Modules that are left out, each with the one that stands for it.
    left_out: dict[nn.Module, nn.Module] = field(default_factory=dict)
    # Names of the blocks that stand for others, with those of the others; and modules that do, in the same order.
    _others: dict[str, list[str]] = field(default_factory=dict)
    _likes: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)

    def leave_out(self, block: nn.Module, kept: nn.Module, names: Mapping[nn.Module, str]) -> None:
        """Leave a block out, for which another one stands."""
        name, other = name_of_block(kept, names), name_of_block(block, names)
        self._others.setdefault(f"{name}.", []).append(f"{other}.")
        for module, like in zip(block.modules(), kept.modules(), strict=True):
            self._likes.setdefault(like, []).append(module)
            if module is not like:  # blocks may share a module
                self.left_out[module] = like

    def names_of_all(self, names: Iterable[str]) -> Iterator[str]:
        """Yield names of layers, each followed by those of the layers that it stands for."""
        for name in names:
            yield name
            for kept, others in self._others.items():
                if name.startswith(kept):
                    yield from (other + name.removeprefix(kept) for other in others)

    def modules_of_all(self, modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
        """Yield modules, each followed by those that it stands for."""
        for module in modules:
            yield from (module, *self._likes.get(module, ()))

    def blocks_like(self, names: Collection[str]) -> Iterator[tuple[str, str, dict[nn.Module, nn.Module]]]:
        """Yield each block that the block of these layers stands for: the prefixes of names in both, and its modules.

        Raises:
            TraceError: The layers are of several blocks.
        """
        kept = next((kept for kept in self._others if any(name.startswith(kept) for name in names)), "")
        if not all(name.startswith(kept) for name in names):
            raise TraceError(f"{min(names)} is cut together with layers of other blocks")
        for index, other in enumerate(self._others.get(kept, ())):
            yield kept, other, {like: modules[index] for like, modules in self._likes.items() if len(modules) > index}


def repeated_blocks(model: nn.Module, names: Mapping[nn.Module, str]) -> RepeatedBlocks:
    """Return the blocks of a model that others stand for; `names` has the names of its modules."""
    repeated = RepeatedBlocks()
    for stack in _stacks(model):
        kinds: dict[object, list[nn.Module]] = {}
        blocks = list(dict.fromkeys(stack))
        for block in blocks:
            kinds.setdefault(_kind(block), []).append(block)
        for alike in kinds.values():
            for block in alike[_KEPT:]:
                if block is not blocks[-1]:  # which is a place where tokens are gathered
                    repeated.leave_out(block, alike[_KEPT - 1], names)
    return repeated


def _stacks(model: nn.Module) -> Iterator[nn.ModuleList]:
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _stacks(child)


def _kind(block: nn.Module) -> object:
    """Return what blocks of a kind have in common: classes, shapes and settings, without the number of the block."""
    return tuple(
        (
            path,
            type(module),
            tuple((key, p.shape, p.requires_grad) for key, p in module._parameters.items() if p is not None),
            tuple((key, value) for key, value in vars(module).items() if _is_setting(key, value)),
        )
        for path, module in block.named_modules()
    )


def _is_setting(key: str, value: Any) -> bool:
    return key == "forward" or (isinstance(value, (int, float, str)) and not _NUMBER.search(key))
