"""Processor time of the host in an eager step, by phase: ours, plain PEFT, and FSDP2 by hand, in turns.

    python benchmarks/host.py                                   # 16 blocks, 20 steps: a minute or two on 2 cores
    python benchmarks/host.py --short                           # 2 blocks, 3 steps

- The model is deep and narrow (hidden 64, one row of 12 tokens), so that launches and Python take the time.
- All ranks get the same batch, so every side must have the loss and the gradient norm of plain PEFT before the timing.
- The sides of a number of ranks live in the same processes and take turns, step by step, in an order that is drawn anew
  for each round. Rank 0 is measured.
- What counts is the time that the training thread computes (`time.thread_time`). Waiting for a peer is not in it,
  nor what gloo's own threads do.
- It runs on the CPU, also where there are GPUs. On a CPU autograd runs the backward pass in the thread that calls it;
  for a GPU it would run it in a thread of its own, which `time.thread_time` does not see.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peers import BY_HAND_FSDP, CASES, Case, Peer, build_model, build_ours, build_peer, join, plain_peft
from report import environment, range_text, ratio_by_round, write_files
from sides import MAX_NORM, Side
from torch import Tensor
from tqdm import tqdm

HIDDEN, HEAD_DIM, TOKENS = 64, 16, 12
ADAMW = "foreach"  # as on a GPU: the loop would measure AdamW's own operators, one by one
TOLERANCE = 1e-5  # relative; float32 sums in another order differ by about 1e-7
SHORT = {"layers": 2, "steps": 3, "warmup": 1}
PHASES = ("forward", "backward", "clip", "AdamW")

PLAIN, BY_HAND = "plain PEFT", "FSDP2 by hand 2x1"
MESHES = {2: ("2x1", "1x2"), 4: ("2x2",)}
"""Map numbers of ranks to the meshes of ours, dp_shard x tp."""

Samples = dict[str, list[list[float]]]
"""Map each side to the seconds of the phases of each of its steps, [steps][phases]."""


def build_sides(ranks: int, layers: int) -> dict[str, Side]:
    """Build the sides that are measured in `ranks` processes, plain PEFT first."""

    def by_peer(peer: Peer, case: Case) -> Side:
        return build_peer(peer, build_model(HIDDEN, layers, HEAD_DIM), case, "cpu", ADAMW, compiled=False, scratch="")

    sides = {PLAIN: by_peer(Peer(PLAIN, plain_peft), CASES["1x1"])}
    if ranks == 2:
        sides[BY_HAND] = by_peer(BY_HAND_FSDP, CASES["2x1"])
    for mesh in MESHES[ranks]:
        sides[f"ours {mesh}"] = build_ours(build_model(HIDDEN, layers, HEAD_DIM), CASES[mesh], "cpu", ADAMW)
    return sides


def check_equal_work(sides: dict[str, Side], tokens: Tensor) -> None:
    """Take a step of each side; raise an error if one has another loss or gradient norm than plain PEFT."""
    found = {name: side.first_step(tokens) for name, side in sides.items()}
    for name, values in found.items():
        for what, value, expected in zip(("loss", "gradient norm"), values, found[PLAIN], strict=True):
            if not abs(value - expected) <= TOLERANCE * abs(expected):
                raise RuntimeError(f"{name}: its {what} is {value:.7f}, that of {PLAIN} {expected:.7f}")


def timed_step(side: Side, tokens: Tensor) -> list[float]:
    """Take a step; return the seconds of processor time that this thread took for each phase."""
    trainables = side.trainables()
    dist.barrier()
    times = [time.thread_time()]
    loss = side.model(input_ids=tokens, labels=tokens).loss
    times.append(time.thread_time())
    side.backward(loss)
    times.append(time.thread_time())
    side.clip(trainables, MAX_NORM)
    times.append(time.thread_time())
    side.optimizer.step()
    side.optimizer.zero_grad()
    times.append(time.thread_time())
    return np.diff(times).tolist()


def worker(rank: int, ranks: int, options: argparse.Namespace, scratch: str) -> None:
    warnings.simplefilter("ignore")
    join(Case(ranks, 1, ()), rank, f"{scratch}/rendezvous", threads=1)
    sides = build_sides(ranks, options.layers)
    tokens = torch.randint(HIDDEN * 4, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    check_equal_work(sides, tokens)
    gc.collect()
    gc.freeze()  # a collection in one side's step shall not walk through the models of all sides
    samples: Samples = {name: [] for name in sides}
    for number in tqdm(range(-options.warmup, options.steps), f"{ranks} ranks", disable=rank > 0):
        names = list(sides)
        random.Random(number).shuffle(names)  # the same order on all ranks
        for name in names:
            seconds = timed_step(sides[name], tokens)
            if number >= 0:
                samples[name].append(seconds)
    if rank == 0:
        Path(scratch, "samples.json").write_text(json.dumps(samples))
    dist.barrier()  # a rank that leaves early can take gloo's threads of the other down with it
    dist.destroy_process_group()


def ratio_text(samples: Samples, name: str, other: str) -> str:
    seconds, others = (np.sum(samples[side], axis=1).tolist() for side in (name, other))
    ratio, interval = ratio_by_round(seconds, others)
    return f"{ratio:.2f} ({range_text(interval, 2)})"


def markdown_table(results: dict[int, Samples]) -> str:
    lines = [
        f"| ranks | side | {' | '.join(f'{phase} ms' for phase in PHASES)} | step ms | / {PLAIN}, by round (95%) |",
        f"|---|---|{'---|' * len(PHASES)}---|---|",
    ]
    for ranks, samples in results.items():
        for name, steps in samples.items():
            milliseconds = 1e3 * np.asarray(steps)
            medians = [*np.median(milliseconds, axis=0), np.median(milliseconds.sum(axis=1))]
            ratio = "" if name == PLAIN else ratio_text(samples, name, PLAIN)
            lines.append(f"| {ranks} | {name} | {' | '.join(f'{each:.1f}' for each in medians)} | {ratio} |")
    lines += ["", f"ours 2x1 / {BY_HAND}, by round (95%): {ratio_text(results[2], 'ours 2x1', BY_HAND)}"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side that are not counted")
    parser.add_argument("--short", action="store_true", help=f"a short form: {SHORT}")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    if parser.parse_known_args()[0].short:
        parser.set_defaults(**SHORT)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the worker processes
    results: dict[int, Samples] = {}
    for ranks in MESHES:
        with tempfile.TemporaryDirectory() as scratch:
            mp.spawn(worker, (ranks, options, scratch), nprocs=ranks)
            results[ranks] = json.loads(Path(scratch, "samples.json").read_text())
    table = markdown_table(results)
    settings = {name: getattr(options, name) for name in ("layers", "steps", "warmup")}
    record = {"environment": environment(), "options": settings, "phases": PHASES, "seconds": results}
    write_files(options.output, "host", table, record)
    print(f"{table}\n\nwritten to {options.output}")


if __name__ == "__main__":
    main()
