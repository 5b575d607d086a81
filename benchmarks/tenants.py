"""Eight fine-tunes of one base: batched, one after the other, and by PEFT's `set_adapter`, interleaved in one process.

    python benchmarks/tenants.py                                 # a minute or two on 2 cores
    python benchmarks/tenants.py --hidden 256 --rows 1 --tokens 64
    torchrun --nproc-per-node 4 benchmarks/tenants.py --tp 2     # sharded, without PEFT's side

- Each side has the same base, the same eight adapters and takes the same rows of each tenant; a step of a side is one
  optimizer step of every tenant. Before the timing the adapters of all sides must agree after a step.
- The sides take turns, so that a busy machine slows all alike; who goes first rotates.
- Nothing here fails for being slow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from lora_parallel import ParallelConfig, TenantPool, build_mesh, parallelize

TOLERANCE = 1e-4  # relative, of adapters after a step in float32


def base(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": options.hidden, "intermediate_size": 3 * options.hidden, "vocab_size": 4 * options.hidden}
    return LlamaForCausalLM(
        LlamaConfig(**size, num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=4)
    ).train()


def adapter(options: argparse.Namespace) -> LoraConfig:
    return LoraConfig(r=options.r, target_modules="all-linear", init_lora_weights=False)


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Pooled:
    """Ours: all tenants in one forward, or each in its own."""

    def __init__(
        self, options: argparse.Namespace, mesh: Any, config: ParallelConfig, batched: bool, shard: bool
    ) -> None:
        self.model, self.batched = parallelize(base(options).to(mesh.device_type), mesh, config), batched
        self.pool = TenantPool(self.model, shard=shard)
        for number in range(options.tenants):
            self.pool.add(f"tenant{number}", adapter(options), optimizer, number)

    def step(self, ids: Tensor) -> None:
        names = self.pool.names()
        if not self.batched:
            for name, rows in zip(names, ids, strict=True):
                with self.pool.train(name):
                    loss_of(self.model(input_ids=rows).logits, rows).backward()
                self.pool.step(name)
            return
        with self.pool.route([name for name in names for _ in ids[0]]):
            logits = self.model(input_ids=ids.flatten(0, 1)).logits.unflatten(0, ids.shape[:2])
            torch.stack([loss_of(*each) for each in zip(logits, ids, strict=True)]).sum().backward()
        for name in names:
            self.pool.step(name)

    def adapters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.model.named_parameters() if "lora_" in name}

    def held(self) -> tuple[int, int]:
        memory = self.pool.memory()
        return memory[""]["base"], sum(sum(memory[name].values()) for name in self.pool.names())


class Switched:
    """PEFT's: eight adapters in one model, `set_adapter` before each tenant's step."""

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        plain = base(options).to(device)
        self.names = [f"tenant{number}" for number in range(options.tenants)]
        for number, name in enumerate(self.names):
            torch.manual_seed(number)
            if number == 0:
                self.model = get_peft_model(plain, adapter(options), adapter_name=name)
            else:
                self.model.add_adapter(name, adapter(options))
        named = list(self.model.named_parameters())
        self.optimizers = {name: optimizer([p for key, p in named if f".{name}." in key]) for name in self.names}

    def step(self, ids: Tensor) -> None:
        for name, rows in zip(self.names, ids, strict=True):
            self.model.set_adapter(name)
            loss_of(self.model(input_ids=rows).logits, rows).backward()
            self.optimizers[name].step()
            self.optimizers[name].zero_grad()

    def adapters(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name.removeprefix("base_model.model."): p for name, p in named if "lora_" in name}

    def held(self) -> tuple[int, int]:
        adapters = [*self.adapters().values()]
        states = [each for optimizer in self.optimizers.values() for each in tree_leaves(dict(optimizer.state))]
        own = sum(each.nbytes for each in (*adapters, *states) if isinstance(each, Tensor))
        return sum(p.nbytes for p in self.model.parameters()) - sum(p.nbytes for p in adapters), own


def check_equal_work(sides: dict[str, Any], ids: Tensor) -> None:
    found = {}
    for name, side in sides.items():
        side.step(ids)
        adapters = {key: p.detach() for key, p in side.adapters().items()}
        found[name] = {key: p.full_tensor() if hasattr(p, "full_tensor") else p for key, p in adapters.items()}
    first = next(iter(found.values()))
    for name, adapters in found.items():
        assert adapters.keys() == first.keys(), f"{name}: other adapters"
        worst = max(((adapters[key] - p).norm() / p.norm()).item() for key, p in first.items())
        assert worst <= TOLERANCE, f"{name}: the sides do not do equal work ({worst:.1e})"


def timed(step: Callable[[Tensor], None], ids: Tensor) -> float:
    synchronize = torch.cuda.synchronize if ids.is_cuda else lambda: None
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    step(ids)
    synchronize()
    dist.barrier()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--r", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="of each tenant in a step, per data-parallel rank")
    parser.add_argument("--tokens", type=int, default=64, help="of each row")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--tp", type=int, default=1)
    options = parser.parse_args()

    config = ParallelConfig(tp=options.tp, require_adapters=False)
    mesh = build_mesh(config)
    rank = mesh.get_local_rank("dp_shard")
    generator = torch.Generator().manual_seed(rank)
    shape = (options.tenants, options.rows, options.tokens)
    ids = torch.randint(4 * options.hidden, shape, generator=generator).to(mesh.device_type)

    sides: dict[str, Any] = {
        "batched": Pooled(options, mesh, config, batched=True, shard=False),
        "one after the other": Pooled(options, mesh, config, batched=False, shard=False),
    }
    if mesh["dp_shard"].size() > 1:
        sides["batched, shard=True"] = Pooled(options, mesh, config, batched=True, shard=True)
    if dist.get_world_size() == 1:
        sides["PEFT set_adapter"] = Switched(options, mesh.device_type)
    check_equal_work(sides, ids)

    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in tqdm(range(-options.warmup, options.steps), disable=dist.get_rank() != 0):
        order = list(sides)
        turn = number % len(order)
        for name in (*order[turn:], *order[:turn]):
            took = timed(sides[name].step, ids)
            if number >= 0:
                seconds[name].append(took)
    if dist.get_rank() == 0:
        tokens = ids.numel() * mesh["dp_shard"].size()
        table = Table("side", "ms a step", "tokens/s", "time to batched's", "MB a rank: base", "tenants")
        for name, took in seconds.items():
            median = statistics.median(took)
            ratio = statistics.median(a / b for a, b in zip(took, seconds["batched"], strict=True))
            sizes = [f"{size / 1e6:.1f}" for size in sides[name].held()]
            table.add_row(name, f"{1e3 * median:.1f}", f"{tokens / median:,.0f}", f"{ratio:.2f}", *sizes)
        Console().print(table)
        each = f"{options.rows} x {options.tokens} tokens of each"
        Console().print(f"{options.tenants} tenants, {each}, {mesh.device_type}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
