"""Full training steps, ours against what people write by hand, interleaved in the same processes.

    python benchmarks/step.py                                  # all cases, four to eight minutes on 2 cores
    python benchmarks/step.py --cases 1x2 --hidden 256 --steps 50

- Each case starts its own processes; both models live in the same ones and take turns, so that a
  busy machine slows both alike. Who goes first alternates.
- Before the timing both must give the same loss and the same gradient norm on the same batch.
- Nothing here fails for being slow: the goals are printed beside the measurement.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peers import CASES, Case, Side, build_model, build_ours, build_peer
from report import CaseResult, Samples, write_report
from tqdm import tqdm

TOLERANCE = 1e-5  # relative; float32 sums in another order differ by about 1e-7
ADAMW: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@dataclass(frozen=True)
class Options:
    """What a worker needs to know; picklable."""

    layers: int
    batch: int
    sequence: int
    steps: int
    warmup: int
    threads: int
    adamw: str
    timeout: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--hidden", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="sequences per data-parallel rank")
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side that are not counted")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument("--adamw", choices=ADAMW, default="default", help="AdamW implementation, both sides")
    parser.add_argument("--timeout", type=float, default=120, help="seconds a collective may take")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    arguments = vars(parser.parse_args())
    cases, sizes, output = (arguments.pop(name) for name in ("cases", "hidden", "output"))
    options = Options(**arguments)

    results = [run_case(case, hidden, options) for case in cases for hidden in sizes]
    print(write_report(results, asdict(options), output))


def run_case(case_name: str, hidden: int, options: Options) -> CaseResult:
    """Start the processes of one case and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(worker, (case_name, hidden, options, scratch), nprocs=CASES[case_name].world_size)
        return CaseResult(**json.loads(Path(scratch, "result.json").read_text()))


def worker(rank: int, case_name: str, hidden: int, options: Options, scratch: str) -> None:
    case = CASES[case_name]
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.device_count() >= case.world_size else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=case.world_size,
        timeout=timedelta(seconds=options.timeout),
    )
    result = measure(case_name, hidden, device, options)
    if rank == 0:
        Path(scratch, "result.json").write_text(json.dumps(asdict(result)))
    dist.barrier()  # a rank that leaves early can take gloo's threads of the other down with it
    dist.destroy_process_group()


def measure(case_name: str, hidden: int, device: str, options: Options) -> CaseResult:
    case = CASES[case_name]
    adamw = ADAMW[options.adamw]
    ours = build_ours(build_model(hidden, options.layers).to(device), case, device, adamw)
    peer = build_peer(build_model(hidden, options.layers).to(device), case, device, adamw)
    sides = {"ours": ours, "peer": peer}
    tokens = draw_batch(case, hidden, device, options)

    loss, norm = check_equal_work(case_name, sides, tokens)
    samples = {name: Samples([], []) for name in sides}
    rounds = range(-options.warmup, options.steps)
    for number in tqdm(rounds, f"{case_name} hidden {hidden}", disable=dist.get_rank() > 0):
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for name in order:
            forward_backward, step = time_step(sides[name], tokens, device)
            if number >= 0:
                samples[name].forward_backward.append(forward_backward)
                samples[name].step.append(step)
    slowest = {name: slowest_rank(sample, device) for name, sample in samples.items()}
    return CaseResult(
        case_name, hidden, case.peer, device, loss, norm, asdict(slowest["ours"]), asdict(slowest["peer"])
    )


def draw_batch(case: Case, hidden: int, device: str, options: Options) -> torch.Tensor:
    """A batch of this process's dp rank; tp peers draw the same one. The vocabulary is 4 * hidden."""
    generator = torch.Generator().manual_seed(dist.get_rank() // case.tp)
    return torch.randint(hidden * 4, (options.batch, options.sequence), generator=generator).to(device)


def check_equal_work(case_name: str, sides: dict[str, Side], tokens: torch.Tensor) -> tuple[float, float]:
    """Take one step of each side; loss and gradient norm must agree. Returns both, as ours has them."""
    found = {name: (side.forward_backward(tokens).item(), side.update().item()) for name, side in sides.items()}
    for index, what in enumerate(("loss", "gradient norm")):
        ours, peer = found["ours"][index], found["peer"][index]
        difference = abs(ours - peer) / abs(peer)
        if dist.get_rank() == 0:
            tqdm.write(f"{case_name}: {what} ours {ours:.7f}, peer {peer:.7f}, difference {difference:.1e}")
        assert difference <= TOLERANCE, f"{case_name}: the two sides do not do equal work: {what} {ours} and {peer}"
    return found["ours"]


def time_step(side: Side, tokens: torch.Tensor, device: str) -> tuple[float, float]:
    """Seconds for forward + backward, and for the whole step, on this process."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    dist.barrier()
    synchronize()
    start = time.perf_counter()
    side.forward_backward(tokens)
    synchronize()
    middle = time.perf_counter()
    side.update()
    synchronize()
    return middle - start, time.perf_counter() - start


def slowest_rank(samples: Samples, device: str) -> Samples:
    """A step takes as long as its slowest process."""
    times = torch.tensor([samples.forward_backward, samples.step], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return Samples(*times.tolist())


if __name__ == "__main__":
    main()
