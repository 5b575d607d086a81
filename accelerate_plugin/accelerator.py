"""The methods of an Accelerator that trains by us, in front of Accelerate's own.

In such an Accelerator `num_processes` counts data-parallel processes, and `gather` and `reduce` go over these:
tensor-parallel peers see the same batch and act as one process. Scripts that scale learning-rate schedules, batch sizes
or metrics by `num_processes` are right without knowing of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import PartialState
from accelerate.utils import gather_object, operations, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate_plugin import checkpoint
from accelerate_plugin.data import prepare_sampler, resumable
from accelerate_plugin.models import prepare_models
from accelerate_plugin.parallelism import LoRAParallelism, parallelism_of
from lora_parallel import clip_grad_norm_ as clip_norm
from lora_parallel import no_sync as engine_no_sync
from lora_parallel.integration import (
    adapter_parameters,
    agreed,
    collective_call,
    gather_on_rank_zero,
    reshard,
    state_of,
    write_pretrained,
)
from lora_parallel.integration import clip_grad_value_ as clip_value_

__all__ = ["AcceleratorOverrides"]


class AcceleratorOverrides(Accelerator):
    """Override what Accelerate does otherwise; a comment at each method says why.

    `accelerator_init.py` puts the class in place.
    """

    @property
    def _parallelism(self) -> LoRAParallelism:
        parallelism = parallelism_of(self)
        assert parallelism is not None
        return parallelism

    # A tp axis of one process makes the dispatching dataloader repeat batches.
    def _prepare_device_mesh(self) -> Any:
        return None if self._parallelism.tp_size == 1 else super()._prepare_device_mesh()

    # ------------------------------------------------------------------ preparation

    # _prepare_tp shards nothing, and _prepare_fsdp2 remaps optimizers by pointer, which meta tensors share.
    @collective_call("accelerator.prepare")
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Shard models, give optimizers their sharded parameters, and let Accelerate prepare the rest. Collective."""
        placements = device_placement if device_placement is not None else [None] * len(args)
        prepared = [
            self._prepare_one(each, first_pass=True, device_placement=placement)
            if isinstance(each, (DataLoader, Optimizer))
            else each
            for each, placement in zip(args, placements, strict=True)
        ]
        prepare_models(
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

    # Accelerate's refuses FSDP2.
    @collective_call("accelerator.prepare_model")
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, for evaluation whether or not it has adapters. Collective."""
        prepare_models(self, [model], [], evaluation_mode)
        model._is_accelerate_prepared = True  # type: ignore[assignment]
        return model

    # Shuffling differs between tensor-parallel peers, and is not resumed in mid-epoch.
    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Deal batches out by data-parallel process, in the order that rank 0 says. Collective."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        prepare_sampler(data_loader, self._parallelism.dp_rank, self.use_seedable_sampler)
        return resumable(super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch))

    # ------------------------------------------------------------------ gradients

    # set_requires_gradient_sync knows nothing of gradients that are partial over tp.
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate: within, no gradient is reduced over any axis."""
        return engine_no_sync(model) if state_of(model) is not None else super().no_sync(model)

    # Accelerate's needs all gradients of a group on one mesh, and returns a DTensor or a tensor by case.
    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float | str = 2
    ) -> Any:
        """Clip gradients by their norm over the whole mesh."""
        return clip_norm(parameters, max_norm, float(norm_type))

    # Accelerate's refuses FSDP.
    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of the gradients."""
        clip_value_([parameters] if isinstance(parameters, Tensor) else parameters, clip_value)

    # ------------------------------------------------------------------ values of all data-parallel processes

    # Tensor-parallel peers would be gathered as if they had seen other batches.
    def gather(self, tensor: Any) -> Any:
        """Gather over data-parallel processes: what tensor-parallel peers hold alike is there once."""
        gathered, parallelism = super().gather(tensor), self._parallelism
        if parallelism.tp_size == 1:
            return gathered

        def once(each: Tensor) -> Tensor:
            shares = parallelism.dp_size, parallelism.tp_size
            return each.unflatten(0, (*shares, len(each) // (shares[0] * shares[1])))[:, 0].flatten(0, 1)

        return recursively_apply(once, gathered)

    # The same, for objects; for tensors Accelerate's goes through `gather`.
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather over data-parallel processes, without the rows that fill the last batch up."""
        tp_size = self._parallelism.tp_size
        if tp_size == 1 or not (use_gather_object or _holds_others(input_data)):
            return super().gather_for_metrics(input_data, use_gather_object)
        everyone = gather_object([input_data])[::tp_size]
        data = [each for part in everyone for each in part]
        remainder = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        return data[:remainder] if remainder > 0 else data

    # The same, for sums.
    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over data-parallel processes: what tensor-parallel peers hold alike counts once."""
        parallelism = self._parallelism
        if parallelism.tp_size == 1:
            return super().reduce(tensor, reduction, scale)

        def share(each: Tensor) -> Tensor:
            return each if parallelism.mesh.get_local_rank("tp") == 0 else torch.zeros_like(each)

        total = super().reduce(recursively_apply(share, tensor), "sum", scale)
        if reduction != "mean":
            return total
        return recursively_apply(lambda each: each / parallelism.dp_size, total)

    # Accelerate's would give tensor-parallel peers different inputs.
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Split inputs between data-parallel processes."""
        parallelism = self._parallelism
        if parallelism.tp_size == 1:
            return super().split_between_processes(inputs, apply_padding)
        place: Any = SimpleNamespace(
            num_processes=parallelism.dp_size, process_index=parallelism.dp_rank, device=self.device
        )
        return PartialState.split_between_processes(place, inputs, apply_padding)

    # Accelerate's sums by `reduce`, which counts tensor-parallel peers once.
    def check_trigger(self) -> bool:
        """Return True if any process has set the trigger, a tensor-parallel peer too."""
        nothing = torch.tensor(0, device=self.device)
        mine: Tensor = nothing if self.flag_tensor is None else self.flag_tensor  # type: ignore[has-type]
        self.flag_tensor = nothing
        return operations.reduce(mine, "sum").item() >= 1

    # ------------------------------------------------------------------ on disk

    # Accelerate's gathers the frozen base, and knows one mesh.
    @collective_call("accelerator.get_state_dict")
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return what trains, in full: on the CPU of the main process, on meta elsewhere. Collective."""
        reshard(model)
        trained = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        trained |= adapter_parameters(model)
        full = gather_on_rank_zero(trained)
        if full:
            return full
        return {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in trained.items()}

    # Accelerate's gathers and writes the frozen base.
    @collective_call("accelerator.save_model")
    def save_model(
        self,
        model: nn.Module,
        save_directory: Any,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the adapters as PEFT does, or a model without any. Collective."""
        if state_of(model) is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        with agreed():
            if not safe_serialization:
                raise TypeError(
                    "save_model of a sharded model does not support safe_serialization=False: leave it True."
                )
        write_pretrained(model, save_directory, max_shard_size=max_shard_size)

    # Accelerate's writes the base with every checkpoint, in place, and random states by process.
    @collective_call("accelerator.save_state")
    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> str:
        """Write a checkpoint, see `checkpoint.save_state`. Collective."""
        return checkpoint.save_state(self, output_dir, safe_serialization, **save_model_func_kwargs)

    # The counterpart of save_state.
    @collective_call("accelerator.load_state")
    def load_state(
        self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Go on from a checkpoint, see `checkpoint.load_state`. Collective."""
        checkpoint.load_state(self, input_dir)


def _holds_others(data: Any) -> bool:
    """Return True if some of the data is not a tensor."""
    try:
        recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return True
    return False
