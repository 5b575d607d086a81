"""What sharding a very large model costs each rank, on simulated ranks: a fake process group that sends nothing.

    python benchmarks/scale.py                                  # 70B, 405B and a mixture on 512 and 4,096 ranks
    python benchmarks/scale.py --models tiny tiny-mixture --ranks 8 --tp 2      # a look, half a minute

- Models are built on meta and wrapped by `parallelize(..., materialize=False)`: everything but the reading of base
  weights, adapters drawn from the seed included.
- Each simulated rank has a process of its own, one at a time, so that peaks of memory are its own.
- The first and the last rank stand for all of them. FSDP2 and tensor parallelism cut a dim into chunks of
  ceil(size / ranks), so on every axis the size of a shard never grows with the coordinate: no rank holds more than the
  first one, and none less than the last one. `--check` measures a rank between them, which must lie between them.
- Messages are counted in the backward pass of a narrow model with the same layers, on the same simulated mesh.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from matplotlib import pyplot as plt
from peft import LoraConfig
from report import environment, write_files
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from lora_parallel import ParallelConfig, build_mesh, meta_init, parallelize
from lora_parallel.distributed.dtensors import local

GOAL_SECONDS = 30  # of the 405B model
GOAL_RATIO = 1.1  # of adapter bytes, largest rank / smallest
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
NARROW = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
NARROW_MIXTURE = {
    **NARROW,
    **{"moe_intermediate_size": 64, "n_routed_experts": 16, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
}

PRELOAD = ["lora_parallel", "matplotlib.pyplot"]
PRELOAD += ["transformers.models.deepseek_v3.modeling_deepseek_v3", "transformers.models.llama.modeling_llama"]

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """A model that is built from sizes alone, and the sizes that make a narrow one with the same layers."""

    title: str
    config: type[Any]
    targets: tuple[str, ...]
    sizes: Mapping[str, Any]
    narrow: Mapping[str, Any]

    def build(self, narrow: bool, dtype: torch.dtype) -> nn.Module:
        sizes = {**self.sizes, **(self.narrow if narrow else {})}
        config = self.config(use_cache=False, experts_implementation="eager", **sizes)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def llama(title: str, hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int = 128256) -> Shape:
    sizes = {
        **{"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": vocabulary},
    }
    return Shape(title, LlamaConfig, LINEAR, sizes, NARROW)


def mixture(title: str, **sizes: int) -> Shape:
    # Attention alone: of the MLP's names PEFT makes adapters of the routed experts, five billion parameters at r = 16.
    return Shape(title, DeepseekV3Config, LATENT_ATTENTION, sizes, NARROW_MIXTURE)


SHAPES = {
    "70B": llama("Llama 3 70B", 8192, 28672, 80, 64),
    "405B": llama("Llama 3.1 405B", 16384, 53248, 126, 128),
    "671B": mixture("DeepSeek-V3, a mixture of 256 experts"),
    "tiny": llama("a Llama of 2 layers", 256, 512, 2, 16, 512),
    "tiny-mixture": mixture("a DeepSeek-V3 of 4 layers", num_hidden_layers=4, **NARROW_MIXTURE),
}


@dataclass(frozen=True)
class Job:
    """One simulated run; picklable."""

    model: str
    ranks: int
    tp: int
    r: int

    @property
    def lora_config(self) -> LoraConfig:
        return LoraConfig(r=self.r, target_modules=[*SHAPES[self.model].targets])

    def start(self, rank: int) -> tuple[ParallelConfig, Any]:
        dist.init_process_group("fake", rank=rank, world_size=self.ranks, store=FakeStore())
        config = ParallelConfig(tp=self.tp)
        return config, build_mesh(config, "cpu")


@dataclass
class RankCost:
    """What one rank has after wrapping, and what wrapping took."""

    rank: int
    seconds: float
    processor_seconds: float
    peak: int
    """Most memory that the process had, libraries included, in bytes."""

    imported: int
    """Most memory that the process had before it built the model, in bytes."""

    base: int
    adapters: int
    whole_base: int
    whole_adapters: int


@dataclass
class Result:
    model: str
    title: str
    ranks: int
    mesh: str
    first: RankCost
    last: RankCost
    messages: int
    """Messages that carry adapter gradients in a step."""


def wrap(job: Job, rank: int) -> RankCost:
    """Wrap the model as `rank` would."""
    config, mesh = job.start(rank)
    imported = _peak()
    with meta_init():
        model = SHAPES[job.model].build(narrow=False, dtype=torch.bfloat16)
    start, processor = time.perf_counter(), time.process_time()
    parallelize(model, mesh, config, lora_config=job.lora_config, materialize=False)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    peak = _peak()
    adapters = [p for p in model.parameters() if not p.is_meta]
    base = [p for p in model.parameters() if p.is_meta]
    return RankCost(
        rank, seconds, processor, peak, imported, *(_bytes(map(local, each)) for each in (base, adapters)),
        *(_bytes(each) for each in (base, adapters)),
    )  # fmt: skip


def count_messages(job: Job) -> int:
    """Count the messages that carry adapter gradients in a step of the narrow model."""
    config, mesh = job.start(0)
    torch.manual_seed(0)
    model = SHAPES[job.model].build(narrow=True, dtype=torch.float32)
    parallelize(model, mesh, config, lora_config=job.lora_config)
    tokens = torch.arange(16).view(1, 16)
    loss = model(input_ids=tokens, labels=tokens).loss
    with GradientMessages() as messages:
        loss.backward()
    return messages.count


class GradientMessages(TorchDispatchMode):
    """Count the collectives of a backward pass that sum gradients.

    Gradients are sent flat, as one vector of many; activations have rows and tokens, and checks are ints.
    """

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "reduce" in func.__name__:
            sent = next(each for each in tree_leaves(args) if isinstance(each, Tensor))
            self.count += sent.dim() == 1 and sent.is_floating_point()
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def alone(function: Callable[..., T], *args: Any) -> T:
    """Call `function` in a process of its own, forked from one that has imported the libraries and done no more."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with ProcessPoolExecutor(1, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return pool.submit(function, *args).result()


