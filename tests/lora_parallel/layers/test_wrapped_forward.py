"""The wrapper of a module's forward: what it calls, when it is recomputed, and what it leaves as it was."""

from __future__ import annotations

import copy
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from lora_parallel.layers.wrapped_forward import Around, wrap_forward


class Block(GradientCheckpointingLayer):
    """A block of transformers, which notes what each of its forwards is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.fed: list[float] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.fed.append(x.item())
        return (self.weight * x).sin()


def changing(change: Any, calls: list[str] | None = None, name: str = "") -> Around:
    def around(module: nn.Module, compute: Any, args: Any, kwargs: Any) -> Any:
        if calls is not None:
            calls.append(name)
        return compute(change(args[0]), *args[1:], **kwargs)

    return around


def recomputing(module: nn.Module, compute: Any, args: Any, kwargs: Any) -> Any:
    return checkpoint(compute, *args, use_reentrant=False, **kwargs)


def test_the_last_wrap_is_the_outermost():
    block, calls = Block(), list[str]()
    wrap_forward(block, changing(lambda x: x + 1, calls, "inner"))
    wrap_forward(block, changing(lambda x: x * 2, calls, "outer"))
    block(torch.tensor(5.0))
    assert (calls, block.fed) == (["outer", "inner"], [11.0])


def test_a_class_that_the_module_is_given_later_recomputes():
    """Checkpoint in the forward of the last class, as under FSDP2, on what the wrap passes to it.

    Older releases of transformers checkpoint around the call of the module, and recompute the wrap with it.
    """
    block, calls = Block(), list[str]()
    wrap_forward(block, changing(lambda x: x + 1, calls, "wrap"))
    block.__class__ = type("FSDPBlock", (Block,), {})
    block.gradient_checkpointing, block._gradient_checkpointing_func = True, partial(checkpoint, use_reentrant=False)
    block(torch.tensor(1.0)).backward()
    around_calls = "__call__" in vars(GradientCheckpointingLayer)
    assert (calls, block.fed) == (["wrap"] * (2 if around_calls else 1), [2.0, 2.0])
    assert block.weight.grad == pytest.approx(2 * torch.tensor(6.0).cos())


def test_what_is_wrapped_is_recomputed_with_the_forward():
    block, calls = Block(), list[str]()
    wrap_forward(block, changing(lambda x: x + 1, calls, "wrap"))
    wrap_forward(block, recomputing)
    block(torch.tensor(1.0)).backward()
    assert (calls, block.fed) == (["wrap", "wrap"], [2.0, 2.0])


def of_block(block: Any) -> None:
    """The forward of the class."""


def method(block: Any) -> None:
    block.forward = MethodType(lambda self, x, mask=None: -self.weight * x, block)


def function(block: Any) -> None:
    block.forward = lambda x, mask=None: -block.weight * x


def wrapped(block: Any) -> None:
    wrap_forward(block, changing(lambda x: x + 1))


@pytest.mark.parametrize("before", [of_block, method, function, wrapped])
def test_the_signature_stays_and_what_was_there_comes_back(before):
    block, x = Block(), torch.tensor(5.0)
    before(block)
    there, want = block.__dict__.get("forward"), block(x)
    undo = wrap_forward(block, changing(lambda x: x * 2))
    assert list(signature(block.forward).parameters) == ["x", "mask"]
    assert not torch.equal(block(x), want)
    undo()
    assert block.__dict__.get("forward") is there
    assert torch.equal(block(x), want)


@pytest.mark.parametrize("before", [of_block, method, wrapped])
def test_a_copy_computes_with_its_own_weights(before):
    block, x = Block(), torch.tensor(5.0)
    before(block)
    wrap_forward(block, changing(lambda x: x * 2))
    twin, want = copy.deepcopy(block), block(x)
    with torch.no_grad():
        block.weight.zero_()
    assert torch.equal(twin(x), want)
