"""Full training steps, ours against what people write by hand and other libraries, interleaved in the same processes.

    python benchmarks/step.py                                  # all cases
    python benchmarks/step.py --short                          # hidden 256, 2 layers, 10 steps
    python benchmarks/step.py --cases 1x2 --hidden 256 --steps 50
    python benchmarks/step.py --hidden 256 --against HEAD~20   # and ours of another commit, in turns with these

- Each case starts its own processes; all models live in the same ones and take turns, so that a
  busy machine slows all alike. The order is drawn anew for each round: a step is slower after
  another process has had the caches.
- Before the timing all must give the same loss and the same gradient norm on the same batch.
- Nothing here fails for being slow: the goals are printed beside the measurement. A peer that fails is
  reported with the first line of its error.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from peers import ADAMW, CASES, contestants, draw_batch, join
from report import ALONE, CaseResult, SideResult, write_report
from sides import Cost, OtherCommit
from tqdm import tqdm

TOLERANCE = 1e-5  # relative; float32 sums in another order differ by about 1e-7
ROOT = Path(__file__).parent.parent
SHORT = {"hidden": [256], "layers": 2, "steps": 10, "warmup": 2}


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
    compile: bool
    against: str | None
    """The other commit, and `package` the folder that has its package."""

    package: str | None = None


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
    parser.add_argument("--adamw", choices=ADAMW, default="default", help="AdamW implementation, all sides")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a collective may take, compiling included")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compiled sides too")
    parser.add_argument("--against", metavar="COMMIT", help="time ours in its own processes, and another commit of it")
    parser.add_argument("--short", action="store_true", help=f"a short form: {SHORT}")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    if parser.parse_known_args()[0].short:
        parser.set_defaults(**SHORT)
    arguments = vars(parser.parse_args())
    cases, sizes, output, _ = (arguments.pop(name) for name in ("cases", "hidden", "output", "short"))

    if commit := arguments["against"]:
        found = subprocess.run(["git", "rev-parse", "--short", commit], cwd=ROOT, check=True, capture_output=True)
        arguments["against"] = found.stdout.decode().strip()

    results: list[CaseResult] = []
    with checked_out(arguments["against"]) as package:
        options = Options(**arguments, package=package)
        for case, hidden in [(case, hidden) for hidden in sizes for case in cases]:
            results.append(run_case(case, hidden, options))
            table = write_report(results, asdict(options), output)  # after each, so that an end halfway loses nothing
    print(table)


@contextmanager
def checked_out(commit: str | None) -> Iterator[str | None]:
    """The folder of a git worktree at `commit`, while it is needed."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = f"{scratch}/package"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", path, commit], cwd=ROOT, check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", path], cwd=ROOT, check=True)


def run_case(case_name: str, hidden: int, options: Options) -> CaseResult:
    """Start the processes of one case and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(worker, (case_name, hidden, options, scratch), nprocs=CASES[case_name].world_size)
        return CaseResult.of(json.loads(Path(scratch, "result.json").read_text()))


def worker(rank: int, case_name: str, hidden: int, options: Options, scratch: str) -> None:
    warnings.simplefilter("ignore")
    device = join(CASES[case_name], rank, f"{scratch}/rendezvous", options.threads, options.timeout)
    result = measure(case_name, hidden, device, options, scratch)
    if rank == 0:
        Path(scratch, "result.json").write_text(json.dumps(asdict(result)))
    dist.barrier()  # a rank that leaves early can take gloo's threads of the other down with it
    dist.destroy_process_group()


def measure(case_name: str, hidden: int, device: str, options: Options, scratch: str) -> CaseResult:
    case = CASES[case_name]
    tokens = draw_batch(case, hidden, options.batch, options.sequence, device)
    builders = contestants(case, hidden, options.layers, device, options.adamw, options.compile, scratch)
    if options.against:
        shared = {name: getattr(options, name) for name in ("layers", "batch", "sequence", "threads", "adamw")}
        arguments = {"case": case_name, "hidden": hidden, "rank": dist.get_rank(), **shared}
        # Ours once more in such processes: those that hold many models step slower, by 3% at 2x2.
        for compiled, alone in enumerate(ALONE[: 1 + options.compile]):
            other = f"ours at {options.against}" + (", compiled" if compiled else "")
            for name, package in ((alone, ROOT), (other, Path(str(options.package)))):
                asked = {**arguments, "compiled": bool(compiled)}
                builders[name] = partial(OtherCommit, package, f"{scratch}/{name}", asked)

    sides: dict[str, Any] = {}
    reference = (0.0, 0.0)
    results: dict[str, SideResult] = {}
    for name, build in builders.items():
        note(f"{case_name} hidden {hidden}: {name}")
        results[name] = SideResult(name)
        try:
            side = build()
            found, problem = side.first_step(tokens), ""
            if sides:
                problem = difference(found, reference)
        except Exception as error:
            if name == "ours":
                raise
            problem = first_line(error)
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        results[name].error = next(filter(None, problems), "")
        if results[name].error:
            note(f"{name}: {results[name].error}")
            continue
        if not sides:
            reference = found
        sides[name] = side

    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    rounds = range(-options.warmup, options.steps)
    for number in tqdm(rounds, f"{case_name} hidden {hidden}", disable=dist.get_rank() > 0):
        names = list(sides)
        random.Random(number).shuffle(names)  # the same order on all processes
        for name in names:
            took = sides[name].timed_step(tokens)
            if number >= 0:
                samples[name].append(took)
    for name, side in sides.items():
        times = torch.tensor(samples[name], dtype=torch.float64, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)  # a step takes as long as its slowest process
        results[name].forward_backward, results[name].step = times.T.tolist()
        costs: list[Cost | None] = [None] * dist.get_world_size()
        dist.all_gather_object(costs, side.cost(tokens))
        results[name].cost = asdict(max(filter(None, costs), key=lambda cost: cost.memory))
        if isinstance(side, OtherCommit):
            side.close()
    return CaseResult(case_name, hidden, device, *reference, list(results.values()))


def note(text: str) -> None:
    if dist.get_rank() == 0:
        tqdm.write(text)


def difference(found: tuple[float, float], reference: tuple[float, float]) -> str:
    """Say where a side's loss or gradient norm is not that of ours, or return an empty text."""
    for what, got, want in zip(("loss", "gradient norm"), found, reference, strict=True):
        if not abs(got - want) <= TOLERANCE * abs(want):
            return f"no equal work: its {what} is {got:.7f}, that of ours {want:.7f}"
    return ""


def first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


if __name__ == "__main__":
    main()
