"""Replace methods of Accelerate and transformers, and put them back.

Accelerate has no extension point for another package's parallelism: subclasses of `KwargsHandler` raise KeyError, there
are no entry points, and Trainer makes the plugin and the Accelerator itself. So methods are replaced. Each replacement
asks whether the Accelerator trains with `lora_parallel`, and calls the replaced method if not. An Accelerator that
trains with `lora_parallel` gets the methods of `AcceleratorOverrides` when it is made; of the class Accelerator only
`__init__` is replaced.
"""

from __future__ import annotations

import atexit
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pkgutil import resolve_name
from typing import Any

from accelerate import Accelerator
from packaging.version import Version

from accelerate_plugin import accelerator, data, trainer
from accelerate_plugin.accelerator import AcceleratorOverrides
from accelerate_plugin.models import refusing_wrappers
from accelerate_plugin.parallelism import asked_by_environment, standing_in
from lora_parallel.integration import defer_from_pretrained

_OLDEST = {"accelerate": "1.13", "transformers": "5.19"}


@dataclass(frozen=True)
class Patch:
    """Describe one replaced method, property or function."""

    owner: str
    """Module and class of the method, as in "accelerate.accelerator:Accelerator"; of a function the module."""
    name: str
    instead: Callable[..., Any]
    """Function that is called with the replaced method and with that method's arguments."""
    reason: str
    parameters: str = ""
    """Names of the method's parameters, with spaces between, if `instead` does not name them."""

    @property
    def target(self) -> Any:
        return resolve_name(self.owner)


def _parameters(function: Callable[..., Any]) -> str:
    return " ".join(name for name in inspect.signature(function).parameters if name != "original")


def _check_parameters(owner: Any, name: str, expected: str) -> None:
    """Raise ImportError unless a method of a class, or a function of a module, has these parameters."""
    original = vars(owner).get(name)
    present = _parameters(inspect.unwrap(_function(original))) if original is not None else None
    if present == expected:
        return
    home = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__name__}"
    package = home.split(".")[0]
    change = "it is gone" if present is None else f"its parameters are ({present}), not ({expected})"
    raise ImportError(
        f"{package} {version(package)} changed {home}.{name}: {change}. Use a version of {package} that this release "
        "was tested with, or a later release of lightning-lora."
    )


def _function(attribute: Any) -> Any:
    """Return the function of a property, or the attribute itself, which is a function."""
    return attribute.fget if isinstance(attribute, property) else attribute


_STANDS_IN = "_stands_in_for_accelerate"

_PARTIAL, _STATE = "accelerate.state:PartialState", "accelerate.state:AcceleratorState"
_OPERATIONS, _DISPATCHER = "accelerate.utils.operations", "accelerate.data_loader:DataLoaderDispatcher"
_ARGUMENTS, _TRAINER = "transformers.training_args:TrainingArguments", "transformers.trainer:Trainer"
_SIGTERM = "transformers.trainer_jit_checkpoint:JITCheckpointCallback"
_ITERATION = "iteration " if Version(version("accelerate")) >= Version("1.15") else ""

