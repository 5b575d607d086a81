"""Run the commands of `accelerate-lora`: what Accelerate's commands do, with this package in the right places.

`config` asks its questions here; `check` and `plan` do their work in `check_and_plan`. The console script begins in the
module `accelerate_lora`.
"""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig, default_config_file
from accelerate.commands.launch import launch_command
from accelerate.utils import ComputeEnvironment, DistributedType

from accelerate_plugin.check_and_plan import check_set_up, plan
from accelerate_plugin.config_file import CONFIG_FILES, check_machines, check_share, mesh_sections, one_of, whole
from accelerate_plugin.launch_options import launch_options
from lora_parallel import ParallelConfig
from lora_parallel_failures import repeat_failure


def main(command: str, arguments: list[str]) -> None:
    """Run a command of `accelerate-lora`, or end the process with a text that says why it cannot."""
    try:
        {"launch": launch, "config": config, "plan": plan, "check": check}[command](arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"accelerate-lora {command}: {error}")


# ------------------------------------------------------------- launch, check


def launch(arguments: list[str]) -> None:
    """Run `accelerate launch` with these arguments for a script that `accelerate_plugin.launch` runs."""
    options = launch_options(arguments)
    module = ["-m"] if options.module else []
    options.training_script_args = [*module, options.training_script, *options.training_script_args]
    options.module, options.training_script = True, "accelerate_plugin.launch"
    atexit.register(repeat_failure)
    launch_command(options)


def check(arguments: list[str]) -> None:
    """Check a configuration file, or a script with one, in this process alone."""
    options = read_arguments(arguments)
    words = ["--config_file", options.config_file] if options.config_file is not None else []
    words += ["--num_processes", str(options.num_processes)] if options.num_processes is not None else []
    script = [*(["-m"] if options.module else []), options.target, *options.rest]
    check_set_up(launch_options([*words, *script]), script if options.script else [], options.seq, options.rows)


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse what follows `check` on the command line; `script` is empty for a file alone, `rest` is the script's."""
    parser = argparse.ArgumentParser(
        prog="accelerate-lora check",
        usage="accelerate-lora check CONFIG.yaml [options] [[-m] SCRIPT [ARGUMENTS OF THE SCRIPT]]\n"
        "       accelerate-lora check --config_file CONFIG.yaml [options] [-m] SCRIPT [ARGUMENTS OF THE SCRIPT]",
        description="Check a configuration file, and print its mesh. With a script of Accelerate, Trainer, TRL, "
        "Lightning or torchrun: run it in one process up to where its model is sharded, as rank 0 of the mesh without "
        "the others and without reading weights, and print which rank holds what. Options stand before the script. The "
        "exit code is 1 if the set-up cannot work.",
        allow_abbrev=False,
    )
    parser.add_argument("target", metavar="CONFIG.yaml or SCRIPT")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="arguments of the script").required = False
    parser.add_argument("--config_file", help="the configuration file, if a script is checked (Accelerate's default)")
    parser.add_argument("--num_processes", type=int, help="processes in all (as the file says)")
    parser.add_argument("--seq", type=int, help="tokens of a row: predict the memory of a step, of a language model")
    parser.add_argument("--rows", type=int, help="rows of one batch, for --seq (the dataloader's)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module: package.module")
    options = parser.parse_args(arguments)
    if options.target.endswith(CONFIG_FILES) and not options.module:  # options and a script may stand behind it
        file = options.target
        if options.config_file is not None:
            parser.error(f"{file} is a configuration file, and --config_file names {options.config_file}: give one.")
        parser.parse_args([*options.rest, file], options)  # the file is the target again, if there is no script
        options.rest = [] if options.target == file else options.rest[:-1]
        options.config_file = file
    options.script = "" if options.target == options.config_file else options.target
    for name in ("seq", "rows"):
        if getattr(options, name) is not None:
            whole(f"--{name}", getattr(options, name))
    if options.seq is not None and not options.script:
        parser.error("--seq predicts the memory of a script's model: give the script too.")
    if options.rows is not None and options.seq is None:
        parser.error("--rows is for the memory that --seq predicts: give --seq too.")
    return options


