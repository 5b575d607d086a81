"""Compiled blocks under Accelerate: the dynamo settings of a launch, an argument, and models that arrive compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin
from torch._dynamo.utils import counters

from accelerate_plugin import parallelism
from lora_parallel.runtime import compiled_blocks
from tests.accelerate_plugin.harness import environment, launched, plugin, trains
from tests.logs import listening
from tests.oracle import Case, reference, relative_error

LAUNCHED = {
    "ACCELERATE_DYNAMO_BACKEND": "AOT_EAGER",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True",
    "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
}
"""What `accelerate launch` sets for a file with a dynamo_config."""

CASE = Case(steps=3)


def by_launch() -> Any:
    with launched(**environment("1x2", **LAUNCHED)):
        return trains(CASE, Accelerator())


def by_argument() -> Any:
    with launched():
        dynamo = TorchDynamoPlugin(backend="aot_eager", fullgraph=True)
        return trains(CASE, Accelerator(fsdp_plugin=plugin("1x2"), dynamo_plugin=dynamo))


def compiled_before() -> Any:
    with launched():
        accelerator = Accelerator(fsdp_plugin=plugin("1x2"), dynamo_backend="aot_eager")
        return trains(CASE, accelerator, torch.compile(CASE.model()))


def ways() -> dict[str, Any]:
    found = {}
    for way in (by_launch, by_argument, compiled_before):
        torch.compiler.reset()
        counters.clear()
        with listening(compiled_blocks.__name__) as told:
            run = way()
        found[way.__name__] = run, counters["stats"]["unique_graphs"], told
    return found


@pytest.mark.matrix
def test_every_way_to_ask_for_compiled_blocks(pool):
    want = reference(CASE)
    for rank, found in enumerate(pool.run(2, ways)):
        for name, (run, graphs, told) in found.items():
            names = {each.removeprefix("_orig_mod."): gradient for each, gradient in run.gradients.items()}
            assert relative_error(names, want.gradients) < 1e-12, name
            assert run.losses == pytest.approx(want.losses, rel=1e-6), name
            assert graphs == 2, name
            assert len(told) == (rank == 0 and name == "compiled_before"), (name, told)


@pytest.mark.parametrize(
    ("arguments", "variables", "want"),
    [
        ({}, {}, None),
        ({"dynamo_backend": "no"}, LAUNCHED, None),
        ({"dynamo_plugin": TorchDynamoPlugin(backend="inductor", disable=True)}, {}, None),
        ({"dynamo_backend": "inductor"}, {}, {"backend": "inductor"}),
        ({}, LAUNCHED, {"backend": "aot_eager", "fullgraph": True}),
        (
            {"dynamo_plugin": TorchDynamoPlugin(backend="inductor", mode="max-autotune", dynamic=False)},
            {},
            {"backend": "inductor", "mode": "max-autotune", "dynamic": False},
        ),
        (
            {"dynamo_plugin": TorchDynamoPlugin(backend="inductor", options={"max_autotune": True})},
            {},
            {"backend": "inductor", "options": {"max_autotune": True}},
        ),
    ],
)
def test_what_accelerates_settings_come_to(arguments, variables, want, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert parallelism._compile(arguments) == want
