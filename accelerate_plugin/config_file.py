"""Check the YAML file that `accelerate launch` was given for keys that it does not know and drops without a message.

Accelerate is imported where it is used: `accelerate-lora check` reads a file with this module before it imports torch.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml

from accelerate_plugin.file_values import OWN_KEYS

__all__ = [
    "check_config",
    "check_config_file",
    "config_file_of",
    "mesh_sections",
    "options_in_source",
    "own_keys",
    "own_settings",
]

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
