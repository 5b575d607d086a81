"""Every place where Accelerate and transformers are changed: what stands there instead, why, and how to undo it.

Accelerate has no extension point for a parallelism of others (`KwargsHandler` subclasses raise KeyError, entry points
there are none, and Trainer makes plugin and Accelerator itself), so methods are replaced. Each replacement asks whether
the Accelerator is ours and calls the method it stands in for if not.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import version
from typing import Any

from packaging.version import Version

from accelerate_plugin import accelerator, checkpoint, data, flag, trainer
from lora_parallel.meta import defer_from_pretrained

__all__ = ["PATCHES", "Patch", "activate", "check", "patched", "unpatched"]

_OLDEST = {"accelerate": "1.15", "transformers": "5.17"}


@dataclass(frozen=True)
class Patch:
    """One method that another stands in for."""

    owner: str
    """Module and class, as "accelerate.accelerator:Accelerator"."""

    name: str
    instead: Callable[..., Any]
    """Called with the method it stands in for, and the method's arguments."""

    reason: str
    parameters: str
    """The names of the method's parameters: another version may have others."""

    line: str
    """A line of the method that the replacement is written against."""

    @property
    def target(self) -> type:
        module, _, name = self.owner.partition(":")
        found: type = getattr(importlib.import_module(module), name)
        return found

    def check(self) -> None:
        """Check that the method is the one that the replacement was written for.

        Raises:
            ImportError: It is not.
        """
        package = self.owner.split(".")[0]
        place = f"{package} {version(package)} changed {self.owner.replace(':', '.')}.{self.name}"
        remedy = f"Use a version of {package} that this release was tested with, or a later release of lightning-lora."
        own = inspect.unwrap(self.target.__dict__.get(self.name, None) or _absent)
        if own is _absent:
            raise ImportError(f"{place}: it is gone. {remedy}")
        parameters = " ".join(inspect.signature(own).parameters)
        if parameters != self.parameters:
            raise ImportError(f"{place}: its parameters are ({parameters}), not ({self.parameters}). {remedy}")
        if self.line not in inspect.getsource(own):
            raise ImportError(f"{place}: it has no line {self.line!r} any more. {remedy}")


def _absent() -> None: ...


_STANDS_IN = "_stands_in_for_accelerate"


_STATE, _ACCELERATOR, _TRAINER = (
    "accelerate.state",
    "accelerate.accelerator:Accelerator",
    "transformers.trainer:Trainer",
)

