"""What a Fabric loop needs beside the training itself: refusals, data, communication, precision, a script that runs."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import lightning.fabric
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import TorchCheckpointIO
from peft import get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_lora.data import sync_metrics
from lora_parallel.adapters.inspection import adapter_parameters
from tests.lightning_lora import modules as m
from tests.lightning_lora.harness import ROWS, Tokens, fabric, loader, strategy, tidy, tuner
from tests.lightning_lora.test_data import initialise
from tests.lightning_lora.test_launch import launch
from tests.oracle import SIZES, causal_lm, full, lora_config, trained
from tests.oracle.workers import Failure, attempt

FIRST = "set the model up first (model = fabric.setup_module(model))"
REFUSED: dict[str, tuple[str, str]] = {
    "has state": ("ValueError", FIRST),
    "has state on one rank": ("ValueError", FIRST),
    "foreign": ("ValueError", "AdamW holds 1 parameters that are not those of the PeftModelForCausalLM"),
    "foreign on one rank": ("ValueError", "AdamW holds 1 parameters that are not those of the PeftModelForCausalLM"),
    "lora_config": ("ValueError", "before the adapters are: set the model up first"),
    "stale": ("ValueError", "before the model was sharded. Make it after model = fabric.setup_module(model)"),
    "stale on one rank": ("ValueError", "before the model was sharded. Make it after"),
    "no adapters": ("ValueError", "no PEFT layers and no lora_config"),
    "trains outside": ("ValueError", "head.weight of Headed trains but belongs to no adapter"),
    "not finite": ("RuntimeError", "the total norm of order 2.0 of the gradients is nan"),
    "other mesh": ("ValueError", "was parallelized over a mesh of (1, 2, 1) before; this one has (1, 1, 2)"),
}


class Headed(tuner()):  # type: ignore[misc]
    """A head that trains, outside of the adapted model."""

    def __init__(self) -> None:
        super().__init__(m.adapted)
        self.head = nn.Linear(4, 4)


def attempts() -> dict[str, Any]:
    """What each raises; then the process group still trains."""
    last = dist.get_rank() == 1
    loose = nn.Parameter(torch.zeros(1))

    def optimizer(model: nn.Module, *more: nn.Parameter) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*trained(model).values(), *more], lr=1e-2)

    def stepped(model: nn.Module, really: bool) -> torch.optim.Optimizer:
        made = optimizer(model)
        if really:
            for parameter in trained(model).values():
                parameter.grad = torch.zeros_like(parameter)
            made.step()
        return made

    def has_state(run: Any, really: bool) -> None:
        model = m.adapted()
        run.setup(model, stepped(model, really))

    def foreign(run: Any, really: bool) -> None:
        model = m.adapted()
        run.setup(model, optimizer(model, *([loose] if really else [])))

    def stale(run: Any, really: bool) -> None:
        model = m.adapted()
        early = optimizer(model)
        model = run.setup_module(model)
        run.setup_optimizers(early if really else optimizer(model))

    def not_finite(run: Any) -> None:
        model = m.adapted()
        model, made = run.setup(model, optimizer(model))
        for parameter in trained(model.module).values():
            parameter.grad = torch.full_like(parameter, float("nan"))
        run.clip_gradients(model, made, max_norm=1.0, error_if_nonfinite=False)
        run.clip_gradients(model, made, max_norm=1.0)

    def other_mesh(run: Any) -> None:
        again = run.setup_module(run.setup_module(m.adapted()).module)  # on the same mesh, it is as it was
        fabric("1x2").setup_module(again.module)

    found: dict[str, Any] = {}
    with tidy():
        run = fabric("2x1")
        injecting = fabric("2x1", lora={"lora_config": lora_config()})
        plain = m.plain()
        actions = {
            "has state": lambda: has_state(run, True),
            "has state on one rank": lambda: has_state(run, last),
            "foreign": lambda: foreign(run, True),
            "foreign on one rank": lambda: foreign(run, last),
            "lora_config": lambda: injecting.setup(plain, torch.optim.AdamW(plain.parameters())),
            "stale": lambda: stale(run, True),
            "stale on one rank": lambda: stale(run, last),
            "no adapters": lambda: run.setup(bare := m.plain(), torch.optim.AdamW(bare.parameters())),
            "trains outside": lambda: run.setup_module(Headed()),
            "not finite": lambda: not_finite(run),
            "other mesh": lambda: other_mesh(run),
        }
        for name, action in actions.items():
            found[name] = attempt(action)
        model = m.adapted()
        model, made = run.setup(model, optimizer(model))
        batch = next(iter(loader(Tokens(ROWS), "2x1")))
        run.backward(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)
        before = {name: full(p) for name, p in trained(model).items()}
        made.step()
        found["good"] = all(not torch.equal(full(p), before[name]) for name, p in trained(model).items())
    return found


def test_refused_at_setup(pool):
    for rank, found in enumerate(pool.run(2, attempts)):
        assert found.pop("good")
        assert found.keys() == REFUSED.keys()
        for name, (kind, text) in REFUSED.items():
            failure = found[name]
            assert isinstance(failure, Failure), f"{name} was accepted on rank {rank}"
            assert failure.kind == kind, (name, rank, failure.kind, failure.message)
            assert text in failure.message, (name, rank, failure.message)


def construct(**options: Any) -> Any:
    settings = {"strategy": strategy("2x2", kind="FabricLoRAParallelStrategy"), "accelerator": "cpu", "devices": 4}
    return lightning.fabric.Fabric(**{**settings, **options})


def test_refused_as_fabric_is_made():
    with pytest.raises(ValueError, match=r"precision='16-true' .* is not supported"):
        construct(precision="16-true")
    with pytest.raises(ValueError, match="does not support the plugin TorchCheckpointIO"):
        construct(plugins=[TorchCheckpointIO()])
    with pytest.raises(ValueError, match="= 4, but the world size is 2"):
        construct(devices=2)
    made = construct(precision="64-true")
    assert made.strategy.launcher is not None
    with pytest.raises(RuntimeError, match=r"after fabric.launch\(\)"):
        _ = made.strategy.device_mesh


# ---------------------------------------------------------------------- data, communication


def data_and_values() -> dict[str, Any]:
    """What loaders and collectives give this rank of 2x2."""
    rank, found = dist.get_rank(), {}
    own = partial(initialise, note=[])
    with tidy():
        run = fabric("2x2")
        run.seed_everything(3, verbose=False)
        train, held_out, custom = run.setup_dataloaders(
            DataLoader(Tokens(16), batch_size=2, shuffle=True),
            DataLoader(Tokens(6), batch_size=1),
            DataLoader(Tokens(4), batch_size=1, worker_init_fn=own),
        )
        found["epochs"] = [[i for batch in train for i in batch["index"].tolist()] for _ in range(2)]
        found["held out"] = [batch["index"].item() for batch in held_out]
        found["seeds"] = [train.worker_init_fn.keywords, custom.worker_init_fn is own]
        share = torch.tensor([float(rank // 2), 1.0])
        found["mean"] = run.all_reduce(share).tolist()
        found["in place"] = share.tolist()
        found["sum"] = run.all_reduce(torch.tensor(rank // 2 + 1), reduce_op="sum").item()
        found["gathered"] = run.all_gather({"x": torch.tensor([rank // 2])})["x"].tolist()
        found["broadcast"] = run.broadcast({"from": rank}, src=2)
        found["decision"] = [run.strategy.reduce_boolean_decision(rank == 3, all=each) for each in (True, False)]
        run.barrier()
    return found


def test_data_and_communication_are_over_data_parallel_ranks(pool):
    answers = pool.run(4, data_and_values)
    for rank, found in enumerate(answers):
        assert found == {**answers[rank // 2 * 2], "seeds": [{"rank": rank // 2}, True]}
        assert found["mean"] == found["in place"] == [0.5, 1.0]
        assert found["sum"] == 3
        assert found["gathered"] == [[0], [1]]
        assert found["broadcast"] == {"from": 2}
        assert found["decision"] == [False, True]
    for epoch in range(2):
        assert sorted(answers[0]["epochs"][epoch] + answers[2]["epochs"][epoch]) == list(range(16))
    assert answers[0]["epochs"][0] != answers[0]["epochs"][1]
    assert {*answers[0]["held out"], *answers[2]["held out"]} == set(range(6))


def values_of_replicas() -> dict[str, Any]:
    """Return what loaders, metrics and collectives give this rank of two replicas of two shards."""
    rank = dist.get_rank()
    with tidy():
        run = fabric("2x2x1")
        metric = SumMetric()
        sync_metrics(nn.ModuleList([metric]), run.strategy.device_mesh)
        metric.update(10**rank)
        shards = run.strategy.device_mesh.get_group("dp_shard")
        return {
            "sampler": run.strategy.distributed_sampler_kwargs,
            "gathered": run.all_gather(torch.tensor(rank)).tolist(),
            "mean": run.all_reduce(torch.tensor(10.0**rank)).item(),
            "mean of shards": run.all_reduce(torch.tensor(10.0**rank), group=shards).item(),
            "metric": metric.compute().item(),
        }


def test_each_shard_of_each_replica_counts_as_one_data_parallel_rank(pool):
    for rank, found in enumerate(pool.run(4, values_of_replicas)):
        assert found == {
            "sampler": {"num_replicas": 4, "rank": rank},
            "gathered": [0, 1, 2, 3],
            "mean": 1111 / 4,
            "mean of shards": (11 if rank < 2 else 1100) / 2,
            "metric": 1111,
        }


def largest_gradient() -> float:
    with tidy():
        run = fabric("2x1")
        layer = nn.Linear(2, 1, bias=False)
        layer.weight.grad = torch.tensor([[3.0, -4.0]])
        return run.clip_gradients(layer, torch.optim.SGD(layer.parameters()), max_norm=9.0, norm_type="inf").item()


def test_gradients_are_clipped_by_the_norm_that_is_asked_for(pool):
    assert pool.run(2, largest_gradient) == [4, 4]


# ---------------------------------------------------------------------- precision


def dtypes(precision: str) -> dict[str, Any]:
    with tidy():
        run = fabric("1x2", precision=precision)
        with run.init_module(empty_init=False):
            model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), lora_config())
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        computed: list[torch.dtype] = []
        model.get_base_model().model.layers[1].mlp.up_proj.register_forward_hook(
            lambda layer, args, output: computed.append(output.dtype)
        )
        model, made = run.setup(model, made)
        batch = next(iter(loader(Tokens(ROWS), "1x2")))
        output = model(input_ids=batch["input_ids"], labels=batch["labels"])
        run.backward(output.loss)
        made.step()
        adapters = set(adapter_parameters(model.module).values())
        return {
            "base": {p.dtype for p in model.module.parameters() if p not in adapters},
            "adapters": {p.dtype for p in adapters},
            "computed": set(computed),
            "returned": output.logits.dtype,
            "default": torch.get_default_dtype(),
        }


PRECISIONS = {
    "32-true": (torch.float32, torch.float32, torch.float32, torch.float32),
    "64-true": (torch.float64, torch.float64, torch.float64, torch.float64),
    "bf16-true": (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
    "bf16-mixed": (torch.float32, torch.float32, torch.bfloat16, torch.float32),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision(pool, precision):
    base, adapters, computed, returned = PRECISIONS[precision]
    for found in pool.run(2, dtypes, precision):
        assert found["base"] == {base}
        assert found["adapters"] == {adapters}
        assert found["computed"] == {computed}
        assert found["returned"] == returned
        assert found["default"] == torch.float32


# ---------------------------------------------------------------------- the real thing


@pytest.mark.matrix
@pytest.mark.processes
def test_the_documented_loop_runs(tmp_path):
    """Fabric's own launcher starts the processes (two here); what it saves is a PEFT adapter."""
    causal_lm(dtype=torch.float32).save_pretrained(tmp_path / "model")
    docs = Path(__file__).parents[2] / "docs" / "lightning.md"
    loop = next(code for code in re.findall(r"```python\n(.*?)```", docs.read_text(), re.DOTALL) if "def main" in code)
    script = tmp_path / "train.py"
    script.write_text(loop.replace("path/to/model", str(tmp_path / "model")).replace("devices=4", "devices=2"))
    launch(script)
    saved = tmp_path / "checkpoint"
    assert json.loads((saved / "meta.json").read_text())["mesh"] == {"dp_replicate": 1, "dp_shard": 1, "tp": 2}
    assert (saved / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
