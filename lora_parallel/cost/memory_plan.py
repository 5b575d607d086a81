"""Plan a run before it is started: what each mesh costs a rank, and which to take."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lora_parallel.config import ParallelConfig, check_positive
from lora_parallel.cost.mesh_cost import GPUS, Hardware, MeshCost, fits, possible_meshes, preference, with_cost
from lora_parallel.cost.simulated_step import StepCost
from lora_parallel.cost.simulations import Simulations
from lora_parallel.distributed.mesh import mesh_sizes
from lora_parallel.loading.quantisers import check_method
from lora_parallel.pp.schedules import balanced_bounds, check_held


def hardware_of(hardware: str | Hardware, gpu_memory: float | None) -> Hardware:
    """Return the numbers of a GPU, with another memory if one is given."""
    if isinstance(hardware, str):
        if hardware not in GPUS:
            raise ValueError(f"hardware={hardware!r}: give one of {', '.join(GPUS)}, or a Hardware with its numbers.")
        hardware = GPUS[hardware]
    if gpu_memory is None:
        return hardware
    if not gpu_memory > 0:
        raise ValueError(f"gpu_memory={gpu_memory}: give the GiB of a GPU's memory.")
    return replace(hardware, gpu_memory=gpu_memory)


def _check_step(
    hardware: Hardware,
    gpus: int,
    tokens: int,
    rows: int,
    batch: int,
    optimizer: str,
    config: ParallelConfig | None,
    full: bool,
) -> None:
    """Refuse numbers, an optimizer or a pipeline of which no step can be simulated."""
    for number, value in (("gpus", gpus), ("sequence_length", tokens), ("rows", rows), ("batch_size", batch)):
        check_positive(number, value)
    if batch % rows:
        raise ValueError(f"batch_size={batch} is no multiple of rows={rows}: give values that divide.")
    per_node = hardware.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise ValueError(
            f"gpus={gpus} is no whole number of machines of {per_node} GPUs: give up to {per_node}, or a multiple of "
            f"{per_node}. (In Python a Hardware has its own gpus_per_node.)"
        )
    kind, base = vars(torch.optim).get(optimizer), torch.optim.Optimizer
    if not isinstance(kind, type) or not issubclass(kind, base) or kind is base:
        raise ValueError(f"optimizer={optimizer!r}: give the name of a class of torch.optim, such as AdamW.")
    if kind is torch.optim.LBFGS:
        raise ValueError(
            f"optimizer={optimizer!r} runs the model several times in a step, by a closure, for which there is no "
            "prediction: give another class of torch.optim, such as AdamW."
        )
    if config is None or config.pp == 1:
        return
    check_held(config.pp, config.pp_schedule, not full)
    if config.pp_schedule != "1f1b":
        raise ValueError(
            f'pp_schedule="{config.pp_schedule}" has no prediction: it holds more than "1f1b". Plan for '
            'pp_schedule="1f1b".'
        )
    microbatches = batch // rows * config.pp * config.cp * config.tp // gpus
    if config.pp_microbatches != microbatches:
        raise ValueError(
            f"pp_microbatches={config.pp_microbatches}, and batch_size with rows make {microbatches} micro-batches on "
            "each data-parallel rank: give values that agree."
        )


def config_of(model: str | Path | PretrainedConfig | nn.Module) -> PretrainedConfig:
    """Return the config of a model: of a folder, of a file, of a name on the hub, or the model's own."""
    described: Any = model.config if isinstance(model, nn.Module) else model
    if isinstance(described, PretrainedConfig):
        return described
    name = str(described)
    is_here = Path(name).exists()
    if not is_here and (name.count("/") > 1 or name.startswith((".", "/", "~"))):  # no name on the hub
        raise FileNotFoundError(f"There is no folder {name} with a config.json.")
    try:
        settings, _ = PretrainedConfig.get_config_dict(name)
    except OSError as error:
        if is_here:
            raise
        first, *_ = str(error).split("\n")
        raise FileNotFoundError(
            f"There is no folder {name} here, and the model hub gave no config of that name: {first}"
        ) from error
    if "AutoConfig" in (settings.get("auto_map") or {}) and settings.get("model_type") not in CONFIG_MAPPING:
        raise ValueError(
            f"{name} has code of its own (auto_map in its config), which a plan does not run: a plan can be made for "
            f"causal language models that transformers {transformers.__version__} has."
        )
    config: PretrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    return config


def quantization_of(given: Any, config: PretrainedConfig, name: str) -> dict[str, Any] | None:
    """Return the quantisation of the base as JSON holds it: what is given, else that of the config, or None."""
    settings = given if given is not None else getattr(config, "quantization_config", None)
    if not settings:
        return None
    settings = settings if isinstance(settings, Mapping) else settings.to_dict()
    method = getattr(settings.get("quant_method"), "value", settings.get("quant_method"))
    try:
        check_method(name, str(method))
    except ValueError as error:
        raise ValueError(
            f"{error} Train on a bfloat16 copy (docs/recipes.md, gpt-oss), and plan for it with --quantization none "
            "(quantization_config={} in Python)."
        ) from error
    return {**settings, "quant_method": method}


