"""Run `accelerate-lora check` (what rank 0 would hold) and `accelerate-lora plan` (what each mesh would cost)."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate.utils import DistributedType
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader
from transformers import PretrainedConfig, TrainingArguments

from accelerate_plugin import launch
from accelerate_plugin.config_file import mesh_sections
from accelerate_plugin.launch_options import environment_of
from accelerate_plugin.parallelism import requested_parallelism
from accelerate_plugin.patches import patched
from lora_parallel import MemoryPlan, MeshCost, ParallelConfig, plan_memory
from lora_parallel.integration import (
    SetUpIsPossible,
    axes_text,
    describe,
    end_after_set_up,
    fake_process_group,
    mesh_sizes,
    mesh_text,
    peft_configs,
    rank_lines,
    replaced,
    state_of,
)
from lora_parallel_failures import hint

_OUR_FOLDERS = [Path(__file__).parents[1] / name for name in ("accelerate_plugin", "lightning_lora", "lora_parallel")]


def check_set_up(options: argparse.Namespace, script: list[str], sequence_length: int | None, rows: int | None) -> None:
    """Check what `accelerate launch` would start; this process takes the place of rank 0, and should end afterwards.

    `script` has the arguments of `accelerate_plugin.launch`, or is empty to check the file alone. With a
    `sequence_length` the memory of a step is predicted, with `rows` in a batch of a process.
    """
    _become_rank_zero(options)
    processes = int(options.num_processes)
    parallelism = requested_parallelism({})
    assert parallelism is not None
    if not script:
        sizes = mesh_sizes(parallelism.config, processes)
        print(mesh_text(sizes), *(f"  {line}" for line in rank_lines(sizes)), sep="\n")
        print(f"{options.config_file} can work. Given a script too, check says what rank 0 would hold.")
        return
    with fake_process_group(processes, 0):
        model, rows_of_script = _sharded_by(script)
        print(describe(model))
    if sequence_length is not None:
        _print_prediction(model, processes, sequence_length, rows_of_script if rows is None else (rows, "--rows"))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        print("No parameter of this model trains: an optimizer or a trainer for it will be refused.")
    print(f"The set-up can work: {processes} processes would train this model. Nothing was trained.")


def _become_rank_zero(options: argparse.Namespace) -> None:
    """Put into this process's environment what `accelerate launch` would put into that of rank 0."""
    environment = environment_of(options)
    world, local = str(options.num_processes), str(int(options.num_processes) // int(options.num_machines or 1))
    os.environ.update(environment, RANK="0", LOCAL_RANK="0", WORLD_SIZE=world)
    os.environ.update(LOCAL_WORLD_SIZE=local, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.main_process_port))


def _sharded_by(script: list[str]) -> tuple[nn.Module, tuple[int, str]]:
    """Run a script until its first model is sharded; return it, and the rows of the script with their source.

    An error of this library ends the process.
    """
    gc.freeze()  # `gc.get_objects` returns what is made after it: by the script
    alone = replaced(dist, {"init_process_group": lambda *args, **kwargs: None})  # which a loop of torchrun's calls
    try:
        with end_after_set_up(), alone, patched():  # which defers models, as a run does
            launch.main(script)
    except SetUpIsPossible as possible:
        return possible.model, _rows_of_script()  # while the script's variables live, in frames of the traceback
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    except Exception as error:
        file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not any(folder in file.parents for folder in _OUR_FOLDERS):
            if advice := hint(str(error)):
                atexit.register(print, f"accelerate-lora check: {error}{advice}", file=sys.stderr)  # behind the trace
            raise
        sys.exit(f"accelerate-lora check: {error}")
    finally:
        gc.unfreeze()
    sys.exit(f"accelerate-lora check: {script[script[0] == '-m']} has ended, and no model was prepared.")