PATCHES = (
    Patch(
        _PARTIAL,
        "_prepare_backend",
        accelerator.prepare_backend,
        "processes that torchrun started on a machine without accelerators are not joined",
        "self cpu sagemaker_dp backend",
    ),
    Patch(_PARTIAL, "split_between_processes", accelerator.split_between_processes, "it gives peers different inputs"),
    Patch(
        _STATE,
        "__init__",
        accelerator.state_init,
        "FSDP is for machines with accelerators only, and num_processes counts tensor-parallel peers",
        "self mixed_precision cpu dynamo_plugin deepspeed_plugin fsdp_plugin torch_tp_plugin megatron_lm_plugin "
        "parallelism_config _from_accelerator kwargs",
    ),
    Patch(
        "accelerate.accelerator:Accelerator",
        "__init__",
        accelerator.accelerator_init,
        "the mesh is made in here, from a parallelism_config that a plugin cannot give",
        "self device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config "
        "deepspeed_plugin fsdp_plugin torch_tp_plugin megatron_lm_plugin rng_types log_with project_dir project_config "
        "gradient_accumulation_plugin step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin "
        "deepspeed_plugins parallelism_config",
    ),
    Patch(_OPERATIONS, "_gpu_gather", data.gather_tensors, "it repeats the tensors of peers of one batch"),
    Patch(_OPERATIONS, "_gpu_gather_object", data.gather_objects, "it repeats the objects of peers of one batch"),
    Patch(
        _OPERATIONS,
        "recursively_apply",
        data.reduce_tensors,
        "reduce, which calls it, adds up the tensors of peers of one batch",
        "func data args test_type error_on_other_type kwargs",
    ),
    Patch(
        _DISPATCHER,
        "__init__",
        data.dispatcher_init,
        "it gives peers of one batch different batches",
        "self dataset split_batches skip_batches use_stateful_dataloader _drop_last _non_blocking slice_fn "
        f"torch_device_mesh {_ITERATION}kwargs",
    ),
    Patch(_ARGUMENTS, "__post_init__", trainer.arguments_post_init, "bf16 without accelerators needs use_cpu"),
    Patch(_ARGUMENTS, "world_size", trainer.arguments_world_size, "it counts all processes, and batches by them"),
    Patch(_ARGUMENTS, "main_process_first", trainer.main_process_first, "none goes first where world_size is 1"),
    Patch(_TRAINER, "create_accelerator_and_postprocess", trainer.create_accelerator, "TRL shards references itself"),
    Patch(_TRAINER, "train", trainer.train, "TRL keeps the tensor-parallel size of its own"),
    Patch(_TRAINER, "_has_mixed_mesh_grads", trainer.has_mixed_mesh_grads, "Trainer's clipping knows one mesh"),
    Patch(_TRAINER, "get_tp_size", trainer.one_process, "Trainer divides by it what is by data-parallel process"),
    Patch(_TRAINER, "get_cp_size", trainer.one_process, "Trainer divides by it what is by data-parallel process"),
    Patch(_TRAINER, "store_flos", trainer.store_flos, "it sums over all processes, in float32"),
    Patch(_TRAINER, "log", trainer.log, "a callback cannot add to an entry before those of report_to have sent it"),
    Patch(_TRAINER, "save_model", trainer.save_model, "by state-dict type it writes nothing, or gathers the base"),
    Patch(_TRAINER, "_save_checkpoint", trainer.save_checkpoint, "it writes in place, and half of one is resumed"),
    Patch(_TRAINER, "_save_optimizer_and_scheduler", trainer.save_optimizer_and_scheduler, "it writes the base too"),
    Patch(_TRAINER, "_load_from_checkpoint", trainer.load_from_checkpoint, "load_fsdp_model looks for a base"),
    Patch(_TRAINER, "_load_optimizer_and_scheduler", trainer.load_optimizer_and_scheduler, "it loads onto one mesh"),
    Patch(_TRAINER, "_load_rng_state", trainer.load_rng_state, "random states are by process, of one mesh alone"),
    Patch(_TRAINER, "_load_best_model", trainer.load_best_model, "load_fsdp_model looks for a base"),
    Patch(_SIGTERM, "on_step_end", trainer.on_step_end, "each process saves at the place where its own flag is set"),
    *(
        Patch(_SIGTERM, name, trainer.at_other_places, "each process saves at the place where its own flag is set")
        for name in ("on_step_begin", "on_pre_optimizer_step", "on_epoch_end")
    ),
)


def check() -> None:
    """Raise ImportError if a version is too old or a signature changed."""
    for package, oldest in _OLDEST.items():
        if Version(version(package)) < Version(oldest):
            raise ImportError(f"accelerate_plugin needs {package} >= {oldest}, and {version(package)} is installed.")
    for patch in PATCHES:
        _check_parameters(patch.target, patch.name, patch.parameters or _parameters(patch.instead))
    for name, override in vars(AcceleratorOverrides).items():
        if inspect.isfunction(override):
            _check_parameters(Accelerator, name, _parameters(override))


@contextmanager
def patched() -> Iterator[None]:
    """Apply all patches within the context, and defer `from_pretrained` if the environment asks for FSDP or tp."""
    # A deferred model has no weights until it is prepared; each process then reads its own shard.
    with ExitStack() as stack:
        check()
        for patch in PATCHES:
            original = patch.target.__dict__[patch.name]
            if hasattr(_function(original), _STANDS_IN):  # replaced already when the package was imported
                continue
            stack.callback(setattr, patch.target, patch.name, original)
            method = standing_in(_function(original), patch.instead)
            setattr(method, _STANDS_IN, True)
            setattr(patch.target, patch.name, property(method) if isinstance(original, property) else method)
        if asked_by_environment():
            stack.enter_context(defer_from_pretrained())
            stack.enter_context(refusing_wrappers())
        yield


_active = ExitStack()
atexit.register(_active.close)


def activate() -> None:
    """Apply all patches until the process ends."""
    _active.enter_context(patched())


@contextmanager
def unpatched() -> Iterator[None]:
    """Undo all patches within the context."""
    _active.close()
    try:
        yield
    finally:
        activate()
