"""Each front end has the engine's options as explicit arguments, with the engine's defaults, and few of its own."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

from accelerate_plugin import LoRAParallelPlugin
from lightning_lora.strategy_base import BaseLogic
from lora_parallel import ParallelConfig
from lora_parallel.config import _SAME

OWN = {BaseLogic: {"lora_config", "autocast_adapter_dtype", "process_group_backend"}}
OWN[LoRAParallelPlugin] = {"lora_config", "autocast_adapter_dtype"}
ELSEWHERE = {
    BaseLogic: {"param_dtype", "reduce_dtype", "cpu_offload"},  # precision= of the Trainer; not there yet
    LoRAParallelPlugin: {"param_dtype", "compile"},  # mixed_precision and dynamo_plugin of Accelerator
}


@pytest.mark.parametrize("kind", OWN)
def test_options_are_those_of_the_engine(kind):
    arguments = {name: p for name, p in inspect.signature(kind.__init__).parameters.items() if name != "self"}
    of_field = {}
    for field in fields(ParallelConfig):
        names = next((group for group in _SAME if field.name in group), (field.name,))
        found = [name for name in names if name in arguments]
        assert len(found) == (field.name not in ELSEWHERE[kind]), (field.name, found)
        of_field |= dict.fromkeys(found, field)
    assert arguments.keys() - of_field.keys() == OWN[kind]
    for name, field in of_field.items():
        assert arguments[name].default in (field.default, None), name
