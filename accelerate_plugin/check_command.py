"""Run `accelerate-lora check`: print the mesh of a file, and what rank 0 would hold of the model of a script."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import prepare_multi_gpu_env
from peft import LoraConfig
from torch import nn
from transformers import PretrainedConfig

from accelerate_plugin import launch
from accelerate_plugin.detect import requested_parallelism
from lora_parallel import plan_memory
from lora_parallel.integration import (
    SetUpIsPossible,
    describe,
    end_after_set_up,
    fake_process_group,
    mesh_sizes,
    mesh_text,
    peft_configs,
    rank_lines,
    state_of,
)

__all__ = ["check_set_up"]

_OWN_FOLDERS = [Path(__file__).parents[1] / name for name in ("accelerate_plugin", "lightning_lora", "lora_parallel")]


def check_set_up(options: argparse.Namespace, script: list[str], sequence_length: int | None) -> None:
    """Check what `accelerate launch` would start. This process takes the place of rank 0, and should end afterwards.

    Args:
        options: The options of `accelerate launch`, with a configuration file.
        script: The arguments of `accelerate_plugin.launch`; empty to check the file alone.
        sequence_length: Tokens of a row of the step whose memory is predicted; None to predict none.

    Raises:
        ValueError: The set-up cannot work.
        SystemExit: The script ended before a model was sharded, or the set-up of its model cannot work.
    """
    _become_rank_zero(options)
    processes = int(options.num_processes)
    parallelism = requested_parallelism({})
    assert parallelism is not None
    if not script:
        sizes = mesh_sizes(parallelism.config, processes)
        print(mesh_text(sizes), *(f"  {line}" for line in rank_lines(sizes)), sep="\n")
        print(f"{options.config_file} can work. Given a script too, check says what rank 0 would hold.")
        return
    with fake_process_group(processes, 0):
        model = _sharded_by(script)
        print(describe(model))
    if sequence_length is not None:
        _print_prediction(model, processes, sequence_length)
    print(f"The set-up can work: {processes} processes would train this model. Nothing was trained.")


def _become_rank_zero(options: argparse.Namespace) -> None:
    """Put into this process's environment what `accelerate launch` would put into that of rank 0.

    `_validate_launch_command` completes the options from the file. It is private, and there is no public way to learn
    what a file means but to launch a process.
    """
    from accelerate.commands.launch import _validate_launch_command

    options, _, _ = _validate_launch_command(options)
    options.main_process_port = 0  # nothing listens, and a port that is taken at the moment is no matter
    os.environ.update(prepare_multi_gpu_env(options))
    world = str(options.num_processes)
    local = str(int(options.num_processes) // int(options.num_machines or 1))
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=world, LOCAL_WORLD_SIZE=local)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.main_process_port))


def _sharded_by(script: list[str]) -> nn.Module:
    """Run a script up to where its first model has been sharded, and return the model.

    An error that this library raises ends the process with a line, one of the script's own with its traceback.
    """
    said = f"accelerate-lora check: {script[script[0] == '-m']} has ended, and no model was prepared."
    try:
        with end_after_set_up(), _joined():
            launch.main(script)
    except SetUpIsPossible as found:
        return found.model
    except SystemExit as ended:
        if ended.code in (None, 0):
            sys.exit(said)
        raise
    except Exception as error:
        place = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not any(folder in place.parents for folder in _OWN_FOLDERS):
            raise
        sys.exit(f"accelerate-lora check: {error}")
    sys.exit(said)


@contextmanager
def _joined() -> Iterator[None]:
    """Within the context, `init_process_group` does nothing: a loop of torchrun's makes the process group by itself."""
    own = dist.init_process_group
    dist.init_process_group = lambda *args, **kwargs: None
    try:
        yield
    finally:
        dist.init_process_group = own


def _print_prediction(model: nn.Module, processes: int, sequence_length: int) -> None:
    """Print the predicted peak of a step, with a forward of one row on each data-parallel rank.

    What the script does to recompute activations by itself is not known here; the options of the file are.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ValueError(f"--seq is for models of transformers; this is a {type(model).__name__}: leave it out.")
    adapters = [each for each in peft_configs(model).values() if isinstance(each, LoraConfig)]
    state = state_of(model)
    assert state is not None
    sizes = mesh_sizes(state.config, processes)
    plan = plan_memory(
        config,
        state.config,
        gpus=processes,
        sequence_length=sequence_length,
        batch_size=sizes["dp_replicate"] * sizes["dp_shard"] * state.config.pp_microbatches,
        lora_config=adapters[0] if adapters else None,
        full=not adapters,
        dtype=config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16,
    )
    print(
        f"predicted peak of a step on the rank that holds most, {sequence_length} tokens in each forward: "
        f"{plan.meshes[0].total / 2**20:.2f} MiB"
    )
