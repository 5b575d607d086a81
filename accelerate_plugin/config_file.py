"""Check the YAML file of a run: its keys, its values, and what they ask for together.

Accelerate takes most of them as they are, and fails later, or in every process, or not at all. `accelerate-lora launch`
and `check` make all checks before a process starts. A run makes those of keys, sizes, schedule, version and precision
once more, from the environment that `accelerate launch` makes of the file.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import psutil
import yaml
from accelerate.commands.config import config_args
from accelerate.commands.launch import launch_command_parser

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
    """Return a setting that is a whole number, or raise ValueError."""
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or int(text) < least:
        raise ValueError(
            f"{name} is {value!r}: give a {'positive whole number' if least else 'whole number from 0 on'}."
        )
    return int(text)


def flag(name: str, value: object) -> bool:
    """Return a setting that is true or false, or raise ValueError."""
    if str(value).lower() not in _WORDS:
        raise ValueError(f"{name} is {value!r}: give true or false.")
    return str(value).lower() in _TRUE


def one_of(*words: str) -> Callable[[str, object], str]:
    """Return a function that returns a setting, and raises ValueError if the setting is none of the words."""

    def convert(name: str, value: object) -> str:
        if value not in words:
            raise ValueError(f"{name} is {value!r}: give {', '.join(words[:-1])} or {words[-1]}.")
        return str(value)

    return convert


def plan_of_styles(name: str, value: object) -> str | dict[str, str]:
    """Return a `tp_plan`, which may be JSON: "auto", or a style for each glob of module names; or raise ValueError."""
    plan: Any = value
    if isinstance(value, str) and value != "auto":
        with suppress(ValueError):
            plan = json.loads(value)
    if plan == "auto" or (isinstance(plan, dict) and all(isinstance(x, str) for pair in plan.items() for x in pair)):
        return plan
    raise ValueError(f"{name} is {value!r}: give auto, or a style for each glob of module names.")


def _check_values(content: Mapping[str, Any]) -> None:
    """Check the values of a file whose keys have been checked, with what the command line says in their place."""
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
    "parallelism_config_shard_base": flag,
    "parallelism_config_fused": flag,
    "parallelism_config_tp_plan": plan_of_styles,
}
"""Map the keys that `accelerate launch` does not know and drops to the function that converts their value.

The environment variable of a key has its name in upper case.
"""


def check_share(processes: int, machines: int) -> None:
    """Check that each machine can start the same number of processes."""
    if machines < 1 or processes % machines:
        raise ValueError(
            f"num_processes {processes} on num_machines {machines}: each machine runs as many, so give a multiple of "
            "the machines."
        )


def check_machines(settings: Mapping[str, Any]) -> None:
    """Check Accelerate's settings by which processes of several machines find each other; any may be left out."""
    machines = whole("num_machines", settings.get("num_machines", 1), least=0)
    check_share(int(settings["num_processes"]), machines)
    if machines > 1:
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
    port = settings.get("main_process_port")
    if port is not None and not int(machines > 1) <= whole("main_process_port", port, least=0) < 65536:
        raise ValueError(f"main_process_port {port}: give a free port of machine 0, 1 to 65535.")


_SECTIONS = {"fsdp_config": "fsdp", "dynamo_config": "dynamo", "parallelism_config": "parallelism_config"}
"""Prefix of the keys in each section. `accelerate launch` adds "fsdp_" and "dynamo_" to keys that lack them."""


def mesh_sections(
    sizes: Mapping[str, int], more: Mapping[str, Any], recompute: bool, adapters: bool
) -> dict[str, dict[str, Any]]:
    """Return the sections of a configuration file that ask for a mesh.

    `more` has further keys of the mesh: "pp_size" and other options of a pipeline, "shard_base", "fused".
    """
    mesh: dict[str, Any] = {f"{axis}_size": sizes[axis] for axis in ("dp_replicate", "dp_shard", "tp")}
    mesh |= {"cp_size": sizes["cp"]} if sizes["cp"] > 1 else {}
    mesh |= more if adapters else {**more, "require_adapters": False}
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
        "parallelism_config": {f"parallelism_config_{name}": value for name, value in mesh.items()},
    }


@cache
def check_config_file() -> dict[str, Any]:
    """Check the configuration file that `accelerate launch` read, if it started this process; return its content."""
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


