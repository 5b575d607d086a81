"""Plan a run before it is started: what each mesh costs a rank, and which to take."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, PretrainedConfig

from lora_parallel.config import ParallelConfig
from lora_parallel.cost.hardware import KNOWN, Hardware
from lora_parallel.cost.mesh_cost import MeshCost, cost_of_mesh
from lora_parallel.cost.meshes import possible_meshes
from lora_parallel.cost.simulated_rank import StepCost
from lora_parallel.distributed.mesh import mesh_sizes
from lora_parallel.pp.split import balanced_bounds

__all__ = ["MemoryPlan", "plan_memory"]

_WORKERS = 4
"""Most processes that simulate steps at the same time; each takes about 1 GB."""


@dataclass(frozen=True)
class MemoryPlan:
    """Say what each mesh costs, and which one is recommended."""

    model: str
    gpus: int
    sequence_length: int
    batch_size: int
    training: str
    """What trains: "LoRA r=16", "QLoRA r=16" or "all parameters"."""

    hardware: Hardware
    meshes: list[MeshCost]
    """All meshes, the fastest of those that fit first; then those that do not fit, and those that are refused."""

    @property
    def recommended(self) -> MeshCost | None:
        """Return the fastest mesh of those that fit, or None if none does."""
        return self.meshes[0] if self.meshes and self.meshes[0].fits else None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as a mapping that JSON can hold; sizes are in bytes, times in seconds."""
        return asdict(self)


