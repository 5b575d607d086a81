"""Loading a checkpoint into a sharded LoRA model, ours against the other ways, on four processes.

    python benchmarks/load.py                                  # 2 GB, three rounds: two to four minutes on 2 cores
    python benchmarks/load.py --gigabytes 0.05 --rounds 1      # a look, half a minute

- Every measurement has processes of its own, so that memory peaks can be compared; a round measures each way once, and
  who goes first rotates.
- A measurement ends when every page of the rank's shard has been read: files are mapped, and a tensor that is a view of
  one has not been read by being there.
- Afterwards the last decoder layer is gathered and must equal the file's.
- Nothing here fails for being slow or large: the goals are printed beside the measurement.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from load_report import Measurement, RankResult, write_load_report
from loaders import LOADERS, WORLD_SIZE, our_read_plan, write_checkpoint
from meters import ReadMeter, metered_memory, metered_reads
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import ProcessRaisedException, start_processes
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

# What every way imports sooner or later. A server imports it once and is forked for each process: it has no thread, and
# no memory of a measurement.
PRELOAD = [
    "accelerate.utils.fsdp_utils",
    "lora_parallel.loading.transformers_private",
    "matplotlib.pyplot",
    "transformers.distributed",
    "transformers.models.llama.modeling_llama",
]


@dataclass(frozen=True)
class Options:
    """What a worker needs to know; picklable."""

    gigabytes: float
    rounds: int
    threads: int
    timeout: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2, help="size of the checkpoint, in 10^9 bytes")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each way to load")
    parser.add_argument("--ways", nargs="+", choices=LOADERS, default=list(LOADERS), help="which ways to load")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a collective may take")
    parser.add_argument("--directory", type=Path, help="where the checkpoint is written, and removed at the end")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "out")
    arguments = vars(parser.parse_args())
    ways, directory, output = (arguments.pop(name) for name in ("ways", "directory", "output"))
    options = Options(**arguments)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # memory is measured in the host's; transformers takes a GPU that it sees

    multiprocessing.set_forkserver_preload(PRELOAD)
    transformers_logging.disable_progress_bar()

    with tempfile.TemporaryDirectory(dir=directory) as checkpoint:
        tqdm.write(f"writing a checkpoint of about {options.gigabytes:g} GB")
        size = write_checkpoint(Path(checkpoint), options.gigabytes)
        warm_page_cache(Path(checkpoint))
        measurements = measure_all(ways, checkpoint, options)
    print(write_load_report(measurements, asdict(options), size, output))


def warm_page_cache(checkpoint: Path) -> None:
    """Read every file once, and have nothing of it left to be written while others are timed."""
    os.sync()
    for path in checkpoint.glob("*.safetensors"):
        with open(path, "rb", buffering=0) as file:
            while file.read(2**24):
                pass


def measure_all(ways: list[str], checkpoint: str, options: Options) -> list[Measurement]:
    measurements: list[Measurement] = []
    with tqdm(total=options.rounds * len(ways), unit="measurement") as progress:
        for number in range(options.rounds):
            first = number % len(ways)
            for way in ways[first:] + ways[:first]:
                progress.set_description(f"round {number + 1} of {options.rounds}, {way}")
                measurements.append(measure_one(way, number, checkpoint, options))
                progress.update()
    return measurements


def measure_one(way: str, number: int, checkpoint: str, options: Options) -> Measurement:
    """Start four processes that load once. A peer that fails is reported, with the first line of its error."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            start_processes(worker, (way, checkpoint, options, scratch), nprocs=WORLD_SIZE, start_method="forkserver")
        except ProcessRaisedException as error:
            if way == "ours":
                raise
            reason = re.findall(r"^[\w.]+: .*$", str(error), re.MULTILINE)[-1]  # after the traceback
            tqdm.write(f"{way} failed: {reason}")
            return Measurement(way, number, [], reason)
        ranks = [json.loads(Path(scratch, f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return Measurement(way, number, [RankResult(**rank) for rank in ranks])


def worker(rank: int, way: str, checkpoint: str, options: Options, scratch: str) -> None:
    torch.set_num_threads(options.threads)
    transformers_logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # how check_values gathers is of no interest
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE)}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=options.timeout),
    )
    result = measure(way, checkpoint)
    Path(scratch, f"{rank}.json").write_text(json.dumps(asdict(result)))
    dist.barrier()  # a rank that leaves early can take gloo's threads of the other down with it
    dist.destroy_process_group()


def measure(way: str, checkpoint: str) -> RankResult:
    parts: dict[str, float] = {}

    def mark(name: str) -> None:
        parts[name] = time.perf_counter() - start - sum(parts.values())

    with metered_reads() as reads, metered_memory() as memory:
        dist.barrier()
        start = time.perf_counter()
        model = LOADERS[way].load(checkpoint, mark)
        touch(model)
        mark("reading each page")

    base = {file_key(name): parameter for name, parameter in model.named_parameters() if "lora_" not in name}
    check_values(base, checkpoint)
    if way == "ours":
        check_plan(reads, checkpoint)
    return RankResult(
        seconds=sum(parts.values()),
        parts=parts,
        asked=reads.bytes,
        owned=sum(size_of(parameter) for parameter in base.values()),
        shard=sum(size_of(tensor) for tensor in (*model.parameters(), *model.buffers())),
        largest_slice=reads.largest,
        anonymous=memory.anonymous,
        file=memory.file,
    )


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    data = tensor.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def size_of(tensor: Tensor) -> int:
    return local(tensor).numel() * tensor.element_size()


def touch(model: nn.Module) -> None:
    """Read one value of every page of this rank's part."""
    for tensor in (*model.parameters(), *model.buffers()):
        flat = local(tensor).flatten() if not local(tensor).is_contiguous() else local(tensor).view(-1)
        flat[:: 4096 // tensor.element_size()].sum()


def file_key(name: str) -> str:
    """The name in the file of a parameter that PEFT may have wrapped."""
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def check_values(base: dict[str, nn.Parameter], checkpoint: str) -> None:
    """The last decoder layer, gathered, equals the stored one."""
    last = max(int(key.split(".")[2]) for key in base if key.startswith("model.layers."))
    stored = stored_tensors(checkpoint, f"model.layers.{last}.")
    assert stored, "the checkpoint has no such layer"
    for key, expected in sorted(stored.items()):
        data = base[key].detach()
        found = data.full_tensor() if isinstance(data, DTensor) else data
        assert torch.equal(found, expected), f"{key} was not loaded as it is stored"


def stored_tensors(checkpoint: str, prefix: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in Path(checkpoint).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys() if key.startswith(prefix)}  # noqa: SIM118
    return found


def check_plan(reads: ReadMeter, checkpoint: str) -> None:
    """What was read is what `read_plan` says will be."""
    plan = our_read_plan(checkpoint)
    planned = Counter(
        (str(read.file), read.key, tuple(stop - start for start, stop in read.region), read.bytes) for read in plan
    )
    found = Counter((read.file, read.key, read.shape, read.bytes) for read in reads.reads)
    assert found == planned, f"read_plan and the reads differ: {found - planned} and {planned - found}"


if __name__ == "__main__":
    main()
