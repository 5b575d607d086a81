"""Translate Fabric's calls to engine calls, for the strategies of both Lightning namespaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_lora.data import moved_position
from lightning_lora.loading import find_roots
from lightning_lora.namespace import is_lightning_module
from lightning_lora.strategy_base import BaseLogic, precision_property, without_reduction
from lora_parallel import clip_grad_norm_
from lora_parallel.integration import (
    Contents,
    HeldByName,
    TrainState,
    agreed,
    check_not_stale,
    check_optimized,
    clip_grad_value_,
    collective_call,
    dp_size,
    has_adapters,
    load_models,
    load_optimizers,
    local_path,
    parallelized,
    read_checkpoint,
    restore_random_state,
    resume_counting,
    write_checkpoint,
)

if TYPE_CHECKING:
    from lightning.fabric.strategies import ParallelStrategy as Base
else:
    Base = object


@dataclass
class FabricState:
    """Hold the entries of the user's dictionary by their kind."""

    models: nn.Module = field(default_factory=nn.Module)
    """Module with the sharded models as children, so that each parameter has one name: key, dot, name in the model."""
    optimizers: dict[str, Optimizer] = field(default_factory=dict)
    rest: dict[str, Any] = field(default_factory=dict)
    """All other entries by key, schedulers and unsharded modules included."""


def divide(state: Mapping[str, Any]) -> FabricState:
    """Divide a dictionary whose models and optimizers were taken out of Fabric's wrappers; refuse what has no place."""
    entries = FabricState()
    holders: dict[nn.Module, str] = {}
    for key, value in state.items():
        if isinstance(value, nn.Module) and parallelized(value):
            # The model's parameters are stored by names that begin with the key, its adapters in a folder of that name.
            if not isinstance(key, str) or not key or "." in key or "/" in key or hasattr(nn.Module(), key):
                raise ValueError(
                    f"state[{key!r}] is a model, and no model can have that name: give it a key like 'model', without "
                    "dots and slashes, that is no attribute of a module."
                )
            for model in parallelized(value).values():
                if holders.setdefault(model, key) != key:
                    raise ValueError(
                        f"state[{holders[model]!r}] and state[{key!r}] are the same model, or hold it: put it in the "
                        "state once."
                    )
            entries.models.add_module(key, value)
        elif isinstance(value, Optimizer):
            entries.optimizers[key] = value
        else:
            entries.rest[key] = value
    if not parallelized(entries.models):
        raise ValueError(
            f"the state ({', '.join(map(str, state)) or 'empty'}) holds no model that Fabric has set up: put the model "
            'that fabric.setup returned in it, for example {"model": model, "optimizer": optimizer, "step": step}.'
        )
    check_not_stale(
        entries.optimizers.values(),
        set(entries.models.parameters()),
        "Put all models whose parameters it holds in the state too.",
    )
    for key, value in entries.rest.items():
        for leaf in tree_leaves(value):
            if isinstance(leaf, (nn.Module, Optimizer, DTensor)) and leaf is not value:
                raise ValueError(
                    f"state[{key!r}] has a {type(leaf).__name__} inside: put models and optimizers in the state "
                    "directly, under keys of their own."
                )
    return entries


def kinds(state: Mapping[str, Any]) -> dict[str, str]:
    """Map each key to the kind of its value, on which all ranks must agree: "model", "optimizer" or "value"."""
    return {
        key: "model" if isinstance(value, nn.Module) else "optimizer" if isinstance(value, Optimizer) else "value"
        for key, value in state.items()
    }


_WRITER = "Fabric"


