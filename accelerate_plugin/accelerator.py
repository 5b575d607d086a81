"""What the methods of an Accelerator do where it trains by us. Each stands in for the method of its name.

`patches.py` puts them there; `own` is Accelerate's. In an Accelerator of ours `num_processes` counts data-parallel
processes, and `gather` and `reduce` go over these: tensor-parallel peers see the same batch and act as one process.
Scripts that scale learning-rate schedules, batch sizes or metrics by `num_processes` are right without knowing of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, gather_object, operations, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_plugin import flag
from accelerate_plugin.parallelism import LoRAParallelism, collective_method, parallelism_of, world_size
from accelerate_plugin.plugin import LoRAParallelPlugin
from lora_parallel import clip_grad_norm_ as clip_norm
from lora_parallel import no_sync as engine_no_sync
from lora_parallel import parallelize
from lora_parallel.adapters import adapter_parameters
from lora_parallel.agreement import agreed, check_alike
from lora_parallel.gather import gather_on_rank_zero, reshard
from lora_parallel.grads import clip_grad_value_ as clip_value_
from lora_parallel.held_parameters import HeldByName, described, refuse_stale
from lora_parallel.inject import has_adapters
from lora_parallel.saving import write_pretrained
from lora_parallel.state import parallelized, state_of

Own = Callable[..., Any]

# ---------------------------------------------------------------------- processes and mesh


def prepare_backend(own: Own, self: PartialState, *args: Any, **kwargs: Any) -> Any:
    """Processes that were started on a machine without accelerators form a group over gloo."""
    backend, distributed_type = own(self, *args, **kwargs)
    if distributed_type is DistributedType.NO and world_size() > 1 and _asked() and not flag.has_accelerator():
        return "gloo", DistributedType.MULTI_CPU
    return backend, distributed_type


_choosing = False
"""Whether an Accelerator that is ours is being made."""


def _asked() -> bool:
    return _choosing or flag.asked_by_environment()


def accelerator_init(own: Own, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    """Find out whether this Accelerator is ours, and make it so."""
    global _choosing
    bound = inspect.signature(own).bind(self, *args, **kwargs)
    if _state_is_ours() and not isinstance(bound.arguments.get("fsdp_plugin"), LoRAParallelPlugin):
        bound.arguments.pop("fsdp_plugin", None)  # one more Accelerator, perhaps Trainer's: of the state that there is
        own(*bound.args, **bound.kwargs)
        return
    chosen = flag.choose({name: value for name, value in bound.arguments.items() if name != "self"})
    if chosen is None:
        own(self, *args, **kwargs)
        return
    bound.arguments.pop("torch_tp_plugin", None)
    bound.arguments.update(fsdp_plugin=chosen.plugin, parallelism_config=chosen)
    _choosing = True
    try:
        own(*bound.args, **bound.kwargs)
    finally:
        _choosing = False
    present = parallelism_of(self)
    if present is None or present.config != chosen.config or present.plugin.lora_config != chosen.plugin.lora_config:
        raise ValueError(
            "an Accelerator was made before with other settings, and all of a process share one state: give the first "
            "one the LoRAParallelPlugin, and later ones the same or none."
        )
    if present.tp_size > 1:
        _check_dispatch(self)


def _state_is_ours() -> bool:
    return isinstance(AcceleratorState._shared_state.get("parallelism_config"), LoRAParallelism)


def state_init(own: Own, self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """A state that is ours is FSDP's, on a CPU and in a single process too, and counts data-parallel processes."""
    own(self, *args, **kwargs)
    parallelism = self.__dict__.get("parallelism_config")
    if not isinstance(parallelism, LoRAParallelism):
        return
    if self.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        self.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.fsdp_plugin = parallelism.plugin
    self.num_processes = parallelism.data_parallel_size


def _check_dispatch(accelerator: Accelerator) -> None:
    """One process that reads and deals out batches deals none to each tensor-parallel group."""
    config = accelerator.dataloader_config
    if config.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True is not supported with tensor parallelism: Accelerate would give every process the "
            "same batch. Leave it None or False; each process then reads its own share."
        )
    config.dispatch_batches = False


