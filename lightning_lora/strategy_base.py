"""Implement the common part of Trainer's and Fabric's strategies: arguments, processes, the mesh, sharding a model."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftConfig
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import DeviceMesh

from lightning_lora.data import seed_order, seed_workers
from lightning_lora.precision import convert_base, sharded_precision
from lora_parallel import ParallelConfig, build_mesh, meta_init, no_sync, parallelize
from lora_parallel.integration import (
    adopt_rank_zero,
    agreed,
    check_checkpoints,
    check_positive,
    collective_call,
    defer_from_pretrained,
    description_to_print,
    dp_size,
    has_deferred,
    is_checked,
    mesh_sizes,
    read_weights,
    state_of,
    suggest_arguments,
    tell_unwrapped,
    tensors_of,
    unwrap_compiled,
)
from lora_parallel.sizes import AXES, axis_sizes, coordinates


class _Gather(torch.autograd.Function):
    """Stack every rank's tensor along a new first dim, [ranks, ...], with gradients."""

    # The all-gather of torch.distributed.nn does not support sub-groups of gloo in backward.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


_PATIENCE = 10.0  # seconds in which processes may end by themselves, once the one that started them has failed


def end_after_an_error(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let an error that ends this process end the processes that it started, too.

    Lightning's launcher ends all of them if one that it started fails, and none if the process that started them does.
    Over gloo they notice that a peer is lost. Over NCCL they wait for it until the timeout of their collectives.
    """
    own_hook = sys.excepthook

    def end(*error: Any) -> None:
        own_hook(*error)
        deadline = time.monotonic() + _PATIENCE
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    sys.excepthook = end


@contextmanager
def without_reduction(models: Iterable[nn.Module]) -> Iterator[None]:
    """Accumulate: within the context, `backward` reduces no gradients of the models."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(no_sync(model))
        yield


def precision_property(attribute: str) -> Any:
    """Return a property for the precision plugin that is kept under `attribute`, in its form for sharded training."""

    def read(self: BaseLogic) -> Any:
        plugin = getattr(self, attribute)
        return sharded_precision(plugin if plugin is not None else self.lightning.Precision(), self.lightning)

    def write(self: BaseLogic, plugin: Any) -> None:
        setattr(self, attribute, None if plugin is None else sharded_precision(plugin, self.lightning))

    return property(read, write)


@suggest_arguments
class BaseLogic:
    """Implement the part of a strategy that is the same for Trainer and for Fabric."""

    lightning: ClassVar[SimpleNamespace]  # see `namespace`

    # Attributes of Lightning's ParallelStrategy, in both namespaces.
    accelerator: Any
    cluster_environment: Any
    parallel_devices: Any
    global_rank: Any
    local_rank: Any
    node_rank: Any
    lightning_module: Any
    _launcher: Any

    _plugin: Any  # the precision plugin, for which Trainer and Fabric have different names

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        data_parallel_size: Literal["auto"] | int = "auto",
        replicate_size: int = 1,
        lora_config: LoraConfig | None = None,
        tp_plan: Literal["auto"] | dict[str, str] = "auto",
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        block_classes: Literal["auto"] | list[str] = "auto",
        reshard_after_forward: bool = True,
        activation_checkpointing: bool = False,
        compile: bool | Mapping[str, Any] = False,
        require_adapters: bool = True,
        autocast_adapter_dtype: bool = True,
        seed: int | None = None,
        process_group_backend: str | None = None,
        timeout_seconds: int = 1800,
        context_parallel_size: int = 1,
        context_parallel_method: Literal["ulysses", "all_gather"] = "ulysses",
        pipeline_parallel_size: int = 1,
        pipeline_microbatches: int = 1,
        pipeline_schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b",
        pipeline_stages_per_rank: int = 1,
        pipeline_split: Literal["auto"] | list[str] = "auto",
        shard_base: bool = True,
        prefetch_blocks: int = 0,
        fused: bool = True,
    ) -> None:
        """Check and keep the options, which `lora_parallel.ParallelConfig` documents; processes are started later.

        Its names are shorter: `tp`, `cp`, `cp_method`, `pp` and `pp_*` for `pipeline_*`, `dp_replicate`.

        Args:
            data_parallel_size: Number of batches that are computed at the same time, in replicas too; "auto": as many
                as the other sizes leave.
            lora_config: Config of the adapter to inject into a model that has none.
            autocast_adapter_dtype: Keep adapters in float32 with `precision="bf16-true"`, as PEFT does.
            seed: Seed of injected adapters and of LoRA dropout; None: the seed of `seed_everything`, else 0.
            process_group_backend: Backend of torch.distributed; None: nccl on GPUs, gloo on CPUs.

        Raises:
            TypeError, ValueError: A value cannot work, sizes do not fit together, or an option is not supported.
        """
        super().__init__()
        check_positive("data_parallel_size", data_parallel_size, also="auto")
        check_positive("replicate_size", replicate_size)
        if data_parallel_size != "auto" and data_parallel_size % replicate_size:
            raise ValueError(
                f"replicate_size={replicate_size} does not divide data_parallel_size={data_parallel_size}: it says how "
                "many copies the data-parallel processes form."
            )
        if lora_config is not None and not isinstance(lora_config, PeftConfig):
            raise TypeError(f"lora_config is a {type(lora_config).__name__}: give a peft.LoraConfig.")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise ValueError(f"seed={seed!r}: give an int that is not negative, or None.")
        self._lora_config, self._autocast_adapter_dtype = lora_config, autocast_adapter_dtype
        self._seed, self._process_group_backend = seed, process_group_backend
        self._options: dict[str, Any] = {
            "tp": tensor_parallel_size,
            "cp": context_parallel_size,
            "cp_method": context_parallel_method,
            "pp": pipeline_parallel_size,
            "pp_microbatches": pipeline_microbatches,
            "pp_schedule": pipeline_schedule,
            "pp_stages_per_rank": pipeline_stages_per_rank,
            "pp_split": pipeline_split,
            "dp_shard": data_parallel_size if data_parallel_size == "auto" else data_parallel_size // replicate_size,
            "dp_replicate": replicate_size,
            "tp_plan": tp_plan,
            "sequence_parallel": sequence_parallel,
            "loss_parallel": loss_parallel,
            "block_classes": block_classes,
            "reshard_after_forward": reshard_after_forward,
            "shard_base": shard_base,
            "prefetch_blocks": prefetch_blocks,
            "fused": fused,
            "activation_checkpointing": activation_checkpointing,
            "compile": compile,
            "require_adapters": require_adapters,
            "timeout_seconds": timeout_seconds,
        }
        ParallelConfig(**self._options)  # bad options are an error here, not after the launch
        self.num_nodes = 1
        self._mesh: DeviceMesh | None = None

    @property
    def config(self) -> ParallelConfig:
        """Return the engine's config, made of the options, the seed and the precision."""
        seed = self._seed if self._seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))
        return ParallelConfig(**self._options, seed=seed, param_dtype=self._plugin.compute_dtype)

    # ------------------------------------------------------------------ processes and mesh

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the device mesh: axes dp_replicate, dp_shard and tp, and pp and cp where their sizes are above 1.

        Raises:
            RuntimeError: The processes have not started yet.
        """
        if self._mesh is None:
            raise RuntimeError(
                "the device mesh exists once the processes have started: in Trainer's hooks, or after fabric.launch()."
            )
        return self._mesh

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Return the number of processes on this node."""
        return len(self.parallel_devices or ())

    def _configure_launcher(self) -> None:
        mesh_sizes(self.config, self.num_nodes * self.num_processes)  # before anything is launched
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = self.lightning.SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def set_world_ranks(self) -> None:
        """Tell Lightning the global rank and the number of processes, once devices and nodes are known."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for rank_zero_only in self.lightning.rank_zero_only:
            rank_zero_only.rank = self.global_rank

    def _connect(self) -> None:
        """Set this process's ranks; on the first call, also join the process group and build the mesh."""
        asked = self.num_nodes * self.num_processes
        if asked > 1:  # one alone goes on with its random numbers
            self.lightning.reset_seed()
        self.set_world_ranks()
        if self._mesh is not None:
            return
        if started := getattr(self._launcher, "procs", []):
            end_after_an_error(started)
        self.lightning.init_dist_connection(
            self.cluster_environment,
            self._process_group_backend or self.lightning.default_backend(self.root_device),
            timeout=timedelta(seconds=self._options["timeout_seconds"]),
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )
        if is_checked() and dist.get_world_size() != asked:
            raise ValueError(
                f"devices and num_nodes of the script ask for {asked} processes, and the configuration file for "
                f"{dist.get_world_size()}: check it with a file, or with --num_processes, of {asked}."
            )
        self._mesh = build_mesh(self.config, self.root_device.type)

    # ------------------------------------------------------------------ values of all ranks

    # Data-parallel ranks alone take part, since pp, cp and tp peers hold the same values. The group of all processes
    # counts as None: Fabric and `LightningModule.all_gather` pass it if the user gave no group.

    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        with collective_call("barrier"):
            dist.barrier(device_ids=[self.root_device.index] if dist.get_backend() == "nccl" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized():
            return obj
        holder = [obj]
        dist.broadcast_object_list(holder, src)
        return holder[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduce a tensor over data-parallel ranks, or over `group`; any other object is returned as it is.

        Before this Trainer's processes have started there is nothing to reduce over, and the tensor is as it was.

        Args:
            tensor: The tensor.
            group: A process group to reduce over instead.
            reduce_op: The operation as Lightning names it; "mean" and "avg" average, None sums.
        """
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        name = "sum" if reduce_op is None else str(reduce_op).rsplit(".", 1)[-1].lower()
        mean = name in ("mean", "avg")
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        operation = dist.ReduceOp.SUM if mean else getattr(dist.ReduceOp, name.upper())
        if group is not None and group is not dist.group.WORLD:
            dist.all_reduce(tensor, operation, group=group)
            return tensor / dist.get_world_size(group) if mean else tensor
        if self._mesh is None:
            return tensor
        for axis in ("dp_replicate", "dp_shard"):
            if self.device_mesh[axis].size() > 1:
                dist.all_reduce(tensor, operation, group=self.device_mesh.get_group(axis))
        return tensor / dp_size(self.device_mesh) if mean else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together with all ranks, pp, cp and tp peers included: True if all say so, or with `all=False` any."""
        flag = torch.tensor(int(decision), device=self.root_device)
        if dist.is_initialized():
            dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from the data-parallel ranks, in their order: [data-parallel size, ...].

        Args:
            tensor: This rank's tensor.
            group: A process group to gather from instead: [group size, ...].
            sync_grads: Let gradients flow back to the ranks that the values came from.
        """
        with nullcontext() if sync_grads else torch.no_grad():
            if group is not None and group is not dist.group.WORLD:
                return _Gather.apply(tensor, group)
            for axis in ("dp_shard", "dp_replicate"):
                tensor = _Gather.apply(tensor, self.device_mesh.get_group(axis))
            return tensor.flatten(0, 1)

    # ------------------------------------------------------------------ data

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the number of data-parallel ranks and the index of this one, before the processes start too."""
        sizes = axis_sizes({axis: self._options[axis] for axis in AXES}, self.num_nodes * self.num_processes)
        at = coordinates(sizes, self.global_rank)
        shards = sizes["dp_shard"]
        return {"num_replicas": sizes["dp_replicate"] * shards, "rank": at["dp_replicate"] * shards + at["dp_shard"]}

    def process_dataloader(self, dataloader: Any) -> Any:
        seed_workers(dataloader, self.distributed_sampler_kwargs["rank"], self.lightning.worker_init_function)
        seed_order(dataloader)
        return dataloader

    # ------------------------------------------------------------------ the model

    @contextmanager
    def _construction(self, empty_init: bool | None) -> Iterator[None]:
        """Enter the context that models are built in: on meta or in CPU memory, in the precision's dtype."""
        # None lets `from_pretrained` alone build on meta, so that each rank reads its shard only. No default device is
        # set: a model that is built in memory is in the CPU's, and moves to the device shard by shard.
        deferral: AbstractContextManager[None] = nullcontext()
        if empty_init is not False:
            deferral = meta_init() if empty_init else defer_from_pretrained()
        with deferral, self._plugin.module_init_context():
            yield

    def _uncompile(self, module: nn.Module) -> nn.Module:
        """Take `torch.compile` off a module and all in it, so that the blocks of its models are compiled instead."""
        module, arguments = unwrap_compiled(module)
        if arguments is not None:
            self._options["compile"] = self._options["compile"] or arguments
        return module

    def compile_blocks(self, module: nn.Module, arguments: Mapping[str, Any]) -> None:
        """Compile the blocks of the models in `module`, from which Lightning has taken `torch.compile`."""
        tell_unwrapped([type(module).__name__])
        self._options["compile"] = self._options["compile"] or arguments

    def _check_meshes(self, models: Mapping[str, nn.Module]) -> None:
        """Check that models which were parallelized before, and are used as they are, have a mesh of the same sizes."""
        for name, model in models.items():
            state = state_of(model)
            if state is not None and state.mesh.shape != self.device_mesh.shape:
                raise ValueError(
                    f"{name} was parallelized over a mesh of {tuple(state.mesh.shape)} before; this one has "
                    f"{tuple(self.device_mesh.shape)}. Use the same sizes, or build the model anew."
                )

    def _shard(self, module: nn.Module, models: Mapping[str, nn.Module], trains: bool) -> None:
        """Convert `module` to the precision's dtype, parallelize its models, and move the rest to the device."""
        inside = {id(tensor) for model in models.values() for tensor in tensors_of(model).values()}
        beside = {name: tensor for name, tensor in tensors_of(module).items() if id(tensor) not in inside}
        adopt_rank_zero(beside, self.device_mesh)  # raises if one is on meta and remembers no checkpoint
        convert_base(module, self._plugin.stored_dtype, self._autocast_adapter_dtype)
        self.lightning.update_properties(module, dtype=self._plugin.stored_dtype)  # module.dtype of a LightningModule
        for model in models.values():
            if state_of(model) is None:
                parallelize(
                    model,
                    self.device_mesh,
                    self.config,
                    lora_config=self._lora_config,
                    autocast_adapter_dtype=self._autocast_adapter_dtype,
                    trains=trains,
                )
                if (said := description_to_print(model)) is not None:
                    self.lightning.rank_zero_info(said)
        with agreed():  # every rank reads the rest in full, such as a frozen teacher whose from_pretrained was deferred
            if has_deferred(module):
                check_checkpoints(module, materialize=True)
                read_weights(module, self.root_device.type)
        module.to(self.root_device)
