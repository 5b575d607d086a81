"""What the strategy does, whichever Lightning namespace its class belongs to.

It translates Lightning's hooks to engine calls and holds no maths and no placement.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from peft import LoraConfig
from torch import nn
from torch.distributed import DeviceMesh
from torch.optim import Optimizer

from lightning_lora import checkpoint
from lightning_lora.communication import Communication
from lightning_lora.data import UnevenPrediction, check_shares, seed_workers, sync_metrics
from lightning_lora.namespace import Namespace
from lightning_lora.precision import convert_base, sharded_precision
from lightning_lora.roots import find_roots
from lora_parallel import ParallelConfig, build_mesh, no_sync, parallelize
from lora_parallel.agreement import agreed
from lora_parallel.mesh import dp_rank, dp_size, mesh_sizes
from lora_parallel.state import state_of

__all__ = ["StrategyLogic"]

if TYPE_CHECKING:  # at run time the class is mixed into either namespace's ParallelStrategy
    from lightning.pytorch.strategies import ParallelStrategy as Base
else:
    Base = object

# Callbacks that copy, prune or unfreeze weights behind the strategy's back.
_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it copies the model and swaps weights, which sharded tensors do not allow",
    "WeightAveraging": "it deep-copies the model, which sharded modules do not allow",
    "ModelPruning": "it replaces parameters by masked copies",
    "BaseFinetuning": "it unfreezes base weights in mid-training; set requires_grad before fit instead",
}


class StrategyLogic(Communication, Base):
    """Trains LoRA adapters of a LightningModule's model under FSDP2 and tensor parallelism, as one device would.

    The LightningModule stays as it is. Its model may be built in `__init__` or in `configure_model`, with PEFT layers
    or, if `lora_config` is given, without.

    Args:
        tensor_parallel_size: Processes that share each layer and see the same batch.
        data_parallel_size: Processes with different batches, replicas included; "auto": all the others.
        replicate_size: How many copies of the sharded model the data-parallel processes form (HSDP); divides
            data_parallel_size.
        lora_config: Adapter to inject into a model that has none.
        tp_plan: "auto" for the model's own plan, or a mapping {glob of module names: style} laid over it.
        sequence_parallel: Not supported yet.
        block_classes: Class names of the modules that become one FSDP unit each; "auto": the model's own.
        reshard_after_forward: Free a block's gathered weights between forward and backward.
        activation_checkpointing: Recompute each block's activations in backward.
        require_adapters: Refuse a model without adapters, and one whose base trains.
        autocast_adapter_dtype: Keep adapters in float32 with `precision="bf16-true"`, as PEFT does.
        seed: Seed of injected adapters and of LoRA dropout; None: that of `seed_everything`, else 0.
        process_group_backend: None: nccl on GPUs, gloo on CPUs.
        timeout_seconds: After this long a collective that a peer has not joined is an error.

    Raises:
        ValueError: Sizes that do not fit together, or an option that is not supported.
    """

    lightning: ClassVar[Namespace]

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        data_parallel_size: Literal["auto"] | int = "auto",
        replicate_size: int = 1,
        lora_config: LoraConfig | None = None,
        tp_plan: Literal["auto"] | dict[str, str] = "auto",
        sequence_parallel: bool = False,
        block_classes: Literal["auto"] | list[str] = "auto",
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
        require_adapters: bool = True,
        autocast_adapter_dtype: bool = True,
        seed: int | None = None,
        process_group_backend: str | None = None,
        timeout_seconds: int = 1800,
    ) -> None:
        super().__init__()
        dp_shard: Literal["auto"] | int = "auto"
        for name, size in (("data_parallel_size", data_parallel_size), ("replicate_size", replicate_size)):
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int)):
                raise TypeError(f"{name}={size!r}: give a positive int.")
        if data_parallel_size != "auto":
            if replicate_size < 1 or data_parallel_size % replicate_size:
                raise ValueError(
                    f"replicate_size={replicate_size} does not divide data_parallel_size={data_parallel_size}: it says "
                    "how many copies the data-parallel processes form."
                )
            dp_shard = data_parallel_size // replicate_size
        self._lora_config = lora_config
        self._autocast_adapter_dtype = autocast_adapter_dtype
        self._seed = seed
        self._process_group_backend = process_group_backend
        self._options: dict[str, Any] = {
            "tp": tensor_parallel_size,
            "dp_shard": dp_shard,
            "dp_replicate": replicate_size,
            "tp_plan": tp_plan,
            "sequence_parallel": sequence_parallel,
            "block_classes": block_classes,
            "reshard_after_forward": reshard_after_forward,
            "activation_checkpointing": activation_checkpointing,
            "require_adapters": require_adapters,
            "timeout_seconds": timeout_seconds,
        }
        ParallelConfig(**self._options)  # bad options are an error here, not after the launch
        self.num_nodes = 1
        self._mesh: DeviceMesh | None = None
        self._roots: dict[str, nn.Module] = {}
        self._resume_from: Path | None = None
        self._optimizers_from: Path | None = None
        self._prediction: UnevenPrediction | None = None

    # ------------------------------------------------------------------ the mesh

    @property
    def is_distributed(self) -> bool:
        """Lightning injects a DistributedSampler."""
        return True

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh with axes dp_replicate, dp_shard and tp.

        Raises:
            RuntimeError: Before the processes have started.
        """
        if self._mesh is None:
            raise RuntimeError("the device mesh exists once the Trainer has started its processes (setup_environment).")
        return self._mesh

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def config(self) -> ParallelConfig:
        """What the engine is told."""
        seed = self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
        return ParallelConfig(**self._options, seed=seed, param_dtype=self.precision_plugin.compute_dtype)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": dp_size(self.device_mesh), "rank": dp_rank(self.device_mesh)}

    def process_dataloader(self, dataloader: object) -> object:
        seed_workers(dataloader, self.device_mesh, self.lightning.worker_init_function)
        return dataloader

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        mesh_sizes(self.config, self.num_nodes * self.num_processes)  # before anything is launched
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = self.lightning.SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Called by the Trainer once devices and nodes are known."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for rank_zero_only in self.lightning.rank_zero_only:
            rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        super().setup_environment()
        self.lightning.reset_seed()
        self.set_world_ranks()
        if self._mesh is not None:
            return
        self.lightning.init_dist_connection(
            self.cluster_environment,
            self._process_group_backend or self.lightning.default_backend(self.root_device),
            timeout=timedelta(seconds=self._options["timeout_seconds"]),
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )
        self._mesh = build_mesh(self.config, self.root_device.type)

    # ------------------------------------------------------------------ precision

    @property
    def precision_plugin(self) -> Any:
        if not hasattr(self._precision_plugin, "compute_dtype"):
            self._precision_plugin = sharded_precision(
                self._precision_plugin or self.lightning.Precision(), self.lightning
            )
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else sharded_precision(plugin, self.lightning)

    # ------------------------------------------------------------------ the model

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        with agreed():
            self._refuse_features(trainer)
            if trainer.predicting:
                check_shares(trainer.predict_loop, self.device_mesh)
            self._roots = self._find_roots()
            self._adopt_parallelized()
        assert self.lightning_module is not None
        convert_base(self.lightning_module, self.precision_plugin.stored_dtype, self._autocast_adapter_dtype)
        for model in self._roots.values():
            if state_of(model) is None:
                self._parallelize(model)
        self.model_to_device()
        self._fill_model()
        # FSDP2 allocates its buffers in the first forward: under inference_mode they could never be trained with.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        sync_metrics(self.lightning_module, self.device_mesh)
        self._prediction = UnevenPrediction(self.device_mesh, self.root_device)
        self.barrier()
        if trainer.state.fn == self.lightning.fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == self.lightning.fitting:
            self.lightning.optimizers_to_device(self.optimizers, self.root_device)

    def _find_roots(self) -> dict[str, nn.Module]:
        assert self.lightning_module is not None
        return find_roots(self.lightning_module, self._lora_config is not None, self._options["require_adapters"])

    def _refuse_features(self, trainer: Any) -> None:
        for callback in trainer.callbacks:
            for kind in type(callback).__mro__:
                if kind.__name__ in _REFUSED_CALLBACKS:
                    raise ValueError(
                        f"{type(self).__name__} does not support the callback {type(callback).__name__}: "
                        f"{_REFUSED_CALLBACKS[kind.__name__]}. Remove it."
                    )
        if self._layer_sync is not None:
            raise ValueError(
                f"{type(self).__name__} does not support sync_batchnorm=True: batch norm layers are not converted. "
                "Remove it."
            )
        if type(self.checkpoint_io) is not self.lightning.TorchCheckpointIO:
            raise ValueError(
                f"{type(self).__name__} writes checkpoints itself and does not support the plugin "
                f"{type(self.checkpoint_io).__name__}. Remove it."
            )

    def _adopt_parallelized(self) -> None:
        """A model that an earlier Trainer parallelized is used as it is, if the mesh has the same sizes."""
        for name, model in self._roots.items():
            state = state_of(model)
            if state is not None and state.mesh.shape != self.device_mesh.shape:
                raise ValueError(
                    f"{name} was parallelized over a mesh of {tuple(state.mesh.shape)} by an earlier Trainer; this one "
                    f"has {tuple(self.device_mesh.shape)}. Use the same sizes, or build the model anew."
                )

    def _parallelize(self, model: nn.Module) -> None:
        parallelize(
            model,
            self.device_mesh,
            self.config,
            lora_config=self._lora_config,
            autocast_adapter_dtype=self._autocast_adapter_dtype,
        )

    def setup_optimizers(self, trainer: Any) -> None:
        self.optimizers, self.lr_scheduler_configs = [], []
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        known = set(self.lightning_module.parameters())
        for optimizer in self.optimizers:
            stale = sum(p not in known for group in optimizer.param_groups for p in group["params"])
            if stale:
                raise ValueError(
                    f"{type(optimizer).__name__} holds {stale} parameters that are not the sharded model's: it was "
                    "made before the model was sharded. Make it in configure_optimizers, from self.parameters()."
                )

    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self.lightning_module.to(self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulation: no reduction until the last microbatch."""
        with ExitStack() as stack:
            for model in self._roots.values():
                stack.enter_context(no_sync(model))
            yield

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._prediction is not None
        step = super().predict_step
        return self._prediction.step(lambda: step(*args, **kwargs))

    def on_predict_end(self) -> None:
        """Called when this rank has predicted its last batch."""
        if self._prediction is not None:
            with torch.no_grad():
                self._prediction.finish()

    # ------------------------------------------------------------------ the end

    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is not None and trainer.state.status != self.lightning.interrupted:
            self.barrier()  # a rank that leaves while others communicate takes them down
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ------------------------------------------------------------------ checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Lightning reads before `setup`; tensors are filled in `setup`, once the model is sharded."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The trained parameters, sharded as they are."""
        assert self.lightning_module is not None
        return {name: p.detach() for name, p in self.lightning_module.named_parameters() if p.requires_grad}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Empty: `save_checkpoint` writes optimizer states by parameter name."""
        return {}

    def save_checkpoint(self, checkpoint_state: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(
                f"{type(self).__name__}.save_checkpoint does not support storage_options={storage_options}."
            )
        assert self.lightning_module is not None
        path = Path(self.broadcast(str(filepath)))
        checkpoint_state.pop("state_dict")
        weights_only = checkpoint_state.pop("optimizer_states", None) is None
        optimizers = [getattr(optimizer, "_optimizer", optimizer) for optimizer in self.optimizers]
        checkpoint_state["lora_parallel"] = {
            "forward_counts": {name: self._state(model).forward_count.done for name, model in self._roots.items()},
            "optimizers": None if weights_only else [checkpoint.optimizer_settings(each) for each in optimizers],
        }
        checkpoint.save(
            path, self._roots, self.lightning_module, None if weights_only else optimizers, checkpoint_state
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(str(checkpoint_path)))
        found = checkpoint.read_trainer_state(path, weights_only)
        found["state_dict"] = {}
        if found["lora_parallel"]["optimizers"] is not None:
            found["optimizer_states"] = []
        self._resume_from = self._optimizers_from = path
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done in `setup`, once the model is sharded, or here if it is (`lr_find` restores in mid-run)."""
        if self._roots and all(state_of(model) is not None for model in self._find_roots().values()):
            self._fill_model()

    def _fill_model(self) -> None:
        """Load what `load_checkpoint` has announced, once: a later run without ckpt_path goes on from memory."""
        path, self._resume_from = self._resume_from, None
        if path is not None:
            assert self.lightning_module is not None
            checkpoint.load_model(path, self._find_roots(), self.lightning_module)

    def load_optimizer_state_dict(self, checkpoint_state: Mapping[str, Any]) -> None:
        assert self._optimizers_from is not None
        assert self.lightning_module is not None
        written = checkpoint_state["lora_parallel"]["optimizers"]
        if len(written) != len(self.optimizers):
            raise ValueError(
                f"{self._optimizers_from} holds {len(written)} optimizer states; configure_optimizers made "
                f"{len(self.optimizers)}."
            )
        checkpoint.load_optimizers(self._optimizers_from, self.lightning_module, self.optimizers, written)
        for name, count in checkpoint_state["lora_parallel"]["forward_counts"].items():
            self._state(self._roots[name]).forward_count.done = count

    def _state(self, model: nn.Module) -> Any:
        state = state_of(model)
        assert state is not None
        return state
