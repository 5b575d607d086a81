"""Translate the hooks of Lightning's Trainer to engine calls, for the strategies of both Lightning namespaces.

Lightning refuses a compiled LightningModule for all strategies but its own, and has no hook for that. So two private
functions of its trainer, `_maybe_unwrap_optimized` and `_verify_strategy_supports_compile`, are wrapped here. For other
strategies they do what they did before; `tests/lightning_lora/test_compile.py` checks that they do what is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_lora.callbacks import Logging, watch
from lightning_lora.data import UnevenPrediction, check_shares, moved_position, sync_metrics
from lightning_lora.loading import find_roots
from lightning_lora.namespace import installed_trainers, wrap
from lightning_lora.single_file_checkpoint import TRAINER, save_in_one_file, unpacked
from lightning_lora.strategy_base import BaseLogic, precision_property, without_reduction
from lora_parallel.integration import (
    Contents,
    TrainState,
    agreed,
    check_not_stale,
    check_optimized,
    collective_call,
    explained,
    is_checked,
    load_models,
    load_optimizers,
    local,
    local_path,
    read_checkpoint,
    restore_random_state,
    resume_counting,
    state_of,
    without_numpy,
    write_checkpoint,
)

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as Base
else:
    Base = object

# Lightning's callbacks that copy, prune or unfreeze weights without the strategy's knowledge.
_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it copies the model and swaps weights, which sharded tensors do not allow",
    "WeightAveraging": "it deep-copies the model, which sharded modules do not allow",
    "ModelPruning": "it replaces parameters by masked copies",
    "BaseFinetuning": "it unfreezes base weights in mid-training; set requires_grad before fit instead",
}


class TrainerStrategyLogic(BaseLogic, Base):
    """Train LoRA adapters of a LightningModule's model under FSDP2 and tensor parallelism, as one device would.

    The LightningModule's code needs no change. Its model may be built in `__init__` or in `configure_model`, with PEFT
    layers or, if `lora_config` is given, without.
    """

    _roots: Mapping[str, nn.Module] = MappingProxyType({})
    _models_from: Contents | None = None
    _optimizers_from: Contents | None = None
    _random_from: Contents | None = None
    _unpacked: Any = None
    _prediction: UnevenPrediction
    _unwatch: Callable[[], None] | None = None

    def __init__(self, *args: Any, save_distributed_checkpoint: bool = True, **kwargs: Any) -> None:
        """Check and keep the options of `BaseLogic` and of checkpoints.

        Args:
            args: Positional arguments for `BaseLogic`.
            save_distributed_checkpoint: True: a checkpoint is a folder into which each rank writes its shards. False: a
                checkpoint is one file, which rank 0 writes; its `state_dict` has the full trained parameters.
            kwargs: Keyword arguments for `BaseLogic`.
        """
        super().__init__(*args, **kwargs)
        self._save_distributed_checkpoint = save_distributed_checkpoint

    @property
    def is_distributed(self) -> bool:
        """Return True if there are several processes; Lightning then injects a DistributedSampler into dataloaders."""
        return self.num_nodes * self.num_processes > 1

    def setup_environment(self) -> None:
        super().setup_environment()
        self._connect()
        if is_checked() and self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            trainer.loggers = [self.lightning.DummyLogger() for _ in trainer.loggers]  # a logger makes its folder soon

    precision_plugin = _plugin = precision_property("_precision_plugin")

    # ------------------------------------------------------------------ the model

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Enter the context of `_construction`: for `configure_model`, and for blocks under `trainer.init_module`."""
        with agreed(), self._construction(empty_init):  # every rank enters it, so every rank raises the error of one
            yield

    @collective_call("Trainer's setup")
    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == self.lightning.fitting
        with agreed():
            self._refuse_features(trainer, fits)
            if trainer.predicting:
                check_shares(trainer.predict_loop, self.device_mesh)
            self._uncompile(self.lightning_module)
            self._roots = self._find_roots(fits)
            self._check_meshes(self._roots)
        if is_checked():
            trainer.callbacks.clear()  # some save a checkpoint where a run is ended
        for callback in trainer.callbacks:
            callback.log, callback.log_dict = Logging(callback.log), Logging(callback.log_dict)
        self._shard(self.lightning_module, self._roots, trains=fits)
        self._fill_model()
        sync_metrics(self.lightning_module, self.device_mesh)
        self._prediction = UnevenPrediction(self.device_mesh, self.root_device)
        self.barrier()
        if fits:
            self._unwatch = watch(trainer, self.lightning)
            self.setup_optimizers(trainer)
            self.lightning.optimizers_to_device(self.optimizers, self.root_device)
        self.setup_precision_plugin()

    def _find_roots(self, trains: bool) -> dict[str, nn.Module]:
        injects = self._lora_config is not None
        return find_roots(self.lightning_module, injects, self._options["require_adapters"], trains)

    def _refuse_features(self, trainer: Any, fits: bool) -> None:
        for callback in trainer.callbacks if fits else ():
            for kind in type(callback).__mro__:
                package = kind.__module__.split(".")[0]
                if package in ("lightning", "pytorch_lightning") and kind.__name__ in _REFUSED_CALLBACKS:
                    raise ValueError(
                        f"{type(self).__name__} does not support the callback {type(callback).__name__}: "
                        f"{_REFUSED_CALLBACKS[kind.__name__]}. Remove it."
                    )
        if fits and self._layer_sync is not None:
            raise ValueError(
                f"{type(self).__name__} does not support sync_batchnorm=True: batch norm layers are not converted. "
                "Remove it."
            )
        if type(self.checkpoint_io) is not self.lightning.TorchCheckpointIO:
            raise ValueError(
                f"{type(self).__name__} writes checkpoints itself and does not support the plugin "
                f"{type(self.checkpoint_io).__name__}. Remove it."
            )

    def setup_optimizers(self, trainer: Any) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []
        super().setup_optimizers(trainer)
        with agreed():
            check_not_stale(
                self.optimizers,
                set(self.lightning_module.parameters()),
                "Make it in configure_optimizers, from self.parameters().",
            )
        check_optimized(self._roots.values(), self._optimizers_by_name().values())

    def model_to_device(self) -> None:
        self.lightning_module.to(self.root_device)

    def block_backward_sync(self) -> Any:
        return without_reduction(self._roots.values())

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with explained():
            return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the optimizer's step; torch's errors about sharded tensors get a remedy."""
        with explained():  # the hook on_before_optimizer_step, in which users may read gradients, runs in it
            return super().optimizer_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        step = super().predict_step
        return self._prediction.step(lambda: step(*args, **kwargs))

    def on_predict_end(self) -> None:
        """Keep this rank in the sharded forward, after its last batch, until all ranks have predicted theirs."""
        with torch.no_grad():
            self._prediction.finish()

    # ------------------------------------------------------------------ the end

    def teardown(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is not None and trainer.state.status != self.lightning.interrupted:
            self.barrier()  # a rank that exits while others communicate makes them fail
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ------------------------------------------------------------------ checkpoints

    # Lightning reads a checkpoint before `setup` (`restore_checkpoint_after_setup`), which fills the sharded tensors.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return by name what a checkpoint holds of the module: its trained shards, its buffers and other states."""
        return {**self._saved_tensors(), **self._train_state().other_state()}

    def _saved_tensors(self) -> dict[str, Tensor]:
        trained = {name: p.detach() for name, p in self.lightning_module.named_parameters() if p.requires_grad}
        return {**trained, **self._train_state().buffers()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an empty dictionary: `save_checkpoint` writes optimizer states by parameter name."""
        return {}

    @collective_call("trainer.save_checkpoint")
    def save_checkpoint(self, checkpoint_state: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__}.save_checkpoint does not support storage_options={storage_options}."
            )
        name = self.broadcast(str(filepath))
        checkpoint_state = dict(checkpoint_state)  # callbacks may have kept the dictionary of their hook
        with agreed():
            path = local_path(name)
            self._check_untouched(checkpoint_state.pop("state_dict", {}))  # a hook may have taken it out
        checkpoint_state = without_numpy(checkpoint_state)
        weights_only = checkpoint_state.pop("optimizer_states", None) is None
        state = self._train_state({} if weights_only else self._optimizers_by_name())
        extra = {"trainer": checkpoint_state, "weights_only": weights_only}
        if self._save_distributed_checkpoint:
            write_checkpoint(path, state, extra, TRAINER, replace=True)
        else:
            save_in_one_file(path, state, extra, checkpoint_state)

    def _check_untouched(self, state_dict: Mapping[str, Any]) -> None:
        """Check that no hook has put values into `state_dict`: tensors are written from the module, not from there."""
        entries = self.lightning_module_state_dict()
        addresses = {name: local(tensor).data_ptr() for name, tensor in self._saved_tensors().items()}
        foreign = [
            name
            for name, value in state_dict.items()
            if name not in entries
            or (name in addresses and not (isinstance(value, Tensor) and local(value).data_ptr() == addresses[name]))
        ]
        if foreign:
            raise ValueError(
                f"a hook (on_save_checkpoint, perhaps) put {len(foreign)} values into the checkpoint's state_dict "
                f"(first: {foreign[0]}). {type(self).__name__} writes the trained parameters from the module, and "
                "nothing from there: put them under a key of their own, checkpoint['mine'] = ..., as plain values and "
                "full tensors."
            )

    def _train_state(self, optimizers: Mapping[str, Optimizer] = MappingProxyType({})) -> TrainState:
        return TrainState(self.lightning_module, optimizers, mesh_without_models=self.device_mesh)

    def _optimizers_by_name(self) -> dict[str, Optimizer]:
        return {str(index): getattr(wrapper, "_optimizer", wrapper) for index, wrapper in enumerate(self.optimizers)}

    @collective_call("Trainer's loading of a checkpoint")
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        name = self.broadcast(str(checkpoint_path))
        with agreed():
            path = local_path(name)
            folder = unpacked(path, weights_only) if path.is_file() else None
        contents = read_checkpoint(path if folder is None else Path(folder.name), TRAINER, weights_only)
        self._unpacked = folder  # until everything is loaded
        state: dict[str, Any] = contents.record["trainer"]
        state["state_dict"] = {}
        if not contents.record["weights_only"]:
            state["optimizer_states"] = []
        self._models_from = self._optimizers_from = contents
        dp = self.distributed_sampler_kwargs["num_replicas"]
        fit = state.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if "combined_loader" in fit:
            fit["combined_loader"] = [moved_position(loader, contents.dp, dp) for loader in fit["combined_loader"]]
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Fill the model if it is sharded already, as when `lr_find` restores in mid-run; else `setup` fills it."""
        if self._roots and all(state_of(model) is not None for model in self._find_roots(False).values()):
            self._fill_model()

    def _fill_model(self) -> None:
        """Load the models from the checkpoint that `load_checkpoint` has opened; a later run keeps its values."""
        contents, self._models_from = self._models_from, None
        if contents is not None:
            for commit in load_models(contents, self._train_state()):
                commit()

    @collective_call("Trainer's loading of optimizers")
    def load_optimizer_state_dict(self, checkpoint_state: Mapping[str, Any]) -> None:
        contents = self._optimizers_from
        assert contents is not None
        if len(contents.optimizers) != len(self.optimizers):
            raise ValueError(
                f"{contents.path} holds {len(contents.optimizers)} optimizer states; configure_optimizers made "
                f"{len(self.optimizers)}."
            )
        state = self._train_state(self._optimizers_by_name())
        for commit in load_optimizers(contents, state):
            commit()
        resume_counting(contents, state)
        restore_random_state(contents.record["random"], self.device_mesh)
        self._random_from = contents

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Restore the random state again before the first batch of a run that resumes in mid-epoch."""
        # Lightning has made a new dataloader iterator for the rest of the epoch, which draws from the random state. The
        # interrupted run made no iterator at this point.
        super().on_train_batch_start(batch, batch_idx)
        contents, self._random_from = self._random_from, None
        if contents is not None and batch_idx > 0:
            restore_random_state(contents.record["random"], self.device_mesh)


_ARGUMENTS = "_lora_parallel_compile"


def accept_compiled_modules() -> None:
    """Let Trainer take a compiled LightningModule with this library's strategy, in every installed namespace."""
    for package in installed_trainers():
        trainer: Any = import_module(f"{package}.trainer.trainer")
        wrap(trainer, "_maybe_unwrap_optimized", _unwrap_compiled)
        wrap(trainer, "_verify_strategy_supports_compile", _accept_compiled)


def _unwrap_compiled(original: Any, model: Any) -> Any:
    module = original(model)
    if module is not model:
        module.__dict__[_ARGUMENTS] = getattr(model, "_compile_kwargs", {})  # Lightning keeps them there
    return module


def _accept_compiled(original: Any, model: Any, strategy: Any) -> None:
    arguments = model.__dict__.pop(_ARGUMENTS, {})
    if not isinstance(strategy, TrainerStrategyLogic):
        original(model, strategy)
    elif model._compiler_ctx is not None:
        strategy.compile_blocks(import_module(original.__module__).to_uncompiled(model), arguments)
