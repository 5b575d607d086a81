"""Check the YAML file of a run without torch: its keys, its values, and what they ask for together.

Accelerate takes most of them as they are, and fails later, or in every process, or not at all.

Accelerate is imported where it is used: `accelerate-lora check` reads a file with this module before it imports torch.

`accelerate-lora launch` has the same checks before it starts a process. A run has those of sizes, schedule, version and
precision once more, from the environment that `accelerate launch` makes of the file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from math import prod
from pathlib import Path
from typing import Any

import psutil
import yaml

from lora_parallel.sizes import AXES, axis_sizes, check_schedule

_FLAGS = ("use_cpu", "debug", "same_network")
_FSDP_FLAGS = (
    "reshard_after_forward",
    "offload_params",
    "forward_prefetch",
    "use_orig_params",
    "cpu_ram_efficient_loading",
    "sync_module_states",
    "activation_checkpointing",
    "activation_checkpointing_offload",
)
_TRUE = ("y", "yes", "t", "true", "on", "1")
_WORDS = (*_TRUE, "n", "no", "f", "false", "off", "0")
"""Words that Accelerate reads as true or false."""


def whole(name: str, value: object, least: int = 1) -> int:
    """Return a setting that is a whole number.

    Raises:
        ValueError: It is none, or it is too small.
    """
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or int(text) < least:
        raise ValueError(
            f"{name} is {value!r}: give a {'positive whole number' if least else 'whole number from 0 on'}."
        )
    return int(text)


def flag(name: str, value: object) -> bool:
    """Return a setting that is true or false.

    Raises:
        ValueError: It is neither.
    """
    if str(value).lower() not in _WORDS:
        raise ValueError(f"{name} is {value!r}: give true or false.")
    return str(value).lower() in _TRUE


def one_of(*words: str) -> Callable[[str, object], str]:
    """Return a function that returns a setting, and raises a ValueError if the setting is none of the words."""

    def convert(name: str, value: object) -> str:
        if value not in words:
            raise ValueError(f"{name} is {value!r}: give {', '.join(words[:-1])} or {words[-1]}.")
        return str(value)

    return convert


def plan_of_styles(name: str, value: object) -> str | dict[str, str]:
    """Return a `tp_plan`: "auto", or a style for each glob of module names.

    Args:
        name: The name of the setting.
        value: A mapping, or its text as JSON.

    Raises:
        ValueError: It is neither "auto" nor such a mapping.
    """
    found: Any = value
    if isinstance(value, str) and value != "auto":
        with suppress(ValueError):
            found = json.loads(value)
    whole_plan = isinstance(found, dict) and all(isinstance(each, str) for pair in found.items() for each in pair)
    if found != "auto" and not whole_plan:
        raise ValueError(f"{name} is {value!r}: give auto, or a style for each glob of module names.")
    return found


def check_values(content: Mapping[str, Any]) -> None:
    """Check the values of a configuration file whose keys have been checked.

    Args:
        content: The content of the file, with what the command line says in its place.

    Raises:
        ValueError: A value cannot work.
    """
    if content.get("num_processes", -1) in (None, -1):
        raise ValueError("num_processes is missing: give a positive whole number, in the file or as --num_processes.")
    whole("num_processes", content["num_processes"])
    for name in _FLAGS:
        if name in content and not isinstance(content[name], bool):
            raise ValueError(f"{name} is {content[name]!r}: give true or false.")
    check_machines(content)
    fsdp = content.get("fsdp_config") or {}
    for key, value in fsdp.items():
        if key.removeprefix("fsdp_") in _FSDP_FLAGS and str(value).lower() not in _WORDS:
            raise ValueError(f"fsdp_config has {key}: {value!r}: give true or false.")
    for key, value in (content.get("parallelism_config") or {}).items():
        convert = OWN_KEYS.get(key, whole if key.endswith("_size") else None)
        if convert is not None and not (value is None and key in OWN_KEYS):  # it is then as if it was left out
            convert(key, value)


OWN_KEYS: dict[str, Callable[[str, object], Any]] = {
    "parallelism_config_cp_method": one_of("ulysses", "all_gather"),
    "parallelism_config_pp_size": whole,
    "parallelism_config_pp_microbatches": whole,
    "parallelism_config_pp_schedule": lambda name, value: str(value),  # `check_schedule` checks it with the sizes
    "parallelism_config_pp_stages_per_rank": whole,
    "parallelism_config_require_adapters": flag,
    "parallelism_config_tp_plan": plan_of_styles,
}
"""Keys of `parallelism_config` that `accelerate launch` does not know and drops.