def _print_prediction(model: nn.Module, processes: int, sequence_length: int, batch: tuple[int, str]) -> None:
    """Print the predicted peak of a step, with so many rows in a `batch` of a process, and what says so."""
    # What the script does to recompute activations by itself is not known here; the options of the file are.
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ValueError(f"--seq is for models of transformers; this is a {type(model).__name__}: leave it out.")
    adapters = [adapter for adapter in peft_configs(model).values() if isinstance(adapter, LoraConfig)]
    state = state_of(model)
    assert state is not None
    sizes = mesh_sizes(state.config, processes)
    rows = -(-batch[0] // state.config.pp_microbatches)
    plan = plan_memory(
        config,
        state.config,
        gpus=processes,
        sequence_length=sequence_length,
        batch_size=sizes["dp_replicate"] * sizes["dp_shard"] * state.config.pp_microbatches * rows,
        rows=rows,
        lora_config=adapters[0] if adapters else None,
        full=not adapters,
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16,
    )
    print(
        f"predicted peak of a step on the rank that holds most, {rows} x {sequence_length} tokens in each forward "
        f"({batch[1]}): {plan.meshes[0].total / 2**20:.2f} MiB"
    )


def _rows_of_script() -> tuple[int, str]:
    """Return the rows of one batch of a process, and which object in the script's memory has the number."""
    found = gc.get_objects()  # `prepare` is given the model, and often without the dataloader
    for kind, name in ((TrainingArguments, "per_device_train_batch_size"), (DataLoader, "batch_size")):
        if sizes := [size for each in found if issubclass(type(each), kind) and (size := getattr(each, name))]:
            return max(sizes), f"the script's {name}; --rows N says otherwise"
    return 1, "no DataLoader is made yet; --rows N says how many rows"


_QUANTIZATIONS = {
    "4bit": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    },
    "8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "none": {},
}
_SHOWN = 12
"""Number of meshes in the printed table; `--all` prints every one."""

_LOADED = """AutoModelForCausalLM.from_pretrained(NAME, dtype="{0}")
SFTConfig(..., model_init_kwargs={{"dtype": "{0}"}})  # TRL's default is float32"""
"""Load a model in the dtype of a plan: what a script has to say."""

_MEETING = {"machine_rank": 0, "main_process_ip": "HOST_OF_RANK_0", "main_process_port": 29500}
"""Hold the place of what lets processes of several machines find each other: a plan does not know the machines."""


def plan(arguments: list[str]) -> None:
    """Print a plan for a model, from the command line after `plan`."""
    options = _parser().parse_args(arguments)
    if options.plot is not None:
        _check_picture(options.plot)
    if not Path(options.model).exists():
        print(f"There is no folder {options.model} here: the model hub is asked for it.", file=sys.stderr)
    costs = plan_memory(
        options.model,
        gpus=options.gpus,
        gpu_memory=options.gpu_memory,
        sequence_length=options.seq,
        batch_size=options.batch,
        rows=options.rows,
        hardware=options.hardware,
        full=options.full,
        lora_config=None
        if options.full
        else LoraConfig(r=options.r, target_modules=options.target_modules or "all-linear", task_type="CAUSAL_LM"),
        quantization_config=_QUANTIZATIONS.get(options.quantization),
        dtype=getattr(torch, options.dtype),
        optimizer=options.optimizer,
    )
    if options.json:
        recommended = None if costs.recommended is None else costs.meshes.index(costs.recommended)
        print(json.dumps({**costs.to_json(), "recommended": recommended}, indent=2))
    else:
        _print(costs, None if options.all else _SHOWN)
    if all(mesh.refused for mesh in costs.meshes):
        raise ValueError(f"No mesh is possible: {costs.meshes[0].refused}")
    if options.plot is not None:
        _plot(costs, options.plot)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-lora plan",
        description="Predict, from a model's config alone, what each mesh costs a GPU in bytes, messages and time, and "
        "recommend one. Nothing is downloaded but the config, and no GPU is needed.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder with a config.json, or a name on the model hub")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs")
    parser.add_argument("--gpu-memory", type=float, help="GiB of a GPU (that of --hardware)")
    parser.add_argument("--seq", type=int, required=True, help="tokens of a row")
    parser.add_argument("--batch", type=int, help="rows of a step, over all GPUs (one for each GPU)")
    parser.add_argument("--rows", type=int, default=1, help="rows of one forward on one GPU (%(default)s)")
    parser.add_argument(
        "--hardware", default="H100", help="name of the GPU (%(default)s); an unknown one lists those that are known"
    )
    parser.add_argument("--r", type=int, default=16, help="rank of the adapter (%(default)s)")
    parser.add_argument("--target-modules", nargs="+", help="layers that the adapter is on (all linear layers)")
    parser.add_argument("--full", action="store_true", help="train all parameters, without an adapter")
    parser.add_argument(
        "--quantization",
        choices=sorted(_QUANTIZATIONS),
        help="hold the base in 4 or 8 bits (QLoRA), or not quantised (what its config says)",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="dtype of the weights")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim (%(default)s)")
    parser.add_argument("--all", action="store_true", help=f"print every mesh, not the first {_SHOWN}")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, every mesh")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the memory of each mesh (needs matplotlib)")
    return parser


