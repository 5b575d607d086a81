"""Pipeline parallelism: the bubble of each schedule, a drawing of real runs, and pp 2 beside tp 2 and dp_shard 2.

    python benchmarks/pipeline.py                       # all three, about two minutes on 2 cores
    python benchmarks/pipeline.py --parts bubble        # the simulation alone, seconds
    python benchmarks/pipeline.py --parts picture       # docs/assets/pipeline.png again
    python benchmarks/pipeline.py --parts sides --rounds 20

- bubble: the orders of `lora_parallel/pp/schedules.py`, simulated, against the formula (`schedule_simulation.py`).
- picture: a Llama of 8 blocks on four processes, 8 micro-batches, under each schedule. Each process notes when its
  actions begin and end. So that four processes can share two cores, each block also sleeps as long as `--pause` says in
  forward, and twice as long in backward, as if it waited for a device. Of five steps the quickest is drawn.
- sides: a training step on the same global batch in three meshes of two processes, which take turns, without pauses.
  Losses must agree first. Two CPU cores tell nothing about speed on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import matplotlib
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from meters import metered_memory
from peft import LoraConfig, get_peft_model
from report import environment
from schedule_simulation import bubble_formula, order_of, simulate
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lora_parallel import ParallelConfig, build_mesh, clip_grad_norm_, parallelize
from lora_parallel.pp.links import Links
from lora_parallel.pp.pipeline import Pipeline
from lora_parallel.pp.schedules import Action

matplotlib.use("Agg")  # draws to a file: needs no screen
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

MIB = 2**20
PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "pipeline.png"
STAGES, MICROBATCHES = 4, 8
SCHEDULES = {"1f1b": 1, "interleaved": 2, "gpipe": 1}
"""The number of stages on each rank."""

SIDES: dict[str, dict[str, Any]] = {
    "pp 2, 1f1b": {"pp": 2, "pp_microbatches": MICROBATCHES},
    "pp 2, gpipe": {"pp": 2, "pp_microbatches": MICROBATCHES, "pp_schedule": "gpipe"},
    "tp 2": {"tp": 2},
    "dp_shard 2": {"dp_shard": 2},
}


def model_of(hidden: int) -> nn.Module:
    torch.manual_seed(0)
    size = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": 8}
    heads = {"num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 64}
    model = LlamaForCausalLM(LlamaConfig(**size, **heads, vocab_size=4 * hidden, use_cache=False))
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)).train()


def batch_of(hidden: int, tokens: int) -> Tensor:
    return torch.randint(4 * hidden, (MICROBATCHES, tokens), generator=torch.Generator().manual_seed(1))


def run(job: Callable[..., Any], processes: int, *arguments: Any, **variables: str) -> Any:
    """Return what rank 0 answers, of a job that new processes with these environment variables run as ranks."""
    answers = mp.get_context("spawn").SimpleQueue()
    os.environ.update(variables)
    with tempfile.TemporaryDirectory() as scratch:
        given = (job, processes, Path(scratch) / "store", answers, arguments)
        mp.start_processes(_joined, given, nprocs=processes, start_method="spawn")
    for name in variables:
        del os.environ[name]
    return answers.get()


def _joined(rank: int, job: Callable[..., Any], processes: int, store: Path, answers: Any, arguments: Any) -> None:
    torch.set_num_threads(1)
    place = {"init_method": f"file://{store}", "rank": rank, "world_size": processes}
    dist.init_process_group("gloo", timeout=timedelta(seconds=300), **place)
    found = job(*arguments)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


def gathered(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


# ---------------------------------------------------------------------- the simulation


def bubble_table() -> str:
    sizes = (4, 8, 16, 32)
    lines = [
        "| P | stages on a rank | " + " | ".join(f"M {each}" for each in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for stages in (1, 2):
        for pp in (2, 4, 8):
            cells = []
            for microbatches in sizes:
                found = simulate(order_of("1f1b", pp, stages, microbatches)).bubble
                cells.append(f"{found:.1%} ({bubble_formula(pp, stages, microbatches):.1%})")
            lines.append(f"| {pp} | {stages} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---------------------------------------------------------------------- the picture


class _Pause(torch.autograd.Function):
    """Sleep in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Trace:
    """Note when the actions of this rank begin to compute, and when they end."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, bool, float, float]] = []
        """Stage, micro-batch, True for a forward, begin and end."""

        self._begin = 0.0

    @contextmanager
    def around(self, pipeline: Pipeline, action: Action, count: int) -> Iterator[None]:
        self._begin = time.monotonic()  # one clock for all processes of a machine
        with _around(pipeline, action, count):
            yield
        self.rows.append((action.stage, action.microbatch, action.is_forward, self._begin, time.monotonic()))

    def received(self, links: Links, is_hidden: bool) -> Tensor:
        """Wait for an input. Waiting is not computing, so the action begins anew."""
        tensor = _receive(links, is_hidden)
        self._begin = time.monotonic()
        return tensor


_receive, _around = Links.receive, Pipeline.around


def traced(pause: float) -> dict[str, list[Any]]:
    """Each schedule's quickest step, as others use the cores too: the rows of all ranks."""
    found = {}
    for schedule, stages in SCHEDULES.items():
        config = ParallelConfig(
            pp=STAGES, pp_microbatches=MICROBATCHES, pp_schedule=schedule, pp_stages_per_rank=stages
        )
        model: Any = parallelize(model_of(64), build_mesh(config, "cpu"), config)
        for module in model.modules():
            if isinstance(module, LlamaDecoderLayer):
                module.register_forward_hook(lambda block, args, hidden: _Pause.apply(hidden, pause))
        ids = batch_of(64, 32)
        steps = []
        for _ in range(5):
            trace = Trace()
            dist.barrier()
            with (
                patch.object(Links, "receive", lambda links, is_hidden, trace=trace: trace.received(links, is_hidden)),
                patch.object(Pipeline, "around", lambda *about, trace=trace: trace.around(*about)),
            ):
                model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
            steps.append(gathered(trace.rows))
        found[schedule] = min(steps, key=length_of)
    return found