Each has the function that converts its value, or raises a ValueError. The environment variable of a key has its name in
upper case.
"""


def check_share(processes: int, machines: int) -> None:
    """Check that a number of processes can be started by as many on each machine.

    Raises:
        ValueError: It cannot.
    """
    if machines < 1 or processes % machines:
        raise ValueError(
            f"num_processes {processes} on num_machines {machines}: each machine runs as many, so give a multiple of "
            "the machines."
        )


def check_machines(settings: Mapping[str, Any]) -> None:
    """Check the settings of Accelerate that say how processes of several machines find each other.

    Args:
        settings: The settings; those that are left out have Accelerate's defaults.

    Raises:
        ValueError: One of them is missing, or cannot work.
    """
    machines = whole("num_machines", settings.get("num_machines", 1), least=0)
    check_share(int(settings["num_processes"]), machines)
    if machines > 1:
        _check_address(machines, settings)
    port = settings.get("main_process_port")
    if port is not None and not int(machines > 1) <= whole("main_process_port", port, least=0) < 65536:
        raise ValueError(f"main_process_port {port}: give a free port of machine 0, 1 to 65535.")


def _check_address(machines: int, settings: Mapping[str, Any]) -> None:
    rank, address = settings.get("machine_rank", 0), settings.get("main_process_ip")
    if not 0 <= whole("machine_rank", rank, least=0) < machines:
        raise ValueError(f"machine_rank {rank} of {machines} machines: give 0 to {machines - 1}.")
    if not address:
        raise ValueError("main_process_ip is missing: give the address of machine 0, as the others reach it.")
    if not isinstance(address, str) or "/" in address or address.count(":") == 1:  # IPv6 has more colons
        raise ValueError(
            f"main_process_ip is {address!r}: give the name or address of machine 0 alone, and the port as "
            "main_process_port."
        )


_SECTIONS = {"fsdp_config": "fsdp", "dynamo_config": "dynamo", "parallelism_config": "parallelism_config"}
"""Prefix of the keys in each section. `accelerate launch` adds "fsdp_" and "dynamo_" to keys that lack them."""


def mesh_sections(
    sizes: Mapping[str, int], pipeline: Mapping[str, Any], recompute: bool, adapters: bool
) -> dict[str, dict[str, Any]]:
    """Return the sections of a configuration file that ask for a mesh.

    Args:
        sizes: Sizes of dp_replicate, dp_shard, cp and tp.
        pipeline: Values of the keys that begin with `parallelism_config_pp_`, without that; empty without a pp axis.
        recompute: Recompute activations in backward.
        adapters: Train adapters, and refuse to train anything else.
    """
    mesh = {f"{axis}_size": sizes[axis] for axis in ("dp_replicate", "dp_shard", "tp")}
    mesh |= {"cp_size": sizes["cp"]} if sizes["cp"] > 1 else {}
    mesh |= {f"pp_{name}": value for name, value in pipeline.items()}
    settings: dict[str, Any] = mesh if adapters else {**mesh, "require_adapters": False}
    return {
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": recompute,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_offload_params": False,
        },
        "parallelism_config": {f"parallelism_config_{name}": value for name, value in settings.items()},
    }


@cache
def check_config_file() -> dict[str, Any]:
    """Check the configuration file that `accelerate launch` read, if it started this process.

    Returns:
        The content of the file, which is empty if there is none.

    Raises:
        ValueError: The file has keys that `accelerate launch` drops, or a parallelism_config that it has dropped.
    """
    path = _launched_with()
    if path is None:
        return {}
    content = check_config(path)
    if content.get("parallelism_config") and "ACCELERATE_USE_PARALLELISM_CONFIG" not in os.environ:
        raise ValueError(
            f"{path} has a parallelism_config, which `accelerate launch` drops where --use_fsdp or the like is given "
            "on the command line too: leave that out, distributed_type: FSDP in the file says it."
        )
    return content


def check_config(path: Path, options: Collection[str] | None = None) -> dict[str, Any]:
    """Check a configuration file for keys that `accelerate launch` does not know.

    Args:
        path: The file.
        options: The options of `accelerate launch`; None asks its parser.

    Returns:
        The content of the file.

    Raises:
        ValueError: A section has keys that `accelerate launch` drops, or is none; or the file holds no configuration.
    """
    try:
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no configuration: `accelerate-lora config` writes one.")
    options = _options() if options is None else options
    for section, begin in _SECTIONS.items():
        known = sorted(each for each in options if each.startswith(f"{begin}_"))
        keys = content.get(section) or {}
        if not isinstance(keys, dict):
            raise ValueError(f"{path}: {section} is {keys!r}: give keys with values there, or leave it out.")
        for key, name in ((each, str(each)) for each in keys):
            option = name if begin == section or name.startswith(begin) else f"{begin}_{name}"
            if option not in known and option not in OWN_KEYS:
                own = [each for each in OWN_KEYS if each.startswith(begin)]
                close = difflib.get_close_matches(f"{begin}_{option.removeprefix(f'{begin}_')}", [*known, *own], 1)
                raise ValueError(
                    f"{path}: {section} has the key {key!r}, which `accelerate launch` does not know and drops: "
                    f"{f'did you mean {close[0]}?' if close else 'remove it.'}"
                )
    return content


def own_keys(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of `parallelism_config` that only this library knows, and their values as text.

    `accelerate launch` drops them. `accelerate-lora launch` puts them into the environment, in upper case.

    Args:
        content: The content of a configuration file.
    """
    section = content.get("parallelism_config") or {}
    given = {key: section[key] for key in OWN_KEYS if section.get(key) is not None}
    return {key: json.dumps(value) if isinstance(value, dict) else str(value) for key, value in given.items()}


