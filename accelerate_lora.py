"""Start the console script `accelerate-lora`; `--help` and `--version` do not import torch.

A module by itself: importing `accelerate_plugin`, or anything in it, imports torch and changes Accelerate.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

__all__ = ["main"]

USAGE = """usage: accelerate-lora [-h] [--version] {config,launch,check,plan} ...

Train LoRA under FSDP2 and tensor parallelism with Accelerate, transformers' Trainer and TRL.

commands:
  config                ask a few questions, and write a file that `accelerate launch` reads too
  launch [options] script.py [arguments of the script]
                        run a script as `accelerate launch [options] -m accelerate_plugin.launch script.py` does
  check CONFIG.yaml, or check --config_file CONFIG.yaml script.py [arguments of the script]
                        say whether a set-up can work, and who holds what, in one process and without training
  plan MODEL --gpus N --seq TOKENS
                        predict what each mesh costs a GPU, from a model's config alone, and recommend one

options:
  -h, --help            show this text; after a command, that of the command
  --version             show the versions of this library and of what it builds on

A first run, on four GPUs of one machine:
  accelerate-lora config --config_file mesh.yaml --num_processes 4 --num_machines 1 --tp_size 2
  accelerate-lora check --config_file mesh.yaml train.py
  accelerate-lora launch --config_file mesh.yaml train.py

Documentation: docs/accelerate.md
"""
_DISTRIBUTIONS = ("lightning-lora", "torch", "peft", "transformers", "accelerate", "lightning", "trl")


def main() -> None:
    """Run the console script `accelerate-lora` with the arguments of the command line."""
    command, *arguments = sys.argv[1:] or [""]
    if command in ("-h", "--help"):
        print(USAGE, end="")
    elif command == "--version":
        print("\n".join(f"{name} {_version(name)}" for name in _DISTRIBUTIONS))
    elif command in ("config", "launch", "check", "plan"):
        from accelerate_plugin import cli

        cli.main(command, arguments)
    else:
        said = f"{command!r} is no command of accelerate-lora.\n\n" if command else ""
        print(f"{said}{USAGE}", end="", file=sys.stderr)
        sys.exit(2)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "is not installed"


if __name__ == "__main__":
    main()