PATCHES = (
    Patch(
        f"{_STATE}:PartialState",
        "_prepare_backend",
        accelerator.prepare_backend,
        "processes that torchrun started on a machine without accelerators are not joined",
        "self cpu sagemaker_dp backend",
        "distributed_type = DistributedType.NO",
    ),
    Patch(
        f"{_STATE}:AcceleratorState",
        "__init__",
        accelerator.state_init,
        "FSDP is for machines with accelerators only, and num_processes counts tensor-parallel peers",
        "self mixed_precision cpu dynamo_plugin deepspeed_plugin fsdp_plugin torch_tp_plugin megatron_lm_plugin "
        "parallelism_config _from_accelerator kwargs",
        "self.__dict__.update(PartialState._shared_state)",
    ),
    Patch(
        _ACCELERATOR,
        "__init__",
        accelerator.accelerator_init,
        "the mesh is made in here, from a parallelism_config that a plugin cannot give",
        "self device_placement split_batches mixed_precision gradient_accumulation_steps cpu dataloader_config "
        "deepspeed_plugin fsdp_plugin torch_tp_plugin megatron_lm_plugin rng_types log_with project_dir project_config "
        "gradient_accumulation_plugin step_scheduler_with_optimizer kwargs_handlers dynamo_backend dynamo_plugin "
        "deepspeed_plugins parallelism_config",
        "self.state.device_mesh = self.parallelism_config.get_device_mesh(self.device.type)",
    ),
    Patch(
        _ACCELERATOR,
        "_prepare_device_mesh",
        accelerator.prepare_device_mesh,
        "a tp axis of one process makes the dispatching dataloader repeat batches",
        "self",
        "return self.torch_device_mesh",
    ),
    Patch(
        _ACCELERATOR,
        "prepare",
        accelerator.prepare,
        "_prepare_tp shards nothing, _prepare_fsdp2 remaps optimizers by pointer, which meta tensors share",
        "self args device_placement",
        "result = self._prepare_fsdp2(*args)",
    ),
    Patch(
        _ACCELERATOR,
        "prepare_model",
        accelerator.prepare_model,
        "it refuses FSDP2",
        "self model device_placement evaluation_mode",
        "FSDP2 preparation should be done via `accelerate.prepare()`",
    ),
    Patch(
        _ACCELERATOR,
        "prepare_data_loader",
        data.prepare_data_loader,
        "shuffling differs between tensor-parallel peers, and is not resumed in mid-epoch",
        "self data_loader device_placement slice_fn_for_dispatch",
        "prepared_data_loader = prepare_data_loader(",
    ),
    Patch(
        _ACCELERATOR,
        "no_sync",
        accelerator.no_sync,
        "set_requires_gradient_sync knows nothing of gradients that are partial over tp",
        "self model",
        "model.set_requires_gradient_sync(False)",
    ),
    Patch(
        _ACCELERATOR,
        "clip_grad_norm_",
        accelerator.clip_grad_norm_,
        "it needs all gradients of a group on one mesh, and returns a DTensor or a tensor by case",
        "self parameters max_norm norm_type",
        "return self._clip_grad_norm_dtensor_aware(parameters, max_norm, norm_type=norm_type)",
    ),
    Patch(
        _ACCELERATOR,
        "clip_grad_value_",
        accelerator.clip_grad_value_,
        "it refuses FSDP",
        "self parameters clip_value",
        "torch.nn.utils.clip_grad_value_(parameters, clip_value)",
    ),
    Patch(
        _ACCELERATOR,
        "gather",
        accelerator.gather,
        "tensor-parallel peers are gathered as if they had seen other batches",
        "self tensor",
        "return gather(tensor)",
    ),
    Patch(
        _ACCELERATOR,
        "gather_for_metrics",
        accelerator.gather_for_metrics,
        "the same, for objects",
        "self input_data use_gather_object",
        "data = self.gather(input_data)",
    ),
    Patch(
        _ACCELERATOR,
        "reduce",
        accelerator.reduce,
        "the same, for sums",
        "self tensor reduction scale",
        "return reduce(tensor, reduction, scale)",
    ),
    Patch(
        _ACCELERATOR,
        "split_between_processes",
        accelerator.split_between_processes,
        "it would give tensor-parallel peers different inputs",
        "self inputs apply_padding",
        "with PartialState().split_between_processes(inputs, apply_padding=apply_padding) as inputs:",
    ),
    Patch(
        _ACCELERATOR,
        "check_trigger",
        accelerator.check_trigger,
        "it sums over reduce, which counts tensor-parallel peers once",
        "self",
        "flag_tensor = self.reduce(self.flag_tensor)",
    ),
    Patch(
        _ACCELERATOR,
        "get_state_dict",
        accelerator.get_state_dict,
        "it gathers the frozen base, and knows one mesh",
        "self model unwrap",
        "state_dict = get_model_state_dict(model, options=options)",
    ),
    Patch(
        _ACCELERATOR,
        "save_model",
        accelerator.save_model,
        "it gathers and writes the frozen base",
        "self model save_directory max_shard_size safe_serialization",
        "state_dict = self.get_state_dict(model)",
    ),
    Patch(
        _ACCELERATOR,
        "save_state",
        checkpoint.save_state,
        "it writes the base with every checkpoint, in place, and random states by process",
        "self output_dir safe_serialization save_model_func_kwargs",
        "save_fsdp_model(self.state.fsdp_plugin, self, model, output_dir, i)",
    ),
    Patch(
        _ACCELERATOR,
        "load_state",
        checkpoint.load_state,
        "the counterpart of save_state",
        "self input_dir load_kwargs load_model_func_kwargs",
        "load_fsdp_model(self.state.fsdp_plugin, self, model, input_dir, i)",
    ),
    Patch(
        "transformers.training_args:TrainingArguments",
        "__post_init__",
        trainer.arguments_post_init,
        "bf16 is refused on a machine without accelerators unless use_cpu is set",
        "self",
        "if self.output_dir is None:",
    ),
    Patch(
        _TRAINER,
        "train",
        trainer.train,
        "TRL keeps the tensor-parallel size of its own",
        "self resume_from_checkpoint trial ignore_keys_for_eval",
        "inner_training_loop = find_executable_batch_size(",
    ),
    Patch(
        _TRAINER,
        "_has_mixed_mesh_grads",
        trainer.has_mixed_mesh_grads,
        "Trainer would clip by itself, and knows no mesh whose axes a gradient is replicated over",
        "self model",
        "self._mixed_mesh_grads = has_mixed_dtensor(",
    ),
    Patch(
        _TRAINER,
        "get_tp_size",
        trainer.get_tp_size,
        "Trainer divides by it what the Accelerator has counted by data-parallel process already",
        "self",
        '"_tp_size", None)',
    ),
    Patch(
        _TRAINER,
        "get_total_train_batch_size",
        trainer.get_total_train_batch_size,
        "it divides the number of processes by get_tp_size",
        "self args",
        "dp_world_size = args.world_size // self.get_tp_size()",
    ),
    Patch(
        _TRAINER,
        "store_flos",
        trainer.store_flos,
        "it sums over all processes, in float32",
        "self",
        "distributed_broadcast_scalars([self.current_flos]",
    ),
    Patch(
        _TRAINER,
        "evaluate",
        trainer.evaluate,
        "it counts steps by all processes",
        "self eval_dataset ignore_keys metric_key_prefix",
        "num_steps=math.ceil(output.num_samples / total_batch_size),",
    ),
    Patch(
        _TRAINER,
        "predict",
        trainer.predict,
        "it counts steps by all processes",
        "self test_dataset ignore_keys metric_key_prefix",
        "num_steps=math.ceil(output.num_samples / total_batch_size),",
    ),
    Patch(
        _TRAINER,
        "save_model",
        trainer.save_model,
        "with SHARDED_STATE_DICT it writes nothing, with FULL_STATE_DICT it gathers the base",
        "self output_dir _internal_call",
        'if "FULL_STATE_DICT" in str(self.accelerator.state.fsdp_plugin.state_dict_type):',
    ),
    Patch(
        _TRAINER,
        "_save_checkpoint",
        trainer.save_checkpoint,
        "it writes in place, and resuming takes the newest folder, half-written or not",
        "self model trial",
        "self.state.save_to_json(os.path.join(output_dir, TRAINER_STATE_NAME))",
    ),
    Patch(
        _TRAINER,
        "_save_optimizer_and_scheduler",
        trainer.save_optimizer_and_scheduler,
        "save_fsdp_model writes the base; save_fsdp_optimizer knows one mesh",
        "self output_dir",
        "save_fsdp_optimizer(",
    ),
    Patch(
        _TRAINER,
        "_load_from_checkpoint",
        trainer.load_from_checkpoint,
        "load_fsdp_model looks for a base",
        "self resume_from_checkpoint model",
        "elif self.is_fsdp_enabled:",
    ),
    Patch(
        _TRAINER,
        "_load_optimizer_and_scheduler",
        trainer.load_optimizer_and_scheduler,
        "load_fsdp_optimizer loads onto the mesh that saved",
        "self checkpoint",
        "load_fsdp_optimizer(",
    ),
    Patch(
        _TRAINER,
        "_load_rng_state",
        trainer.load_rng_state,
        "random states are by process, and other meshes have other processes",
        "self checkpoint",
        'rng_file = os.path.join(checkpoint, f"rng_state_{process_index}.pth")',
    ),
    Patch(
        _TRAINER,
        "_load_best_model",
        trainer.load_best_model,
        "load_fsdp_model looks for a base",
        "self",
        "load_result = load_fsdp_model(",
    ),
)