class FabricLogic(BaseLogic, Base):
    """Train LoRA adapters of a model in a Fabric loop under FSDP2 and tensor parallelism, as one device would.

    The model has PEFT layers, or gets them if `lora_config` is given. The loop must call the forward of the whole
    model. If Fabric is given a LightningModule, these rules apply to the models that it holds.
    """

    @cached_property
    def _modules(self) -> WeakKeyDictionary[nn.Module, None]:
        """Return the modules that were parallelized, in this order, held by weak references."""
        return WeakKeyDictionary()

    # ------------------------------------------------------------------ processes

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    _set_world_ranks = BaseLogic.set_world_ranks  # what Fabric calls

    def setup_environment(self) -> None:
        super().setup_environment()
        self._connect()
        # Fabric warns of a model on meta with adapters in memory; but with this strategy it does not move the model.
        warnings.filterwarnings("ignore", message=r".*parameters on different devices \(for example")
        self._backward_sync_control = self  # type: ignore[assignment]  # Fabric only calls its no_backward_sync

    def all_reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce a tensor in place over data-parallel ranks, and return it, as Fabric's other strategies do."""
        if not isinstance(tensor, Tensor):
            return tensor
        tensor.detach().copy_(self.reduce(tensor, group, reduce_op))
        return tensor

    # ------------------------------------------------------------------ precision, plugins

    precision = _plugin = precision_property("_precision")

    @property
    def checkpoint_io(self) -> Any:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        raise ValueError(
            f"{type(self).__name__} writes checkpoints itself and does not support the plugin {type(plugin).__name__}. "
            "Remove it."
        )

    # ------------------------------------------------------------------ models and optimizers

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Return the context that `fabric.init_module` enters: see `_construction`."""
        return self._construction(empty_init)

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: Fabric calls this before `setup_module`, and an unsharded model may not fit on a device."""

    @collective_call("fabric.setup_module")
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Parallelize a model in place. Collective."""
        return self._set_up(module, trains=False)

    def _set_up(self, module: nn.Module, trains: bool) -> nn.Module:
        with agreed():
            module = self._uncompile(module)
            models = self._find_models(module)
            self._check_meshes(models)
        self._shard(module, models, trains)
        self._modules[module] = None
        return module

    def _find_models(self, module: nn.Module) -> dict[str, nn.Module]:
        if is_lightning_module(module):
            return find_roots(module, self._lora_config is not None, self._options["require_adapters"])
        return {"model": module}

    @collective_call("fabric.setup_optimizers")
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Check that an optimizer was made after its model was set up. Collective.

        Raises:
            ValueError: The optimizer holds parameters that are not those of a model that was set up.
        """
        with agreed():
            check_not_stale(
                [optimizer],
                self._parameters(),
                "Make it after model = fabric.setup_module(model), from model.parameters(), or set both up at once: "
                "model, optimizer = fabric.setup(model, optimizer).",
            )
        check_optimized(self._modules, [optimizer])
        return optimizer

    @collective_call("fabric.setup")
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any | None = None
    ) -> tuple[nn.Module, list[Optimizer], Any | None]:
        """Parallelize a model and give its optimizers the sharded parameters of the same names. Collective."""
        with agreed():
            models = self._find_models(module)
            if self._lora_config is not None and not all(has_adapters(model) for model in models.values()):
                raise ValueError(
                    "lora_config is given, and the optimizer was made before the adapters are: set the model up first "
                    "(model = fabric.setup_module(model)) and make the optimizer from its parameters, or give the "
                    "model its adapters with peft.get_peft_model."
                )
            sharded = self._parameters()
            remedy = (
                "set the model up first (model = fabric.setup_module(model)) and make the optimizer from its "
                "parameters afterwards."
            )
            by_name = [HeldByName(optimizer, module, sharded, remedy) for optimizer in optimizers]
        self._set_up(module, trains=bool(optimizers))
        for optimizer_by_name in by_name:
            optimizer_by_name.restore(module)
        return module, optimizers, scheduler

    def _parameters(self) -> set[nn.Parameter]:
        return {parameter for module in self._modules for parameter in module.parameters()}

    # ------------------------------------------------------------------ gradients

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return the context that `fabric.no_backward_sync` enters: in it `backward` reduces no gradients."""
        return without_reduction(parallelized(module).values() if enabled else ())

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip the gradients of an optimizer by their norm over the whole mesh; return that norm.

        Raises:
            RuntimeError: The norm is not finite and `error_if_nonfinite` is True; raised on every rank. The gradients
                cannot be used then.
        """
        norm = clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {norm.item()}: drop this step "
                "(optimizer.zero_grad()), or go on regardless with error_if_nonfinite=False."
            )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of an optimizer's gradients."""
        clip_grad_value_(self.precision.main_params(optimizer), clip_val)

    # ------------------------------------------------------------------ checkpoints

    @collective_call("fabric.save")
    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint directory. Collective.

        Raises:
            TypeError: `storage_options` or `filter` is given.
            ValueError: The state holds no model that was set up, or has models or optimizers inside containers.
            OSError: The checkpoint cannot be written. All on every rank.
        """
        name = self.broadcast(str(path))
        with agreed() as alike:
            if storage_options is not None:
                raise TypeError(f"fabric.save does not support storage_options={storage_options!r} here.")
            if filter:
                raise TypeError(
                    f"fabric.save does not support filter (for {', '.join(filter)}) here: of a model, what trains is "
                    "saved, and nothing else."
                )
            entries = divide(state)
            rest = {
                k: value.state_dict() if isinstance(value, Stateful) else value for k, value in entries.rest.items()
            }
            folder = local_path(name)
            alike["state"] = kinds(state)
        write_checkpoint(
            folder,
            TrainState(entries.models, entries.optimizers),
            {"state": rest, "modules": [name for name, _ in entries.models.named_children()]},
            _WRITER,
            replace=True,
        )

    @collective_call("fabric.load")
    @torch.inference_mode(False)  # tensors made in inference mode cannot be trained with
    def load_checkpoint(
        self, path: Any, state: Any | None = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill models, optimizers and everything else in `state` from a checkpoint directory. Collective.

        Returns:
            The entries of the checkpoint that `state` does not have, without models and optimizers.

        Raises:
            TypeError: `state` is a model or an optimizer, or is empty.
            KeyError: A key of `state` is not in the checkpoint. With `strict=False`, its value is left as it is.
            FileNotFoundError, ValueError: There is no checkpoint at `path`, or it does not fit `state`. All on every
                rank.
        """
        name = self.broadcast(str(path))
        with agreed() as alike:
            path = local_path(name)
            if isinstance(state, (nn.Module, Optimizer)):
                raise TypeError(
                    f"fabric.load_raw cannot fill a sharded {type(state).__name__}: load weights before fabric.setup, "
                    "a PEFT folder with lora_parallel.load_adapter(model, folder), a checkpoint with fabric.load."
                )
            if not state:
                raise TypeError(
                    "fabric.load needs the objects to fill: fabric.load(path, {'model': model, 'optimizer': optimizer})"
                )
            alike.update(state=kinds(state), strict=strict, weights_only=weights_only)
        contents = read_checkpoint(path, _WRITER, weights_only)
        rest = contents.record["state"]
        with agreed():
            present = {*rest, *contents.record["modules"], *contents.optimizers}
            missing = [key for key in state if key not in present]
            if missing and strict:
                raise KeyError(
                    f"state[{missing[0]!r}] is not in {path}, which holds {', '.join(sorted(map(str, present)))}: drop "
                    "it, or pass strict=False."
                )
            wanted = divide({key: value for key, value in state.items() if key in present})
            _check_kinds(wanted, contents)
        target = TrainState(wanted.models, wanted.optimizers)
        commits = [*load_models(contents, target), *load_optimizers(contents, target)]
        with agreed():  # before any model is changed, since an object may refuse its state
            for key, value in wanted.rest.items():
                if isinstance(value, Stateful):
                    value.load_state_dict(moved_position(rest.pop(key), contents.dp, dp_size(self.device_mesh)))
        for commit in commits:
            commit()
        resume_counting(contents, target)
        if wanted.optimizers:
            restore_random_state(contents.record["random"], self.device_mesh)
        state.update({key: rest.pop(key) for key in wanted.rest if key in rest})
        return rest


def _check_kinds(wanted: FabricState, contents: Contents) -> None:
    """Check that each key of `wanted` holds the kind of object that was saved under it."""
    for kind, keys, saved in (
        ("model that was set up", parallelized(wanted.models), contents.record["models"]),
        ("optimizer", wanted.optimizers, contents.optimizers),
    ):
        for key in keys:
            if key not in saved:
                raise ValueError(f"state[{key!r}] is a {kind}; {contents.path} holds no such under this name.")
    for key, value in wanted.rest.items():
        if key in contents.record["modules"] or key in contents.optimizers:
            raise ValueError(
                f"state[{key!r}] is a {type(value).__name__}, and {contents.path} holds a sharded model or an "
                "optimizer under this name: pass what fabric.setup returned."
            )
