"""`ParallelConfig` refuses what cannot work when it is made, with the field and its value."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import fields, replace

import pytest
import torch

from lora_parallel import ParallelConfig

BAD = [
    ({"tp": 0}, ValueError, "tp=0"),
    ({"tp": -2}, ValueError, "tp=-2"),
    ({"tp": "2"}, TypeError, "tp='2'"),
    ({"tp": 2.0}, TypeError, r"tp=2\.0"),
    ({"tp": True}, TypeError, "tp=True"),
    ({"tp": "auto"}, TypeError, "tp='auto'"),
    ({"dp_shard": 0}, ValueError, "dp_shard=0.* or auto"),
    ({"dp_shard": "all"}, TypeError, "dp_shard='all'.* or auto"),
    ({"dp_replicate": 0}, ValueError, "dp_replicate=0"),
    ({"dp_replicate": None}, TypeError, "dp_replicate=None"),
    ({"timeout_seconds": 0}, ValueError, "timeout_seconds=0"),
    ({"seed": 1.5}, TypeError, r"seed=1\.5"),
    ({"seed": True}, TypeError, "seed=True"),
    ({"tp_plan": "colwise"}, ValueError, "tp_plan='colwise'"),
    ({"tp_plan": ["q_proj"]}, TypeError, "tp_plan is a list"),
    ({"block_classes": "LlamaDecoderLayer"}, ValueError, "give .*list of class names"),
    ({"param_dtype": "bf16"}, TypeError, "param_dtype='bf16'"),
    ({"param_dtype": torch.int8}, TypeError, r"param_dtype=torch\.int8"),
    ({"reduce_dtype": torch.int64}, TypeError, r"reduce_dtype=torch\.int64"),
    ({"param_dtype": torch.float16}, ValueError, "loss scaling.*bfloat16"),
    ({"loss_parallel": "auto"}, TypeError, "loss_parallel='auto': give True or False"),
    ({"cpu_offload": True}, ValueError, "cpu_offload=True .*fsdp_offload_params.* has not run over NCCL yet"),
    ({"cpu_offload": 1}, TypeError, "cpu_offload=1: give True or False"),
    ({"compile": "inductor"}, TypeError, "compile='inductor': give True, False or a mapping"),
    ({"compile": {"mode": "bogus"}}, ValueError, "'mode': 'bogus'.*torch.compile refuses it: Unrecognized mode"),
    ({"compile": {"backend": "bogus"}}, ValueError, "torch.compile refuses it: Invalid backend"),
    ({"compile": {"mode": "reduce-overhead"}}, ValueError, "asks for CUDA graphs.*max-autotune-no-cudagraphs"),
    ({"compile": {"options": {"triton.cudagraphs": True}}}, ValueError, "asks for CUDA graphs"),
    ({"compile": {"options": "x"}}, ValueError, "torch.compile refuses it"),
    ({"compile": {"back": "inductor"}}, ValueError, "torch.compile has no argument 'back'; it has fullgraph, dynamic"),
]


@pytest.mark.parametrize(("fields", "kind", "message"), BAD, ids=[str(fields) for fields, _, _ in BAD])
def test_a_value_that_cannot_work_is_refused(fields, kind, message):
    with pytest.raises(kind, match=message):
        ParallelConfig(**fields)


def test_values_that_work():
    ParallelConfig()
    ParallelConfig(tp=2, dp_shard=3, dp_replicate=4, tp_plan={"*.fc1": "colwise"}, block_classes=["Block"])
    ParallelConfig(param_dtype=torch.bfloat16, reduce_dtype=None, seed=-1, timeout_seconds=1)


def test_fields_are_keywords_and_fixed():
    with pytest.raises(TypeError):
        ParallelConfig(2)
    with pytest.raises(AttributeError):
        ParallelConfig().tp = 2


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2: did you mean tp?"),
        ({"tp_size": 2}, "tp_size=2: did you mean tp?"),
        ({"dp_shard_size": 2, "dp_shard": 2}, "dp_shard_size=2: It has"),
        ({"replicate_size": 2}, "did you mean dp_replicate?"),
        ({"sequence_paralel": True}, "did you mean sequence_parallel?"),
        ({"anything": 1}, r"anything=1: It has tp, dp_shard, dp_replicate, .*compile\.$"),
    ],
)
def test_an_argument_that_is_not_there_names_the_one_that_is_meant(given, meant):
    with pytest.raises(TypeError, match=f"ParallelConfig has no argument .*{meant.replace('?', '[?]')}"):
        ParallelConfig(**given)


def test_the_signature_is_that_of_the_dataclass():
    assert list(inspect.signature(ParallelConfig).parameters) == [field.name for field in fields(ParallelConfig)]
    config = ParallelConfig(tp=2)
    assert replace(pickle.loads(pickle.dumps(config)), seed=1) == ParallelConfig(tp=2, seed=1)