def plan_memory(
    model: str | Path | PretrainedConfig | nn.Module,
    config: ParallelConfig | None = None,
    *,
    gpus: int,
    sequence_length: int,
    batch_size: int | None = None,
    rows: int = 1,
    lora_config: LoraConfig | None = None,
    full: bool = False,
    quantization_config: Any = None,
    dtype: torch.dtype = torch.bfloat16,
    optimizer: str = "AdamW",
    hardware: str | Hardware = "H100",
    gpu_memory: float | None = None,
    progress: bool = True,
) -> MemoryPlan:
    """Predict what a training step costs a rank, from the model's config alone. Nothing is downloaded or loaded.

    A rank's forward, backward and optimizer step are run as they are, on tensors without memory and on a process group
    that sends nothing, in processes of their own. A model's equal blocks are run once. Routing to experts is taken to
    be even, attention to be fused, and no row to be padded.

    Args:
        model: A folder with a config.json, that file, a name on the model hub (where there is a network), a config, or
            a model that has one. A causal language model of transformers.
        config: The one mesh to look at, with its options. None looks at every mesh of `gpus` GPUs, each with and
            without recomputation, and with `loss_parallel` and `sequence_parallel` where it does not fit without.
        gpus: Number of GPUs.
        sequence_length: Tokens of a row.
        batch_size: Rows of a step, over all ranks; `gpus` if None.
        rows: Rows of one forward on one data-parallel rank; more rows of a step are micro-batches.
        lora_config: The adapter; None stands for `LoraConfig(r=16, target_modules="all-linear")`.
        full: True trains all parameters, without adapters.
        quantization_config: Quantisation of the base, as `from_pretrained` takes it; None takes that of the config.
        dtype: Dtype of the weights.
        optimizer: Name of a class of `torch.optim`.
        hardware: A name of `lora_parallel.cost.hardware.KNOWN`, or numbers of your own.
        gpu_memory: GiB of a GPU, in the place of the hardware's.
        progress: Show a bar.

    Returns:
        The plan.

    Raises:
        ValueError: An argument cannot work, or the config describes no causal language model.
        OSError: There is no config.
    """
    given = _hardware(hardware, gpu_memory)
    _check_numbers(gpus=gpus, sequence_length=sequence_length, rows=rows)
    if batch_size is not None:
        _check_numbers(batch_size=batch_size)
    batch = batch_size or gpus * rows
    if optimizer not in vars(torch.optim):
        raise ValueError(f"optimizer={optimizer!r}: give the name of a class of torch.optim, such as AdamW.")
    if full and lora_config is not None:
        raise ValueError("full=True trains all parameters, without adapters: leave lora_config out.")
    described: Any = model.config if isinstance(model, nn.Module) else model
    if not isinstance(described, PretrainedConfig):
        described = AutoConfig.from_pretrained(described)
    quantization = _quantization(quantization_config, described)
    if full and quantization is not None:
        raise ValueError("full=True trains all parameters, which a quantised base cannot: leave one of the two out.")
    lora = lora_config or LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    with tempfile.TemporaryDirectory() as folder, _Workers() as workers:
        described.save_pretrained(folder)
        if not full:
            lora.save_pretrained(str(Path(folder, "lora")))
        files = {
            "config": folder,
            "lora": None if full else str(Path(folder, "lora")),
            "dtype": str(dtype).removeprefix("torch."),
            "quantization": quantization,
        }
        stack = workers.ask({"kind": "stack", "model": files})
        if "refused" in stack:
            raise ValueError(stack["refused"])
        if config is not None:
            candidates = [_Candidate(mesh_sizes(config, gpus), _options(config))]
        else:
            per_node = min(gpus, given.gpus_per_node)
            found = possible_meshes(gpus, per_node, stack["blocks"], sequence_length, batch // rows)
            candidates = [
                _Candidate(sizes, {"activation_checkpointing": recompute})
                for sizes in found
                for recompute in (False, True)
            ]
        look = _Look(
            workers,
            files,
            stack,
            given,
            rows,
            sequence_length,
            batch,
            optimizer,
            not full,
            dtype.itemsize,
            config is not None,
        )
        costs = look.at(candidates, progress)
        if config is None and not any(each.fits for each in costs):
            more = [each for candidate in candidates for each in candidate.with_less_memory()]
            costs += look.at(more, progress)
    name = model if isinstance(model, (str, Path)) else type(described).__name__
    training = "all parameters" if full else f"{'QLoRA' if quantization else 'LoRA'} r={lora.r}"
    order = sorted(
        costs, key=lambda each: (bool(each.refused), not each.fits, each.seconds if each.fits else each.total)
    )
    return MemoryPlan(str(name), gpus, sequence_length, batch, training, given, order)


@dataclass(frozen=True)
class _Candidate:
    sizes: dict[str, int]
    options: dict[str, Any]

    def with_less_memory(self) -> Iterator[_Candidate]:
        """Yield the mesh with options that divide logits and activations over tp and cp peers, if it has any."""
        if self.options["activation_checkpointing"] and self.sizes["tp"] * self.sizes["cp"] > 1:
            more = {**self.options, "loss_parallel": True}
            yield replace(self, options=more)
            if self.sizes["tp"] > 1:
                yield replace(self, options={**more, "sequence_parallel": True})


@dataclass
class _Look:
    workers: _Workers
    files: dict[str, Any]
    stack: dict[str, Any]
    hardware: Hardware
    rows: int
    tokens: int
    batch: int
    optimizer: str
    adapters: bool
    element_size: int
    """Bytes of an activation."""

    exact: bool
    """True simulates as many shards as there are; False 2 at most, so that meshes with equal tp and cp share a run."""

    def at(self, candidates: list[_Candidate], progress: bool) -> list[MeshCost]:
        """Return the cost of each candidate."""
        jobs = {json.dumps(job): job for job in map(self._job, candidates)}
        bar = tqdm(total=len(jobs), desc="Planning", unit="run", disable=not progress)
        with bar, ThreadPoolExecutor(_WORKERS) as threads:

            def ask(item: tuple[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
                answer = self.workers.ask(item[1])
                bar.update()
                return item[0], answer

            answers = dict(threads.map(ask, jobs.items()))
        return [self._cost(each, answers[json.dumps(self._job(each))]) for each in candidates]

    def _simulated(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the mesh that is simulated: one stage of one copy of the model."""
        shards = sizes["dp_shard"] if self.exact else min(sizes["dp_shard"], 2)
        return {"dp_replicate": 1, "dp_shard": shards, "cp": sizes["cp"], "tp": sizes["tp"]}

    def _job(self, candidate: _Candidate) -> dict[str, Any]:
        mesh = self._simulated(candidate.sizes)
        ranks = mesh["dp_shard"] * mesh["cp"] * mesh["tp"]
        return {
            "kind": "step",
            "model": self.files,
            "config": {**candidate.options, **mesh, "require_adapters": self.adapters},
            "ranks": ranks,
            "rows": self.rows,
            "tokens": self.tokens,
            "optimizer": self.optimizer,
        }

    def _cost(self, candidate: _Candidate, answer: dict[str, Any]) -> MeshCost:
        sizes = candidate.sizes
        microbatches, left = divmod(self.batch, sizes["dp_replicate"] * sizes["dp_shard"] * self.rows)
        if left or not microbatches:
            ranks = sizes["dp_replicate"] * sizes["dp_shard"]
            text = f"{ranks} data-parallel ranks with {self.rows} rows each do not divide a batch of {self.batch} rows."
            answer = {"refused": text}
        if "refused" in answer:
            return MeshCost(sizes, candidate.options, self.rows, microbatches, refused=answer["refused"])
        step = StepCost(answer["around"], answer["blocks"])
        blocks = [(each["base"] + each["trained"], each["flops"]) for each in step.blocks]
        before, after = (step.around["embedding"], 0.0), (step.around["head"], step.around["flops"])
        stages = balanced_bounds(blocks, before, after, sizes["pp"])
        hidden = self.rows * self.tokens // sizes["cp"] * self.stack["hidden"] * self.element_size
        logits = hidden // self.stack["hidden"] * self.stack["vocabulary"]
        logits //= sizes["tp"] if candidate.options.get("loss_parallel") else 1
        return cost_of_mesh(
            step,
            sizes,
            candidate.options,
            self._simulated(sizes),
            stages,
            hidden,
            logits,
            self.rows,
            microbatches,
            self.hardware,
        )


class _Workers:
    """Hold processes that answer jobs, each of which is started when it is needed."""

    def __init__(self) -> None:
        self._free: SimpleQueue[subprocess.Popen[str] | None] = SimpleQueue()
        self._started: list[subprocess.Popen[str]] = []
        for _ in range(min(_WORKERS, os.cpu_count() or 1)):
            self._free.put(None)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._started:
            process.kill()
            process.wait()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a job. Several threads may ask.

        Raises:
            RuntimeError: The process ended without an answer.
        """
        process = self._free.get() or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"the process that simulates a step ended with {process.wait()}; its job was {job}")
        self._free.put(process)
        answer_of: dict[str, Any] = json.loads(answer)
        return answer_of

    def _start(self) -> subprocess.Popen[str]:
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in launcher}
        path = os.pathsep.join(each for each in sys.path if each)
        process = subprocess.Popen(
            [sys.executable, "-m", "lora_parallel.cost.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        self._started.append(process)
        return process


def _hardware(hardware: str | Hardware, gpu_memory: float | None) -> Hardware:
    if isinstance(hardware, str):
        if hardware not in KNOWN:
            raise ValueError(f"hardware={hardware!r}: give one of {', '.join(KNOWN)}, or a Hardware with its numbers.")
        hardware = KNOWN[hardware]
    if gpu_memory is None:
        return hardware
    if not gpu_memory > 0:
        raise ValueError(f"gpu_memory={gpu_memory}: give the GiB of a GPU's memory.")
    return replace(hardware, gpu_memory=gpu_memory)


def _check_numbers(**numbers: int) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(f"{name}={number!r}: give a positive int.")


def _options(config: ParallelConfig) -> dict[str, Any]:
    """Return the fields of a config besides the mesh's sizes, as JSON holds them."""
    sizes = ("tp", "cp", "pp", "dp_shard", "dp_replicate", "timeout_seconds", "compile", "require_adapters", "seed")
    found = {each.name: getattr(config, each.name) for each in fields(config) if each.name not in sizes}
    found = {name: value for name, value in found.items() if not name.startswith("pp_")}
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in found.items()
        if value != getattr(ParallelConfig(), name)
    }


def _quantization(given: Any, config: PretrainedConfig) -> dict[str, Any] | None:
    held = given if given is not None else getattr(config, "quantization_config", None)
    if held is None:
        return None
    held = held if isinstance(held, Mapping) else held.to_dict()
    method = held.get("quant_method")
    return {**held, "quant_method": getattr(method, "value", method)}