def measure(job: Job, check: bool) -> Result:
    first, last = (alone(wrap, job, rank) for rank in (0, job.ranks - 1))
    if check:
        between = alone(wrap, job, job.ranks // 3)
        for kind in ("base", "adapters"):
            low, found, high = (getattr(each, kind) for each in (last, between, first))
            assert low <= found <= high, (
                f"{job}: rank {between.rank} holds {found} bytes of {kind}, not {low} to {high}"
            )
    mesh = f"{job.ranks // job.tp}x{job.tp}"
    return Result(job.model, SHAPES[job.model].title, job.ranks, mesh, first, last, alone(count_messages, job))


def markdown_table(results: list[Result]) -> str:
    lines = [
        "| model | ranks (mesh) | seconds to wrap (processor) | peak MiB, above the libraries | base MiB a rank "
        "| max / min | adapter KiB a rank | max / min | messages with adapter gradients a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        slower = max((each.first, each.last), key=lambda cost: cost.processor_seconds)
        above = max(cost.peak - cost.imported for cost in (each.first, each.last))
        lines.append(
            f"| {each.title} | {each.ranks} ({each.mesh}) | {slower.seconds:.1f} ({slower.processor_seconds:.1f}) "
            f"| {max(each.first.peak, each.last.peak) / 2**20:.0f}, {above / 2**20:.0f} "
            f"| {each.first.base / 2**20:.1f} | {_ratio(each, 'base'):.3f} "
            f"| {each.first.adapters / 2**10:.0f} | {_ratio(each, 'adapters'):.3f} | {each.messages} |"
        )
    return "\n".join(lines)


def _ratio(result: Result, kind: str) -> float:
    return float(getattr(result.first, kind) / max(1, getattr(result.last, kind)))


def draw(results: list[Result], path: Path) -> None:
    """Cost against ranks: processor seconds, peak memory, bytes of base and adapters."""
    panels: list[tuple[str, Callable[[Result], float]]] = [
        ("processor seconds to wrap", lambda each: max(each.first.processor_seconds, each.last.processor_seconds)),
        ("peak GiB of the process", lambda each: max(each.first.peak, each.last.peak) / 2**30),
        ("base MiB a rank", lambda each: each.first.base / 2**20),
        ("adapter MiB a rank", lambda each: each.first.adapters / 2**20),
    ]
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 3.6), layout="constrained")
    for axis, (title, value) in zip(axes, panels, strict=True):
        for model in dict.fromkeys(each.model for each in results):
            own = [each for each in results if each.model == model]
            axis.plot([each.ranks for each in own], [value(each) for each in own], marker="o", label=model)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set(xlabel="ranks", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["70B", "405B", "671B"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[512, 4096])
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--r", type=int, default=16, help="LoRA rank")
    parser.add_argument("--check", action="store_true", help="measure a third rank too, between the first and the last")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    arguments = parser.parse_args()
    jobs = [Job(model, ranks, arguments.tp, arguments.r) for model in arguments.models for ranks in arguments.ranks]

    results: list[Result] = []
    for job in tqdm(jobs):
        results.append(measure(job, arguments.check))
        table = markdown_table(results)
        record = {
            "environment": environment(),
            "options": {"tp": arguments.tp, "r": arguments.r},
            "results": [asdict(each) for each in results],
        }
        write_files(arguments.output, "scale", table, record)  # after each, so that an end halfway loses nothing
        draw(results, arguments.output / "scale.png")
        tqdm.write(table.splitlines()[-1])
    print(f"{table}\n\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