def check_config(path: Path) -> dict[str, Any]:
    """Return a configuration file's content, or raise ValueError for a key that `accelerate launch` drops."""
    try:
        content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no configuration: `accelerate-lora config` writes one.")
    for section, begin in _SECTIONS.items():
        known = [option for option in (*_options(), *OWN_KEYS) if option.startswith(f"{begin}_")]
        keys = content.get(section) or {}
        if not isinstance(keys, dict):
            raise ValueError(f"{path}: {section} is {keys!r}: give keys with values there, or leave it out.")
        for key, name in zip(keys, map(str, keys), strict=True):
            option = name if begin == section or name.startswith(begin) else f"{begin}_{name}"
            if option not in known:
                close = difflib.get_close_matches(f"{begin}_{option.removeprefix(f'{begin}_')}", known, 1)
                raise ValueError(
                    f"{path}: {section} has the key {key!r}, which `accelerate launch` does not know and drops: "
                    f"{f'did you mean {close[0]}?' if close else 'remove it.'}"
                )
    return content


def own_keys(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the `OWN_KEYS` of a configuration file, with their values as text."""
    section = content.get("parallelism_config") or {}
    values = {key: section[key] for key in OWN_KEYS if section.get(key) is not None}
    return {key: json.dumps(value) if isinstance(value, dict) else str(value) for key, value in values.items()}


def own_settings() -> dict[str, Any]:
    """Return the values of `OWN_KEYS` without their prefix: the environment's, else those of the file of the launch."""
    content = check_config_file()
    texts = own_keys(content) | {key: os.environ[key.upper()] for key in OWN_KEYS if os.environ.get(key.upper())}
    return {key.removeprefix("parallelism_config_"): OWN_KEYS[key](key, text) for key, text in texts.items()}


def config_file_of(arguments: list[str]) -> Path | None:
    """Return the configuration file that `accelerate launch` reads for these arguments, or None if there is none."""
    try:
        name = launch_command_parser().parse_known_args(arguments)[0].config_file
    except SystemExit:  # the parser prints what is wrong
        return None
    path = Path(name if name is not None else config_args.default_config_file)
    return path if path.is_file() else None


@cache
def _options() -> list[str]:
    """List the options of `accelerate launch`, and the one that it reads from the file alone."""
    return sorted({action.dest for action in launch_command_parser()._actions} | {"fsdp_ignored_modules"})


def _launched_with() -> Path | None:
    if "WORLD_SIZE" not in os.environ:
        return None
    process = psutil.Process()
    with suppress(psutil.Error):  # no permission to look at a process, for instance the first one of a container
        for _ in range(3):
            process = process.parent()
            if process is None:
                return None
            arguments = _launcher_arguments(process.cmdline())
            if arguments is not None:
                path = config_file_of(arguments)
                return Path(process.cwd()) / path if path is not None else None
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


def check_file(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check a configuration file, with the settings of the command line in place of the file's; return its content."""
    content = check_config(path)
    if content.get("distributed_type") != "FSDP":
        raise ValueError(
            f"{path} has distributed_type: {content.get('distributed_type')}: set it to FSDP, with fsdp_version: 2."
        )
    fsdp = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in (content.get("fsdp_config") or {}).items()}
    fsdp |= {key: value for key, value in options.items() if key.startswith("fsdp_")}
    mesh = dict(content.get("parallelism_config") or {})
    mesh |= {key: value for key, value in options.items() if key.startswith("parallelism_config_")}
    asked = {**content, **options, "fsdp_config": fsdp, "parallelism_config": mesh}
    try:
        check_version(fsdp.get("fsdp_version", 1))
        check_precision(str(asked.get("mixed_precision") or "no").lower())
        _check_values(asked)
        _check_mesh(mesh, int(asked["num_processes"]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return content


def _check_mesh(section: Mapping[str, Any], processes: int) -> None:
    """Check the sizes and the schedule in `parallelism_config`, whose values are of the right kinds."""
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in section.items() if value is not None}
    sizes: dict[str, Any] = {axis: int(mesh.get(f"{axis}_size", 1)) for axis in AXES}
    check_schedule(sizes["pp"], mesh.get("pp_schedule", "1f1b"), int(mesh.get("pp_stages_per_rank", 1)))
    if not mesh:
        return
    others = prod(sizes.values()) // sizes["dp_shard"]
    fits = f"set parallelism_config_dp_shard_size: {processes // others}"
    axis_sizes(sizes, processes, f"choose sizes whose product is {processes}" if processes % others else fits)


def check_version(version: object) -> None:
    """Refuse another version of FSDP than 2."""
    if str(version) != "2":
        raise ValueError(
            f"fsdp_version is {version}: LoRA under FSDP2 and tensor parallelism needs fsdp_version: 2 in fsdp_config "
            "(FSDP_VERSION=2; TrainingArguments(fsdp_config={'version': 2}))."
        )


def check_precision(mixed_precision: str) -> None:
    """Refuse a mixed precision of Accelerate that is not supported."""
    if mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"mixed_precision={mixed_precision!r} is not supported by LoRAParallelPlugin"
            f"{' (it needs loss scaling)' if mixed_precision == 'fp16' else ''}: use bf16 or no."
        )
