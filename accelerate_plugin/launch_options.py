"""Read the options of `accelerate launch`, and make the environment of its processes without launching them."""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from accelerate.commands.config import config_args
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import prepare_multi_gpu_env

from accelerate_plugin.config_file import CONFIG_FILES, LAUNCHERS, check_file, config_file_of, own_keys
from accelerate_plugin.patches import activate
from lora_parallel_failures import record_failure


def launch_options(arguments: list[str]) -> argparse.Namespace:
    """Return the options of `accelerate launch`, and put the keys that it drops into the environment."""
    options = launch_command_parser().parse_args(arguments)
    script = options.training_script
    if script.endswith(CONFIG_FILES) and not options.module and options.config_file != script:
        raise ValueError(f"{script} is no script, but a configuration file: give it as --config_file {script}.")
    path = config_file_of(arguments)
    if path is None:
        raise FileNotFoundError(
            f"there is no file {options.config_file or default_config_file}: write it with `accelerate-lora config`, "
            "or pass --config_file."
        )
    if options.cpu:
        raise ValueError(
            "--cpu starts one process and drops fsdp_config and parallelism_config: leave it out. On a machine without "
            "accelerators distributed_type: FSDP runs on the CPU, over gloo."
        )
    names = ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "mixed_precision")
    said = {name: vars(options)[name] for name in names if vars(options)[name] is not None}
    said |= {name: getattr(options, name) for name in getattr(options, "nondefault", ())}
    content = check_file(path, said)
    if not options.module and not Path(script).is_file():
        raise FileNotFoundError(f"{script} is not there{_instead(script, options.training_script_args)}.")
    if content.get("mixed_precision") is False and options.mixed_precision is None:
        options.mixed_precision = "no"  # YAML reads an unquoted no as false, which Accelerate cannot handle
    for key, value in own_keys(content).items():
        os.environ.setdefault(key.upper(), value)
    return options


def _instead(command: str, arguments: list[str]) -> str:
    """Return the end of an error message: the module to launch in place of a console script, if that is what it is."""
    # The commands of a package that launch processes, such as `trl sft`, have modules for what they launch.
    for entry in entry_points(group="console_scripts", name=command):
        module = entry.module
        if module.startswith(LAUNCHERS):
            return f" ({command} is a command that launches processes: launch the script or module that trains itself)"
        with suppress(ModuleNotFoundError):
            inner = f"{module.split('.')[0]}.scripts.{arguments[0]}" if arguments else ""
            module = inner if inner and find_spec(inner) is not None else module
        return f" ({command} is a command: launch its module, -m {module})"
    return ""


_MESH = ("FSDP_", "PARALLELISM_CONFIG_")
"""Beginnings of the environment variables by which `accelerate launch` hands a mesh to its processes."""


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Return this process's environment with what `accelerate launch` would add; `options` get what the file says."""
    # It is private, and the only way to learn what a file means but to launch a process.
    from accelerate.commands.launch import _validate_launch_command

    _validate_launch_command(options)
    options.main_process_port = 0  # nothing listens, and a port that is taken at the moment is no matter
    return prepare_multi_gpu_env(options)


def join(path: str) -> None:
    """Make this process, which another launcher has started, a rank of the mesh in a configuration file.

    Raises:
        ValueError: The file cannot work, or is for another number of processes than were started.
    """
    record_failure()
    config_args.default_config_file = path  # `check_config_file` looks there for that of an `accelerate launch`
    options = launch_options(["--config_file", path, "-m", "module"])
    environment = environment_of(options)
    processes, machines = int(options.num_processes), int(options.num_machines or 1)
    if processes != int(os.environ["WORLD_SIZE"]):
        nodes = f"--nnodes {machines} " if machines > 1 else ""
        raise ValueError(
            f"it is for {processes} processes, and {os.environ['WORLD_SIZE']} have been started. Start {processes}: "
            f"torchrun {nodes}--nproc-per-node {processes // machines}, `accelerate launch --num_processes "
            f"{processes}`, or NPROC_PER_NODE={processes // machines} for commands that call torchrun themselves."
        )
    other = [name for name, value in os.environ.items() if name.startswith(_MESH) and environment[name] != value]
    if other and os.environ.get("ACCELERATE_USE_FSDP") == "true":
        raise ValueError(
            f"the launcher was given another configuration, with {other[0]}={os.environ[other[0]]} in the place of "
            f"{environment[other[0]]}: give it the same file, or none."
        )
    # The launcher has shown this process its GPUs.
    os.environ.update({name: value for name, value in environment.items() if not name.endswith("VISIBLE_DEVICES")})
    activate()