def check() -> None:
    """Check versions, and that every method is what its replacement was written for.

    Raises:
        ImportError: One is not.
    """
    for package, oldest in _OLDEST.items():
        if Version(version(package)) < Version(oldest):
            raise ImportError(f"accelerate_plugin needs {package} >= {oldest}, and {version(package)} is installed.")
    for patch in PATCHES:
        patch.check()


@contextmanager
def patched() -> Iterator[None]:
    """Within, Accelerators that are asked for FSDP2 are ours; and if the environment asks for it, `from_pretrained`
    leaves reading to the processes that will hold a shard each. Afterwards everything is as it was.

    Raises:
        ImportError: An upgrade changed what is replaced.
    """
    with ExitStack() as stack:
        before: list[tuple[type, str, Any]] = []
        check()
        for patch in PATCHES:
            own = patch.target.__dict__[patch.name]
            if hasattr(own, _STANDS_IN):  # importing the package has put it there
                continue
            before.append((patch.target, patch.name, own))
            setattr(patch.target, patch.name, _standing_in(own, patch.instead))
        stack.callback(_put_back, before)
        if flag.asked_by_environment():
            stack.enter_context(defer_from_pretrained())
        yield


def _put_back(before: list[tuple[type, str, Any]]) -> None:
    for each in reversed(before):
        setattr(*each)


def _standing_in(own: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def method(*args: Any, **kwargs: Any) -> Any:
        return instead(own, *args, **kwargs)

    setattr(method, _STANDS_IN, True)
    return method


_active = ExitStack()


atexit.register(_active.close)


def activate() -> None:
    """`patched`, for the rest of the process."""
    _active.enter_context(patched())


@contextmanager
def unpatched() -> Iterator[None]:
    """Within, Accelerate and transformers are as if this package had not been imported."""
    _active.close()
    try:
        yield
    finally:
        activate()