def prepare_device_mesh(own: Own, self: Accelerator) -> Any:
    """The mesh that dataloaders are told; without tensor parallelism they need none."""
    parallelism = parallelism_of(self)
    return None if parallelism is not None and parallelism.tp_size == 1 else own(self)


# ---------------------------------------------------------------------- preparation


@collective_method("accelerator.prepare")
def prepare(own: Own, self: Accelerator, *args: Any, device_placement: Any = None) -> Any:
    """Shard models, give optimizers their sharded parameters, and let Accelerate prepare the rest. Collective."""
    if parallelism_of(self) is None:
        return own(self, *args, device_placement=device_placement)
    placements = device_placement if device_placement is not None else [None] * len(args)
    prepared = [
        self._prepare_one(each, first_pass=True, device_placement=placement)
        if isinstance(each, (DataLoader, Optimizer))
        else each
        for each, placement in zip(args, placements, strict=True)
    ]
    _prepare_models(
        self,
        [each for each in args if isinstance(each, nn.Module)],
        [each for each in prepared if isinstance(each, AcceleratedOptimizer)],
    )
    prepared = [self._prepare_one(each) if isinstance(each, LRScheduler) else each for each in prepared]
    ours = {id(each) for each in (*self._models, *self._optimizers, *self._dataloaders, *self._schedulers)}
    for each in prepared:
        if id(each) in ours:
            each._is_accelerate_prepared = True
    return tuple(prepared) if len(prepared) > 1 else prepared[0]


@collective_method("accelerator.prepare_model")
def prepare_model(
    own: Own, self: Accelerator, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
) -> nn.Module:
    """Shard a model, for evaluation whether or not it has adapters. Collective."""
    if parallelism_of(self) is None:
        return own(self, model, device_placement=device_placement, evaluation_mode=evaluation_mode)
    _prepare_models(self, [model], [], evaluation_mode)
    model._is_accelerate_prepared = True  # type: ignore[assignment]
    return model


def _prepare_models(
    accelerator: Accelerator,
    models: list[nn.Module],
    optimizers: list[AcceleratedOptimizer],
    evaluation_mode: bool = False,
) -> None:
    parallelism = parallelism_of(accelerator)
    assert parallelism is not None
    new = nn.ModuleList(model for model in dict.fromkeys(models) if not parallelized(model))
    sharded = {p for model in (*accelerator._models, *models) if parallelized(model) for p in model.parameters()}
    fresh = [innermost(each) for each in optimizers]
    with agreed():
        if len(new):
            remedy = (
                "prepare the model before the optimizer steps, or make the optimizer from the prepared model's "
                "parameters."
            )
            held = [HeldByName(each, new, sharded, remedy) for each in fresh]
        else:
            refuse_stale(
                fresh, sharded, "Prepare both at once: model, optimizer = accelerator.prepare(model, optimizer)."
            )
            held = []
    injected = False
    for model in new:
        injected |= _shard(model, parallelism, evaluation_mode)
    with agreed():
        for each in held:
            if injected:
                each.restore_adapted(new)
            else:
                each.restore(new)
    check_alike(optimizers=[described(each, nn.ModuleList(models)) for each in fresh])
    accelerator._models.extend(model for model in models if model not in accelerator._models)


def _shard(model: nn.Module, parallelism: LoRAParallelism, evaluation_mode: bool) -> bool:
    """Parallelize a model; return whether it was given adapters.

    Without any it is a teacher, a reference or the like if nothing in it trains, or if it is prepared for evaluation.
    """
    plugin, config = parallelism.plugin, parallelism.config
    bare = not has_adapters(model)
    frozen = bare and (evaluation_mode or not any(parameter.requires_grad for parameter in model.parameters()))
    lora_config = plugin.lora_config if bare and not frozen else None
    parallelize(
        model,
        parallelism.mesh,
        config if not frozen else replace(config, require_adapters=False),
        lora_config=lora_config,
        autocast_adapter_dtype=plugin.autocast_adapter_dtype,
    )
    return lora_config is not None


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer that Accelerate has wrapped."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


# ---------------------------------------------------------------------- gradients


