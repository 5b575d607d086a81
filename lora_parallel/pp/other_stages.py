"""Stand in for the blocks and layers of a model that are on other pipeline stages.

The model's own code runs on every stage, so that masks, rotary tables and position ids are what they are in one
process. Before the first block of a stage it gets the hidden states that the stage before has sent, and at the first
block after the stage it ends: `StageEnd`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lora_parallel.state import OTHER_STAGE
from lora_parallel.tp.sequence import first_activations

__all__ = ["OtherStageBlock", "OtherStageLayer", "OutputShape", "StageEnd", "StageRun"]


@dataclass(frozen=True)
class OutputShape:
    """Say which shape the output of a layer before the blocks has, by that of its first tensor."""

    features: int
    """The last dim of the output."""

    looks_up: bool
    """True if the layer is given ids [...], or a mask of them; False if it is given activations [..., features]."""

    def of(self, given: Tensor) -> tuple[int, ...]:
        """Return the shape of the output, from the layer's first tensor."""
        return (*(given.shape if self.looks_up else given.shape[:-1]), self.features)


class StageEnd(Exception):
    """Leave a model's forward behind the last block of a stage.

    Args:
        hidden: The hidden states that the next stage is given.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class StageRun(Protocol):
    """Say what is computed now, to the modules that stand in for those of other stages."""

    running: bool
    """True while a stage computes; other calls of the modules are errors."""

    def pass_block(self, index: int, hidden: Tensor) -> Tensor:
        """Return the output of block `index`, which is on another stage, from its input [rows, tokens, features].

        Raises:
            StageEnd: The block is the first one behind the stage.
        """


class _OtherStage(nn.Module):
    """Stand in for a module of another stage, with its plain attributes and without its parameters.

    Args:
        name: The name of the module, for messages.
        module: The module.
        run: Says what is computed now.
    """

    def __init__(self, name: str, module: nn.Module, run: StageRun) -> None:
        super().__init__()
        held = {key: value for key, value in vars(module).items() if key != "training" and not key.startswith("_")}
        plain = {key: value for key, value in held.items() if not isinstance(value, Tensor) and not callable(value)}
        self.__dict__ |= {"_name": name, "_run": run, "_plain": plain, OTHER_STAGE: True}

    def __getattr__(self, key: str) -> Any:
        plain = self.__dict__.get("_plain", {})
        return plain[key] if key in plain else super().__getattr__(key)

    def __delattr__(self, key: str) -> None:
        """Delete an attribute, as Trainer does with `neftune_noise_alpha` of the embedding after training."""
        plain = self.__dict__["_plain"]
        if key in plain and key not in self.__dict__:
            del plain[key]
        else:
            super().__delattr__(key)

    def check_running(self) -> None:
        """Check that the parallelized model runs.

        Raises:
            RuntimeError: The module was called by itself.
        """
        if not self.__dict__["_run"].running:
            raise RuntimeError(
                f"{self.__dict__['_name']} was called, and is on another pipeline stage than this rank's: call the "
                "parallelized model, not a module inside of it, nor its forward."
            )


class OtherStageBlock(_OtherStage):
    """Stand in for a block.

    Args:
        name: The name of the block.
        block: The block.
        run: Says what is computed now.
        index: The number of the block in its stack.
        outputs: The number of values that the block returns in a tuple; None if it returns the hidden states.
    """

    def __init__(self, name: str, block: nn.Module, run: StageRun, index: int, outputs: int | None) -> None:
        super().__init__(name, block, run)
        self.__dict__ |= {"_index": index, "_outputs": outputs}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.check_running()
        hidden = self.__dict__["_run"].pass_block(self.__dict__["_index"], first_activations(args, kwargs)[1])
        outputs = self.__dict__["_outputs"]
        return hidden if outputs is None else (hidden, *[None] * (outputs - 1))


class OtherStageLayer(_OtherStage):
    """Stand in for a layer before the blocks, by zeros, or for one after the blocks, which is never reached.

    Args:
        name: The name of the layer.
        layer: The layer.
        run: Says what is computed now.
        output: The shape of the layer's output; None for a layer after the blocks.
        dtype: The dtype of the layer's output.
        device: The type of device that the layer would be on.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        run: StageRun,
        output: OutputShape | None,
        dtype: torch.dtype,
        device: str = "cpu",
    ) -> None:
        super().__init__(name, layer, run)
        self.__dict__["_output"] = output
        # Models ask an embedding's weight for its device. It has no elements, so that nothing is computed with it.
        self.__dict__["_plain"]["weight"] = torch.empty(0, dtype=dtype, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OtherStageLayer:
        """Follow `model.to(dtype)`, as the layer would."""
        plain = self.__dict__["_plain"]
        plain["weight"] = fn(plain["weight"])
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.check_running()
        output = self.__dict__["_output"]
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if output is None or given is None:
            raise RuntimeError(f"{self.__dict__['_name']} was called on a pipeline stage that has no part of it.")
        return torch.zeros(output.of(given), dtype=self.__dict__["_plain"]["weight"].dtype, device=given.device)