_FULL = "all parameters"


@dataclass(frozen=True)
class MemoryPlan:
    """Say what each mesh costs, and which one is recommended."""

    model: str
    gpus: int
    sequence_length: int
    batch_size: int
    training: str
    """Name of what trains: "LoRA r=16", "QLoRA r=16" or "all parameters"."""

    hardware: Hardware
    meshes: list[MeshCost]
    """All meshes, the fastest of those that fit first; then those that do not fit, and those that are refused."""

    dtype: str = "bfloat16"
    """Dtype of the weights."""

    more_rows: MeshCost | None = None
    """The recommended mesh with twice the rows in each forward and in a step; None if one mesh was asked for."""

    @property
    def recommended(self) -> MeshCost | None:
        """Return the fastest mesh of those that fit, or None if none does."""
        return self.meshes[0] if self.meshes and self.meshes[0].fits else None

    @property
    def trains_all(self) -> bool:
        """Return True if all parameters train, without adapters."""
        return self.training == _FULL

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
        config: The one mesh to look at, with its options. None looks at every mesh of `gpus` GPUs, with recomputation
            where a mesh does not fit without, with `shard_base=False` where there is room, and with `loss_parallel` and
            `sequence_parallel` where nothing fits without.
        gpus: Number of GPUs.
        sequence_length: Tokens of a row.
        batch_size: Rows of a step, over all ranks; `gpus` if None.
        rows: Rows of one forward on one data-parallel rank; more rows of a step are micro-batches.
        lora_config: The adapter; None stands for `LoraConfig(r=16, target_modules="all-linear")`.
        full: True trains all parameters, without adapters.
        quantization_config: Quantisation of the base, as `from_pretrained` takes it; None takes that of the config, and
            an empty mapping plans for weights that are not quantised.
        dtype: Dtype of the weights.
        optimizer: Name of a class of `torch.optim`.
        hardware: A name of `lora_parallel.cost.mesh_cost.GPUS`, or numbers of your own.
        gpu_memory: GiB of a GPU, in the place of the hardware's.
        progress: Show a bar.

    Returns:
        The plan.

    Raises:
        TypeError: A number is no int.
        ValueError: An argument cannot work, or the config describes no causal language model.
        OSError: There is no config, or a process that simulates a step ended.
    """
    cluster = hardware_of(hardware, gpu_memory)
    batch = gpus * rows if batch_size is None else batch_size
    _check_step(cluster, gpus, sequence_length, rows, batch, optimizer, config, full)
    if full and lora_config is not None:
        raise ValueError("full=True trains all parameters, without adapters: leave lora_config out.")
    lora = lora_config or LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    check_positive("r", lora.r)
    described = config_of(model)
    name = str(model) if isinstance(model, (str, Path)) else type(described).__name__
    quantization = quantization_of(quantization_config, described, name)
    if full and quantization is not None:
        raise ValueError("full=True trains all parameters, which a quantised base cannot: leave one of the two out.")
    training = _FULL if full else f"{'QLoRA' if quantization else 'LoRA'} r={lora.r}"
    with tempfile.TemporaryDirectory() as folder, Simulations(progress) as simulations:
        files = _write_description(folder, described, None if full else lora, dtype, quantization)
        stack = simulations.ask({"kind": "stack", "model": files})
        if "refused" in stack:
            raise ValueError(stack["refused"])
        planner = _Planner(simulations, files, stack, cluster, gpus, rows, sequence_length, batch, optimizer, config)
        meshes = sorted(planner.costs(), key=preference)
        doubled = replace(planner, rows=2 * rows, batch=2 * batch) if config is None and meshes[0].fits else None
        more = None if doubled is None else doubled.at([(meshes[0].sizes, meshes[0].options)])[0]
    return MemoryPlan(name, gpus, sequence_length, batch, training, cluster, meshes, files["dtype"], more)


def _write_description(
    folder: str, config: PretrainedConfig, lora: LoraConfig | None, dtype: torch.dtype, quantization: Any
) -> dict[str, Any]:
    """Write the files that describe a model to the processes that simulate steps; return the fields of its
    `DescribedModel`.
    """
    config.save_pretrained(folder)
    adapter = str(Path(folder, "lora"))
    if lora is not None:
        lora.save_pretrained(adapter)
    return {
        "config": folder,
        "lora": None if lora is None else adapter,
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": quantization,
    }


_Candidate = tuple[dict[str, int], dict[str, Any]]
"""The sizes of a mesh's axes, and the fields of `ParallelConfig` besides."""