# ---------------------------------------------------------------------- config


def config(arguments: list[str]) -> None:
    """Write a configuration file, and ask for the settings that matter and that no option gives."""
    options = _parser().parse_args(arguments)
    path = Path(options.config_file)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: give the name of a file in it, {path / 'mesh.yaml'}.")
    if path.exists() and not options.force:
        raise FileExistsError(f"{path} is there already: pass --force to replace it, or --config_file for another.")

    asked = ("num_processes", "num_machines", "tp_size", "dp_replicate_size")
    if None not in map(vars(options).get, (*asked, "mixed_precision", "activation_checkpointing")):
        options.require_adapters = options.require_adapters or "yes"  # command lines of earlier releases ask nothing

    def ask(name: str, question: str, default: Any, convert: Callable[[str, str], Any] = whole) -> None:
        if getattr(options, name) is None:
            try:
                answer = input(f"{question} [{default}]: ").strip()
            except EOFError as error:
                raise ValueError(f"there is no terminal to ask on: give --{name}.") from error
            setattr(options, name, convert(name, answer) if answer else default)

    ask("num_processes", "How many processes in all, one a GPU?", 4)
    ask("num_machines", "On how many machines?", 1)
    check_share(options.num_processes, options.num_machines)
    if options.num_machines > 1:
        ask("machine_rank", "Which of them is this one (0 is the first)?", 0, partial(whole, least=0))
        ask("main_process_ip", "What is the address of machine 0, as the others reach it?", "", lambda _, text: text)
        ask("main_process_port", "On which free port of it do the processes meet?", 29500)
    _check_used(options)
    check_machines(vars(options))
    ask("tp_size", "Over how many processes is each layer split (tensor parallelism)?", 1)
    _shards(options, 1)
    ask("dp_replicate_size", "How many copies of the sharded model (1: none but it)?", 1)
    _shards(options, options.dp_replicate_size)
    ask("mixed_precision", "Compute in bf16, or as the weights are (no)?", "bf16", one_of("no", "bf16"))
    ask(
        "activation_checkpointing",
        "Recompute activations in backward (no, if the script enables gradient checkpointing, as TRL does)?",
        "no",
        one_of("yes", "no"),
    )
    ask(
        "require_adapters",
        "Does the script train adapters (yes), or the model itself, in whole or in part (no)?",
        "yes",
        one_of("yes", "no"),
    )
    _write(path, options)
    print(f"{path} is written. Run a script with:\n  accelerate-lora launch --config_file {path} train.py")
    if options.num_machines > 1:
        print("On each other machine, run the same with --machine_rank 1, 2, ... after launch.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-lora config",
        description="Ask for the settings that matter, and write them to a configuration file. A question that an "
        "option answers is not asked.",
    )
    parser.add_argument("--config_file", default=default_config_file, help="where to write (%(default)s)")
    parser.add_argument("--num_processes", type=int, help="processes in all, one a GPU")
    parser.add_argument("--num_machines", type=int, help="machines")
    parser.add_argument("--machine_rank", type=int, help="which machine this is, from 0 (asked if there are several)")
    parser.add_argument("--main_process_ip", help="address of machine 0 (asked if there are several)")
    parser.add_argument("--main_process_port", type=int, help="free port of machine 0 (asked if there are several)")
    parser.add_argument("--tp_size", type=int, help="processes that share each layer")
    parser.add_argument("--cp_size", type=int, default=1, help="processes that share the tokens of a batch (not asked)")
    parser.add_argument("--pp_size", type=int, default=1, help="processes that share the model's blocks (not asked)")
    parser.add_argument("--pp_microbatches", type=int, default=1, help="micro-batches of a batch (not asked)")
    parser.add_argument("--pp_schedule", default="1f1b", help="1f1b, gpipe or interleaved (not asked)")
    parser.add_argument("--pp_stages_per_rank", type=int, default=1, help="stages on each process (not asked)")
    parser.add_argument("--dp_replicate_size", type=int, help="copies of the sharded model")
    parser.add_argument("--mixed_precision", choices=("no", "bf16"), help="precision to compute in")
    parser.add_argument("--activation_checkpointing", choices=("yes", "no"), help="recompute activations in backward")
    parser.add_argument("--require_adapters", choices=("yes", "no"), help="refuse to train what is no adapter (yes)")
    parser.add_argument("--shard_base", choices=("yes", "no"), default="yes", help="shard the base too (not asked)")
    parser.add_argument("--fused", choices=("yes", "no"), default="yes", help="fuse LoRA with its base (not asked)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    return parser


def _write(path: Path, options: argparse.Namespace) -> None:
    names = ("pp_size", *_OF_A_PIPELINE) if options.pp_size > 1 else ()
    more = {name: getattr(options, name) for name in names}
    more |= {name: False for name in ("shard_base", "fused") if getattr(options, name) == "no"}
    sizes = {axis: getattr(options, f"{axis}_size") for axis in ("dp_replicate", "cp", "tp")}
    sizes["dp_shard"] = _shards(options, options.dp_replicate_size)
    machines: dict[str, Any] = {"num_machines": options.num_machines, "same_network": True}
    if options.num_machines > 1:
        machines |= {name: getattr(options, name) for name in _OF_SEVERAL_MACHINES} | {"rdzv_backend": "static"}
    content = ClusterConfig(
        compute_environment=ComputeEnvironment.LOCAL_MACHINE,
        distributed_type=DistributedType.FSDP,
        mixed_precision=options.mixed_precision,
        use_cpu=False,
        debug=False,
        num_processes=options.num_processes,
        **machines,
        **mesh_sections(sizes, more, options.activation_checkpointing == "yes", options.require_adapters == "yes"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.writing")
    content.to_yaml_file(str(beside))
    os.replace(beside, path)


def _shards(options: argparse.Namespace, replicate: int) -> int:
    """Return the number of processes that each of `replicate` copies of the model is sharded over."""
    processes, tp, cp, pp = options.num_processes, options.tp_size, options.cp_size, options.pp_size
    fixed = tp * cp * pp * replicate
    if min(processes, tp, cp, pp, replicate) < 1 or processes % fixed:
        raise ValueError(
            f"tp_size {tp} x cp_size {cp} x pp_size {pp} x dp_replicate_size {replicate} = {fixed} does not divide "
            f"{processes} processes."
        )
    if tp * cp > 1 and replicate > 1 and processes == fixed:
        raise ValueError(
            f"tp_size {tp} x cp_size {cp} x dp_replicate_size {replicate} leaves nothing to shard over {processes} "
            "processes, which Accelerate does not support: give dp_replicate_size 1; the model is then sharded over "
            f"{replicate}."
        )
    return int(processes // fixed)


_OF_SEVERAL_MACHINES = ("machine_rank", "main_process_ip", "main_process_port")
_OF_A_PIPELINE = {"pp_microbatches": 1, "pp_schedule": "1f1b", "pp_stages_per_rank": 1}
"""Options that say nothing without a pipeline, with their defaults."""


def _check_used(options: argparse.Namespace) -> None:
    """Check that no option was given that the file would not have, and that a pipeline has a schedule."""
    for name in _OF_SEVERAL_MACHINES if options.num_machines == 1 else ():
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} is for several machines, and num_machines is 1: leave it out.")
    for name, default in _OF_A_PIPELINE.items() if options.pp_size == 1 else ():
        if getattr(options, name) != default:
            raise ValueError(f"--{name} is for a pipeline, and pp_size is 1: leave it out, or give --pp_size.")
    ParallelConfig(pp=options.pp_size, **{name: getattr(options, name) for name in _OF_A_PIPELINE})