def own_settings() -> dict[str, Any]:
    """Return the values of the keys that only this library knows, without the prefix `parallelism_config_`.

    They come from the environment, or else from the configuration file that `accelerate launch` read, if it started
    this process.

    Raises:
        ValueError: A value is of the wrong kind, or the file has keys that would be dropped.
    """
    content = check_config_file()
    given = own_keys(content) | {key: os.environ[key.upper()] for key in OWN_KEYS if os.environ.get(key.upper())}
    return {key.removeprefix("parallelism_config_"): OWN_KEYS[key](key, text) for key, text in given.items()}


def config_file_of(arguments: list[str]) -> Path | None:
    """Return the configuration file that `accelerate launch` reads, or None if it does not exist.

    Args:
        arguments: The command line of `accelerate launch`: its options, the script and the script's own arguments.
    """
    from accelerate.commands.config.config_args import default_config_file
    from accelerate.commands.launch import launch_command_parser

    try:
        given = launch_command_parser().parse_known_args(arguments)[0].config_file
    except SystemExit:  # the parser prints what is wrong
        return None
    path = Path(given if given is not None else default_config_file)
    return path if path.is_file() else None


_FROM_THE_FILE_ONLY = {"fsdp_ignored_modules"}
"""Keys that `accelerate launch` reads from the file, though they are no options of its command line."""


@cache
def _options() -> frozenset[str]:
    from accelerate.commands.launch import launch_command_parser

    return frozenset({action.dest for action in launch_command_parser()._actions} | _FROM_THE_FILE_ONLY)


def options_in_source() -> frozenset[str]:
    """Return the options of `accelerate launch` for the sections of a file, without importing torch.

    They are read from the source of its parser.

    Returns:
        The options; an empty set if a release of Accelerate declares them in another way.
    """
    accelerate = find_spec("accelerate")
    path = Path(accelerate.origin or "").parent / "commands" / "launch.py" if accelerate is not None else Path()
    found = re.findall(rf'"--((?:{"|".join(_SECTIONS.values())})_\w+)"', path.read_text()) if path.is_file() else []
    return frozenset({*found, *_FROM_THE_FILE_ONLY}) if "fsdp_version" in found else frozenset()


def _launched_with() -> Path | None:
    if "WORLD_SIZE" not in os.environ:
        return None
    process: psutil.Process | None = psutil.Process()
    for _ in range(3):
        try:
            process = process.parent() if process is not None else None
            if process is None:
                return None
            rest = _launcher_arguments(process.cmdline())
            if rest is not None:
                found = config_file_of(rest)
                return Path(process.cwd()) / found if found is not None else None
        except psutil.Error:  # no permission to look at the process, for instance the first one of a container
            return None
    return None


_LAUNCHERS = ("accelerate", "accelerate-lora", "accelerate_lora", "accelerate_lora.py")


def _launcher_arguments(words: list[str]) -> list[str] | None:
    """Return the words after `accelerate launch` in a command line; None if the command is another one."""
    for index, word in enumerate(words):
        name = Path(word).name
        if name in ("accelerate-launch", "accelerate.commands.launch"):
            return words[index + 1 :]
        if name in _LAUNCHERS and words[index + 1 :][:1] == ["launch"]:
            return words[index + 2 :]
    return None


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