@dataclass
class _Planner:
    """Simulate a step on meshes, and compute what each costs."""

    simulations: Simulations
    files: dict[str, Any]  # the fields of the model's `DescribedModel`
    stack: dict[str, Any]  # what `DescribedModel.describe` returns
    hardware: Hardware
    gpus: int
    rows: int
    tokens: int
    batch: int
    optimizer: str
    config: ParallelConfig | None  # None looks at all meshes

    def costs(self) -> list[MeshCost]:
        """Return the costs of the config's mesh, or of all meshes, with options that take less memory if none fits."""
        if self.config is not None:
            return self.at([(mesh_sizes(self.config, self.gpus), _options(self.config))])
        per_node = min(self.gpus, self.hardware.gpus_per_node)
        candidates: list[_Candidate] = [
            (sizes, {"activation_checkpointing": False})
            for sizes in possible_meshes(
                self.gpus, per_node, len(self.stack["blocks"]), self.tokens, self.batch // self.rows
            )
            if sizes["pp"] == 1 or self.files["lora"]  # check_held
        ]
        if not candidates:
            raise ValueError(
                f"gpus={self.gpus}, batch_size={self.batch}, rows={self.rows}: no mesh divides such a batch. Give a "
                f"batch_size that is a multiple of {self.gpus * self.rows} rows."
            )
        costs = self.at(candidates)
        recomputed: list[_Candidate] = [
            (cost.sizes, {"activation_checkpointing": True}) for cost in costs if not cost.fits and not cost.refused
        ]
        costs += self.at(recomputed)
        costs += self.at([*self._with_whole_base(costs)])
        if not any(cost.fits for cost in costs):
            costs += self.at([smaller for candidate in recomputed for smaller in _with_less_memory(*candidate)])
        return costs

    def _with_whole_base(self, costs: list[MeshCost]) -> Iterator[_Candidate]:
        """Yield the meshes on which a rank has room for the base of all of its shards."""
        for cost in costs:
            shards = cost.sizes["dp_shard"] * cost.sizes["cp"]
            more = cost.weights * (shards - 1)
            has_room = fits(cost.total + more, cost.sizes, self.hardware)
            if self.files["lora"] and shards > 1 and has_room and not cost.refused:
                yield cost.sizes, {**cost.options, "shard_base": False}

    def at(self, candidates: list[_Candidate]) -> list[MeshCost]:
        answers = self.simulations.answers([self._job(*candidate) for candidate in candidates])
        return [self._cost(*candidate, answer) for candidate, answer in zip(candidates, answers, strict=True)]

    def _job(self, sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
        """Return the step that is simulated for a mesh: on one stage of one copy of the model."""
        mesh = {"dp_replicate": 1, "dp_shard": self._step_shards(sizes), "cp": sizes["cp"], "tp": sizes["tp"]}
        return {
            "kind": "step",
            "model": self.files,
            "config": {**options, **mesh, "require_adapters": self.files["lora"] is not None},
            "ranks": prod(mesh.values()),
            "rows": self.rows,
            "tokens": self.tokens,
            "optimizer": self.optimizer,
        }

    def _step_shards(self, sizes: dict[str, int]) -> int:
        """Return as many shards as there are for one mesh; else 2 at most: meshes of one tp and cp share a run."""
        return sizes["dp_shard"] if self.config is not None else min(sizes["dp_shard"], 2)

    def _cost(self, sizes: dict[str, int], options: dict[str, Any], answer: dict[str, Any]) -> MeshCost:
        ranks = sizes["dp_replicate"] * sizes["dp_shard"]
        microbatches, rest = divmod(self.batch, ranks * self.rows)
        refused = answer.get("refused", "")
        if rest or not microbatches:
            refused = (
                f"{ranks} data-parallel ranks with {self.rows} rows each do not divide a batch of {self.batch} rows."
            )
        mesh = MeshCost(sizes, options, self.rows, microbatches, refused=refused)
        if refused:
            return mesh
        stages = balanced_bounds(self.stack["blocks"], self.stack["before"], self.stack["after"], sizes["pp"])
        feature_bytes = self.rows * self.tokens // sizes["cp"] * getattr(torch, self.files["dtype"]).itemsize
        logits = feature_bytes * self.stack["vocabulary"] // (sizes["tp"] if options.get("loss_parallel") else 1)
        step = StepCost(answer["around"], answer["blocks"])
        step_shards = self._step_shards(sizes) * sizes["cp"]
        return with_cost(mesh, step, step_shards, stages, feature_bytes * self.stack["hidden"], logits, self.hardware)


def _with_less_memory(sizes: dict[str, int], options: dict[str, Any]) -> Iterator[_Candidate]:
    """Yield the mesh with options that divide logits and activations over tp and cp peers, if it has any."""
    if sizes["tp"] * sizes["cp"] > 1:
        yield sizes, {**options, "loss_parallel": True}
        if sizes["tp"] > 1:
            yield sizes, {**options, "loss_parallel": True, "sequence_parallel": True}


def _options(config: ParallelConfig) -> dict[str, Any]:
    """Return the fields of a config besides the mesh's sizes, as JSON holds them."""
    sizes = ("tp", "cp", "pp", "dp_shard", "dp_replicate", "timeout_seconds", "compile", "require_adapters", "seed")
    options = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name not in sizes and not field.name.startswith("pp_") and value != field.default:
            options[field.name] = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    return options
