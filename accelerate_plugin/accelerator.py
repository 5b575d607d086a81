"""Find out whether an Accelerator trains with `lora_parallel`, and override its methods then.

In such an Accelerator `num_processes` counts data-parallel processes, `process_index` numbers them, and `gather` and
`reduce` work on their values: pipeline, tensor and context parallel peers see the same batch and act as one process. So
scripts that scale learning-rate schedules, batch sizes or metrics by `num_processes`, or take their share of a list by
`process_index`, stay right under all of them.

`patches.py` replaces methods of Accelerate by these functions; their argument `original` is the replaced method.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, DistributedType, operations
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_plugin import checkpoint
from accelerate_plugin.data import (
    check_dispatch,
    deal_as_dispatched,
    note_last_rows,
    prepare_sampler,
    resumable,
    whole_stream,
)
from accelerate_plugin.models import prepare_models, uncompiled
from accelerate_plugin.parallelism import (
    LoRAParallelism,
    Original,
    asked_by_environment,
    current_parallelism,
    parallelism_of,
    parallelism_within_batch,
    requested_parallelism,
    world_size,
)
from accelerate_plugin.plugin import LoRAParallelPlugin
from lora_parallel import clip_grad_norm_ as clip_norm
from lora_parallel import no_sync as engine_no_sync
from lora_parallel.integration import (
    adapter_parameters,
    agreed,
    collective_call,
    gather_on_rank_zero,
    merged_over_stages,
    reshard,
    state_of,
    write_pretrained,
)
from lora_parallel.integration import clip_grad_value_ as clip_value_


class AcceleratorOverrides(Accelerator):
    """Override methods of an Accelerator that trains with `lora_parallel`; the comment at each gives the reason."""

    replaced_config: DataLoaderConfiguration | None = None
    """Replaces a `dataloader_config` that leaves `dispatch_batches` to Accelerate; None if there was none."""

    @property
    def _parallelism(self) -> LoRAParallelism:
        _ = self.distributed_type  # Accelerate's error, if its state was reset after this Accelerator was made
        parallelism = parallelism_of(self)
        assert parallelism is not None
        return parallelism

    # With a mesh Accelerate would find the data-parallel rank itself, and knows no pp axis.
    def _prepare_device_mesh(self) -> Any:
        return None

    # Accelerate's property compares a data-parallel rank, which several processes have.
    @property
    def is_last_process(self) -> bool:
        """Return True on the last of all processes."""
        return bool(PartialState().is_last_process)

    # Accelerate's _prepare_tp shards nothing, and its _prepare_fsdp2 finds the parameters of an optimizer by their data
    # pointer, which meta tensors share.
    @collective_call("accelerator.prepare")
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shard models, give optimizers their sharded parameters, and let Accelerate prepare the rest. Collective."""
        placements = device_placement if device_placement is not None else [None] * len(args)
        args = tuple(uncompiled(arg, self._parallelism) if isinstance(arg, nn.Module) else arg for arg in args)
        prepared = [
            self._prepare_one(arg, first_pass=True, device_placement=placement)
            if isinstance(arg, (DataLoader, Optimizer))
            else arg
            for arg, placement in zip(args, placements, strict=True)
        ]
        prepare_models(
            self,
            [arg for arg in args if isinstance(arg, nn.Module)],
            [arg for arg in prepared if isinstance(arg, AcceleratedOptimizer)],
        )
        prepared = [self._prepare_one(arg) if isinstance(arg, LRScheduler) else arg for arg in prepared]
        registered = {id(arg) for arg in (*self._models, *self._optimizers, *self._dataloaders, *self._schedulers)}
        for arg in prepared:
            if id(arg) in registered:
                arg._is_accelerate_prepared = True
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    # Accelerate's method refuses FSDP2.
    @collective_call("accelerator.prepare_model")
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, which may lack adapters if it is prepared for evaluation. Collective."""
        model = uncompiled(model, self._parallelism)
        prepare_models(self, [model], [], evaluation_mode)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    # Accelerate's dataloaders may shuffle differently on peers of one batch, and do not resume in mid-epoch.
    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Give each data-parallel process its share of the batches, shuffled by rank 0's seed. Collective."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        check_dispatch(self)  # again: `dataloader_config` may be another than the Accelerator was made with
        is_replaced = self.dataloader_config is self.replaced_config
        if is_replaced:
            data_loader = whole_stream(data_loader)
        prepare_sampler(data_loader, self._parallelism.dp_rank, self.use_seedable_sampler)
        loader = resumable(super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch))
        return deal_as_dispatched(loader) if is_replaced else loader

    # Accelerate knows the rows of a last batch from the dataset's length, which a stream does not have.
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather from all data-parallel processes, without the rows that fill up a last batch."""
        note_last_rows(self.gradient_state.active_dataloader)
        return super().gather_for_metrics(input_data, use_gather_object)

    # Accelerate's method calls FSDP2's set_requires_gradient_sync, which does not know of gradients that are partial
    # sums over tp.
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes reduce no gradients."""
        return engine_no_sync(model) if state_of(model) is not None else super().no_sync(model)

    # Accelerate's method needs all gradients of a group on one mesh, and returns a DTensor in some cases only.
    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2
    ) -> Any:
        """Clip gradients by their norm over the whole mesh, and return the norm before clipping."""
        return clip_norm(parameters, max_norm, float(norm_type))

    # Accelerate's method refuses FSDP.
    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Limit each element of the gradients to the range from -clip_value to clip_value."""
        clip_value_([parameters] if isinstance(parameters, Tensor) else parameters, clip_value)

    # Accelerate's method joins what DDP reduces: the other processes would wait in FSDP2's collectives for ever.
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context that warns and changes nothing, as under FSDP; refuse batches that some processes lack."""
        even = self.even_batches if even_batches is None else even_batches
        if not even and self._parallelism.dp_size > 1:
            raise ValueError(
                "join_uneven_inputs with even_batches=False is not supported: a process without a batch would leave "
                "the others waiting in a collective. Leave even_batches=True, or give every process as many batches."
            )
        return super().join_uneven_inputs(joinables, even_batches)

    # Accelerate's method adds up, and would miss a trigger that only a peer of one batch has set.
    def check_trigger(self) -> bool:
        """Return True if any process has set the trigger, and reset the trigger."""
        unset = torch.tensor(0, device=self.device)
        mine: Tensor = unset if self.flag_tensor is None else self.flag_tensor  # type: ignore[has-type]
        self.flag_tensor = unset
        return operations.reduce(mine, "max").item() >= 1

    # Accelerate's method gathers the frozen base too, and supports parameters on one mesh only.
    @collective_call("accelerator.get_state_dict")
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return trained parameters and adapters, whole on the main process's CPU and on meta elsewhere. Collective."""
        reshard(model)
        trained = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        trained |= adapter_parameters(model)
        full = gather_on_rank_zero(trained)
        mine = {name: (p.shape, p.dtype) for name, p in trained.items()}
        shapes = merged_over_stages(mine, self._parallelism.device_mesh)
        return full or {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}

    # Accelerate's method gathers and writes the frozen base.
    @collective_call("accelerator.save_model")
    def save_model(
        self, model: nn.Module, save_directory: Any, max_shard_size: int | str = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write a model's adapters in PEFT's format, or the whole model if it has no adapters. Collective."""
        if state_of(model) is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        with agreed():
            if not safe_serialization:
                raise TypeError(
                    "save_model of a sharded model does not support safe_serialization=False: leave it True."
                )
        write_pretrained(model, save_directory, max_shard_size=max_shard_size)

    # Accelerate's method writes the base with every checkpoint, overwrites files in place, and saves a random state for
    # each process, which does not fit another number of processes.
    save_state = checkpoint.save_state

    load_state = checkpoint.load_state


def prepare_backend(original: Original, self: PartialState, *args: Any, **kwargs: Any) -> Any:
    """Choose the backend gloo for several processes on a machine without accelerators; Accelerate chooses none."""
    backend, distributed_type = original(self, *args, **kwargs)
    asked = world_size() > 1 and (_choosing or asked_by_environment())
    if distributed_type is DistributedType.NO and asked and not torch.accelerator.is_available():
        return "gloo", DistributedType.MULTI_CPU
    return backend, distributed_type


_choosing = False
"""True while an Accelerator that trains with `lora_parallel` is being made."""


def accelerator_init(original: Original, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    """Make an Accelerator train with `lora_parallel` if its arguments or the environment ask for it."""
    global _choosing
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    if current_parallelism() is not None and not isinstance(bound.arguments.get("fsdp_plugin"), LoRAParallelPlugin):
        _make_ours(self)
        bound.arguments.pop("fsdp_plugin", None)  # a later Accelerator shares the first one's state
        original(*bound.args, **bound.kwargs)
        check_dispatch(self)
        return
    chosen = requested_parallelism(bound.arguments)
    if chosen is None:
        original(self, *args, **kwargs)
        return
    _make_ours(self)
    bound.arguments.pop("torch_tp_plugin", None)
    bound.arguments.update(fsdp_plugin=chosen.plugin, parallelism_config=chosen)
    _choosing = True
    try:
        original(*bound.args, **bound.kwargs)
    finally:
        _choosing = False
    present = parallelism_of(self)
    if present is None or present.config != chosen.config or present.plugin.lora_config != chosen.plugin.lora_config:
        raise ValueError(
            "an Accelerator was made before with other settings, and all of a process share one state: give the first "
            "one the LoRAParallelPlugin, and later ones the same or none."
        )
    AcceleratorState()  # now that there is a mesh, state_init can tell the data-parallel rank
    check_dispatch(self)


def _make_ours(accelerator: Accelerator) -> None:
    """Put `AcceleratorOverrides` into an Accelerator's class, after the methods of a class that the user wrote."""
    kind = type(accelerator)
    if not issubclass(kind, AcceleratorOverrides):
        bases = (AcceleratorOverrides,) if kind is Accelerator else (kind, AcceleratorOverrides)
        # Every class has a `__getstate__` from Python 3.11 on; the user's own may leave out what cannot be pickled.
        state = getattr(kind, "__getstate__", vars)
        reduced = {"__reduce__": lambda self: (_unpickled, (kind,), state(self))}
        accelerator.__class__ = type(f"LoRAParallel{kind.__name__}", bases, reduced)


def _unpickled(kind: type[Accelerator]) -> Accelerator:
    """Return an Accelerator without attributes, which pickle fills."""
    accelerator = object.__new__(kind)
    _make_ours(accelerator)
    return accelerator


def state_init(original: Original, self: AcceleratorState, *args: Any, **kwargs: Any) -> None:
    """Make Accelerate's state, which is FSDP's and counts data-parallel processes if it has a `LoRAParallelism`."""
    original(self, *args, **kwargs)
    parallelism = self.__dict__.get("parallelism_config")
    if not isinstance(parallelism, LoRAParallelism):
        return
    if self.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
        self.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        self.fsdp_plugin = parallelism.plugin
    self.num_processes = parallelism.data_parallel_size
    if parallelism.device_mesh is not None:
        self.process_index = parallelism.dp_rank


def split_between_processes(
    original: Original, self: PartialState, inputs: Any, apply_padding: bool = False
) -> AbstractContextManager[Any]:
    """Split inputs between data-parallel processes: peers of one batch get the same ones."""
    parallelism = parallelism_within_batch()
    state: Any = self
    if parallelism is not None:
        state = SimpleNamespace(
            num_processes=parallelism.dp_size, process_index=parallelism.dp_rank, device=self.device
        )
    return original(state, inputs, apply_padding)