def length_of(ranks: list[Any]) -> float:
    """Seconds from the first action's begin to the last one's end."""
    rows = [row for each in ranks for row in each]
    return max(row[4] for row in rows) - min(row[3] for row in rows)


def bubble_of(ranks: list[Any]) -> float:
    busy = sum(row[4] - row[3] for each in ranks for row in each)
    return 1 - busy / (length_of(ranks) * len(ranks))


def draw(found: dict[str, list[Any]], path: Path) -> None:
    """One panel a schedule, one row a rank; stages after the first one of a rank are darker."""
    colours = {True: ("#a6cee3", "#4f94c4"), False: ("#fdbf6f", "#e08a1e")}
    figure, panels = plt.subplots(len(found), 1, figsize=(13, 7.2), layout="constrained", sharex=True)
    for panel, (schedule, ranks) in zip(panels, found.items(), strict=True):
        start = min(row[3] for each in ranks for row in each)
        for rank, rows in enumerate(ranks):
            for stage, microbatch, is_forward, begin, end in rows:
                panel.barh(
                    rank,
                    1000 * (end - begin),
                    left=1000 * (begin - start),
                    height=0.86,
                    color=colours[is_forward][stage // STAGES],
                    edgecolor="white",
                    linewidth=0.8,
                )
                middle = 1000 * ((begin + end) / 2 - start)
                panel.text(middle, rank, str(microbatch + 1), ha="center", va="center", fontsize=8)
        stages = SCHEDULES[schedule]
        panel.set_title(
            f"{schedule}{f', {stages} stages on a rank' * (stages > 1)}: ranks wait for {bubble_of(ranks):.0%} of the "
            f"time (formula: {bubble_formula(STAGES, stages, MICROBATCHES):.0%})",
            loc="left",
            fontsize=10,
        )
        panel.set_yticks(range(STAGES), [f"rank {rank}" for rank in range(STAGES)])
        panel.invert_yaxis()
        panel.margins(x=0.005)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
    panels[-1].set_xlabel("milliseconds since the first action of the step")
    legend = {"forward": (True, 0), "backward": (False, 0)}
    legend |= {"forward, second stage": (True, 1), "backward, second stage": (False, 1)}
    handles = [Patch(color=colours[kind][shade], label=label) for label, (kind, shade) in legend.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------------- the sides


def measured(hidden: int, tokens: int, rounds: int) -> dict[str, list[tuple[float, int]]]:
    """Return, for each side and round, the seconds, and the most bytes that a process holds and a step adds."""
    sides = {}
    for name, options in SIDES.items():
        config = ParallelConfig(**options)
        mesh = build_mesh(config, "cpu")
        model: Any = parallelize(model_of(hidden), mesh, config)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        shares = mesh["dp_shard"].size()
        ids = batch_of(hidden, tokens).chunk(shares)[mesh.get_local_rank("dp_shard") if shares > 1 else 0]
        sides[name] = model, optimizer, ids

    def step(name: str) -> float:
        model, optimizer, ids = sides[name]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    first = {name: statistics.mean(gathered(step(name))) for name in sides}
    assert max(first.values()) - min(first.values()) < 1e-4, f"the sides have other losses: {first}"
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in sides}
    for index in range(rounds):
        for name in list(sides)[:: 1 if index % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            with metered_memory() as memory:
                step(name)
            seconds = time.perf_counter() - start
            everyone = gathered((seconds, held(*sides[name][:2]) + memory.anonymous))
            found[name].append((max(each for each, _ in everyone), max(each for _, each in everyone)))
    return found


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    states = [each for state in optimizer.state.values() for each in state.values()]
    tensors = {t for t in (*model.parameters(), *model.buffers(), *states) if isinstance(t, Tensor)}
    return sum(local.nbytes for t in tensors for local in [t.to_local() if isinstance(t, DTensor) else t])


def sides_table(times: dict[str, Any], memory: dict[str, Any]) -> str:
    """Ratios to pp 2 under 1f1b: the median over the rounds of the time, the most of any round of the memory."""
    ours = next(iter(SIDES))
    lines = [
        "| two processes | step | largest process |",
        "|---|---|---|",
    ]
    for name in SIDES:
        ratio = statistics.median(it[0] / our[0] for it, our in zip(times[name], times[ours], strict=True))
        most, our_most = (max(each[1] for each in memory[which]) for which in (name, ours))
        lines.append(f"| {name} | {ratio:.2f} | {most / our_most:.2f} ({most / MIB:.0f} MiB) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("bubble", "picture", "sides"), default=None)
    parser.add_argument("--pause", type=float, default=0.04, help="seconds that a block sleeps in forward")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    options = parser.parse_args()
    parts = options.parts or ["bubble", "picture", "sides"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    text, raw = [], {"environment": environment(), "options": {k: str(v) for k, v in vars(options).items()}}
    if "bubble" in parts:
        text.append(f"Share of the time that ranks wait, simulated (formula):\n\n{bubble_table()}")
    if "picture" in parts:
        raw["trace"] = run(traced, STAGES, options.pause)
        draw(raw["trace"], options.picture)
        shares = ", ".join(f"{name} {bubble_of(ranks):.0%}" for name, ranks in raw["trace"].items())
        text.append(f"Ranks of the real runs waited for: {shares}. Drawn into {options.picture}")
    if "sides" in parts:
        arguments = (options.hidden, options.tokens)
        # What is freed goes back to the system at once, so that all that is taken is seen; pages taken anew are slow.
        memory = run(measured, 2, *arguments, 3, MALLOC_MMAP_THRESHOLD_=str(MIB // 16))
        times = run(measured, 2, *arguments, options.rounds)
        raw |= {"memory": memory, "times": times, "columns": ["seconds", "bytes"]}
        text.append(f"{options.rounds} rounds, to pp 2 with 1f1b:\n\n{sides_table(times, memory)}")
    options.output.mkdir(parents=True, exist_ok=True)
    table = "\n\n".join(text) + "\n"
    (options.output / "pipeline.md").write_text(table)
    (options.output / "pipeline.json").write_text(json.dumps(raw, indent=2) + "\n")
    print(f"\n{table}\nwritten to {options.output}")


if __name__ == "__main__":
    main()
