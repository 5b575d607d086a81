"""Check the values in a configuration file one by one, before anything is started: none of them needs torch.

Accelerate takes most of them as they are, and fails later, or in every process, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["OWN_KEYS", "check_machines", "check_share", "check_values", "flag", "one_of", "plan_of_styles", "whole"]

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
