"""What is asked for and cannot be done: one error that names it, on every rank, before anything starts."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    MegatronLMPlugin,
)
from peft import IA3Config
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer, TrainingArguments

from accelerate_plugin import LoRAParallelPlugin
from tests.accelerate_plugin.harness import environment, launched, plugin
from tests.oracle import Case, causal_lm, lora_config, trained
from tests.oracle.workers import Failure, attempt


def bare(**settings: Any) -> Any:
    """A model without adapters that trains."""
    accelerator = Accelerator(fsdp_plugin=plugin("2x2", **settings))
    model = causal_lm()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def stepped() -> Any:
    accelerator = Accelerator(fsdp_plugin=plugin("2x2"))
    model = Case().model()
    optimizer = torch.optim.AdamW(trained(model).values())
    model(input_ids=torch.ones(1, 2, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    return accelerator.prepare(model, optimizer)


def wrapped() -> Any:
    """As for stock data parallelism."""
    accelerator = Accelerator(fsdp_plugin=plugin("2x2"))
    model = torch.nn.parallel.DistributedDataParallel(Case().model())
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def optimizer_alone() -> Any:
    accelerator = Accelerator(fsdp_plugin=plugin("2x2"))
    return accelerator.prepare(torch.optim.AdamW(trained(Case().model()).values()))


def optimizer_kept_apart() -> Any:
    """The model prepared alone, with an optimizer that was made before; and one made from what came back."""
    accelerator = Accelerator(fsdp_plugin=plugin("2x2"))
    model = Case().model()
    early = torch.optim.AdamW(model.parameters())
    model = accelerator.prepare(model)
    batch = torch.ones(2, 4, dtype=torch.long)
    accelerator.backward(model(input_ids=batch, labels=batch).loss)
    torch.optim.AdamW(trained(model).values()).step()
    return early.step()


def sharded_at_load() -> Any:
    """As of from_pretrained(distributed_config=...)."""
    from torch.distributed.tensor import distribute_tensor

    accelerator = Accelerator(fsdp_plugin=plugin("2x2"))
    model = Case().model()
    weight = model.get_base_model().lm_head.weight
    head = model.get_base_model().lm_head
    head.weight = torch.nn.Parameter(distribute_tensor(weight.detach(), accelerator.torch_device_mesh["tp"]), False)
    return accelerator.prepare(model, torch.optim.AdamW(trained(model).values()))


def other_optimizer(change: str) -> Any:
    """On rank 1."""
    accelerator = Accelerator(fsdp_plugin=plugin("2x2"))
    model, odd = Case().model(), dist.get_rank() == 1
    parameters = list(trained(model).values())[1 if odd and change == "fewer" else 0 :]
    kind = torch.optim.SGD if odd and change == "kind" else torch.optim.AdamW
    return accelerator.prepare(model, kind(parameters, lr=2.0 if odd and change == "rate" else 1.0))


def one_rank(**settings: Any) -> Any:
    """Only rank 1 has a model without adapters."""
    accelerator = Accelerator(fsdp_plugin=plugin("2x2"))
    model = Case().model() if dist.get_rank() != 1 else causal_lm()
    return accelerator.prepare(model, torch.optim.AdamW(trained(model).values()))


def twice() -> Any:
    Accelerator(fsdp_plugin=plugin("2x2"))
    return Accelerator(fsdp_plugin=plugin("4x1"))


def made_before() -> Any:
    Accelerator(cpu=True)
    return Accelerator(fsdp_plugin=plugin("2x2"))


def with_environment(**variables: str) -> Any:
    os.environ.update(variables)
    return Accelerator()


def with_plugin(given: LoRAParallelPlugin, **variables: str) -> Any:
    os.environ.update(variables)
    return Accelerator(fsdp_plugin=given)


FSDP = environment("2x2")

# What is tried, and words of the error.
BAD: dict[str, tuple[Any, list[str]]] = {
    "sizes": (lambda: Accelerator(fsdp_plugin=LoRAParallelPlugin(tp_size=3)), ["tp=3", "world size 4"]),
    "sizes of the file": (
        lambda: with_environment(**{**FSDP, "PARALLELISM_CONFIG_TP_SIZE": "4"}),
        ["dp_shard=2", "tp=4", "world size is 4"],
    ),
    "replicas of a tensor-parallel model": (
        lambda: Accelerator(fsdp_plugin=plugin("2x1x2")),
        ["dp_replicate_size=2", "dp_shard_size=2, dp_replicate_size=1"],
    ),
    "the same by Accelerate": (
        lambda: with_environment(**environment("2x1x2")),
        ["dp_shard_size"],
    ),
    "two sizes": (
        lambda: Accelerator(fsdp_plugin=plugin("2x2"), parallelism_config=ParallelismConfig(dp_shard_size=4)),
        ["tp_size is 2 by LoRAParallelPlugin and 1 by parallelism_config"],
    ),
    "sequence parallelism of Accelerate's own": (
        lambda: Accelerator(
            fsdp_plugin=LoRAParallelPlugin(), parallelism_config=ParallelismConfig(dp_shard_size=2, sp_size=2)
        ),
        ["sp_size=2 is not supported", "give cp_size"],
    ),
    "two methods of context parallelism": (
        lambda: with_plugin(
            LoRAParallelPlugin(cp_size=2, cp_method="ulysses"), PARALLELISM_CONFIG_CP_METHOD="all_gather"
        ),
        ["cp_method is 'ulysses' by LoRAParallelPlugin and 'all_gather' by the configuration"],
    ),
    "fsdp 1": (lambda: with_environment(**{**FSDP, "FSDP_VERSION": "1"}), ["fsdp_version is 1", "fsdp_version: 2"]),
    "fsdp 1 by argument": (
        lambda: with_environment(ACCELERATE_USE_FSDP="true", FSDP_AUTO_WRAP_POLICY="NO_WRAP"),
        ["fsdp_version is 1"],
    ),
    "offload": (
        lambda: with_environment(**{**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}),
        ["fsdp_offload_params", "has not run over NCCL yet"],
    ),
    "offload by argument": (lambda: LoRAParallelPlugin(cpu_offload=True), ["cpu_offload=True"]),
    "wrapping by size": (
        lambda: with_environment(**{**FSDP, "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "9"}),
        ["fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
    ),
    "ignored modules": (lambda: with_environment(**{**FSDP, "FSDP_IGNORED_MODULES": "a"}), ["fsdp_ignored_modules"]),
    "fp16": (lambda: Accelerator(fsdp_plugin=plugin("2x2"), mixed_precision="fp16"), ["'fp16'", "bf16"]),
    "fp8": (lambda: Accelerator(fsdp_plugin=plugin("2x2"), mixed_precision="fp8"), ["'fp8'", "bf16"]),
    "DeepSpeed": (
        lambda: Accelerator(fsdp_plugin=plugin("2x2"), deepspeed_plugin=object.__new__(DeepSpeedPlugin)),
        ["DEEPSPEED", "deepspeed_plugin"],
    ),
    "DeepSpeed of the file": (lambda: with_environment(**{**FSDP, "ACCELERATE_USE_DEEPSPEED": "true"}), ["DEEPSPEED"]),
    "Megatron": (
        lambda: Accelerator(fsdp_plugin=plugin("2x2"), megatron_lm_plugin=object.__new__(MegatronLMPlugin)),
        ["MEGATRON_LM"],
    ),
    "no adapters": (bare, ["no PEFT layers", "lora_config", "require_adapters=False"]),
    "not LoRA": (lambda: LoRAParallelPlugin(lora_config=IA3Config()) and bare(lora_config=IA3Config()), ["LoRA"]),
    "lora_config of another type": (lambda: LoRAParallelPlugin(lora_config={"r": 4}), ["lora_config is a dict"]),
    "blocks": (lambda: bare(block_classes=["NoSuchLayer"], lora_config=lora_config()), ["NoSuchLayer"]),
    "an optimizer with state": (stepped, ["AdamW has state for 28 parameters"]),
    "an optimizer kept apart": (optimizer_kept_apart, ["AdamW optimizer holds base_model.model.", "test_refusals.py:"]),
    "an optimizer alone": (optimizer_alone, ["AdamW holds 28 parameters", "accelerator.prepare(model, optimizer)"]),
    "sharded at load": (sharded_at_load, ["DTensor already", "DistributedConfig"]),
    "another optimizer on one rank": (lambda: other_optimizer("kind"), ["AdamW", "SGD", "rank 1"]),
    "another rate on one rank": (lambda: other_optimizer("rate"), ["'lr': 1.0", "'lr': 2.0"]),
    "fewer parameters on one rank": (lambda: other_optimizer("fewer"), ["28 parameters", "27 parameters"]),
    "one rank only": (one_rank, ["no PEFT layers"]),
    "another plugin": (twice, ["made before with other settings"]),
    "an Accelerator before": (made_before, ["made before"]),
    "the strategy's name": (
        lambda: LoRAParallelPlugin(tensor_parallel_size=2),
        ["LoRAParallelPlugin has no argument tensor_parallel_size=2: did you mean tp_size?"],
    ),
    "wrapped": (wrapped, ["wrapped in DistributedDataParallel", "pass the bare model", "model.module"]),
    "targets": (
        lambda: bare(lora_config=lora_config(target_modules=["q_proj", "query"])),
        ["'query', which no module", "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"],
    ),
    "a size of no number": (lambda: LoRAParallelPlugin(tp_size="2"), ["tp_size='2'"]),
}


def made_for_trl(kind: str, **settings: Any) -> Any:
    import trl

    os.environ.update(FSDP)
    return getattr(trl, kind)("out", bf16=False, **settings)


BAD_OF_TRL: dict[str, tuple[Any, list[str]]] = {
    "precomputed": (lambda: made_for_trl("DPOConfig", precompute_ref_log_probs=True), ["precompute_ref_log_probs"]),
    "vLLM": (
        lambda: made_for_trl("GRPOConfig", use_vllm=True),
        ["use_vllm=True does not work with a sharded model", "rollout_func", "docs/serving.md"],
    ),
    "continuous batching": (
        lambda: made_for_trl("GRPOConfig", use_transformers_continuous_batching=True),
        ["use_transformers_continuous_batching=True does not work"],
    ),
}


def tried(of_trl: bool) -> dict[str, Any]:
    answers = {}
    for name, (make, _) in (BAD_OF_TRL if of_trl else BAD).items():
        with launched():
            answers[name] = attempt(make)
    return answers


def check_errors(bad: dict[str, tuple[Any, list[str]]], of_ranks: list[dict[str, Any]]) -> None:
    for rank, answers in enumerate(of_ranks):
        for name, answer in answers.items():
            assert isinstance(answer, Failure), f"{name}: nothing was raised on rank {rank}"
            assert answer.kind in ("ValueError", "TypeError", "RuntimeError"), f"{name}:\n{answer.trace}"
            for words in bad[name][1]:
                assert words in answer.message, f"{name} on rank {rank}: {answer.message}"


def test_bad_input_is_one_error_on_every_rank(pool):
    check_errors(BAD, pool.run(4, tried, False))


def test_bad_input_for_trl_is_one_error_on_every_rank(pool):
    pytest.importorskip("trl")
    check_errors(BAD_OF_TRL, pool.run(4, tried, True))


def of_a_trainer() -> list[Any]:
    """Trainer makes its plugin itself; and reports what a file asks for."""
    answers = []
    with launched():
        sizes = ParallelismConfig(dp_shard_size=2, tp_size=2)
        arguments = TrainingArguments(
            "out", report_to=[], fsdp=True, fsdp_config={"version": 2}, use_cpu=True, parallelism_config=sizes
        )
        trainer = Trainer(model=Case().model(), args=arguments)
        answers.append([trainer.accelerator.num_processes, trainer.accelerator.parallelism_config.tp_size])
    with launched():
        Accelerator(fsdp_plugin=plugin("2x2"))
        trainer = Trainer(model=Case().model(), args=TrainingArguments("out", report_to=[]))  # starts anew
        answers.append([trainer.accelerator.num_processes, trainer.accelerator.parallelism_config.tp_size])
    with launched():
        handler = InitProcessGroupKwargs(timeout=timedelta(seconds=77))
        accelerator = Accelerator(fsdp_plugin=LoRAParallelPlugin(tp_size=2), kwargs_handlers=[handler])
        answers.append(accelerator.parallelism_config.config.timeout_seconds)
    return answers


def test_the_plugin_of_a_trainer(pool):
    for sizes, after_another, timeout in pool.run(4, of_a_trainer):
        assert sizes == after_another == [2, 2]
        assert timeout == 77


def test_a_plugin_of_accelerates_own_is_taken_over():
    own = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=False,
        activation_checkpointing=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    config = LoRAParallelPlugin.of(own).parallel_config({"tp": 1}, "bf16")
    assert (config.reshard_after_forward, config.activation_checkpointing) == (False, True)
    assert config.block_classes == ["LlamaDecoderLayer"]
    assert config.param_dtype is torch.bfloat16
    assert config.reduce_dtype is torch.float32
    own.mixed_precision_policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    assert LoRAParallelPlugin.of(own).parallel_config({"tp": 1}, "bf16").reduce_dtype is torch.float64
    own.fsdp_version = 1
    with pytest.raises(ValueError, match=r"fsdp_version is 1: .*fsdp_version: 2"):
        LoRAParallelPlugin.of(own)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """The plugin sets a variable for transformers."""
    monkeypatch.delenv("FSDP_CPU_RAM_EFFICIENT_LOADING", raising=False)
    yield
    os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
