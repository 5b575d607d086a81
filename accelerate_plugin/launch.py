"""Run a script unchanged: `accelerate launch --config_file cfg.yaml -m accelerate_plugin.launch train.py [args]`.

`-m package.module [args]` in place of `train.py [args]` runs a module.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from accelerate_plugin import detect

__all__ = ["main"]

_USAGE = "usage: accelerate launch --config_file CONFIG -m accelerate_plugin.launch [-m] SCRIPT [ARGUMENTS]"


def main(arguments: list[str]) -> None:
    """Run a script or a module as Python would.

    Args:
        arguments: The script, or "-m" and a module; then the arguments of the script or module.

    Raises:
        SystemExit: There is no script, or the configuration asks for neither FSDP nor tensor parallelism.
    """
    as_module = arguments[:1] == ["-m"]
    script, rest = (arguments[as_module:] or [""])[0], arguments[1 + as_module :]
    if not script or script.startswith("-"):
        sys.exit(_USAGE)
    if not detect.asked_by_environment():
        sys.exit(_nothing_asked())
    sys.argv = [script, *rest]
    if as_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if not Path(script).is_file():
        sys.exit(f"{script}: there is no such script. {_USAGE}")
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _nothing_asked() -> str:
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1", "yes"):
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
    main(sys.argv[1:])