# --------------------------------------------------------------------- as text


def _print(plan: MemoryPlan, shown: int | None) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 120
    memory = plan.hardware.gpu_memory
    table = Table(
        title=f"{plan.model}, {plan.training}: {plan.batch_size} rows of {plan.sequence_length} tokens a step on "
        f"{plan.gpus} GPUs of {memory:g} GiB, weights in {plan.dtype}",
        caption="Of the GPU that holds most, in GiB: trained parameters with gradients and optimizer; what forward and "
        "backward of the blocks add; what logits and loss add. Forwards, seconds (a rough guide, of products in "
        "bfloat16) and GiB sent are of a step. ! does not fit.",
    )
    table.add_column("mesh", min_width=24)
    for name in ("forwards", "weights", "trained", "blocks", "logits", "total", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sent")
    costs = [cost for cost in plan.meshes if not cost.refused]
    for cost in costs[:shown]:
        mesh, *sizes, sent, seconds = cost_text(cost)
        sizes[-1] += "" if cost.fits else " !"
        table.add_row(mesh, str(cost.microbatches), *sizes, seconds, sent, style="" if cost.fits else "dim")
    if costs:
        console.print(table)
    if shown is not None and len(costs) > shown:
        console.print(f"{len(costs) - shown} more meshes: --all prints them.")
    for text, mesh in {cost.refused: _mesh_text(cost.sizes) for cost in plan.meshes if cost.refused}.items():
        console.print(f"not possible, {mesh}: {text}", style="dim")
    if not costs:
        return
    best = plan.recommended
    if best is None:
        least = min(cost.total for cost in costs)
        console.print(
            f"No mesh fits. The smallest needs {_gib(least)} GiB of {memory:g} GiB, of which 8 % or more stay free: "
            "take more GPUs, shorter rows (--seq) or a quantised base (--quantization 4bit)."
        )
        return
    console.print(f"\nRecommended: {cost_text(best)[0]}", style="bold")
    console.print(_reason(best, plan.meshes))
    if plan.more_rows is not None:
        console.print(_more_rows(best, plan.more_rows))
    for title, text in snippets(plan).items():
        console.print(f"\n{title}", style="bold")
        print(text)


def _reason(best: MeshCost, others: list[MeshCost]) -> str:
    """Return what speaks for a mesh, against the next one of other sizes."""
    other = next((cost for cost in others if cost.fits and cost.sizes != best.sizes), None)
    if other is None:
        is_only = all(cost.sizes == best.sizes for cost in others)
        return f"Why: {'there is no mesh of other sizes' if is_only else 'no mesh of other sizes fits'}."
    mine, its = (
        f"{cost_text(cost)[-1]} s"
        + (f" and sends {_gib(size)} GiB between machines" if (size := cost.between_machines) else "")
        for cost in (best, other)
    )
    return f"Why: a step takes {mine} by prediction; with {cost_text(other)[0]}, the next, it takes {its}."


def _more_rows(best: MeshCost, more: MeshCost) -> str:
    """Return what twice the rows would give on the mesh that is recommended."""
    said = f"More rows: with --rows {more.rows} and twice the batch it would "
    if not more.fits:
        return f"{said}need {_gib(more.total)} GiB, which do not fit."
    return f"{said}take {_gib(more.total)} GiB, and {2 * best.seconds / more.seconds:.2f} times as many rows a second."


def _mesh_text(sizes: Mapping[str, int]) -> str:
    return axes_text(sizes) or "one GPU"


def cost_text(cost: MeshCost) -> list[str]:
    """Return a mesh's cost as text: mesh, weights, trained, blocks, logits, total, sent and seconds."""
    sizes = (cost.weights, cost.trained + cost.gradients + cost.states, cost.activations, cost.logits, cost.total)
    sent = ", ".join(f"{axis} {_gib(size)}" for axis, size in cost.sent.items())
    mesh = f"{_mesh_text(cost.sizes)} {_options_text(cost.options)}".rstrip()
    return [mesh, *map(_gib, sizes), sent, _digits(cost.seconds, 1 if cost.seconds >= 10 else 2)]


_DEFAULTS = {field.name: field.default for field in fields(ParallelConfig)}


def _options_text(options: Mapping[str, Any]) -> str:
    words = {"activation_checkpointing": "recompute", "shard_base": "base whole"}
    return ", ".join(words.get(name, name) for name, value in options.items() if value != _DEFAULTS[name])


def _gib(size: float) -> str:
    return _digits(size / 2**30, 1 if size >= 2**30 / 10 else 2)


def _digits(value: float, decimals: int) -> str:
    """Return a number with so many decimals, or one digit of it if these are all zeros: of a small model."""
    return f"{value:.{decimals}f}" if value >= 0.005 or not value else f"{value:.0g}"


# ------------------------------------------------------- what a user writes for it


def snippets(plan: MemoryPlan) -> dict[str, str]:
    """Return what to write for the recommended mesh: options, a file and Python, each under its title."""
    best = plan.recommended
    assert best is not None
    sizes, options = best.sizes, {name: value for name, value in best.options.items() if value != _DEFAULTS[name]}
    batch, accumulation = best.rows, best.microbatches
    pipeline = {"pp_size": sizes["pp"], "pp_microbatches": best.microbatches} if sizes["pp"] > 1 else {}
    if pipeline:
        batch, accumulation = batch * accumulation, 1
    machines = max(1, plan.gpus // plan.hardware.gpus_per_node)
    python = _python(plan, best, machines, options, accumulation)
    recompute = options.pop("activation_checkpointing", False)
    whole_base = {"shard_base": options.pop("shard_base")} if "shard_base" in options else {}
    flags = f"accelerate-lora config --config_file mesh.yaml --num_processes {plan.gpus} --num_machines {machines}"
    flags += f" --tp_size {sizes['tp']} --dp_replicate_size {sizes['dp_replicate']} --mixed_precision no"
    flags += f" --cp_size {sizes['cp']}" if sizes["cp"] > 1 else ""
    flags += "".join(f" --{name} {value}" for name, value in pipeline.items())
    flags += f" --activation_checkpointing {'yes' if recompute else 'no'}"
    flags += " --require_adapters no" if plan.trains_all else ""
    flags += " --shard_base no" if whole_base else ""
    if machines > 1:
        flags += "".join(f" --{name} {value}" for name, value in _MEETING.items()) + f"   # rank 0..{machines - 1}"
    if options:  # which no key of the file stands for
        arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
        flags += f"\n# in train.py: Accelerator(fsdp_plugin=LoRAParallelPlugin({arguments}))"
    trainer = f"--per_device_train_batch_size {batch} --gradient_accumulation_steps {accumulation}"
    trainer += "   # or in the TrainingArguments of a script that takes no options"
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": DistributedType.FSDP.value,
        "mixed_precision": "no",
        "num_machines": machines,
        **({**_MEETING, "rdzv_backend": "static", "same_network": True} if machines > 1 else {}),
        "num_processes": plan.gpus,
        **mesh_sections(sizes, {**pipeline, **whole_base}, bool(recompute), not plan.trains_all),
    }
    computes = f"mixed_precision: 'no'  # in the dtype of the weights, {plan.dtype}: load them so"
    return {
        f"Load the model in {plan.dtype}, as this plan takes it to be": _LOADED.format(plan.dtype),
        "Commands": f"{flags}\naccelerate-lora launch --config_file mesh.yaml train.py {trainer}",
        "mesh.yaml": yaml.safe_dump(content, sort_keys=False)
        .replace("machine_rank: 0", f"machine_rank: 0  # 0..{machines - 1}, on each machine its own")
        .replace("mixed_precision: 'no'", computes)
        .rstrip(),
        "Python": python,
    }


def _python(plan: MemoryPlan, best: MeshCost, machines: int, options: dict[str, Any], accumulation: int) -> str:
    sizes: dict[str, Any] = {
        "tensor_parallel_size": best.sizes["tp"],
        "replicate_size": best.sizes["dp_replicate"],
        "context_parallel_size": best.sizes["cp"],
        "pipeline_parallel_size": best.sizes["pp"],
        "pipeline_microbatches": best.microbatches if best.sizes["pp"] > 1 else 1,
    }
    arguments = {name: size for name, size in sizes.items() if size > 1} | options
    arguments |= {"require_adapters": False} if plan.trains_all else {}
    trainer = f"Trainer(devices={min(plan.gpus, plan.hardware.gpus_per_node)}"
    trainer += f", num_nodes={machines}" if machines > 1 else ""
    trainer += f", accumulate_grad_batches={accumulation}" if accumulation > 1 else ""
    return (
        "from lightning import Trainer\nfrom lightning_lora import LoRAParallelStrategy\n\n"
        f"{trainer}, strategy=LoRAParallelStrategy({', '.join(f'{k}={v!r}' for k, v in arguments.items())}))"
    )


def _check_picture(path: Path) -> None:
    """Check, before the work, that a picture can be drawn and written."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot draws with matplotlib, which is not installed: pip install matplotlib.") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        raise ValueError(f"--plot {path}: give the name of a file that ends in .{', .'.join(sorted(kinds))}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise OSError(f"--plot {path}: no file can be written there.")


def _plot(plan: MemoryPlan, path: Path) -> None:
    """Draw the memory of the meshes that were printed, as stacked bars."""
    from matplotlib import pyplot as plt

    costs = [cost for cost in plan.meshes if not cost.refused][:_SHOWN][::-1]
    names = [f"{_mesh_text(cost.sizes)}\n{_options_text(cost.options)}".strip() for cost in costs]
    figure, axis = plt.subplots(figsize=(9, 1.2 + 0.5 * len(costs)), layout="constrained")
    left = [0.0] * len(costs)
    fields = {"weights": "weights", "trained": "adapters", "states": "optimizer"}
    for field, label in {**fields, "activations": "activations, gradients", "logits": "logits"}.items():
        widths = [getattr(cost, field) / 2**30 for cost in costs]
        axis.barh(names, widths, left=left, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.axvline(plan.hardware.gpu_memory, color="black", linestyle="--", label="a GPU's memory")
    axis.set(xlabel="GiB on the GPU that holds most", title=f"{plan.model}, {plan.training}, {plan.gpus} GPUs")
    axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
