"""A model of 405 billion parameters on 512 simulated ranks, in one process: nothing grows with it but its names."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from tests.oracle.workers import SCRIPT_LIMIT

SHAPE = {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def simulate(rank: int, world_size: int, tp: int) -> dict[str, int]:
    """Shard Llama 3.1 405B's shape as `rank` would; a fake process group sends nothing."""
    import torch
    import torch.distributed as dist
    from peft import LoraConfig
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM

    from lora_parallel import ParallelConfig, build_mesh, meta_init, parallelize, read_plan
    from lora_parallel.distributed.dtensors import local

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    config = ParallelConfig(tp=tp)
    with meta_init():
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    lora_config = LoraConfig(r=16, target_modules="all-linear")
    parallelize(model, build_mesh(config, "cpu"), config, lora_config=lora_config, materialize=False)
    base = [p for p in model.parameters() if p.is_meta]
    adapters = [p for p in model.parameters() if not p.is_meta]
    drawn = next(p for name, p in model.named_parameters() if "layers.125.self_attn.q_proj.lora_A" in name)
    return {
        "planned": sum(read.bytes for read in read_plan(model)),
        "base": sum(local(p).numel() * p.element_size() for p in base),
        "whole": sum(p.numel() * p.element_size() for p in base),
        "adapters": sum(local(p).numel() for p in adapters),
        "whole_adapters": sum(p.numel() for p in adapters),
        "frozen_adapters": sum(not p.requires_grad for p in adapters),
        "drawn": int(local(drawn).count_nonzero()),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


@pytest.mark.matrix
@pytest.mark.processes
def test_405b_on_512_ranks_is_planned_in_one_small_process():
    command = [sys.executable, "-m", "tests.lora_parallel.test_scale", "511"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=SCRIPT_LIMIT)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert found["planned"] == found["base"]
    assert found["whole"] > 810e9  # 405 billion parameters of 2 bytes
    assert found["base"] <= found["whole"] / 512 * 1.01
    assert found["adapters"] < found["whole_adapters"] / 100  # those replicated over tp are on 64 ranks only
    assert found["frozen_adapters"] == 0
    assert found["drawn"] > 0
    assert found["peak"] < 4e9


if __name__ == "__main__":
    print(json.dumps(simulate(int(sys.argv[1]), world_size=512, tp=8)))