def no_sync(own: Own, self: Accelerator, model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate: nothing is reduced within."""
    return engine_no_sync(model) if state_of(model) is not None else own(self, model)


def clip_grad_norm_(
    own: Own, self: Accelerator, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2
) -> Any:
    """Clip by the norm over the whole mesh."""
    if parallelism_of(self) is None:
        return own(self, parameters, max_norm, norm_type=norm_type)
    return clip_norm(parameters, max_norm, norm_type)


def clip_grad_value_(own: Own, self: Accelerator, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clip each element."""
    if parallelism_of(self) is None:
        own(self, parameters, clip_value)
        return
    clip_value_([parameters] if isinstance(parameters, Tensor) else parameters, clip_value)


# ---------------------------------------------------------------------- values of all data-parallel processes


def gather(own: Own, self: Accelerator, tensor: Any) -> Any:
    """Those of tensor-parallel peers once."""
    gathered = own(self, tensor)
    parallelism = parallelism_of(self)
    if parallelism is None or parallelism.tp_size == 1:
        return gathered

    def once(each: Tensor) -> Tensor:
        shares = parallelism.dp_size, parallelism.tp_size
        return each.unflatten(0, (*shares, len(each) // (shares[0] * shares[1])))[:, 0].flatten(0, 1)

    return recursively_apply(once, gathered)


def gather_for_metrics(own: Own, self: Accelerator, input_data: Any, use_gather_object: bool = False) -> Any:
    """As Accelerate's, which goes through `gather` for tensors."""
    parallelism = parallelism_of(self)
    if parallelism is None or parallelism.tp_size == 1 or not (use_gather_object or _holds_others(input_data)):
        return own(self, input_data, use_gather_object)
    everyone = gather_object([input_data])[:: parallelism.tp_size]
    data = [each for part in everyone for each in part]
    remainder = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
    return data[:remainder] if remainder > 0 else data


def _holds_others(data: Any) -> bool:
    try:
        recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return True
    return False


def reduce(own: Own, self: Accelerator, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    """Those of tensor-parallel peers once."""
    parallelism = parallelism_of(self)
    if parallelism is None or parallelism.tp_size == 1:
        return own(self, tensor, reduction, scale)

    def share(each: Tensor) -> Tensor:
        return each if parallelism.mesh.get_local_rank("tp") == 0 else torch.zeros_like(each)

    total = own(self, recursively_apply(share, tensor), "sum", scale)
    if reduction != "mean":
        return total
    return recursively_apply(lambda each: each / parallelism.dp_size, total)


def split_between_processes(
    own: Own, self: Accelerator, inputs: Any, apply_padding: bool = False
) -> AbstractContextManager[Any]:
    """Tensor-parallel peers get the same."""
    parallelism = parallelism_of(self)
    if parallelism is None or parallelism.tp_size == 1:
        return own(self, inputs, apply_padding)
    place: Any = SimpleNamespace(
        num_processes=parallelism.dp_size, process_index=parallelism.dp_rank, device=self.device
    )
    return PartialState.split_between_processes(place, inputs, apply_padding)


def check_trigger(own: Own, self: Accelerator) -> bool:
    """Any process may have set it, a tensor-parallel peer too."""
    if parallelism_of(self) is None:
        return own(self)
    flag_tensor = self.flag_tensor if self.flag_tensor is not None else torch.tensor(0, device=self.device)
    self.flag_tensor = torch.tensor(0, device=self.device)
    return operations.reduce(flag_tensor, "sum").item() >= 1


# ---------------------------------------------------------------------- the adapter, on its own


@collective_method("accelerator.get_state_dict")
def get_state_dict(own: Own, self: Accelerator, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
    """What trains, in full, on the CPU of the main process; elsewhere the same on meta. Collective."""
    if parallelism_of(self) is None:
        return own(self, model, unwrap)
    reshard(model)
    trained = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    trained |= adapter_parameters(model)
    full = gather_on_rank_zero(trained)
    if full:
        return full
    return {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in trained.items()}


@collective_method("accelerator.save_model")
def save_model(
    own: Own,
    self: Accelerator,
    model: nn.Module,
    save_directory: Any,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    """Write the adapters as PEFT does, or a model without any. Collective."""
    if state_of(model) is None:
        own(self, model, save_directory, max_shard_size, safe_serialization)
        return
    with agreed():
        if not safe_serialization:
            raise TypeError("save_model of a sharded model does not support safe_serialization=False: leave it True.")
    write_pretrained(model, save_directory, max_shard_size=max_shard_size)
