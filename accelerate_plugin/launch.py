"""Run a script unchanged: `accelerate launch --config_file cfg.yaml -m accelerate_plugin.launch train.py [args]`.

`-m package.module [args]` in place of `train.py [args]` runs a module.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.commands import launch as accelerate_launch
from torch.distributed.launcher.api import elastic_launch

from accelerate_plugin.config_file import LAUNCHERS
from accelerate_plugin.parallelism import asked_by_environment, flag
from lora_parallel.integration import replaced
from lora_parallel_failures import record_failure

_USAGE = "usage: accelerate launch --config_file CONFIG -m accelerate_plugin.launch [-m] SCRIPT [ARGUMENTS]"


def main(arguments: list[str]) -> None:
    """Run a script, or a module after "-m", as Python would, with the rest of the arguments."""
    as_module = arguments[:1] == ["-m"]
    script, rest = (arguments[as_module:] or [""])[0], arguments[1 + as_module :]
    if not script or script.startswith("-"):
        sys.exit(_USAGE)
    if not asked_by_environment():
        sys.exit(_nothing_asked())
    sys.argv = [script, *rest]
    with _refusing_launches():
        if as_module:
            if script.startswith(LAUNCHERS):  # its `__main__` has functions of its own
                _refuse()
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
            return
        if not Path(script).is_file():
            sys.exit(f"{script}: there is no such script. {_USAGE}")
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")


@contextmanager
def _refusing_launches() -> Iterator[None]:
    """Make a script raise an error where it would launch processes itself, as the commands of some packages do."""
    with replaced(accelerate_launch, {"launch_command": _refuse}), replaced(elastic_launch, {"__call__": _refuse}):
        yield


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "a process that was launched would launch processes itself: launch the module that trains, not the command "
        "that launches it (for `trl sft`: accelerate-lora launch --config_file CONFIG -m trl.scripts.sft ...)."
    )


def _nothing_asked() -> str:
    if flag("ACCELERATE_USE_CPU"):
        return (
            "accelerate_plugin.launch: with --cpu, or use_cpu: true without distributed_type: FSDP, `accelerate "
            "launch` starts one process and drops fsdp_config and parallelism_config. Leave --cpu out and set "
            "distributed_type: FSDP: on a machine without accelerators that runs on the CPU, over gloo."
        )
    return (
        "accelerate_plugin.launch: the configuration asks for nothing that this package does. Set distributed_type: "
        "FSDP and fsdp_version: 2 (`accelerate-lora config` writes such a file), or launch the script without "
        "-m accelerate_plugin.launch."
    )


if __name__ == "__main__":
    record_failure()
    main(sys.argv[1:])
