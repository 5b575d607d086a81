"""Check what a configuration file asks for without torch: `accelerate-lora check` refuses most files within a second.

`accelerate-lora launch` has the same checks before it starts a process. A run has those of sizes, schedule, version and
precision once more, from the environment that `accelerate launch` makes of the file.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

from accelerate_plugin.config_file import check_config, options_in_source
from accelerate_plugin.file_values import check_values
from lora_parallel.sizes import AXES, axis_sizes, check_schedule

__all__ = [
    "CONFIG_FILES",
    "LAUNCHERS",
    "OVER_THE_FILE",
    "check_early",
    "check_file",
    "check_launch_early",
    "check_precision",
    "check_type",
    "check_version",
    "read_arguments",
]

CONFIG_FILES = (".yaml", ".yml", ".json")
"""Endings of names that are no scripts."""

LAUNCHERS = ("accelerate.commands.", "accelerate_lora", "torch.distributed.run", "torch.distributed.launch")
"""Beginnings of the names of modules that start processes."""

OVER_THE_FILE = (
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
)
"""Options of `accelerate launch` that take the place of the file's, beside those of its sections."""


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line of `accelerate-lora check`.

    Args:
        arguments: The command line after `check`.

    Returns:
        The options. `script` is empty for a file alone; `rest` has the script's own arguments.
    """
    parser = argparse.ArgumentParser(
        prog="accelerate-lora check",
        usage="accelerate-lora check CONFIG.yaml [--num_processes N]\n"
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
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module: package.module")
    given = parser.parse_args(arguments)
    given.script = given.target
    if given.target.endswith(CONFIG_FILES) and not given.module:
        parser.parse_args([*given.rest, given.target], given)  # its options stand behind it too
        if given.rest or given.config_file is not None or given.seq is not None:
            parser.error(f"{given.target} is a configuration file, which is checked with --num_processes alone.")
        given.script, given.config_file = "", given.target
    return given


def check_early(arguments: list[str]) -> None:
    """Check the configuration file in the command line of `accelerate-lora check`, as far as that takes no torch.

    Args:
        arguments: The command line after `check`.

    Raises:
        FileNotFoundError: There is no such file, or no such script.
        ValueError: What the file asks for cannot work.
    """
    given = read_arguments(arguments)
    for name in (given.config_file, given.script if not given.module else None):
        if name and not Path(name).is_file():
            raise FileNotFoundError(f"{name} is not there.")
    options = options_in_source()
    if given.config_file is None or not options:
        return
    said = {} if given.num_processes is None else {"num_processes": given.num_processes}
    check_file(Path(given.config_file), said, options)


def check_launch_early(arguments: list[str]) -> None:
    """Check the configuration file in the command line of `accelerate-lora launch`, as far as that takes no torch.

    A command line whose script has no name of Python's is not understood here, and is checked with torch.

    Args:
        arguments: The command line after `launch`.

    Raises:
        ValueError: What the file asks for, with the options of the command line, cannot work.
    """
    words = [*takewhile(lambda word: word not in ("-m", "--module") and not word.endswith(".py"), arguments)]
    given: dict[str, str] = {}
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            given[name.replace("-", "_")] = value if equals else following
    path, options = Path(given.get("config_file", "")), options_in_source()
    if len(words) < len(arguments) and path.is_file() and options:
        said = {key: value for key, value in given.items() if key.startswith(("fsdp_", "parallelism_config_"))}
        check_file(path, said | {name: given[name] for name in OVER_THE_FILE if name in given}, options)


def check_file(path: Path, given: Mapping[str, Any], options: Collection[str] | None = None) -> dict[str, Any]:
    """Check a configuration file, as far as that takes no torch.

    Args:
        path: The file.
        given: What the command line says: settings that take the place of the file's, and of those in its sections.
        options: The options of `accelerate launch`; None asks its parser.

    Returns:
        The content of the file.

    Raises:
        ValueError: What the file asks for cannot work; the message begins with the path.
    """
    content = check_config(path, options)
    check_type(path, content)
    fsdp = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in (content.get("fsdp_config") or {}).items()}
    section = content.get("parallelism_config") or {}
    fsdp |= {key: value for key, value in given.items() if key.startswith("fsdp_")}
    section = section | {key: value for key, value in given.items() if key.startswith("parallelism_config_")}
    asked = {**content, **given, "fsdp_config": fsdp, "parallelism_config": section}
    try:
        check_version(fsdp.get("fsdp_version", 1))
        check_precision(str(asked.get("mixed_precision") or "no").lower())
        check_values(asked)
        _check_mesh(section, int(asked["num_processes"]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return content


def _check_mesh(section: Mapping[str, Any], processes: int) -> None:
    """Check the sizes and the schedule in the section `parallelism_config`, whose values are of the right kinds."""
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in section.items() if value is not None}
    sizes: dict[str, Any] = {axis: int(mesh.get(f"{axis}_size", 1)) for axis in AXES}
    check_schedule(sizes["pp"], mesh.get("pp_schedule", "1f1b"), int(mesh.get("pp_stages_per_rank", 1)))
    if not mesh:
        return
    others = prod(sizes.values()) // sizes["dp_shard"]
    fits = f"set parallelism_config_dp_shard_size: {processes // others}"
    axis_sizes(sizes, processes, f"choose sizes whose product is {processes}" if processes % others else fits)


def check_type(path: Path, content: Mapping[str, Any]) -> None:
    """Check that a configuration file asks for FSDP.

    Raises:
        ValueError: It asks for something else.
    """
    if content.get("distributed_type") != "FSDP":
        raise ValueError(
            f"{path} has distributed_type: {content.get('distributed_type')}: set it to FSDP, with fsdp_version: 2."
        )


def check_version(version: object) -> None:
    """Check that FSDP2 is asked for.

    Raises:
        ValueError: The version is another one, or none.
    """
    if str(version) != "2":
        raise ValueError(
            f"fsdp_version is {version}: LoRA under FSDP2 and tensor parallelism needs fsdp_version: 2 in fsdp_config "
            "(FSDP_VERSION=2; TrainingArguments(fsdp_config={'version': 2}))."
        )


def check_precision(mixed_precision: str) -> None:
    """Check that a mixed precision of Accelerate is supported.

    Raises:
        ValueError: It is neither "no" nor "bf16".
    """
    if mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={mixed_precision!r} is not supported by LoRAParallelPlugin"
            f"{' (it needs loss scaling)' if mixed_precision == 'fp16' else ''}: use bf16 or no."
        )
